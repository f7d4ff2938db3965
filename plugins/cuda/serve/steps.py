"""Runs steps of the cuda target: pads, uploads, runs or replays a graph, and samples on the device.

A step is one upload from fixed memory, its kernels, and one download of the sampled ids. A size of decode steps is
captured as a CUDA graph at its second step, and replayed from then on. A dropped graph is captured at its next step.
"""

from __future__ import annotations

import math
import threading
import time
import warnings
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from enginewright.runtime.shared.contracts import (
    NO_TOKEN,
    STATE,
    Int32Array,
    SamplingBatch,
    StepInput,
    StepMasks,
    StepOutput,
)
from enginewright.runtime.shared.errors import CapacityError, EnginewrightError, RequestError
from enginewright.runtime.shared.step_arrays import part_of
from enginewright.runtime.shared.step_schema import LOGITS, port_of

from ...gpu.sampling import (
    chosen_rows,
    drawing_of,
    option_type,
    option_words,
    packed_lists,
    places_of,
    write_masks,
    write_options,
)
from ...gpu.sampling_calls import Drawing, SamplingMemory, sampling_calls
from ...steps.packed_steps import (
    StepShape,
    bucketed,
    input_shapes,
    padded,
    parts,
    rounded,
)
from .ops import Launcher, Work
from .program import CudaProgram

MOST_SHAPES = 64
"""Sizes of steps whose work, or graph, is kept."""


class Graph(Protocol):
    """Captured work: ``torch.cuda.CUDAGraph``, or a fake one in tests."""

    def replay(self) -> None:
        """Runs the work again, on the same memory."""


_LOGPROB_PIECES = 32
"""Pieces that logprobs are made of: of each there are floats, and keys of twice the size."""

TOKENS = "tokens"
"""The name of drawn tokens among a step's results."""

Result = TypeVar("Result")

Capture = Callable[[Callable[[], None]], Graph]
"""A function that makes a graph of work, without running it."""


@dataclass
class _Bound:
    """A step of one size that is ready to run."""

    places: dict[str, int]
    staged: Tensor
    uploaded: Tensor
    works: list[Work]
    outputs: dict[str, Tensor]
    by_row: list[Work]
    copied: torch.cuda.Event | None  # after the last upload: before it, ``staged`` must not change
    options: dict[str, Tensor]
    draws: dict[tuple[Drawing, int], list[Work]] = field(default_factory=dict)  # by the words of the lists' memory
    graph: Graph | None = None


