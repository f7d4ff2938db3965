"""The GPUs for which we have kernels, and those for which TensorRT-RTX builds engines, as compute capabilities."""

from __future__ import annotations

from collections.abc import Sequence

from enginewright.runtime.shared.errors import TargetError

from ..gpu.tiles import GPUS, capability_of
from .plan import CAPABILITY_BITS

KERNELS_FOR = tuple(map(capability_of, GPUS))
"""The compute capabilities with kernels, ascending."""


def check_kernels(capabilities: Sequence[str]) -> None:
    """Raises TargetError for a compute capability without kernels."""
    if unknown := [name for name in capabilities if name not in KERNELS_FOR]:
        raise TargetError(
            f"gpu: no kernels are compiled for compute capability {', '.join(unknown)}",
            hint=f"Known are {', '.join(KERNELS_FOR)}.",
        )


CUDA_DEFAULT = ("8.0", "9.0", "10.0", "12.0")
"""The compute capabilities for which the cuda target's kernels are compiled by default. Code for 8.0 runs on 8.6 and
8.9 too.
"""

DEFAULT = ("8.0", "8.6", "8.9", "12.0")
"""The compute capabilities for which engines are built by default: Ampere, Ada and Blackwell. More of them don't make
an engine larger.
"""


def check_suited(capabilities: Sequence[str]) -> None:
    """Raises TargetError naming the compute capabilities for which TensorRT-RTX builds no engines."""
    unsuited = [c for c in capabilities if c not in CAPABILITY_BITS]
    if unsuited:
        raise TargetError(
            f"gpu: TensorRT-RTX builds no engine for compute capability {', '.join(unsuited)}",
            hint=f"It builds for {', '.join(CAPABILITY_BITS)}.",
        )
