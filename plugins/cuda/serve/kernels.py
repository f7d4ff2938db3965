"""The kernels of the cuda target: collects those that a program may launch, and launches those of a bundle."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import torch

from enginewright.runtime.bundle.regular_file import MOST_JSON_BYTES, read_regular
from enginewright.runtime.shared.errors import BundleError
from enginewright.runtime.shared.lowered_program import LoweredProgram
from enginewright.runtime.shared.step_schema import LOGITS, port_of

from ...gpu.call import Call
from ...gpu.carried_kernels import CarriedKernels
from ...gpu.choose_tiles import Compile, choose_tile
from ...gpu.compile_ahead import compile_kernel
from ...gpu.cuda_driver import Device
from ...gpu.placing import PLACED, place_call
from ...gpu.sampling import each_sampling_call
from ...gpu.specs import AttentionShape, KernelSpec
from ...gpu.step_calls import reduce_call
from ...gpu.tiles import Tile, gpu_of
from ...steps.packed_steps import StepLimits, StepShape, input_shapes
from ..section import CudaSection
from .exchange import Exchange
from .program import TORCH_DTYPES, CudaProgram, Place

_META = torch.device("meta")


TILES_FILE = "tiles-sm{}.json"
"""The file with the tiles of the attention kernels for a compute capability, next to the kernels."""


class SpecCollector:
    """A launcher that launches nothing: it collects the specifications of kernels and the chosen tiles.

    ``compiler`` compiles candidates for tiles; ``start`` is called with each new specification.
    """

    def __init__(
        self,
        capability: int,
        compiler: Compile = compile_kernel,
        start: Callable[[KernelSpec], object] = lambda spec: None,
    ) -> None:
        self.found: dict[KernelSpec, None] = {}
        self.tiles: dict[tuple[AttentionShape, bool], Tile] = {}
        self.capability, self._compiler, self._start = capability, compiler, start

    def tile(self, shape: AttentionShape, decode: bool) -> Tile:
        """Returns the tile for an attention layer, chosen by compiling candidates, and records it."""
        if (shape, decode) not in self.tiles:
            self.tiles[shape, decode] = choose_tile(shape, self.capability, decode=decode, compiler=self._compiler)
        return self.tiles[shape, decode]

    def tiles_json(self) -> str:
        """Returns the chosen tiles as JSON, for ``CarriedLauncher``."""
        entries = [{"shape": asdict(s), "decode": d, "tile": asdict(tile)} for (s, d), tile in self.tiles.items()]
        return json.dumps(entries, indent=1, sort_keys=True) + "\n"

    def bind(self, call: Call) -> Callable[[], object]:
        spec = call.spec(self.capability)
        if spec not in self.found:
            self.found[spec] = None
            self._start(spec)
        return lambda: None

    def resident(self, call: Call) -> int:
        """Returns 1. The number has no effect here, because the number of programs doesn't change a kernel."""
        return 1


def specs_of(
    program: LoweredProgram, section: CudaSection, collector: SpecCollector, exchange: Exchange | None = None
) -> SpecCollector:
    """Collects every kernel that a program's steps and sampling may launch in ``collector``, and returns it.

    A step's sizes determine tiles, and in decode steps also if contexts are split. So steps of many sizes are bound,
    with tensors without memory. ``exchange`` is that of a rank; None for a single rank. Raises the errors of
    ``compile_attention``.
    """
    limits = StepLimits(tokens=section.chunk, requests=section.requests, rows=section.requests, blocks=256)
    bound = CudaProgram(
        program,
        {use.name: _meta_weight(use.shape, use.dtype) for use in program.weights},
        Place(_META, gpu_of(collector.capability), collector),
        blocks={group.name: 1 for group in program.cache_groups},
        limits=limits,
        exchange=exchange,
        exact=section.exact,
    )
    outputs: dict[str, torch.Tensor] = {}
    for shape in _shapes(section):
        inputs = {
            name: torch.empty(size, dtype=TORCH_DTYPES[port_of(name).dtype], device=_META)
            for name, size in input_shapes(bound.groups, shape, program.ports).items()
        }
        outputs = bound.bound(shape, inputs).outputs
    words = torch.empty(4, dtype=torch.int32, device=_META)
    collector.bind(place_call(dict.fromkeys(PLACED, words), 1, 1))
    if (logits := outputs.get(LOGITS)) is not None:
        for of_any_step in (logits, logits.float()):  # the latter where a step was run in parts
            for call in each_sampling_call(of_any_step):
                collector.bind(call)
            if section.exact:
                sums = torch.empty((len(of_any_step), 1), device=_META)
                collector.bind(reduce_call(of_any_step, sums, "logsumexp"))
    return collector


def _shapes(section: CudaSection) -> Iterator[StepShape]:
    sizes = {1 << i for i in range(section.chunk.bit_length())} | {section.requests, section.chunk}
    for size in sorted(sizes):
        for blocks in (1, 256):
            if size <= section.requests:
                yield StepShape(0, size, size, size, blocks, True)
            for mixed in (False, True):
                most = min(size, section.requests)
                yield StepShape(0, size, most, most, blocks, False, mixed)


def _meta_weight(shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    stored = (*shape[:-1], shape[-1] // 2) if dtype in ("i4", "u4") else shape
    return torch.empty(stored, dtype=TORCH_DTYPES[dtype], device=_META)


class CarriedLauncher(CarriedKernels):
    """Launches the kernels of a bundle on a GPU's stream, with the tiles that were chosen at the export.

    ``bind`` raises the errors of ``CarriedKernels.bind``.
    """

    def __init__(self, device: Device | None, folder: Path, capability: int) -> None:
        super().__init__(device, folder, capability)
        path = folder / TILES_FILE.format(capability)
        try:
            entries = json.loads(read_regular(path, most=MOST_JSON_BYTES))
            self._tiles = {(AttentionShape(**t["shape"]), bool(t["decode"])): Tile(**t["tile"]) for t in entries}
        except (OSError, ValueError, KeyError, TypeError) as e:
            raise BundleError(f"{path}: the kernels' tiles can't be read: {e}", hint="Export the bundle again.") from e

    def tile(self, shape: AttentionShape, decode: bool) -> Tile:
        if (shape, decode) not in self._tiles:
            raise BundleError(f"{self._folder}: no attention kernel for {shape}", hint="Export the bundle again.")
        return self._tiles[shape, decode]
