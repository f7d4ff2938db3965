"""The emitters there are."""

from __future__ import annotations

from collections.abc import Callable

from .cpu.emitter import CpuEmitter
from .onnx.emitter import OnnxEmitter
from .shared.base import Emitter
from .tensorrt.emitter import TensorRtEmitter
from .tensorrt_rtx.emitter import TensorRtRtxEmitter
from .torch_tensorrt.emitter import TorchTensorRtEmitter, check_machine

EMITTERS: dict[str, Emitter] = {
    emitter.name: emitter
    for emitter in (CpuEmitter(), OnnxEmitter(), TensorRtRtxEmitter(), TensorRtEmitter(), TorchTensorRtEmitter())
}
"""One for each target that can be emitted; the names are those of recipes and bundles."""

TOOLS: dict[str, tuple[str, ...]] = {
    "cpu": (),
    "onnx": ("onnx",),
    "tensorrt-rtx": ("onnx", "tensorrt_rtx"),
    "tensorrt": ("onnx", "triton"),
    "torch-tensorrt": ("torch_tensorrt",),
}
"""Distributions that a target is made with, besides those of every export; the manifest has their versions."""

CHECKS: dict[str, Callable[[], None]] = {"torch-tensorrt": check_machine}
"""Of targets that can't be emitted everywhere: raises before any work what would be raised after it."""
