"""The tvm target: a compiled library in TVM's virtual machine, on KV blocks; sampling is the cpu target's."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from enginewright.plugins.cpu.sampling import RowSampler
from enginewright.plugins.cpu.threads import available_threads
from enginewright.plugins.shared.contracts import CacheGroup, ExecutorCaps, StepInput, StepOutput
from enginewright.plugins.shared.errors import BundleError, TargetError
from enginewright.plugins.shared.lowered_program import LoweredProgram
from enginewright.runtime.bundle.manifest import target_folder
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.bundle.tvm_section import (
    STEP,
    TvmSection,
    arguments_of,
    best_level,
    library_name,
    stored_type,
)
from enginewright.runtime.kv_cache.cache_groups import check_free

from .base import Deferred
from .machine import processor_features
from .requirements import level_problem, tvm_problem
from .tvm_library import Library, tensor, tvm_version

Array = npt.NDArray[Any]
_ALIGNMENT = 64


class TvmExecutor:
    """See ``executors.base.Executor``. A step runs on the thread that asks for its result.

    Args:
        bundle: with a ready target ``target``.
        blocks: cache group -> blocks to allocate.
        threads: of the kernels; 0 takes as many as there are cores. TVM has one pool of them in a process: the last
            executor that is made says how many there are.
        target: the target's name.

    Raises:
        BundleError: the bundle has no such target, or it is damaged.
        TargetError: its libraries are for other processors, or another TVM.
        MissingDependencyError: TVM isn't there.
        CapacityError: less memory is free than the caches take.
    """

    def __init__(self, bundle: Bundle, blocks: Mapping[str, int], *, threads: int = 0, target: str = "tvm") -> None:
        section, program = tvm_section(bundle, target), bundle.program(target)
        level = check_section(section)
        self._bundle, self._target = bundle, target
        self.blocks = dict(blocks)
        self.cache_groups: tuple[CacheGroup, ...] = tuple(g.to_group() for g in program.cache_groups)
        self.caps = ExecutorCaps(shared_blocks=True)
        check_free(sum(g.bytes_per_block * self.blocks.get(g.name, 0) for g in self.cache_groups), "a KV cache")
        self._threads = threads or available_threads()
        name = f"{target_folder(target)}/{library_name(level)}"
        library = Library(checked_library(bundle, name), bundle.path / name, self._threads)
        self._level = level
        self._step = TvmStep(program, library, {u.name: bundle.weight(u.name) for u in program.weights}, self.blocks)
        self._sampler = RowSampler(self._threads)

    @property
    def threads(self) -> int:
        return self._threads

    def submit(self, step: StepInput) -> Deferred:
        self._bundle.check_unchanged()
        return Deferred(self._run, step)

    @property
    def cache_identity(self) -> bytes:
        """See ``kv_cache.disk_tier.BlockMemory``."""
        folders = ("weights/", target_folder(self._target) + "/")
        files = [(name, file.sha256) for name, file in self._bundle.files.items() if name.startswith(folders)]
        return json.dumps([self._level, tvm_version(), sorted(files)]).encode()

    def read_block(self, group: str, block: int) -> Array:
        """See ``kv_cache.disk_tier.BlockMemory``."""
        return np.concatenate([memory[block] for memory in self._step.memory_of(group)])

    def write_block(self, group: str, block: int, payload: Array) -> None:
        """See ``kv_cache.disk_tier.BlockMemory``."""
        at = 0
        for memory in self._step.memory_of(group):
            memory[block] = payload[at : at + memory.shape[1]]
            at += memory.shape[1]

    def _run(self, step: StepInput) -> StepOutput:
        for group, blocks in step.clears.items():
            for memory in self._step.memory_of(group):
                memory[blocks] = 0
        for group, pairs in step.copies.items():
            for memory in self._step.memory_of(group):
                memory[pairs[:, 1]] = memory[pairs[:, 0]]
        logits = self._step.run(step)
        if step.sampling is None:
            return StepOutput(tokens=None, logits=logits.copy() if step.return_logits else None)
        return self._sampler.sample(logits, step.sampling, return_logits=step.return_logits)

    def describe(self) -> dict[str, str | int]:
        return {
            "target": self._target,
            "library": f"tvm {tvm_version()}",
            "level": f"x86-64-{self._level}",
            "threads": self._threads,
        }

    def close(self) -> None:
        """Nothing runs between steps; memory goes with the object."""


class TvmStep:
    """A library with its memory: arena, weights and caches.

    Args:
        program: that it was compiled from.
        library: that was.
        weights: by name, as the bundle has them.
        blocks: cache group -> blocks.
    """

    def __init__(
        self, program: LoweredProgram, library: Library, weights: Mapping[str, Array], blocks: Mapping[str, int]
    ) -> None:
        self._program = program
        self._given = arguments_of(program)
        self._library = library
        self._step = self._library.function(STEP)
        self._weights = [weights[u.name].reshape(-1).view(stored_type(u)) for u in program.weights]
        self._weight_tensors = [tensor(array) for array in self._weights]
        self._caches: list[Array] = []
        self._memory: dict[str, list[Array]] = {group.name: [] for group in program.cache_groups}
        for group in program.cache_groups:
            for _ in group.layers:
                for size in (group.key_head_size, group.value_head_size):
                    count = blocks[group.name] * group.block_size * group.kv_heads * size
                    self._caches.append(aligned(4 * count, zero=True).view(np.float32))
                    self._memory[group.name].append(self._caches[-1].view(np.uint8).reshape(blocks[group.name], -1))
        self._cache_tensors = [tensor(array) for array in self._caches]
        self._arena = aligned(0)
        self._arena_tensors: list[Any] = []

    def memory_of(self, group: str) -> list[Array]:
        """The keys and the values of each layer, [P, bytes of a block]."""
        return self._memory[group]

    def run(self, step: StepInput) -> Array:
        """The logits [R, V], in memory that the next step writes."""
        sizes = (len(step.ids), len(step.kv_len), len(step.rows))
        self._grow(self._program.arena_bytes.evaluate(*sizes))
        self._library.enter()
        inputs = [tensor(aligned_copy(array)) for array in self._inputs(step)]
        self._step(*inputs, *self._arena_tensors, self._weight_tensors, self._cache_tensors)
        out = self._program.outputs["logits"]
        place = next(b.offset for b in self._program.buffers if b.name == out.name)
        assert place is not None, "memory is planned before a program is stored"
        start = place.evaluate(*sizes) // 4 + out.offset.evaluate(*sizes)
        rows, columns = (size.evaluate(*sizes) for size in out.shape)
        return self._arena.view(np.float32)[start : start + rows * columns].reshape(rows, columns)

    def _inputs(self, step: StepInput) -> list[Array]:
        named = {
            "ids": step.ids,
            "positions": step.positions,
            "rows": step.rows,
            "q_start": step.q_start,
            "kv_len": step.kv_len,
            **{f"slots:{name}": array for name, array in step.slots.items()},
            **{f"block_table:{name}": array for name, array in step.block_tables.items()},
        }
        return [named[name] for name in self._given.inputs]

    def _grow(self, size: int) -> None:
        if size > self._arena.nbytes:
            self._arena = aligned(size + size // 2)
            self._arena_tensors = [tensor(self._arena.view(dtype)) for dtype in self._given.arena]


def aligned(size: int, *, zero: bool = False) -> npt.NDArray[np.uint8]:
    """Bytes that begin at a multiple of what TVM asks for, in whole lines."""
    size = -(-size // _ALIGNMENT) * _ALIGNMENT
    memory = (np.zeros if zero else np.empty)(size + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + size]


def aligned_copy(array: Array) -> Array:
    """A step's input where TVM takes it."""
    memory = aligned(array.nbytes)[: array.nbytes].view(array.dtype).reshape(array.shape)
    memory[...] = array
    return memory


