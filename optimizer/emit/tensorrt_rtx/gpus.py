"""The GPUs that TensorRT-RTX builds engines for."""

from __future__ import annotations

from collections.abc import Sequence

from enginewright.plugins.shared.errors import TargetError
from enginewright.runtime.bundle.tensorrt_plan import CAPABILITY_BITS

DEFAULT = ("8.0", "8.6", "8.9", "12.0")
"""What engines are built for by default: Ampere, Ada and Blackwell. More of them make no larger engine."""


def check_suited(capabilities: Sequence[str]) -> None:
    """Raises TargetError naming those that TensorRT-RTX builds nothing for."""
    unsuited = [c for c in capabilities if c not in CAPABILITY_BITS]
    if unsuited:
        raise TargetError(
            f"gpu: TensorRT-RTX builds no engine for compute capability {', '.join(unsuited)}",
            hint=f"It builds for {', '.join(CAPABILITY_BITS)}.",
        )
