"""Runs steps of the cuda target: pads and uploads them, runs them or replays a graph, and samples on the device.

A step is an upload from fixed memory, its kernels, and a download of the sampled ids. Its launches depend only on the
number of tokens and the kind of the step: block tables, and the tokens that the step before has drawn, are on the
device (``placing``). So when a bundle is opened, ``warm`` binds the launches of all sizes and captures them as CUDA
graphs. Other variants, such as steps with hidden states, are captured at their second step.
"""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

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
    StepOutput,
)
from enginewright.runtime.shared.errors import CapacityError, EnginewrightError, RequestError
from enginewright.runtime.shared.step_schema import BLOCK_TABLE, IDS, LOGITS, ROWS, Array, group_port, port_of

from ...gpu.cuda_driver import Graph
from ...gpu.graphed_steps import Capture, GraphedSteps, Works
from ...gpu.placing import CHANGED, SOURCES, TableChanges, place_call
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
from ...gpu.step_calls import reduce_call
from ...gpu.tiles import SPLIT_KEYS
from ...steps.packed_steps import (
    StepShape,
    bucketed,
    divided,
    input_shapes,
    rounded,
)
from .ops import Launcher, Work
from .program import BoundStep, CudaProgram

MOST_GRAPHS = 256
"""The most graphs that are kept. ``warm`` makes some 20 of decode steps for each way of sampling, and some 50 of
prompts.
"""

_LOGPROB_PIECES = 32
"""The number of pieces in which logprobs are computed. Each piece needs memory for floats, and for keys of twice their
size.
"""

TOKENS = "tokens"
"""The name under which a step's results have the drawn tokens."""

Result = TypeVar("Result")


@dataclass
class _Bound:
    """The launches of steps of one size.

    Attributes:
        key: the sizes and the variant.
        step: the step, whose works begin with the launch of ``place_call``.
        places, words: the starts of an upload's arrays in 4-byte words, and the upload's length.
        staged: the step's arrays by name, in the host's memory, and their value for padding; None repeats the last one.
        options: the sampling options in the upload, on the device.
        draws: the launches of sampling, by the options in use and the words of the lists' memory.
        row_sums: the launch that sums rows for logprobs, in exact steps; None in others.
    """

    key: tuple[StepShape, bool, bool]
    step: BoundStep
    places: dict[str, int]
    words: int
    staged: Mapping[str, tuple[Int32Array, int | None]]
    options: dict[str, Tensor]
    draws: dict[tuple[Drawing, int], list[Work]] = field(default_factory=dict)
    row_sums: Work | None = None

    @property
    def shape(self) -> StepShape:
        """The sizes."""
        return self.key[0]


