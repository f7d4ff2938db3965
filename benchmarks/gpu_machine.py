"""Records of figures that only a GPU can tell, and the machine that measures them. Importing this loads no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Record = dict[str, Any]
Figure = tuple[Record, Callable[[], Record]]
"""A figure's labels, and the function that measures it."""

Mode = Literal["gpu", "looked-up", "interpreted"]

CAPABILITY = "9.0"
"""The compute capability that packed kernels are compiled for."""

EXACT = "-exact"
"""The end of the name of what was packed for exact steps."""


class NotMeasuredError(Exception):
    """A figure that isn't measured here, and why."""


@dataclass(frozen=True)
class Machine:
    """The machine that runs parts, with the folder ``packed``. ``free``: bytes that a rehearsal's GPU has."""

    packed: Path
    mode: Mode = "gpu"
    free: int = 139 << 30

    @property
    def gpu(self) -> bool:
        return self.mode == "gpu"

    @property
    def device(self) -> str:
        return "cuda" if self.gpu else "cpu"

    @property
    def section(self) -> Any:
        """The section that programs were packed for."""
        from gpu_places import section_of

        return section_of(CAPABILITY)

    def free_bytes(self) -> int:
        """Says how much of the GPU's memory is free."""
        if not self.gpu:
            return self.free
        import torch

        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info()[0])

    def place(self, device: str = "cpu") -> Any:
        """The ``gpu_places.Place`` of this machine. ``device``: the device of a rehearsal."""
        from gpu_places import Rehearsal

        from enginewright.plugins.cuda.serve import executor as cuda_blocks

        if not self.gpu:
            return Rehearsal(CAPABILITY, interpreted=self.mode == "interpreted" and device == "cpu", device=device)
        place = cuda_blocks.place_of(self.section)
        place.entered().__enter__()  # until the process ends
        return place

    def launcher(self, folder: str, place: Any) -> Any:
        """Launches the kernels in a folder of what was packed."""
        return place.launcher(self.packed / folder, self.section)
