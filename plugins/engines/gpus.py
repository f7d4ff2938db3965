"""The GPUs that targets are for: those that the tensorrt plugins have kernels for, and that TensorRT-RTX builds for."""

from __future__ import annotations

from collections.abc import Sequence

from enginewright.runtime.shared.errors import TargetError

from ..gpu.tiles import GPUS
from .plan import CAPABILITY_BITS

KERNELS_FOR = tuple(f"{capability // 10}.{capability % 10}" for capability in GPUS)
"""Compute capabilities, in rising order; all of them by default."""


def check_kernels(capabilities: Sequence[str]) -> None:
    """Raises TargetError for a compute capability without kernels."""
    if unknown := [name for name in capabilities if name not in KERNELS_FOR]:
        raise TargetError(
            f"gpu: no kernels are compiled for compute capability {', '.join(unknown)}",
            hint=f"Known are {', '.join(KERNELS_FOR)}.",
        )


CUDA_DEFAULT = ("8.0", "9.0", "10.0", "12.0")
"""The compute capabilities of the cuda target's kernels by default: code for 8.0 runs on 8.6 and 8.9 too."""

DEFAULT = ("8.0", "8.6", "8.9", "12.0")
"""The compute capabilities of engines by default: Ampere, Ada and Blackwell. More of them make no larger engine."""


def check_suited(capabilities: Sequence[str]) -> None:
    """Raises TargetError naming those that TensorRT-RTX builds nothing for."""
    unsuited = [c for c in capabilities if c not in CAPABILITY_BITS]
    if unsuited:
        raise TargetError(
            f"gpu: TensorRT-RTX builds no engine for compute capability {', '.join(unsuited)}",
            hint=f"It builds for {', '.join(CAPABILITY_BITS)}.",
        )
