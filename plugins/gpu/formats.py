"""Compute capabilities of NVIDIA GPUs: how they are written, which products have them, and which formats they
support.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches

from enginewright.runtime.shared.errors import TargetError
from enginewright.runtime.shared.weight_formats import FORMATS

KNOWN = ("7.5", "8.0", "8.6", "8.7", "8.9", "9.0", "10.0", "10.3", "11.0", "12.0", "12.1")
"""The known compute capabilities, ascending."""

_PRODUCTS = {
    "7.5": "T4, T1000, Titan RTX, RTX 2060, RTX 2070, RTX 2080, RTX 2080 Ti",
    "8.0": "A100, A30",
    "8.6": "A2, A10, A10G, A16, A40, RTX A2000, RTX A4000, RTX A4500, RTX A5000, RTX A5500, RTX A6000, RTX 3050, "
    "RTX 3060, RTX 3060 Ti, RTX 3070, RTX 3070 Ti, RTX 3080, RTX 3080 Ti, RTX 3090, RTX 3090 Ti",
    "8.7": "Jetson AGX Orin, Jetson Orin NX, Jetson Orin Nano",
    "8.9": "L4, L40, L40S, RTX 2000 Ada, RTX 4000 Ada, RTX 4500 Ada, RTX 5000 Ada, RTX 6000 Ada, RTX 4050, RTX 4060, "
    "RTX 4060 Ti, RTX 4070, RTX 4070 Ti, RTX 4080, RTX 4090",
    "9.0": "GH200, H100, H200",
    "10.0": "B200, GB200",
    "10.3": "B300, GB300",
    "11.0": "Jetson T4000, Jetson T5000",
    "12.0": "RTX PRO 6000, RTX PRO 5000, RTX PRO 4500, RTX PRO 4000, RTX PRO 2000, RTX 5050, RTX 5060, RTX 5060 Ti, "
    "RTX 5070, RTX 5070 Ti, RTX 5080, RTX 5090",
    "12.1": "GB10, DGX Spark",
}
"""Compute capability -> names of GPUs, from NVIDIA's lists, https://developer.nvidia.com/cuda-gpus (Turing:
https://developer.nvidia.com/cuda-legacy-gpus). The A10G isn't listed; it has the A10's.
"""

_BESIDES = frozenset(
    ("nvidia", "geforce", "tesla", "gpu", "super", "laptop", "generation", "blackwell", "edition", "pcie", "sxm", "nvl")
)
"""Words of a product's name that don't change its compute capability."""

_WRITTEN = re.compile(r"(?:sm_?)?(\d{1,2}?)\.?(\d)", re.IGNORECASE)

_LEAST: dict[str, str] = {name: of.least_gpu for name, of in FORMATS.items() if of.least_gpu}
"""Formats -> the least compute capability that supports them."""


def parse_capability(text: str) -> str:
    """Returns "8.9" for "8.9", "89", "sm89", "sm_89", "SM89", "L40S" or "RTX 4090". Raises TargetError for an unknown
    name.
    """
    match = _WRITTEN.fullmatch(text.strip())
    name = f"{match[1]}.{match[2]}" if match else _CAPABILITIES.get(_key(text), "")
    if name not in KNOWN:
        near = get_close_matches(_key(text), _CAPABILITIES, 1, 0.75)
        meant = f"Did you mean {_NAMES[near[0]]} ({_CAPABILITIES[near[0]]})? " if near else ""
        raise TargetError(
            f"gpu: {text!r} is not a GPU or a compute capability that is known here",
            hint=f"{meant}Pass a name, such as h100 or rtx4090, or a compute capability: {', '.join(KNOWN)}.",
        )
    return name


def _key(text: str) -> str:
    """Normalizes a product's name, to rtx4090 for "NVIDIA GeForce RTX 4090"."""
    words = re.split(r"[\s_-]+", text.strip().lower())
    return "".join(word for word in words if word not in _BESIDES and not re.fullmatch(r"\d+gb", word))


_NAMES = {_key(name): name for names in _PRODUCTS.values() for name in names.split(", ")}
_CAPABILITIES = {_key(name): capability for capability, names in _PRODUCTS.items() for name in names.split(", ")}


def parse_capabilities(texts: Iterable[str]) -> tuple[str, ...]:
    """Parses compute capabilities, or comma-separated lists of them. Returns each once, in ascending order. Raises
    TargetError.
    """
    capabilities = {parse_capability(part) for text in texts for part in text.split(",")}
    return tuple(name for name in KNOWN if name in capabilities)


def check_formats(capabilities: Sequence[str], formats: Iterable[str]) -> None:
    """Raises TargetError naming the compute capabilities that don't support one of ``formats``, such as fp8 on 8.6."""
    for name in formats:
        least = _LEAST.get(name)
        lacking = [c for c in capabilities if least is not None and KNOWN.index(c) < KNOWN.index(least)]
        if lacking:
            left = ",".join(c for c in capabilities if c not in lacking) or least
            raise TargetError(
                f"gpu: compute capability {', '.join(lacking)} has no {name}, which begins with {least}",
                hint=f"Build for --gpu {left}, or take another format.",
            )
