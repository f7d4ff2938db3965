"""Steps of packed tokens on a GPU, with caches in blocks: memory, padding to a profile, CUDA graphs.

What computes a step is an engine with our plugins (``tensorrt_paged``), or engines with our kernels between them
(``tensorrt_segments``).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np

from enginewright.plugins.cpu.sampling import RowSampler
from enginewright.plugins.shared.contracts import (
    BYTES_PER_ELEMENT,
    CacheGroup,
    FloatArray,
    Int32Array,
    StepInput,
    StepOutput,
)
from enginewright.plugins.shared.errors import RequestError

from .cuda_driver import Device, Graph
from .packed_steps import HoldsSteps, StepLimits, StepShape, input_sizes, of_requests, owners_of_bad_rows, padded, parts

MOST_GRAPHS = 32
"""CUDA graphs of decode steps that are kept."""


class StepMemory:
    """GPU memory that all steps use: the caches' pools, a step's inputs, and its logits.

    Attributes:
        device: the GPU, open for this thread.
        groups, blocks: cache groups, and blocks of their pools by name.
        limits: of steps.
        caches: "k_cache:L" and "v_cache:L" -> address of [P, K, Nkv, D].
        inputs: name of an input -> its address; names are those of ``bundle.paged_section``.
        logits: f32 [R, V].
    """

    def __init__(
        self, device: Device, groups: Sequence[CacheGroup], blocks: Mapping[str, int], limits: StepLimits, vocab: int
    ) -> None:
        """Raises CapacityError where it doesn't fit."""
        self.device = device
        self.groups = tuple(groups)
        self.blocks = dict(blocks)
        self.limits = limits
        self._bytes: dict[str, int] = {}
        self.caches: dict[str, int] = {}
        for group in groups:
            for kind, size in (("k", group.key_head_size), ("v", group.value_head_size)):
                per_token = group.kv_heads * size * BYTES_PER_ELEMENT[group.dtype]
                for layer in group.layers:
                    name = f"{kind}_cache:{layer}"
                    self._bytes[name] = per_token * group.block_size * blocks[group.name]
                    self.caches[name] = device.allocate(self._bytes[name])
        self.inputs = {name: device.allocate(4 * n) for name, n in input_sizes(groups, limits).items()}
        self.logits = device.allocate(4 * limits.rows * vocab)
        self.clear()

    def clear(self) -> None:
        """Makes all caches zero."""
        for name, address in self.caches.items():
            self.device.zero(address, self._bytes[name])

    def forget(self, group: CacheGroup, blocks: Int32Array) -> None:
        """Makes these blocks of a group zero; -1 is none."""
        for layer in group.layers:
            for name in (f"k_cache:{layer}", f"v_cache:{layer}"):
                per_block = self._bytes[name] // self.blocks[group.name]
                for block in blocks[blocks >= 0].tolist():
                    self.device.zero(self.caches[name] + block * per_block, per_block)

    def upload(self, arrays: Mapping[str, Int32Array]) -> None:
        """A step's inputs."""
        for name, array in arrays.items():
            self.device.upload(self.inputs[name], array)


class PackedProgram(HoldsSteps, Protocol):
    """What computes a padded step, from the inputs in ``StepMemory`` to the logits there."""

    def shape_of(self, tokens: int, requests: int, rows: int, blocks: int, decodes: bool) -> StepShape:
        """The sizes to pad to. Raises RequestError for a step that no profile holds."""

    def most_rows(self, shape: StepShape) -> int:
        """Rows of logits that it gives at once, in the profile of ``shape``."""

    def bound(self, shape: StepShape, *, keep: bool) -> Callable[[], None]:
        """What puts a step of these sizes on the stream: now, or, to ``keep`` for a graph, at any time."""


class PackedSteps:
    """Runs steps: pads, uploads, launches, samples.

    Steps are put on the stream call by call; decode steps of a shape that comes again are a graph from then on.

    Args:
        memory: of all steps.
        program: what computes them.
        vocab: columns of the logits.
        threads: of the sampler.
        graphs: whether graphs are made; False where the library makes them by itself.
    """

    def __init__(self, memory: StepMemory, program: PackedProgram, *, vocab: int, threads: int, graphs: bool) -> None:
        self.graph_launches = 0
        self._device = memory.device
        self._memory = memory
        self._program = program
        self._vocab = vocab
        self._sampler = RowSampler(threads)
        self._makes_graphs = graphs
        self._seen: set[StepShape] = set()
        self._graphs: OrderedDict[StepShape, tuple[Graph, Callable[[], None]]] = OrderedDict()

    def run(self, step: StepInput) -> StepOutput:
        """Raises RequestError for a step that can't be, EnginewrightError for what else goes wrong."""
        if not len(step.ids):
            raise RequestError("step: it has no tokens", hint="Give it one at least.")
        logits = self._logits(step)
        if step.sampling is None:
            return StepOutput(tokens=None, logits=logits if step.return_logits else None)
        output = self._sampler.sample(logits, step.sampling, return_logits=step.return_logits)
        for owner in owners_of_bad_rows(step, logits, output.tokens).tolist():
            for group in self._memory.groups:  # in the caches, these numbers would spread to who gets the blocks next
                self._memory.forget(group, step.block_tables[group.name][owner])
        return output

    def close(self) -> None:
        """Frees graphs."""
        for graph, _ in self._graphs.values():
            graph.close()
        self._graphs.clear()

    def _logits(self, step: StepInput) -> FloatArray:
        """[R, V], of a step that no profile holds in parts."""
        decodes = bool((np.diff(step.q_start) == 1).all())
        tokens, requests = self._program.most(decodes=decodes)
        if len(step.ids) <= tokens and len(step.kv_len) <= requests:
            return self._logits_of(step, decodes)
        logits = np.empty((len(step.rows), self._vocab), np.float32)
        for members in parts(np.diff(step.q_start), self._program):
            part, order = of_requests(step, members)
            logits[order] = self._logits_of(part, bool((np.diff(part.q_start) == 1).all()))
        return logits

    def _logits_of(self, step: StepInput, decodes: bool) -> FloatArray:
        """[R, V]. More rows than a profile has take several runs: a step that is run again writes the same."""
        tokens, requests = len(step.ids), len(step.kv_len)
        blocks = max(table.shape[1] for table in step.block_tables.values())
        logits = np.empty((len(step.rows), self._vocab), np.float32)
        start = 0
        while start < max(len(step.rows), 1):
            left = max(len(step.rows) - start, 1)
            shape = self._program.shape_of(tokens, requests, 1, blocks, decodes)
            rows = step.rows[start : start + min(left, self._program.most_rows(shape))]
            shape = self._program.shape_of(tokens, requests, max(len(rows), 1), blocks, decodes)
            self._memory.upload(padded(step, rows, self._memory.groups, shape))
            self._launch(shape)
            if len(rows):
                self._device.download(logits[start : start + len(rows)], self._memory.logits)
            start += max(len(rows), 1)
        return logits

    def _launch(self, shape: StepShape) -> None:
        if shape in self._graphs:
            self._graphs.move_to_end(shape)
            self._graphs[shape][0].launch()
            self.graph_launches += 1
        elif shape.decodes and self._makes_graphs and shape in self._seen:
            work = self._program.bound(shape, keep=True)
            work()
            self._graphs[shape] = self._device.capture(work), work
            if len(self._graphs) > MOST_GRAPHS:
                self._device.synchronize()
                self._graphs.popitem(last=False)[1][0].close()
        else:
            self._seen.add(shape)
            self._program.bound(shape, keep=False)()