class CudaSteps:
    """Runs steps of a program.

    Args:
        program: the program, with its memory.
        vocab: the number of tokens in the vocabulary.
        launcher: launches the kernels of sampling.
        capture: makes graphs; None makes none.

    Attributes:
        graphs: the graphs of steps.
        late: counts of delays during serving, by name: sizes that were bound, graphs that were captured, milliseconds
            for both, and times that memory ran out.
    """

    def __init__(self, program: CudaProgram, vocab: int, launcher: Launcher, capture: Capture | None) -> None:
        self.late: defaultdict[str, float] = defaultdict(float)
        self._program, self._vocab, self._launcher = program, vocab, launcher
        self._limits, self._device = program.limits, program.device
        self._runs_once = program.ranked or any(group.kind == STATE for group in program.groups)
        self._advanced = False
        self._sums = _Float32Sums()
        self._memory = SamplingMemory(program.limits.rows, vocab, self._new)
        self._drawn = self._new((max(program.limits.tokens, program.limits.rows),), "int32")  # for the next step
        self._memory.tokens = self._drawn[: program.limits.rows]
        self._lists = _Upload(self._new((256,), "int32"))
        self._row_sums = self._new((program.limits.rows, 1), "float32")
        self._masks = _Upload(self._memory.masks)
        self._changes = TableChanges(program.groups, self._limits.requests, self._limits.blocks)
        self._tables = self._new(self._changes.shape, "int32").fill_(-1)
        self._changed = _Upload(self._new((self._tables.numel(), 2), "int32"))
        words = places_of(self._words(self._padded_shape(self._limits.tokens, self._limits.requests)))[1]
        self._inputs = _Upload(self._new((words,), "int32"))
        self._bound: dict[tuple[StepShape, bool, bool], _Bound] = {}
        captured = None if capture is None else partial(self._captured, capture)
        self.graphs = GraphedSteps[tuple[Any, ...]]("cuda", captured, self.synchronize, MOST_GRAPHS)
        self._captures = capture is not None

    @property
    def program(self) -> CudaProgram:
        """The program that it runs."""
        return self._program

    def most(self, *, decodes: bool) -> tuple[int, int]:
        """Returns the most tokens and the most requests of a step."""
        return self._limits.tokens, self._limits.requests

    @torch.inference_mode()
    def warm(self, drawings: Sequence[Drawing] = (Drawing(), Drawing(random=True))) -> None:
        """Binds the launches of steps of all sizes, runs them once with padding only, and captures them as graphs.

        It does nothing if no graphs are made. If memory runs out, the other sizes are captured while the executor
        serves. Ranks must not call it before their collectives are open.

        Args:
            drawings: the ways of sampling that graphs of decode steps contain.
        """
        try:
            for shape in self._shapes() if self._captures else ():
                bound = self._bound_for(shape, taps=False, keeps=False)
                for drawing in drawings if shape.decodes and LOGITS in bound.step.outputs else (None,):
                    draws = [] if drawing is None else self._draws(bound, drawing)
                    self._send(bound, {})
                    work = Works((*bound.step.works, *draws))
                    work()
                    self.graphs.capture(self._key(bound, drawing), work)
        except torch.OutOfMemoryError:
            self._forget()
        self.synchronize()
        self.late.clear()

    def start(self, step: StepInput) -> _Started:
        """Starts a step, and its sampling, on the stream.

        Raises RequestError for an invalid step, and CapacityError if there is no memory even after other sizes were
        dropped.
        """
        self._advanced = False
        return self._with_memory(lambda: self._start(step))

    @torch.inference_mode()
    def _with_memory(self, work: Callable[[], Result]) -> Result:
        """Returns the result of ``work``. If memory runs out, it drops the bound sizes and calls ``work`` again.

        Work that may have changed states of recurrent layers, or exchanged data with other ranks, isn't called again.
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
        self._forget()
        try:
            return work()
        except torch.OutOfMemoryError as e:
            raise _no_memory(e) from e

    def _forget(self) -> None:
        """Drops the launches and graphs of all sizes, and frees their memory."""
        self.synchronize()
        self.graphs.clear()
        self._bound.clear()
        self._changes.forget()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _start(self, step: StepInput) -> _Started:
        self.check(step)
        for name, cleared in step.clears.items():
            self._program.clear(name, cleared.tolist())
        for name, pairs in step.copies.items():
            self._program.copy(name, pairs.tolist())
        started = _Started(step)
        for part, order in divided(step, self):
            self._compute(part, order, step.sampling, started)
        tokens = started.values.get(TOKENS)
        if tokens is not None and tokens.data_ptr() != self._drawn.data_ptr():  # drawn in several pieces
            self._drawn[: len(tokens)].copy_(tokens[: len(self._drawn)])
        started.download(self._device)
        return started

    def _compute(
        self, step: StepInput, order: npt.NDArray[np.int64], sampling: SamplingBatch | None, started: _Started
    ) -> None:
        """Computes a part of a step, and puts its results into those of the whole step, at the rows ``order``.

        ``sampling`` has the options of the whole step. If there are more rows of logits than memory for them, only the
        work by row runs several times.
        """
        rows, most = len(step.rows), self._limits.rows
        bound = self._bound_for(self._shape_of(step), taps=not {LOGITS}.issuperset(step.outputs), keeps=rows > most)
        follows: dict[str, Array] = {} if step.sources is None else {SOURCES: step.sources}
        for start in range(0, max(rows, 1), most):
            some = slice(start, start + most)
            options = None if sampling is None or not rows else chosen_rows(sampling, order[some])
            drawing = None if options is None else drawing_of(options)
            if drawing is not None and options is not None and (drawing.penalties or drawing.edits):
                self._upload_lists(*packed_lists(options))
            draws = [] if drawing is None else self._draws(bound, drawing)
            self._send(bound, {**step.arrays, ROWS: step.rows[some]} | follows, options)
            # Masks are computed while the step runs, so what needs them isn't in its graph.
            inside = bound.shape.decodes and start == 0 and drawing is not None and not drawing.masks
            if start == 0:
                self._run(bound, drawing if inside else None, draws if inside else ())
            else:
                for work in bound.step.by_row:
                    work()
            count = min(rows - start, most)
            outputs = bound.step.outputs
            values = {name: outputs[name][:count] for name in step.outputs if name in outputs}
            # Even if the step can't be run again, this can.
            self._with_memory(partial(self._put, started, order[some], values, bound, options, () if inside else draws))
            self._advanced |= step.sources is not None  # the tokens that it takes are overwritten

    def _put(
        self,
        started: _Started,
        order: npt.NDArray[np.int64],
        values: Mapping[str, Tensor],
        bound: _Bound,
        options: SamplingBatch | None,
        draws: Sequence[Work],
    ) -> None:
        """Draws tokens by the launches ``draws`` if there are ``options``, and puts tokens and outputs at the rows
        ``order`` of the results.
        """
        started.put(order, {**values, **(self._draw(bound, options, draws) if options is not None else {})})

    def _send(self, bound: _Bound, arrays: Mapping[str, Array], options: SamplingBatch | None = None) -> None:
        """Uploads a step's inputs, the options of its rows, and the changes of its block tables.

        Padding tokens belong to no request and aren't written to the cache; padding requests have no tokens.
        """
        staged = self._inputs.writable()
        for name, (to, padding) in bound.staged.items():
            array = arrays.get(name)
            flat = to[:0] if array is None else array.reshape(-1).view(np.int32)
            to[: len(flat)] = flat
            if len(flat) < len(to):
                to[len(flat) :] = padding if padding is not None else flat[-1] if len(flat) else 0
        write_options(staged, bound.places, options, bound.shape.rows)
        changes = self._changes.write(arrays, self._changed.writable()) if arrays else 0
        staged[bound.places[CHANGED]] = changes
        if changes:
            self._changed.send(changes)
        self._inputs.send(bound.words)

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
        tokens, requests = len(step.ids), len(step.kv_len)
        if step.sources is not None and (tokens > self._limits.tokens or requests > self._limits.requests):
            raise RequestError(
                f"step: {tokens} tokens of {requests} requests are too many for a step that follows one in flight",
                hint="Plan steps by the executor's caps.",
            )

    def _shape_of(self, step: StepInput) -> StepShape:
        single = step.counts == 1
        if single.all():
            return self._padded_shape(len(step.ids), _blocks_of(step), decodes=True)
        return self._padded_shape(len(step.ids), mixed=bool(single.any()))

    def _padded_shape(
        self, tokens: int, blocks: int | None = None, *, decodes: bool = False, mixed: bool = False
    ) -> StepShape:
        """Returns the sizes to which a step is padded, which depend only on its tokens and kind.

        There are two kinds of decode steps. In one, each context has at most ``blocks`` blocks, and is a single split
        of attention; in the other, contexts may be long.
        """
        limits = self._limits
        tokens = rounded(tokens, (1, 1, limits.requests)) if decodes else bucketed(tokens, (1, 1, limits.tokens))
        short = decodes and blocks is not None and blocks <= self._short
        return StepShape(
            profile=0,
            tokens=tokens,
            requests=min(tokens, limits.requests),
            rows=min(tokens, limits.rows),
            blocks=min(self._short, limits.blocks) if short else limits.blocks,
            decodes=decodes,
            mixed=mixed,
        )

    @property
    def _short(self) -> int:
        """The most blocks of a context that is a single split of attention."""
        return max(SPLIT_KEYS // min((group.block_size for group in self._program.groups), default=1), 1)

    def _shapes(self) -> Sequence[StepShape]:
        """The sizes of all steps, the largest first, because the others then reuse its temporary memory."""
        counts = range(1, self._limits.tokens + 1)
        decodes = [self._padded_shape(n, b, decodes=True) for n in counts[: self._limits.requests] for b in (1, None)]
        prompts = [self._padded_shape(n, mixed=mixed) for n in counts for mixed in (False, True)]
        return sorted({*decodes, *prompts}, key=lambda shape: (-shape.tokens, -shape.blocks, shape.decodes))

    def _words(self, shape: StepShape) -> dict[str, int]:
        """Returns the number of 4-byte words of each array in the upload of a step."""
        sizes = input_shapes(self._program.groups, shape, self._program.program.ports)
        words = {name: math.prod(size) for name, size in sizes.items() if port_of(name).name != BLOCK_TABLE}
        return words | {SOURCES: shape.tokens, CHANGED: 1} | option_words(shape.rows)

    def _bound_for(self, shape: StepShape, *, taps: bool, keeps: bool) -> _Bound:
        key = shape, taps, keeps
        if key in self._bound:
            return self._bound[key]
        groups, ports = self._program.groups, self._program.program.ports
        words = self._words(shape)
        places, count = places_of(words)
        uploaded = {name: self._inputs.device.narrow(0, places[name], words[name]) for name in words}
        inputs = {
            name: uploaded[name].view(size)
            for name, size in input_shapes(groups, shape, ports).items()
            if name in uploaded
        }
        inputs |= {name: inputs[name].view(torch.float32) for name in ports if port_of(name).dtype == "f32"}
        inputs |= {
            group_port(BLOCK_TABLE, group.name): self._tables[number, : shape.requests, : shape.blocks]
            for number, group in enumerate(groups)
        }
        placed = {IDS: inputs[IDS], SOURCES: uploaded[SOURCES], "drawn": self._drawn, "tables": self._tables}
        placed |= {"changes": self._changed.device, "count": uploaded[CHANGED]}
        with self._counted("late_binds"):
            step = self._program.bound(shape, inputs, taps=taps, keeps=keeps)
            step.works.insert(0, self._launcher.bind(place_call(placed, shape.tokens, self._vocab)))
        paddings = {SOURCES: -1, **{name: port_of(name).padding for name in inputs if name in uploaded}}
        host = self._inputs.host
        staged = {name: (host[places[name] : places[name] + words[name]], value) for name, value in paddings.items()}
        options = option_views(self._inputs.device, places, shape.rows)
        self._bound[key] = _Bound(key, step, places, count, staged, options)
        return self._bound[key]

    def _run(self, bound: _Bound, drawing: Drawing | None, draws: Sequence[Work]) -> None:
        """Runs or replays a step. ``draws`` are the launches of a way of sampling; ``drawing`` is None if they aren't
        in the graph.
        """
        self._advanced = self._runs_once
        self.graphs.run(self._key(bound, drawing), lambda keep: Works((*bound.step.works, *draws)))

    def _key(self, bound: _Bound, drawing: Drawing | None) -> tuple[Any, ...]:
        """Returns the key of a step's graph. It has the memory of the lists of tokens, which sampling reads and which
        may grow.
        """
        return (*bound.key, drawing, len(self._lists.device) if drawing is not None and drawing.changes else 0)

    @contextmanager
    def _counted(self, what: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self.late[what] += 1
        self.late["late_ms"] += (time.perf_counter() - begin) * 1e3

    def _captured(self, capture: Capture, work: Callable[[], None]) -> Graph:
        """Captures work as a graph. Raises CapacityError if there is no memory, EnginewrightError for other errors of
        CUDA.
        """
        try:
            with self._counted("late_graphs"):
                return capture(work)
        except torch.OutOfMemoryError as e:
            self.late["late_memory"] += 1
            raise _no_memory(e) from e
        except RuntimeError as e:  # what torch raises for an error of CUDA
            raise EnginewrightError(str(e).partition("\n")[0]) from e

    def _draws(self, bound: _Bound, drawing: Drawing) -> list[Work]:
        """Returns the launches that draw a token for each row of a step, including padding."""
        key = drawing, len(self._lists.device)
        if key not in bound.draws:
            options = {**bound.options, "lists": self._lists.device}
            calls = sampling_calls(bound.step.outputs[LOGITS], options, self._memory, drawing)
            bound.draws[key] = [self._launcher.bind(call) for call in calls]
        return bound.draws[key]

    def _draw(self, bound: _Bound, sampling: SamplingBatch, draws: Sequence[Work]) -> dict[str, Tensor]:
        """Runs launches of sampling that weren't in a graph.

        Returns the tokens [R], in memory that the next step overwrites, and the fields of ``StepOutput`` with their
        logprobs. It waits for the masks of answers with a form, which are computed while the step runs.
        """
        rows = len(sampling.temperature)
        if sampling.masks is not None and bool((sampling.masks.rows >= 0).any()):
            self._masks.send(write_masks(self._masks.writable(), sampling.masks))
        for work in draws:
            work()
        tokens = self._memory.tokens[:rows]
        if sampling.logprobs is None:
            return {TOKENS: tokens}
        changed = self._memory.wide[:rows] if drawing_of(sampling).changes else None
        sums = self._sums_of(bound)[:rows] if self._program.exact else None
        return {TOKENS: tokens} | logprobs_of(bound.step.outputs[LOGITS][:rows], tokens, sampling, changed, sums)

    def _sums_of(self, bound: _Bound) -> Tensor:
        """Returns the logsumexp of each row of a step's logits, [R, 1], by a kernel whose sums depend only on the
        row.
        """
        logits = bound.step.outputs[LOGITS]
        sums = self._row_sums[: len(logits)]
        if bound.row_sums is None:
            bound.row_sums = self._launcher.bind(reduce_call(logits, sums, "logsumexp"))
        bound.row_sums()
        return sums

    def _upload_lists(self, lists: Int32Array, words: int) -> None:
        """Uploads the packed lists of tokens, to larger memory if there aren't ``words`` 4-byte words yet."""
        if words > len(self._lists.device):
            self.synchronize()
            self._lists = _Upload(self._new((1 << (words - 1).bit_length(),), "int32"))
        self._lists.writable()[: len(lists)] = lists
        self._lists.send(len(lists))

    def _new(self, shape: tuple[int, ...], dtype: str) -> Tensor:
        return torch.zeros(shape, dtype=getattr(torch, dtype), device=self._device)

    def close(self) -> None:
        """Waits for running work, and frees graphs and memory. No step can be started afterwards."""
        self._sums.close()
        self.synchronize()
        self.graphs.clear()
        self._bound.clear()
        self._program.close()
        self._memory = SamplingMemory(0, 1, self._new)
        self._tables = self._drawn = self._row_sums = self._new((0,), "int32")
        self._inputs = self._changed = self._masks = self._lists = _Upload(self._tables)

    def synchronize(self) -> None:
        """Waits for all work on the stream."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()


class _Upload:
    """Memory of the host, pinned for a GPU, whose first part is copied to the tensor ``device``."""

    def __init__(self, device: Tensor) -> None:
        self.device = device
        self._staged = torch.zeros(device.shape, dtype=device.dtype, pin_memory=device.is_cuda)
        self.host: Int32Array = self._staged.numpy()
        self._copied = torch.cuda.Event() if device.is_cuda else None

    def writable(self) -> Int32Array:
        """Waits for the last copy, and returns the host's memory, which may then be written."""
        if self._copied is not None:
            self._copied.synchronize()
        return self.host

    def send(self, count: int) -> None:
        """Starts the copy of the first ``count`` entries."""
        self.device[:count].copy_(self._staged[:count], non_blocking=True)
        if self._copied is not None:
            self._copied.record()


