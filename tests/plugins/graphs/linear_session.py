"""Emits a program's file and drives it in onnxruntime as the linear form says: no executor, no scheduler."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
import torch
from transformers import PreTrainedModel

from enginewright.optimizer.capture import capture
from enginewright.optimizer.pipeline.pipeline import default_pipeline
from enginewright.passes.framework.base import PassContext
from enginewright.passes.framework.manager import PassManager
from enginewright.passes.ir.program import Program
from enginewright.plugins.emit.bundle_writer import BundleWriter
from enginewright.plugins.graphs.emit_model import emit_model
from enginewright.plugins.graphs.float_types import FloatType
from enginewright.plugins.onnx.kernels.library import operators_library
from enginewright.plugins.steps.linear_io import CONTRIB_FILE, KERNELS_FILE, MODEL_FILE, LinearIo, cache_names
from enginewright.runtime.shared.dtypes import DTYPES
from enginewright.runtime.shared.progress import silent
from tests.acceptance.tiny_configs import tiny_family

Logits = npt.NDArray[np.float32]

FILES = (MODEL_FILE, CONTRIB_FILE, KERNELS_FILE)


def lowered(model: PreTrainedModel, context: PassContext | None = None) -> Program:
    """A model's program, as the emitter gets it."""
    program = capture(model).program
    PassManager(default_pipeline(), context or PassContext()).run(program)
    return program


@lru_cache(maxsize=16)
def _lowered_family(family: str) -> Program:
    return lowered(tiny_family(family))


def lowered_family(family: str) -> Program:
    """A copy of ``lowered(tiny_family(family))``, which is captured once on a worker that several tables run on."""
    return _lowered_family(family).copy()


def emit(
    program: Program,
    folder: Path,
    contrib: int | None = None,
    floats: FloatType = "f32",
    capacity: int | None = None,
    kernels: int | None = None,
) -> LinearIo:
    """Writes model.onnx, the variants that are wanted, and weights/ into ``folder``, and has files checked."""
    with BundleWriter(folder / "unfinished") as writer:
        io = emit_model(program, writer, silent, floats, capacity, contrib=contrib, kernels=kernels)
        writer.finish_weights()
        for part in (*FILES, "weights"):
            if (writer.folder / part).exists():
                shutil.move(writer.folder / part, folder / part)
    for part in FILES:
        if (folder / part).exists():
            onnx.checker.check_model(folder / part, full_check=True)
    return io


def open_session(path: Path, accuracy_level: int = 1) -> onnxruntime.InferenceSession:
    """A session of one thread, by default one that doesn't round activations for products with 4 bits."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", str(accuracy_level))
    if path.name == KERNELS_FILE:
        options.add_session_config_entry("enginewright.threads", "1")
        options.register_custom_ops_library(str(operators_library()))
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def run_tokens(folder: Path, ids: torch.Tensor, rows: torch.Tensor, file: str = MODEL_FILE) -> torch.Tensor:
    """The result for one request of ids [T], by a program without attention."""
    session = open_session(folder / file)
    feeds = {"input_ids": ids[None].numpy(), "rows": rows.numpy(), "write_index": np.zeros(1, np.int64)}
    feeds["position_ids"] = np.arange(len(ids))[None]
    names_of_inputs = {entry.name for entry in session.get_inputs()}
    (result,) = session.run(["logits"], {name: value for name, value in feeds.items() if name in names_of_inputs})
    return torch.from_numpy(result)


class LinearSession:
    """Slots 0 .. ``slots - 1`` of ``capacity`` tokens each, filled with numbers that must not be seen."""

    def __init__(self, folder: Path, io: LinearIo, slots: int = 3, capacity: int = 32) -> None:
        self.session = open_session(folder / io.file, io.accuracy_level)
        self.io, self.capacity = io, capacity
        self.lengths = [0] * slots
        self.caches: dict[str, npt.NDArray[Any]] = {}
        for group in io.cache_groups:
            for layer in group.layers:
                sizes = (group.key_head_size, group.value_head_size)
                for (past, _), size in zip(cache_names(layer), sizes, strict=True):
                    shape = (slots, group.kv_heads, capacity, size)
                    self.caches[past] = np.full(shape, 3.0, DTYPES[group.dtype].numpy)

    def step(self, work: dict[int, Sequence[int]]) -> dict[int, Logits]:
        """Appends tokens to requests, padded to the longest, in one run. Each request's logits [tokens, V]."""
        slots, longest = list(work), max(len(tokens) for tokens in work.values())
        ids = np.zeros((len(slots), longest), np.int64)
        positions = np.zeros_like(ids)
        masks = {g.mask: np.zeros((len(slots), 1, longest, self.capacity), np.bool_) for g in self.io.cache_groups}
        write_index = np.asarray([self.lengths[slot] for slot in slots], np.int64)
        rows: list[int] = []
        keys = np.arange(self.capacity)
        for b, (slot, tokens) in enumerate(work.items()):
            ids[b, : len(tokens)] = tokens
            positions[b] = self.lengths[slot] + np.arange(longest)
            rows += range(b * longest, b * longest + len(tokens))
            for group in self.io.cache_groups:
                seen = keys[None] <= positions[b][:, None]
                if group.window:
                    seen &= keys[None] > positions[b][:, None] - group.window
                masks[group.mask][b, 0] = seen
            self.lengths[slot] += len(tokens)
        feeds = {"input_ids": ids, "position_ids": positions, "write_index": write_index, **masks}
        feeds |= {"rows": np.asarray(rows, np.int64)} | {name: cache[slots] for name, cache in self.caches.items()}
        names_of_inputs = {entry.name for entry in self.session.get_inputs()}
        names = [output.name for output in self.session.get_outputs()]
        outputs = self.session.run(names, {name: value for name, value in feeds.items() if name in names_of_inputs})
        results = dict(zip(names, outputs, strict=True))
        for name, cache in self.caches.items():
            cache[slots] = results[name.replace("past", "present")]
        counts = np.cumsum([len(tokens) for tokens in work.values()])[:-1]
        return dict(zip(slots, np.split(results["logits"], counts), strict=True))


SEQUENCES = {0: 23, 2: 12}
"""Tokens of the requests in two of three slots."""

PLAN: tuple[dict[int, int], ...] = ({0: 11, 2: 5}, {0: 7, 2: 2}, *({0: 1, 2: 1},) * 5)
"""A ragged prefill, a second one behind it, and decode steps."""


def tokens_of(slot: int) -> list[int]:
    """The tokens of the request in a slot."""
    ids: list[int] = np.random.default_rng(slot).integers(3, 250, SEQUENCES[slot]).tolist()
    return ids


def run_plan(session: LinearSession, plan: Sequence[dict[int, int]] = PLAN) -> dict[int, Logits]:
    """Logits after each token of both requests."""
    by_slot: dict[int, list[Logits]] = {slot: [] for slot in SEQUENCES}
    done = dict.fromkeys(SEQUENCES, 0)
    for counts in plan:
        work = {slot: tokens_of(slot)[done[slot] : done[slot] + n] for slot, n in counts.items()}
        for slot, logits in session.step(work).items():
            by_slot[slot].append(logits)
            done[slot] += len(logits)
    return {slot: np.concatenate(parts) for slot, parts in by_slot.items()}


def reference_logits(model: PreTrainedModel) -> dict[int, Logits]:
    """The logits of transformers, each request by itself."""
    with torch.no_grad():
        return {s: model(input_ids=torch.tensor([tokens_of(s)]), use_cache=False).logits[0].numpy() for s in SEQUENCES}
