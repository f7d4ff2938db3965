"""The ``cuda`` section of a target's manifest: what its kernels were compiled for, and the sizes of its steps."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from enginewright.plugins.shared.records import Positive, Record

from .tensorrt_section import Capability


class CudaSection(Record, frozen=True, kw_only=True):
    """Beside the target's program.json.

    Attributes:
        compute_capabilities: of the GPUs that there are kernels for, such as "9.0"; they run on later ones of the same
            major number too.
        dtype: of activations, and of weights and caches that have no other format.
        requests: most of a step.
        chunk: most tokens of a step.
    """

    compute_capabilities: Annotated[tuple[Capability, ...], Meta(min_length=1)]
    dtype: Literal["f16", "bf16", "f32"]
    requests: Positive
    chunk: Positive

    def kernels_for(self, capability: str) -> str | None:
        """The newest of ``compute_capabilities`` whose kernels run on a GPU of that capability; None if none do."""
        wanted = _numbers(capability)
        fitting = [c for c in self.compute_capabilities if _numbers(c)[0] == wanted[0] and _numbers(c) <= wanted]
        return max(fitting, key=_numbers, default=None)


def _numbers(capability: str) -> tuple[int, int]:
    major, _, minor = capability.partition(".")
    return int(major), int(minor)