def _no_memory(cause: torch.OutOfMemoryError) -> CapacityError:
    return CapacityError(
        f"memory: the GPU has none left for a step: {str(cause).partition('.')[0]}",
        hint="Ask for fewer log-probabilities at a time, or pass less memory for the caches.",
    )


def _blocks_of(step: StepInput) -> int:
    """Returns the most blocks that a request has in a step's tables."""
    return max(int(table.shape[1]) for table in step.block_tables.values())


class _Float32Sums:
    """Makes torch's products add in float32, as cuBLAS may otherwise add partial sums in 16 bits.

    That ends when the last object of this class is closed or deleted. The settings are those of the whole process. They
    don't change during a step, as steps of several models may run at the same time.
    """

    _names = ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")
    _lock = threading.RLock()
    _before: Sequence[bool] = ()
    _open = 0

    def __init__(self) -> None:
        self._count(1)
        self.close = weakref.finalize(self, self._count, -1)
        """Ends this object; a second call does nothing."""

    @classmethod
    def _count(cls, more: int) -> None:
        with cls._lock:
            if not cls._open:
                cls._before = [getattr(torch.backends.cuda.matmul, name) for name in cls._names]
            cls._open += more
            for name, before in zip(cls._names, cls._before, strict=True):
                setattr(torch.backends.cuda.matmul, name, before and not cls._open)


