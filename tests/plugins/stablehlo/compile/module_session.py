"""Writes a program's modules into a bundle and drives them slot by slot: no scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from enginewright.passes.ir.program import Program
from enginewright.plugins.emit.base import EmitOptions
from enginewright.plugins.emit.bundle_writer import BundleWriter
from enginewright.plugins.gpu.recipe import EnginesSection
from enginewright.plugins.stablehlo.compile.emitter import StableHloEmitter
from enginewright.plugins.stablehlo.recipe import StableHloOptions
from enginewright.plugins.stablehlo.serve.executor import ModuleSlots, open_client, stablehlo_section
from enginewright.plugins.steps.slots import SlotRun
from enginewright.plugins.steps.x86_levels import LevelName
from enginewright.runtime.bundle.buckets import BucketPlan
from enginewright.runtime.bundle.manifest import Manifest, ModelSection, SourceSection
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.bundle.tokenizer_files import TokenizerFiles
from enginewright.runtime.shared.contracts import ModelInfo
from enginewright.runtime.shared.progress import silent

CONTEXT = 31
SIZES = BucketPlan.from_sizes((4, 12), (1, 4), 4)


def write_bundle(
    program: Program, folder: Path, kernels: Literal["enginewright"] | None = None, iree: tuple[LevelName, ...] = ()
) -> Bundle:
    """A bundle of the stablehlo target alone, for slots of 32 places."""
    vocabulary = int(program.shape(program.logits)[-1])
    info = ModelInfo(name="tiny", architecture="x", vocab_size=vocabulary, context_length=CONTEXT)
    manifest = Manifest(
        model=ModelSection.from_info(info), source=SourceSection(kind="module", name="tiny"), targets=()
    )
    options = EmitOptions(
        engines=EnginesSection(),
        context_length=CONTEXT,
        buckets=SIZES,
        sections=(StableHloOptions(kernels=kernels, iree=iree),),
    )
    with BundleWriter(folder) as writer:
        emitted = StableHloEmitter().emit(program, writer, silent, options)
        for path, data in TokenizerFiles().to_files().items():
            writer.write_bytes(path, data)
        writer.commit(manifest, {"stablehlo": emitted})
    return Bundle.open(folder, trust="code")


class ModuleSession:
    """Three slots, filled with numbers that must not be seen."""

    def __init__(self, bundle: Bundle, slots: int = 3, provider: str = "cpu") -> None:
        section = stablehlo_section(bundle, "stablehlo")
        client = open_client(section, provider, 1)
        self.slots = ModuleSlots(bundle, "stablehlo", section, client, slots=slots, load="map")
        self.lengths = [0] * slots
        for memory in self.slots._memory.values():
            memory[:] = 3.0

    def step(self, work: dict[int, Sequence[int]]) -> dict[int, npt.NDArray[np.float32]]:
        """Appends tokens to requests: prompts one by one, decodes in one run. Each request's logits [tokens, V]."""
        outputs = {}
        if any(len(tokens) > 1 for tokens in work.values()):
            for slot, tokens in work.items():
                places = self.lengths[slot] + np.arange(len(tokens))[None]
                every = np.arange(len(tokens))
                run = SlotRun(slot, np.asarray([tokens]), places, every, every)
                outputs[slot] = self.slots.run(run).copy()
        else:
            first, last = min(work), max(work)
            ids = np.zeros((last - first + 1, 1), np.int64)
            places = np.full_like(ids, self.slots.length - 1)
            for slot, (token,) in work.items():
                ids[slot - first], places[slot - first] = token, self.lengths[slot]
            rows = np.asarray([slot - first for slot in work])
            logits = self.slots.run(SlotRun(first, ids, places, rows, np.arange(len(rows)))).copy()
            outputs = {slot: logits[i : i + 1] for i, slot in enumerate(work)}
        for slot, tokens in work.items():
            self.lengths[slot] += len(tokens)
        return outputs