def checked_library(bundle: Bundle, name: str) -> bytes:
    """Its content. Raises BundleError if it isn't what was exported: to load it is to run it."""
    path, expected = bundle.path / name, bundle.files.get(name)
    try:
        content = path.read_bytes()
    except OSError as e:
        raise BundleError(f"{path}: {e.strerror}", hint="Copy the bundle again, or export it again.") from e
    if expected is None or hashlib.sha256(content).hexdigest() != expected.sha256:
        raise BundleError(
            f"{path}: it isn't the file that the manifest lists", hint="Copy the bundle again, or export it again."
        )
    return content


def tvm_section(bundle: Bundle, target: str) -> TvmSection:
    """What a ready target's manifest says of its libraries. Raises BundleError if that is nothing."""
    section = bundle.target(target).tvm
    if section is None:
        raise BundleError(f"{bundle.path}: target {target!r} has no libraries", hint="Export the bundle again.")
    return section


def check_section(section: TvmSection) -> str:
    """The level whose library runs here. Raises TargetError if none does, or if TVM is another one."""
    found = tvm_version()
    if found is not None and (problem := tvm_problem(section, found)) is not None:
        raise TargetError(f"target tvm: {problem.message}", hint=problem.hint)
    level = best_level(section.levels, processor_features())
    if level is None:
        problem = level_problem(section)
        raise TargetError(f"target tvm: {problem.message}", hint=problem.hint)
    return level