class _Started:
    """A step that is running, and the results of its rows on the device: outputs in float32, tokens, and fields of
    ``StepOutput`` with logprobs.

    ``result`` waits for an event, since a thread must not wait for a stream on which another thread captures a graph.
    """

    def __init__(self, step: StepInput) -> None:
        self.values: dict[str, Tensor] = {}
        self._count, self._outputs = len(step.rows), step.outputs
        self._ready: torch.cuda.Event | None = None
        self._done: StepOutput | None = None

    def put(self, order: npt.NDArray[np.int64], values: Mapping[str, Tensor]) -> None:
        """Puts results at the rows ``order``. Outputs are copied, as the next step overwrites them."""
        whole = len(order) == self._count
        at = None if whole else torch.from_numpy(order)
        for name, rows in values.items():
            dtype = torch.float32 if name in self._outputs else rows.dtype
            if at is None:
                self.values[name] = rows.to(dtype, copy=name in self._outputs)
                continue
            if name not in self.values:
                self.values[name] = torch.empty((self._count, *rows.shape[1:]), dtype=dtype, device=rows.device)
            self.values[name].index_copy_(0, at.to(rows.device), rows.to(dtype))

    def download(self, device: torch.device) -> None:
        """Starts the download of the tokens, once all results are put."""
        if (drawn := self.values.get(TOKENS)) is not None:
            self.values[TOKENS] = torch.empty(len(drawn), dtype=torch.int32, pin_memory=drawn.is_cuda)
            if not drawn.is_meta:  # there only the calls are of interest
                self.values[TOKENS].copy_(drawn, non_blocking=True)
        if device.type == "cuda":
            self._ready = torch.cuda.Event()
            self._ready.record()

    def result(self) -> StepOutput:
        """Waits for the step and returns its output."""
        if self._done is None:
            self._done = self._finish()
        return self._done

    def _finish(self) -> StepOutput:
        if self._ready is not None:
            self._ready.synchronize()
        arrays = {name: rows.cpu().numpy() for name, rows in self.values.items()}
        outputs = {name: arrays.pop(name) for name in self._outputs if name in arrays}
        return StepOutput(arrays.pop(TOKENS, None), outputs, **arrays)


