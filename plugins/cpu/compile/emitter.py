"""The emitter of the cpu target: a lowered program with planned memory, and weights packed as its kernels read them."""

from __future__ import annotations

from dataclasses import replace

from enginewright.passes.attention.choose_blocks import ChooseBlocks
from enginewright.passes.attention.round_kv_cache import RoundKvCache
from enginewright.passes.framework.base import Pass
from enginewright.passes.fusion.fuse_linear_activation import FuseLinearActivation
from enginewright.passes.fusion.fuse_linear_residual import FuseLinearResidual
from enginewright.passes.fusion.fuse_norm_quantize import FuseNormQuantize
from enginewright.passes.fusion.fuse_rope_kv_write import FuseRopeKvWrite
from enginewright.passes.ir.program import Program
from enginewright.passes.lowering.lower_program import Lowering, lower_program
from enginewright.runtime.bundle.buckets import plan_path
from enginewright.runtime.bundle.manifest import TargetManifest
from enginewright.runtime.ranks.partition import Partition
from enginewright.runtime.ranks.rank_programs import partition
from enginewright.runtime.shared.arena import plan_arena
from enginewright.runtime.shared.hidden_taps import add_taps
from enginewright.runtime.shared.progress import Progress

from ...emit.base import EmitOptions
from ...emit.bundle_writer import BundleWriter
from ...emit.lowered_files import write_lowered
from ..recipe import CpuOptions


class CpuEmitter:
    """Writes targets/cpu/program.json, the weights that the program reads, and the sizes to which steps are padded."""

    name = "cpu"

    def passes(self) -> list[Pass]:
        """Returns the target's own passes, in order."""
        return [
            # Not a fusion: the recipe's KV-cache format, which other targets don't have.
            ChooseBlocks(),
            RoundKvCache(),
            # What comes right behind a linear is done to its sums in registers.
            FuseLinearActivation(),
            FuseLinearResidual(),
            # By now a norm adds nothing where a linear does: its result is quantized while it is in the cache. (A gated
            # activation that quantizes takes as long as the two steps: benchmarks/notes/cpu.md.)
            FuseNormQuantize(),
            FuseRopeKvWrite(ends=True),
        ]

    def emit(
        self, program: Program, writer: BundleWriter, progress: Progress, options: EmitOptions = EmitOptions()
    ) -> TargetManifest:
        """Writes the lowered program and its weights into the bundle. Implements `Emitter.emit`."""
        lowering = lower_for_cpu(program)
        for text in options.section(CpuOptions).partitions:
            partition(lowering.program, Partition.parse(text))
        write_lowered(lowering, self.name, writer, progress)
        if options.buckets is not None:
            writer.write_text(plan_path(self.name), options.buckets.to_json())
        return TargetManifest()


def lower_for_cpu(program: Program) -> Lowering:
    """Lowers a program for the cpu target and plans its memory. Raises the errors of ``lower_program``."""
    lowering = lower_program(program)
    return replace(lowering, program=plan_arena(add_taps(lowering.program)))
