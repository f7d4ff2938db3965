"""The GPUs that the tensorrt target is for: those that its plugins' kernels are compiled for."""

from __future__ import annotations

from collections.abc import Sequence

from enginewright.plugins.shared.errors import TargetError
from enginewright.plugins.triton.tiles import GPUS

KERNELS_FOR = tuple(f"{capability // 10}.{capability % 10}" for capability in GPUS)
"""Compute capabilities, in rising order; all of them by default."""


def check_kernels(capabilities: Sequence[str]) -> None:
    """Raises TargetError for a compute capability without kernels."""
    if unknown := [name for name in capabilities if name not in KERNELS_FOR]:
        raise TargetError(
            f"gpu: target tensorrt: no kernels are compiled for compute capability {', '.join(unknown)}",
            hint=f"Known are {', '.join(KERNELS_FOR)}.",
        )