def option_views(uploaded: Tensor, places: Mapping[str, int], rows: int) -> dict[str, Tensor]:
    """Returns the sampling options of ``rows`` rows as views of an upload, in which ``places`` has their starts."""
    return {
        name: uploaded.narrow(0, places[name], words).view(getattr(torch, option_type(name).name))
        for name, words in option_words(rows).items()
    }


def logprobs_of(
    logits: Tensor,
    tokens: Tensor,
    sampling: SamplingBatch,
    changed: Tensor | None = None,
    row_sums: Tensor | None = None,
) -> dict[str, Tensor]:
    """Returns logprobs by the names of ``StepOutput``'s fields: of tokens [R] or of ``sampling.scored``, and each row's
    top logprobs.

    It processes some rows at a time, and needs at most a fifth of the memory of float32 logits.

    Args:
        logits: [R, V] of any float type, as the model computed them.
        tokens: int32 [R] on their device; rows with NO_TOKEN get NaN.
        sampling: the options of the rows.
        changed: the logits float32 [R, V] from which tokens were drawn, if rules changed them. Rows with
            ``sampling.top_allowed`` have their top logprobs from these.
        row_sums: the logsumexp of each row, float32 [R, 1]; None computes it.
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
        sums = row_logits.logsumexp(-1, keepdim=True) if row_sums is None else row_sums[rows]
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
    """Returns the columns of the ``count`` largest values in each row, in descending order of the values.

    Among equal values the lower column comes first, unlike in ``topk``. The bits of floats, taken as integers, have the
    order of the floats after those of negative ones are inverted.
    """
    bits = values.add(0.0).view(torch.int32)  # which makes -0 equal to 0
    bits.bitwise_xor_((bits >> 31).bitwise_and_(0x7FFFFFFF))
    keys = bits.long().neg_().bitwise_left_shift_(32)
    keys.add_(torch.arange(values.shape[1], device=values.device))
    return keys.topk(count, dim=-1, largest=False).values.bitwise_and_(0xFFFFFFFF).int()
