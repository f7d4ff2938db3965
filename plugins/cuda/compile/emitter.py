"""The emitter of the cuda target: it writes the program, row-major weights, and the kernels for each kind of GPU."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Literal

from enginewright.passes.attention.round_kv_cache import RoundKvCache
from enginewright.passes.framework.base import Pass
from enginewright.passes.fusion.fuse_rope_kv_write import FuseRopeKvWrite
from enginewright.passes.ir.program import Program
from enginewright.passes.lowering.builder import Form
from enginewright.passes.lowering.lower_program import Lowering, lower_program
from enginewright.passes.lowering.narrow_floats import narrow_floats
from enginewright.passes.quantization.dequantize_products import DequantizeProducts
from enginewright.runtime.bundle.buckets import plan_path
from enginewright.runtime.bundle.manifest import TargetManifest, target_folder
from enginewright.runtime.ranks.partition import Partition
from enginewright.runtime.ranks.rank_programs import partition
from enginewright.runtime.shared.arena import plan_arena
from enginewright.runtime.shared.hidden_taps import add_taps
from enginewright.runtime.shared.lowered_program import LoweredProgram
from enginewright.runtime.shared.progress import Progress, ProgressEvent
from enginewright.runtime.shared.threads import available_threads

from ...emit.base import EmitOptions
from ...emit.bundle_writer import BundleWriter
from ...emit.lowered_files import with_own_names, write_lowered
from ...engines.gpus import CUDA_DEFAULT, check_kernels
from ...gpu.compile_ahead import check_triton, files_of
from ...gpu.compile_workers import KernelCompiler
from ...gpu.formats import check_formats
from ...gpu.specs import KernelSpec
from ...gpu.tiles import FloatType, capability_of, gpu_of, number_of
from ...steps.paged_section import KERNELS_FOLDER
from ..section import CudaSection

FLOATS: Literal["bf16"] = "bf16"
"""The default type of activations and caches."""

_REQUESTS, _CHUNK = 256, 2048


class CudaEmitter:
    """Writes targets/cuda/programs, the weights that they use, and targets/cuda/kernels."""

    name = "cuda"

    def passes(self) -> list[Pass]:
        """Returns the target's own passes, in order. Activations become 16-bit floats for all weight formats."""
        return [RoundKvCache(), DequantizeProducts(), FuseRopeKvWrite()]

    def emit(
        self, program: Program, writer: BundleWriter, progress: Progress, options: EmitOptions = EmitOptions()
    ) -> TargetManifest:
        """Writes the lowered program, its weights and kernels. Implements `Emitter.emit`.

        It also raises MissingDependencyError if Triton isn't installed.
        """
        engines = options.engines
        capabilities, floats = engines.gpus or CUDA_DEFAULT, engines.dtype or FLOATS
        check_kernels(capabilities)
        check_formats(capabilities, (floats,))
        check_triton(f"target {self.name}: compiling its kernels")
        lowering = lower_for_gpus(program, floats)
        section = CudaSection(
            compute_capabilities=capabilities,
            dtype=floats,
            requests=engines.requests or _REQUESTS,
            chunk=max(engines.chunk or _CHUNK, engines.requests or _REQUESTS),
            partitions=tuple(map(str, _cuts(engines.partitions))),
            families=tuple(name for name in capabilities if gpu_of(number_of(name)).family),
            exact=engines.exact,
        )
        write_lowered(lowering, self.name, writer, progress)
        if options.buckets is not None:
            writer.write_text(plan_path(self.name), options.buckets.to_json())
        folder = f"{target_folder(self.name)}/{KERNELS_FOLDER}"
        made_by = self._kernels(lowering.program, section, folder, writer, progress)
        return TargetManifest(sections={"cuda": section.model_copy(update={"assemblers": made_by})})

    def _kernels(
        self, program: LoweredProgram, section: CudaSection, folder: str, writer: BundleWriter, progress: Progress
    ) -> dict[str, str]:
        """Compiles all kernels that steps may launch, for each compute capability, and writes them.

        Returns compute capability -> the CUDA version of the assembler, for those whose machine code contains that
        version.
        """
        from ...gpu.carried_kernels import assembler_of
        from ..serve.exchange import Unjoined
        from ..serve.kernels import TILES_FILE, SpecCollector, specs_of

        cuts = [partition(program, how) for how in _cuts(section.partitions)]
        numbers = [number_of(name) for name in section.compute_capabilities]
        specs: list[KernelSpec] = []
        made_by: dict[str, str] = {}
        with KernelCompiler(available_threads()) as compiler:
            for number in numbers:
                launched = specs_of(program, section, SpecCollector(number, compiler.compile, compiler.start))
                for ranks in cuts:
                    for rank in range(len(ranks)):
                        specs_of(ranks[rank], section, launched, Unjoined(rank - ranks[rank].ranks[0]))
                specs += launched.found
                writer.write_text(f"{folder}/{TILES_FILE.format(number)}", launched.tiles_json())
                progress(ProgressEvent("kernels", 0, len(specs), f"tiles for sm_{number}"))
            for done, spec in enumerate(specs, 1):
                kernel = compiler.compile(spec)
                for name, content in files_of(kernel).items():
                    writer.write_bytes(f"{folder}/{name}", content)
                if by := assembler_of(kernel.cubin):
                    made_by[capability_of(spec.capability)] = by
                progress(ProgressEvent("kernels", done, len(specs), f"{spec.kernel} for sm_{spec.capability}"))
        return made_by


def _cuts(partitions: Iterable[str]) -> list[Partition]:
    """Returns the partitions with two ranks or more, without those that divide keys by tokens, which the target doesn't
    support.
    """
    return [how for how in map(Partition.parse, partitions) if how.owners == 1 and how.ranks > 1]


def lower_for_gpus(program: Program, floats: FloatType) -> Lowering:
    """Lowers a program for the cuda target, plans its memory, and gives its weights names of their own.

    ``floats`` is the type of activations. Raises the errors of ``lower_program``.
    """
    lowering = lower_program(program, Form("the cuda target", panels=False, floats=floats))
    groups = tuple(group.stored_as(floats) for group in lowering.program.cache_groups)
    changes = {"cache_groups": groups}
    narrow = narrow_floats(lowering.program.model_copy(update=changes), floats)
    return with_own_names(replace(lowering, program=plan_arena(add_taps(narrow))), "cuda")
