"""The executor of the tvm target: a compiled library in TVM's virtual machine, on KV blocks. Sampling is the cpu
target's.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from importlib import metadata
from typing import Any

import numpy as np
import numpy.typing as npt

from enginewright.plugins.steps.x86_levels import LevelName, best_level
from enginewright.runtime.bundle.manifest import target_folder
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.bundle.trust import read_code
from enginewright.runtime.executors.base import Deferred
from enginewright.runtime.executors.host_blocks import HostBlocks, cache_identity
from enginewright.runtime.kv_cache.kinds.table import cache_block_bytes
from enginewright.runtime.shared.contracts import CacheGroup, ExecutorCaps, StepInput, StepOutput
from enginewright.runtime.shared.errors import BundleError, TargetError
from enginewright.runtime.shared.lowered_program import LoweredProgram
from enginewright.runtime.shared.memory import check_free
from enginewright.runtime.shared.step_schema import LOGITS
from enginewright.runtime.shared.threads import available_threads

from ...native.executable import NUMERICS_VERSION, CpuProgram, isas
from ...native.processor import processor_features
from ...native.sampling import RowSampler
from ...steps.host_arrays import ALIGNMENT, Array, aligned
from ..section import STEP, STEP_WITH_TAPS, TvmSection, arguments_of, stored_type
from .doctor import level_problem, tvm_problem
from .library import Library, tensor, tvm_version


class TvmExecutor(HostBlocks):
    """The executor of the tvm target. A step runs on the thread that calls ``result``.

    Args:
        bundle: a bundle with a ready target ``target``.
        blocks: the number of blocks to allocate for each cache group.
        threads: the number of threads of the kernels; 0 means one for each core. TVM has one thread pool in a process,
            whose size the last created executor sets.
        target: the target's name.

    Raises:
        BundleError: the bundle has no such target, or it is damaged.
        TargetError: the libraries are for other CPUs, or for another TVM.
        MissingDependencyError: TVM is missing.
        CapacityError: less memory is free than the caches need.
    """

    def __init__(self, bundle: Bundle, blocks: Mapping[str, int], *, threads: int = 0, target: str = "tvm") -> None:
        section, program = tvm_section(bundle, target), bundle.program(target)
        level = check_section(section)
        self._bundle, self._target = bundle, target
        self.blocks = dict(blocks)
        self.cache_groups: tuple[CacheGroup, ...] = program.cache_groups
        check_free(sum(cache_block_bytes(g) * self.blocks.get(g.name, 0) for g in self.cache_groups), "a KV cache")
        self._threads = threads or available_threads()
        self._level, self._kernels = level, section.kernels
        name = f"{target_folder(target)}/{section.library(level)}"
        weights = {use.name: bundle.weight(use.name) for use in program.weights}
        check_program(bundle, target, section)
        library = Library(
            read_code(bundle, name), bundle.path / name, self._threads if section.kernels is None else None
        )
        run = library.program(program)
        # The library checks nothing: the program that it was compiled from is verified, and each step, as on the cpu
        # target, which also owns arena and caches.
        program_threads = 1 if section.kernels is None else self._threads
        memory = OurMemory(CpuProgram(run, weights, blocks=self.blocks, threads=program_threads))
        self._step = TvmStep(run, library, weights, memory)
        outputs = tuple(name for name in run.outputs if name not in program.outputs)
        self.caps = ExecutorCaps(shared_blocks=True, masks=True, ports=program.ports, outputs=outputs)
        self._sampler = RowSampler(self._threads)

    @property
    def threads(self) -> int:
        return self._threads

    def submit(self, step: StepInput) -> Deferred:
        self._bundle.check_unchanged()
        return Deferred(self._run, step)

    @property
    def cache_identity(self) -> bytes:
        """Bytes that two executors share only if each can use the cache blocks of the other.

        They depend on the bundle, the target, the level and the versions of TVM and, with the cpu target's kernels, of
        ours.
        """
        ours = (self._kernels, NUMERICS_VERSION, metadata.version("enginewright"), isas()[0]) if self._kernels else ()
        return cache_identity(self._bundle, self._target, self._level, tvm_version(), *ours)

    def memory_of(self, group: str) -> Iterable[npt.NDArray[np.uint8]]:
        return self._step.memory.blocks[group]

    def _run(self, step: StepInput) -> StepOutput:
        for group, blocks in step.clears.items():
            for memory in self.memory_of(group):
                memory[blocks] = 0
        self.copy_blocks(step.copies)
        values = self._step.run(step)
        outputs = {name: values[name].copy() for name in step.outputs}
        if step.sampling is None:
            return StepOutput(tokens=None, outputs=outputs)
        return replace(self._sampler.sample(values[LOGITS], step.sampling), outputs=outputs)

    def describe(self) -> dict[str, str | int]:
        about: dict[str, str | int] = {
            "target": self._target,
            "library": f"tvm {tvm_version()}",
            "level": f"x86-64-{self._level}",
            "threads": self._threads,
        }
        return about | ({"kernels": self._kernels} if self._kernels else {})

    def close(self) -> None:
        """Does nothing: nothing runs between steps, and memory is freed with the object."""


class OwnMemory:
    """The arena and the caches of a program that only TVM's kernels run, and that isn't verified.

    Attributes:
        caches: the memory of each layer's keys and values, in the order of the program's arguments.
        blocks: the same memory as bytes, by cache group, [P, bytes of a block].
    """

    def __init__(self, program: LoweredProgram, blocks: Mapping[str, int]) -> None:
        self.caches: list[Array] = []
        self.blocks: dict[str, list[npt.NDArray[np.uint8]]] = {group.name: [] for group in program.cache_groups}
        self._arena, self._program = aligned((0,), np.uint8), program
        for group in program.cache_groups:
            for _ in group.layers:
                for plane in group.planes:
                    count = blocks[group.name] * group.block_size * math.prod(plane.shape)
                    self.caches.append(aligned((count,), np.float32))
                    self.blocks[group.name].append(self.caches[-1].view(np.uint8).reshape(blocks[group.name], -1))

    def begin(self, step: StepInput) -> npt.NDArray[np.uint8]:
        """Returns the arena for a step. It may be another array than for the step before."""
        size = self._program.arena_bytes.evaluate(*sizes_of(step))
        if size > self._arena.nbytes:
            self._arena = aligned((-(-3 * size // (2 * ALIGNMENT)) * ALIGNMENT,), np.uint8)
        return self._arena

    def end(self) -> None:
        """Does nothing; ``OurMemory`` ends a step here."""


class OurMemory:
    """The arena and the caches of a cpu program, which verifies steps, and whose kernels run some of them."""

    def __init__(self, program: CpuProgram) -> None:
        layers = [(g.name, layer) for g in program.lowered.cache_groups for layer in g.layers]
        self.caches: list[Array] = [c.reshape(-1) for layer in layers for c in program.cache_arrays(*layer)]
        self.blocks: dict[str, list[npt.NDArray[np.uint8]]] = {name: [] for name, _ in layers}
        for name, layer in layers:
            self.blocks[name] += program.cache_memory(name, layer)
        self.begin, self.end = program.begin_for_tvm, program.end_for_tvm


class TvmStep:
    """Runs steps by a library, with its memory and weights.

    Args:
        program: the program that the library runs: see ``Library.program``.
        library: the library.
        weights: the weights by name, in the bundle's form.
        memory: the arena and the caches.
    """

    def __init__(
        self, program: LoweredProgram, library: Library, weights: Mapping[str, Array], memory: OwnMemory | OurMemory
    ) -> None:
        self.memory = memory
        self._given = arguments_of(program)
        self._library = library
        self._step, self._step_with_taps = library.function(STEP), library.function(STEP_WITH_TAPS)
        self._weights = [weights[u.name].reshape(-1).view(stored_type(u)) for u in program.weights]
        self._weight_tensors = [tensor(array) for array in self._weights]
        self._cache_tensors = [tensor(array) for array in memory.caches]
        self._inputs: dict[str, tuple[Array, Any]] = {}
        self._arena: Array | None = None
        self._arena_tensors: list[Any] = []
        places = {buffer.name: buffer.offset for buffer in program.buffers}
        self._outputs = [(name, of, places[of.name]) for name, of in program.outputs.items()]

    def run(self, step: StepInput) -> dict[str, Array]:
        """Runs a step; returns its outputs [R, width], in memory that the next step overwrites.

        Hidden states are included if the step needs one.
        """
        arena = self.memory.begin(step)
        if self._arena is None or arena.ctypes.data != self._arena.ctypes.data or arena.size != self._arena.size:
            self._arena_tensors = [tensor(arena.view(dtype)) for dtype in self._given.arena]
        self._arena = arena
        self._library.enter()
        inputs = [self._input(name, array) for name, array in self._named(step)]
        run = self._step if {LOGITS}.issuperset(step.outputs) else self._step_with_taps
        run(*inputs, *self._arena_tensors, self._weight_tensors, self._cache_tensors)
        self.memory.end()
        sizes, floats = sizes_of(step), arena.view(np.float32)
        values = {}
        for name, of, place in self._outputs:
            assert place is not None, "memory is planned before a program is stored"
            start = place.evaluate(*sizes) // 4 + of.offset.evaluate(*sizes)
            rows, columns = (size.evaluate(*sizes) for size in of.shape)
            values[name] = floats[start : start + rows * columns].reshape(rows, columns)
        return values

    def _named(self, step: StepInput) -> list[tuple[str, Array]]:
        return [(name, step.arrays[name]) for name in self._given.inputs]

    def _input(self, name: str, array: Array) -> Any:
        """Copies an input to memory that TVM accepts, and returns its tensor. The memory is reused while the shape
        stays the same.
        """
        entry = self._inputs.get(name)
        if entry is None or entry[0].shape != array.shape:
            memory = aligned(array.shape, array.dtype)
            entry = self._inputs[name] = (memory, tensor(memory))
        entry[0][...] = array
        return entry[1]


def sizes_of(step: StepInput) -> tuple[int, int, int]:
    """Returns (T, B, R) of a step."""
    return len(step.ids), len(step.kv_len), len(step.rows)


def tvm_section(bundle: Bundle, target: str) -> TvmSection:
    """Returns a ready target's section of the manifest. Raises BundleError if it has none."""
    return bundle.section(target, TvmSection, "libraries")


def check_program(bundle: Bundle, target: str, section: TvmSection) -> None:
    """Raises BundleError if the program isn't the one from which the target's libraries were compiled, or has other
    caches than f32.
    """
    name = bundle.program_file(target)
    if section.program is not None and hashlib.sha256(bundle.read_bytes(name)).hexdigest() != section.program:
        raise BundleError(
            f"{bundle.path / name}: the target's libraries were compiled from another program",
            hint="Copy the bundle again, or export it again.",
        )
    for group in bundle.program(target).cache_groups:
        if group.dtype != "f32":
            raise BundleError(
                f"{bundle.path / name}: cache group {group.name} is {group.dtype}, and libraries have f32 caches",
                hint="Export the bundle again.",
            )


def check_section(section: TvmSection) -> LevelName:
    """Returns the level whose library runs on this CPU. Raises TargetError if none does, or if another TVM is
    installed.
    """
    version = tvm_version()
    if version is not None and (problem := tvm_problem(section, version)) is not None:
        raise TargetError(f"target tvm: {problem.message}", hint=problem.hint)
    level = best_level(section.levels, processor_features())
    if level is None:
        problem = level_problem(section)
        raise TargetError(f"target tvm: {problem.message}", hint=problem.hint)
    return level
