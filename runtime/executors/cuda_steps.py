"""Steps of the cuda target: padded, uploaded as one piece, run or replayed as a graph, sampled on the device.

A step is one upload, from memory that stays where it is, then its kernels, then one download of the sampled ids. Steps
of one token a request are replayed as a CUDA graph from their second time on.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from enginewright.plugins.shared.contracts import (
    NO_TOKEN,
    SAMPLING_OPTIONS,
    Int32Array,
    SamplingBatch,
    StepInput,
    StepOutput,
)
from enginewright.plugins.shared.errors import RequestError
from enginewright.plugins.triton.sampling_calls import Drawing, SamplingMemory, sampling_calls

from .cuda_ops import Launcher, Work
from .cuda_program import CudaProgram
from .packed_steps import (
    StepShape,
    bucketed,
    input_shapes,
    of_requests,
    owners_of_bad_rows,
    padded,
    parts,
    rounded,
)

MOST_SHAPES = 64
"""Sizes of steps whose work, or graph, is kept."""


_ALIGNED_WORDS = 4
"""Kernels are compiled for addresses at multiples of 16 bytes."""


class Graph(Protocol):
    """Work that was captured: ``torch.cuda.CUDAGraph``, or what tests have in its place."""

    def replay(self) -> None:
        """Runs it again, on the same memory."""


Capture = Callable[[Callable[[], None]], Graph]
"""What makes a graph of work; it isn't run."""


@dataclass
class _Bound:
    """A step of one size, ready to run."""

    places: dict[str, int]
    staged: Tensor
    uploaded: Tensor
    works: list[Work]
    logits: Tensor
    copied: torch.cuda.Event | None  # after the last upload: before it, ``staged`` must not change
    runs: int = 0
    graph: Graph | None = None


