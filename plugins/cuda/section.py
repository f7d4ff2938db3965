"""The ``cuda`` section of a target's manifest: the GPUs that it has kernels for, and the sizes of its steps."""

from __future__ import annotations

from itertools import product
from typing import Annotated, Literal

from msgspec import Meta, field

from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.shared.errors import BundleError
from enginewright.runtime.shared.records import Positive, Record

from ..engines.section import Capability
from ..gpu.tiles import code_for, number_of


class CudaSection(Record, frozen=True, kw_only=True):
    """The cuda target's section in a bundle's manifest.

    Attributes:
        compute_capabilities: the compute capabilities for which it has kernels, such as "9.0". ``kernels_for`` has the
            rule for other GPUs.
        dtype: the type of activations, and of weights and caches without another format.
        requests: the most requests of a step.
        chunk: the most tokens of a step.
        partitions: the partitions, such as "tensor=2", for whose ranks it has kernels.
        families: the compute capabilities whose machine code was compiled for their family: "10.0" runs on 10.3, "12.0"
            on 12.1.
        exact: True if a token's bits don't depend on the step that computes it.
        assemblers: compute capability -> the CUDA version of the assembler of its machine code, such as "13.4", if
            known.
    """

    compute_capabilities: Annotated[tuple[Capability, ...], Meta(min_length=1)]
    dtype: Literal["f16", "bf16", "f32"]
    requests: Positive
    chunk: Positive
    partitions: tuple[str, ...] = ()
    families: tuple[Capability, ...] = ()
    exact: bool = False
    assemblers: dict[Capability, str] = field(default_factory=dict)

    def kernels_for(self, capability: str) -> str | None:
        """Returns the one of ``compute_capabilities`` whose kernels are best for a GPU; None if no kernels run on it.

        Kernels whose machine code the GPU runs come before kernels whose PTX its driver translates. See
        ``tiles.code_for``.
        """
        numbers = {number_of(c): c for c in self.compute_capabilities}
        number = code_for(number_of(capability), numbers, {number_of(c) for c in self.families})
        return None if number is None else numbers[number]


def check_opened(bundle: Bundle, target: str) -> None:
    """Raises BundleError if a target's program accesses memory out of bounds. Nothing else checks this before a GPU
    runs it.
    """
    section = bundle.targets[target].section(CudaSection)
    if section is None or target not in bundle.programs:
        return
    most = min(section.requests, section.chunk)
    for sizes in ((1, 1, 1), *product((section.chunk,), (1, most), (1, most))):
        if (problem := bundle.programs[target].memory_problem(*sizes)) is not None:
            path = bundle.path / bundle.program_file(target)
            raise BundleError(f"{path}: {problem}", hint="Export the bundle again.")


SECTIONS = {"cuda": CudaSection}
OWN_FORM = True
