"""Every Triton kernel by its name, loaded when it is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from .specs import SAMPLING_KERNELS, KernelName

_MODULES: Mapping[KernelName, str] = {
    "paged_attention": "attention_kernels",
    "combine_splits": "attention_kernels",
    "listed_attention": "attention_kernels",
    "decode_work": "attention_kernels",
    "kv_write": "cache_kernels",
    "embedding": "step_kernels",
    "norm": "step_kernels",
    "rope": "step_kernels",
    "rope_kv_write": "step_kernels",
    "gated_activation": "step_kernels",
    "product": "product_kernels",
    **dict.fromkeys(SAMPLING_KERNELS, "sampling_kernels"),
}


def kernel_function(name: KernelName) -> Any:
    """The function that ``triton.jit`` made. Raises ModuleNotFoundError without Triton."""
    return getattr(import_module(f".{_MODULES[name]}", __package__), f"{name}_kernel")