class CudaSteps:
    """Runs steps of a program.

    Args:
        program: the program, with its memory.
        vocab: the number of tokens in the vocabulary.
        launcher: launches the kernels of sampling.
        capture: makes graphs; None makes none.

    Attributes:
        graph_launches: the number of steps that replayed a graph.
        no_graphs: the reason why no graphs are made any more; "" if they are.
        late: counts of delays during serving, by name: sizes that were bound, graphs that were captured, milliseconds
            for both, and times that memory ran out.
    """

    def __init__(self, program: CudaProgram, vocab: int, launcher: Launcher, capture: Capture | None) -> None:
        self.graph_launches, self.no_graphs = 0, ""
        self.late: Counter[str] = Counter()
        self._late_seconds = 0.0
        self._program, self._launcher, self._capture = program, launcher, capture
        self._limits, self._device = program.limits, program.device
        self._runs_once = program.ranked or any(group.kind == STATE for group in program.groups)
        self._advanced = False
        self._settled: set[StepShape] = set()  # sizes of decode steps for which the libraries have chosen kernels
        self._sums = _Float32Sums()
        self._memory = SamplingMemory(program.limits.rows, vocab, self._new)
        self._lists = torch.zeros(256, dtype=torch.int32, device=program.device)
        pinned = program.device.type == "cuda"
        self._staged_masks = torch.zeros(len(self._memory.masks), dtype=torch.int32, pin_memory=pinned)
        self._masks_copied = torch.cuda.Event() if pinned else None
        self._bound: OrderedDict[tuple[StepShape, bool, bool], _Bound] = OrderedDict()

    def most(self, *, decodes: bool) -> tuple[int, int]:
        """Returns the most tokens and the most requests of a step."""
        return self._limits.tokens, self._limits.requests

    def start(self, step: StepInput) -> _Started:
        """Starts a step, and its sampling, on the stream.

        Raises RequestError for an invalid step, and CapacityError if there is no memory even after other sizes were
        dropped.
        """
        self._advanced = False
        return self._with_memory(lambda: self._start(step))

    @torch.inference_mode()
    def _with_memory(self, work: Callable[[], Result]) -> Result:
        """Returns the result of ``work``; if memory runs out, runs it again after dropping the bound sizes.

        Work that may have changed states of recurrent layers, or exchanged data with other ranks, isn't run again.
        """
        before, self._advanced = self._advanced, False
        try:
            return work()
        except torch.OutOfMemoryError as e:
            self.late["late_memory"] += 1
            if self._advanced:
                raise _no_memory(e) from e
        finally:
            self._advanced |= before
        self.synchronize()
        self._bound.clear()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        try:
            return work()
        except torch.OutOfMemoryError as e:
            raise _no_memory(e) from e

    def _start(self, step: StepInput) -> _Started:
        self.check(step)
        for name, cleared in step.clears.items():
            self._program.clear(name, cleared.tolist())
        for name, pairs in step.copies.items():
            self._program.copy(name, pairs.tolist())
        results = _Results(step)
        if len(step.ids) <= self._limits.tokens and len(step.kv_len) <= self._limits.requests:
            self._compute(step, np.arange(len(step.rows)), step.sampling, results)
        else:
            for members in parts(step.counts, self):
                part, order = part_of(step, members)
                self._compute(part, order, step.sampling, results)
        return _Started(results, self._device)

    def _compute(
        self, step: StepInput, order: npt.NDArray[np.int64], sampling: SamplingBatch | None, results: _Results
    ) -> None:
        """Puts a step's results, at the rows ``order``, into those of a whole step with the options ``sampling``.

        If there are more rows of logits than memory for them, what is computed by row runs several times, and all else
        once.
        """
        rows, most = len(step.rows), self._limits.rows
        shape = self._shape_of(step, _blocks_of(step), min(rows, most))
        bound = self._bound_for(shape, taps=not {LOGITS}.issuperset(step.outputs), keeps=rows > most)
        for start in range(0, max(rows, 1), most):
            some = slice(start, start + most)
            options = None if sampling is None or not rows else self._options_of(sampling, order[some])
            self._upload(bound, shape, step, step.rows[some], options)
            if start == 0:
                self._run(bound, shape)
            else:
                for work in bound.by_row:
                    work()
            count = min(rows - start, most)
            values = {name: bound.outputs[name][:count] for name in step.outputs if name in bound.outputs}
            # Even if the step can't be run again, this can.
            self._with_memory(partial(self._put, results, order[some], values, bound, options))

    def _put(
        self,
        results: _Results,
        order: npt.NDArray[np.int64],
        values: Mapping[str, Tensor],
        bound: _Bound,
        options: SamplingBatch | None,
    ) -> None:
        """Draws tokens if there are ``options``, and puts them and the outputs ``values`` at the rows ``order``."""
        results.put(order, {**values, **(self._draw(bound, options) if options is not None else {})})

    def _options_of(self, sampling: SamplingBatch, rows: npt.NDArray[np.int64]) -> SamplingBatch:
        return sampling if len(rows) == len(sampling.temperature) else chosen_rows(sampling, rows)

    def _upload(
        self, bound: _Bound, shape: StepShape, step: StepInput, rows: Int32Array, options: SamplingBatch | None
    ) -> None:
        """Uploads a step's inputs, with some of its rows, and their options."""
        arrays = padded(step, rows, self._program.groups, shape, self._program.program.ports)
        if bound.copied is not None:
            bound.copied.synchronize()
        staged = bound.staged.numpy()
        for name, array in arrays.items():
            staged[bound.places[name] : bound.places[name] + array.size] = array.reshape(-1).view(np.int32)
        write_options(staged, bound.places, options, shape.rows)
        bound.uploaded.copy_(bound.staged, non_blocking=True)
        if bound.copied is not None:
            bound.copied.record()

    def check(self, step: StepInput) -> None:
        """Raises RequestError for an invalid step, before any of it runs."""
        if not len(step.ids):
            raise RequestError("step: it has no tokens", hint="Give it one at least.")
        blocks = _blocks_of(step)
        if blocks > self._limits.blocks:
            raise RequestError(
                f"step: a request of {blocks} blocks is longer than the {self._limits.blocks} that there is memory for",
                hint="Plan requests by the executor's context.",
            )

    def _shape_of(self, step: StepInput, blocks: int, rows: int) -> StepShape:
        tokens, requests = len(step.ids), len(step.kv_len)
        single = step.counts == 1
        decodes = bool(single.all())
        limits = self._limits
        return StepShape(
            profile=0,
            tokens=(rounded(tokens, (1, 1, limits.requests)) if decodes else bucketed(tokens, (1, 1, limits.tokens))),
            requests=rounded(requests, (1, 1, limits.requests)),
            rows=rounded(max(rows, 1), (1, 1, limits.rows)),
            blocks=rounded(blocks, (1, 1, limits.blocks)),
            decodes=decodes,
            mixed=not decodes and bool(single.any()),
        )

    def _bound_for(self, shape: StepShape, *, taps: bool, keeps: bool) -> _Bound:
        key = shape, taps, keeps
        if key in self._bound:
            self._bound.move_to_end(key)
            return self._bound[key]
        ports = self._program.program.ports
        sizes = input_shapes(self._program.groups, shape, ports)
        words = {name: math.prod(size) for name, size in sizes.items()} | option_words(shape.rows)
        places, staged, uploaded = self._upload_memory(words)
        inputs = {name: uploaded.narrow(0, places[name], words[name]).view(size) for name, size in sizes.items()}
        inputs |= {name: inputs[name].view(torch.float32) for name in ports if port_of(name).dtype == "f32"}
        with self._counted("late_binds"):
            works, outputs, by_row = self._program.bound(shape, inputs, taps=taps, keeps=keeps)
        copied = torch.cuda.Event() if staged.is_pinned() else None
        options = option_views(uploaded, places, shape.rows)
        self._bound[key] = _Bound(places, staged, uploaded, works, outputs, by_row, copied, options)
        if len(self._bound) > MOST_SHAPES:
            self.synchronize()
            self._bound.popitem(last=False)
        return self._bound[key]

    def _run(self, bound: _Bound, shape: StepShape) -> None:
        def run() -> None:
            for work in bound.works:
                work()

        if bound.graph is None and self._capture is not None and shape in self._settled:
            with self._counted("late_graphs"):
                bound.graph = self._captured(self._capture, run)
        self._advanced = self._runs_once
        if bound.graph is None:
            run()
            if shape.decodes:
                self._settled.add(shape)
        else:
            bound.graph.replay()
            self.graph_launches += 1

    @contextmanager
    def _counted(self, what: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self._late_seconds += time.perf_counter() - begin
        self.late[what] += 1
        self.late["late_ms"] = round(self._late_seconds * 1e3)

    def _captured(self, capture: Capture, run: Callable[[], None]) -> Graph | None:
        """Returns a graph of the work. If the capture fails, it warns and returns None, and no graphs are made any
        more.
        """
        try:
            return capture(run)
        except torch.OutOfMemoryError:  # dropped sizes leave memory for it
            raise
        except (RuntimeError, EnginewrightError) as e:  # what torch raises for an error of CUDA is the former
            self._capture, self.no_graphs = None, str(e).partition("\n")[0]
            warnings.warn(
                f"target cuda: a CUDA graph can't be made: {self.no_graphs}; steps are launched kernel by kernel, "
                "which is slower",
                RuntimeWarning,
                stacklevel=2,
            )
            return None

    def _upload_memory(self, words: Mapping[str, int]) -> tuple[dict[str, int], Tensor, Tensor]:
        """Allocates the memory of one upload for arrays of these numbers of words.

        Returns the start of each array in words, the memory on the host (pinned for a GPU), and the memory on the
        device.
        """
        places, count = places_of(words)
        staged = torch.zeros(count, dtype=torch.int32, pin_memory=self._device.type == "cuda")
        return places, staged, torch.zeros(count, dtype=torch.int32, device=self._device)

    def _draw(self, bound: _Bound, sampling: SamplingBatch) -> dict[str, Tensor]:
        """Starts the sampling of a step on the stream, for all its rows, with padding. Returns the tokens [R], in
        memory that the next step overwrites, and the fields of ``StepOutput`` with their logprobs.

        It waits for the masks of forms, which are computed while the step runs.
        """
        drawing, rows = drawing_of(sampling), len(sampling.temperature)
        if drawing.penalties or drawing.edits:
            self._upload_lists(*packed_lists(sampling))
        if drawing.masks and sampling.masks is not None:
            self._upload_masks(sampling.masks)
        key = drawing, len(self._lists)
        if key not in bound.draws:
            options = {**bound.options, "lists": self._lists}
            calls = sampling_calls(bound.outputs[LOGITS], options, self._memory, drawing)
            bound.draws[key] = [self._launcher.bind(call) for call in calls]
        for work in bound.draws[key]:
            work()
        tokens = self._memory.tokens[:rows]
        if sampling.logprobs is None:
            return {TOKENS: tokens}
        changed = self._memory.wide[:rows] if drawing.changes else None
        return {TOKENS: tokens} | logprobs_of(bound.outputs[LOGITS][:rows], tokens, sampling, changed)

    def _upload_masks(self, masks: StepMasks) -> None:
        """Waits for the masks of a step's rows and for the last upload of masks, and uploads them."""
        if self._masks_copied is not None:
            self._masks_copied.synchronize()
        words = write_masks(self._staged_masks.numpy(), masks)
        self._memory.masks[:words].copy_(self._staged_masks[:words], non_blocking=True)
        if self._masks_copied is not None:
            self._masks_copied.record()

    def _upload_lists(self, lists: Int32Array, words: int) -> None:
        """Uploads the packed lists, to larger memory if they need ``words`` that aren't there."""
        if words > len(self._lists):
            self.synchronize()
            self._lists = torch.zeros(1 << (words - 1).bit_length(), dtype=torch.int32, device=self._device)
        self._lists[: len(lists)].copy_(torch.from_numpy(lists))

    def _new(self, shape: tuple[int, ...], dtype: str) -> Tensor:
        return torch.zeros(shape, dtype=getattr(torch, dtype), device=self._device)

    def close(self) -> None:
        """Waits for running work, and frees graphs and memory. No step can be started afterwards."""
        self._sums.close()
        self.synchronize()
        self._bound.clear()
        self._program.close()
        self._memory = SamplingMemory(0, 1, self._new)
        self._lists = self._new((0,), "int32")

    def synchronize(self) -> None:
        """Waits for all work on the stream."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()


def _no_memory(cause: torch.OutOfMemoryError) -> CapacityError:
    return CapacityError(
        f"memory: the GPU has none left for a step: {str(cause).partition('.')[0]}",
        hint="Ask for fewer log-probabilities at a time, or pass less memory for the caches.",
    )


def _blocks_of(step: StepInput) -> int:
    """Returns the most blocks of a request in a step's tables."""
    return max(int(table.shape[1]) for table in step.block_tables.values())


class _Float32Sums:
    """Makes torch's products add in float32 until the last open object of this class is closed or gone; by default
    cuBLAS may add partial sums in 16 bits.

    These are settings of the whole process. They don't change in a step, as steps of several models may run at a time.
    """

    _names = ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")
    _lock = threading.RLock()
    _before: Mapping[str, bool] = {}
    _open = 0

    def __init__(self) -> None:
        with self._lock:
            if not self._open:
                _Float32Sums._before = {name: getattr(torch.backends.cuda.matmul, name) for name in self._names}
                self._set(dict.fromkeys(self._names, False))
            _Float32Sums._open += 1
        self.close = weakref.finalize(self, self._end)
        """Ends this object; a second call does nothing."""

    @classmethod
    def _end(cls) -> None:
        with cls._lock:
            cls._open -= 1
            if not cls._open:
                cls._set(cls._before)

    @staticmethod
    def _set(values: Mapping[str, bool]) -> None:
        for name, value in values.items():
            setattr(torch.backends.cuda.matmul, name, value)


class _Results:
    """The results of a step's rows on the device: outputs in float32, tokens, and fields of ``StepOutput`` with
    logprobs.
    """

    def __init__(self, step: StepInput) -> None:
        self.count, self.outputs = len(step.rows), step.outputs
        self.values: dict[str, Tensor] = {}

    def put(self, order: npt.NDArray[np.int64], values: Mapping[str, Tensor]) -> None:
        """Puts results at the rows ``order``. Outputs are copied, as the next step overwrites them."""
        whole = len(order) == self.count
        at = None if whole else torch.from_numpy(order)
        for name, rows in values.items():
            dtype = torch.float32 if name in self.outputs else rows.dtype
            if at is None:
                self.values[name] = rows.to(dtype, copy=name in self.outputs)
                continue
            if name not in self.values:
                self.values[name] = torch.empty((self.count, *rows.shape[1:]), dtype=dtype, device=rows.device)
            self.values[name].index_copy_(0, at.to(rows.device), rows.to(dtype))


class _Started:
    """A step that is running. The download of its tokens has been started.

    ``result`` waits for an event, since another thread may not wait for a stream that a graph is captured on.
    """

    def __init__(self, results: _Results, device: torch.device) -> None:
        self._results = results
        self._tokens: Tensor | None = None
        self._done: StepOutput | None = None
        if (drawn := results.values.pop(TOKENS, None)) is not None:
            self._tokens = torch.empty(len(drawn), dtype=torch.int32, pin_memory=drawn.is_cuda)
            if not drawn.is_meta:  # there only the calls are of interest
                self._tokens.copy_(drawn, non_blocking=True)
        self._ready = torch.cuda.Event() if device.type == "cuda" else None
        if self._ready is not None:
            self._ready.record()

    def result(self) -> StepOutput:
        """Waits for the step and returns its output."""
        if self._done is None:
            self._done = self._finish()
        return self._done

    def _finish(self) -> StepOutput:
        if self._ready is not None:
            self._ready.synchronize()
        arrays = {name: rows.cpu().numpy() for name, rows in self._results.values.items()}
        outputs = {name: arrays.pop(name) for name in self._results.outputs if name in arrays}
        if self._tokens is None:
            return StepOutput(None, outputs)
        return StepOutput(self._tokens.numpy(), outputs, **arrays)


def option_views(uploaded: Tensor, places: Mapping[str, int], rows: int) -> dict[str, Tensor]:
    """Returns views of the sampling options of ``rows`` rows in an upload with the starts ``places``."""
    return {
        name: uploaded.narrow(0, places[name], words).view(getattr(torch, option_type(name).name))
        for name, words in option_words(rows).items()
    }


def logprobs_of(
    logits: Tensor, tokens: Tensor, sampling: SamplingBatch, changed: Tensor | None = None
) -> dict[str, Tensor]:
    """Returns the logprobs of tokens [R], or of the tokens in ``sampling.scored``, and each row's top logprobs, by the
    names of ``StepOutput``'s fields.

    It processes some rows at a time, and takes at most a fifth of the memory of float32 logits.

    Args:
        logits: [R, V] of any float type, as the model computed them.
        tokens: int32 [R] on their device; rows with NO_TOKEN get NaN.
        sampling: the options of the rows.
        changed: the logits float32 [R, V] that tokens were drawn from, if rules changed them. Rows with
            ``sampling.top_allowed`` have their top logprobs from these.
    """
    count, device = min(sampling.logprobs or 0, logits.shape[1]), logits.device
    bad = tokens == NO_TOKEN
    if sampling.scored is not None:
        scored = torch.from_numpy(sampling.scored).to(device)
        tokens = tokens.where(scored == NO_TOKEN, scored)
    chosen = tokens.clamp(min=0).long().unsqueeze(1)
    allowed = None
    if changed is not None and sampling.top_allowed is not None:
        allowed = torch.from_numpy(sampling.top_allowed).to(device).ne(0).unsqueeze(1)
    token_logprobs = torch.empty(len(logits), device=device)
    values = torch.empty((len(logits), count), device=device)
    ids = torch.empty((len(logits), count), dtype=torch.int32, device=device)
    size = max(1, len(logits) // _LOGPROB_PIECES)
    for start in range(0, len(logits), size):
        rows = slice(start, start + size)
        row_logits = logits[rows].float()
        sums = row_logits.logsumexp(-1, keepdim=True)
        token_logprobs[rows] = (row_logits.gather(1, chosen[rows]) - sums)[:, 0]
        if allowed is not None and changed is not None:
            row_logits = torch.where(allowed[rows], changed[rows], row_logits)
        ids[rows] = _largest(row_logits, count)
        values[rows] = row_logits.gather(1, ids[rows].long()) - sums
    nan, bad_rows = float("nan"), bad.unsqueeze(1)
    return {
        "token_logprobs": token_logprobs.masked_fill_(bad, nan),
        "top_ids": ids.masked_fill_(bad_rows, NO_TOKEN),
        "top_logprobs": values.masked_fill_(bad_rows, nan),
    }


def _largest(values: Tensor, count: int) -> Tensor:
    """Returns the columns of the ``count`` greatest values in each row, greatest first; in a tie the lower one first,
    unlike ``topk``.

    Bits of floats, as integers, have the order of the floats once those of negative ones are inverted.
    """
    bits = values.add(0.0).view(torch.int32)  # which makes -0 equal to 0
    bits.bitwise_xor_((bits >> 31).bitwise_and_(0x7FFFFFFF))
    keys = bits.long().neg_().bitwise_left_shift_(32)
    keys.add_(torch.arange(values.shape[1], device=values.device))
    return keys.topk(count, dim=-1, largest=False).values.bitwise_and_(0xFFFFFFFF).int()