def _places(lengths: Mapping[str, int]) -> tuple[dict[str, int], int]:
    """Where arrays of so many words begin that are uploaded as one, at multiples of 16 bytes, and how many it has."""
    found, at = {}, 0
    for name, length in lengths.items():
        found[name] = at
        at += -(-length // _ALIGNED_WORDS) * _ALIGNED_WORDS
    return found, at


class CudaSteps:
    """Runs steps of a program.

    Args:
        program: with its memory.
        vocab: tokens of the vocabulary.
        launcher: of sampling's kernels.
        capture: makes graphs; None: none are made.
    """

    def __init__(self, program: CudaProgram, vocab: int, launcher: Launcher, capture: Capture | None) -> None:
        self.graph_launches = 0
        self._program, self._launcher, self._capture = program, launcher, capture
        self._limits, self._device = program.limits, program.device
        self._memory = SamplingMemory(program.limits.rows, vocab, program.device)
        self._bound: OrderedDict[StepShape, _Bound] = OrderedDict()

    def most(self, *, decodes: bool) -> tuple[int, int]:
        """See ``packed_steps.HoldsSteps``."""
        return self._limits.tokens, self._limits.requests

    @torch.inference_mode()
    def start(self, step: StepInput) -> _Started:
        """Puts a step, and its sampling, on the stream. Raises RequestError for one that can't be."""
        if not len(step.ids):
            raise RequestError("step: it has no tokens", hint="Give it one at least.")
        if len(step.ids) > self._limits.tokens or len(step.kv_len) > self._limits.requests:
            return self._in_parts(step)
        blocks = max(table.shape[1] for table in step.block_tables.values())
        if blocks > self._limits.blocks:
            raise RequestError(
                f"step: a request of {blocks} blocks is longer than the {self._limits.blocks} that there is memory for",
                hint="Plan requests by the executor's context.",
            )
        shape = self._shape_of(step, blocks)
        bound = self._bound_for(shape)
        arrays = padded(step, step.rows, self._program.groups, shape)
        if bound.copied is not None:
            bound.copied.synchronize()
        staged = bound.staged.numpy()
        for name, at in bound.places.items():
            staged[at : at + arrays[name].size] = arrays[name].reshape(-1)
        bound.uploaded.copy_(bound.staged, non_blocking=True)
        if bound.copied is not None:
            bound.copied.record()
        self._run(bound, shape)
        logits = bound.logits[: len(step.rows)]
        return self._started(step, logits)

    def _started(self, step: StepInput, logits: Tensor) -> _Started:
        """The rest of a step: sampling, and its ids on their way to the host. What the next step would change of what
        this one gives is copied."""
        tokens, ready = None, None
        if step.sampling is not None and len(step.rows):
            drawn = self._draw(logits, step.sampling)
            tokens = torch.empty(len(drawn), dtype=torch.int32, pin_memory=drawn.is_cuda)
            tokens.copy_(drawn, non_blocking=True)
            if drawn.is_cuda:
                ready = torch.cuda.Event()
                ready.record()
        wanted = step.return_logits or (step.sampling is not None and step.sampling.logprobs is not None)
        return _Started(step, logits.to(torch.float32, copy=True) if wanted else None, tokens, ready, self)

    def forget(self, step: StepInput, owners: Int32Array) -> None:
        """Makes the blocks of these requests zero: else numbers that aren't would go on to who gets them next."""
        for owner in owners.tolist():
            for group in self._program.groups:
                held = step.block_tables[group.name][owner]
                self._program.forget(group.name, held[held >= 0].tolist())

    def _in_parts(self, step: StepInput) -> _Started:
        """Requests that don't fit into one step, one part after the other; their logits together."""
        found: Tensor | None = None
        for members in parts(np.diff(step.q_start), self):
            part, order = of_requests(replace(step, sampling=None, return_logits=True), members)
            logits = self.start(part).logits
            assert logits is not None
            if found is None:
                found = torch.empty((len(step.rows), logits.shape[1]), dtype=logits.dtype, device=logits.device)
            found[torch.from_numpy(order).to(found.device)] = logits
        assert found is not None
        return self._started(step, found)

    def _shape_of(self, step: StepInput, blocks: int) -> StepShape:
        tokens, requests, rows = len(step.ids), len(step.kv_len), max(len(step.rows), 1)
        decodes = bool((np.diff(step.q_start) == 1).all())
        limits = self._limits
        return StepShape(
            profile=0,
            tokens=(rounded(tokens, (1, 1, limits.requests)) if decodes else bucketed(tokens, (1, 1, limits.tokens))),
            requests=rounded(requests, (1, 1, limits.requests)),
            rows=rounded(rows, (1, 1, limits.rows)),
            blocks=rounded(blocks, (1, 1, limits.blocks)),
            decodes=decodes,
        )

    def _bound_for(self, shape: StepShape) -> _Bound:
        if shape in self._bound:
            self._bound.move_to_end(shape)
            return self._bound[shape]
        sizes = input_shapes(self._program.groups, shape)
        places, count = _places({name: math.prod(size) for name, size in sizes.items()})
        pinned = self._device.type == "cuda"
        staged = torch.empty(count, dtype=torch.int32, pin_memory=pinned)
        uploaded = torch.empty(count, dtype=torch.int32, device=self._device)
        inputs = {name: uploaded.narrow(0, places[name], math.prod(size)).view(size) for name, size in sizes.items()}
        works, logits = self._program.bound(shape, inputs)
        self._bound[shape] = _Bound(places, staged, uploaded, works, logits, torch.cuda.Event() if pinned else None)
        if len(self._bound) > MOST_SHAPES:
            self.synchronize()
            self._bound.popitem(last=False)
        return self._bound[shape]

    def _run(self, bound: _Bound, shape: StepShape) -> None:
        def run() -> None:
            for work in bound.works:
                work()

        bound.runs += 1
        if bound.graph is not None:
            bound.graph.replay()
            self.graph_launches += 1
            return
        if shape.decodes and self._capture is not None and bound.runs == 2:  # by now the libraries have chosen
            bound.graph = self._capture(run)
            bound.graph.replay()
            self.graph_launches += 1
            return
        run()

    def _draw(self, logits: Tensor, sampling: SamplingBatch) -> Tensor:
        """Puts sampling on the stream; the tokens [R], on the device."""
        options = self._options(sampling, len(logits))
        random = sampling.temperature > 0
        drawing = Drawing(
            penalties=sampling.repetition_penalty is not None,
            random=bool(random.any()),
            top_k=bool((sampling.top_k[random] > 0).any()),
            top_p=bool((sampling.top_p[random] < 1).any()),
            min_p=bool((sampling.min_p[random] > 0).any()),
        )
        for call in sampling_calls(logits, options, self._memory, drawing):
            self._launcher.bind(call)()
        return self._memory.tokens[: len(logits)]

    def _options(self, sampling: SamplingBatch, rows: int) -> dict[str, Tensor]:
        """Options that rows are drawn with, uploaded as one array of words. Raises RequestError as the sampler does."""
        arrays = sampling.options()
        _check_options(arrays, rows)
        words = {name: np.ascontiguousarray(array).view(np.int32) for name, array in arrays.items()}
        places, count = _places({name: len(array) for name, array in words.items()})
        packed = torch.empty(count, dtype=torch.int32, pin_memory=self._device.type == "cuda")
        for name, at in places.items():
            packed.numpy()[at : at + len(words[name])] = words[name]
        there = packed.to(self._device, non_blocking=True)
        found = {}
        for name, at in places.items():
            kind = torch.int64 if arrays[name].itemsize == 8 else torch.from_numpy(arrays[name][:0]).dtype
            found[name] = there.narrow(0, at, len(words[name])).view(kind)
        return found

    def synchronize(self) -> None:
        """Waits for all that was put on the stream."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()


@dataclass
class _Started:
    """A step on its way."""

    step: StepInput
    logits: Tensor | None
    tokens: Tensor | None
    ready: torch.cuda.Event | None
    steps: CudaSteps
    _done: StepOutput | None = None

    def result(self) -> StepOutput:
        """Waits for it."""
        if self._done is None:
            self._done = self._finish()
        return self._done

    def _finish(self) -> StepOutput:
        step, sampling = self.step, self.step.sampling
        logits = self.logits.cpu().numpy() if self.logits is not None and step.return_logits else None
        if self.tokens is None or sampling is None:
            return StepOutput(tokens=None, logits=logits)
        if self.ready is not None:
            self.ready.synchronize()
        tokens = self.tokens.numpy()
        output = StepOutput(tokens=tokens, logits=logits)
        if sampling.logprobs is not None and self.logits is not None:
            _add_logprobs(output, self.logits, tokens, sampling.logprobs)
        owners = owners_of_bad_rows(step, np.empty((0, 1), np.float32), tokens)
        if len(owners):
            self.steps.forget(step, owners)
        return output


def _add_logprobs(output: StepOutput, logits: Tensor, tokens: Int32Array, count: int) -> None:
    """Logprobs of the tokens [R] and of the ``count`` most likely ones of each row."""
    logprobs = logits.log_softmax(-1)
    there = torch.from_numpy(tokens).to(logprobs.device)
    bad = there == NO_TOKEN
    own = logprobs.gather(1, there.clamp(min=0).long()[:, None])[:, 0].masked_fill(bad, float("nan"))
    values, ids = logprobs.sort(dim=-1, descending=True, stable=True)
    output.token_logprobs = own.cpu().numpy()
    output.top_ids = ids[:, :count].int().masked_fill(bad[:, None], NO_TOKEN).cpu().numpy()
    output.top_logprobs = values[:, :count].masked_fill(bad[:, None], float("nan")).cpu().numpy()


def _check_options(arrays: Mapping[str, npt.NDArray[Any]], rows: int) -> None:
    """Raises RequestError for a value out of range, or where there is not one for each row."""
    ranges = {
        "temperature": (0, np.inf, "[0, inf)"),
        "top_k": (0, np.inf, "[0, inf)"),
        "top_p": (0, 1, "[0, 1]"),
        "min_p": (0, 1, "[0, 1]"),
        "repetition_penalty": (np.nextafter(0, 1), np.inf, "(0, inf)"),
    }
    for name in SAMPLING_OPTIONS:
        array = arrays.get(name)
        if array is None:
            continue
        if len(array) != rows:
            raise RequestError(f"step: {name} has {len(array)} values for {rows} rows")
        if name in ranges:
            least, most, said = ranges[name]
            wrong = ~((array >= least) & (array <= most) & (array < np.inf))
            if wrong.any():
                raise RequestError(f"step: sampled row {int(wrong.argmax())} has a {name} that is not in {said}")
