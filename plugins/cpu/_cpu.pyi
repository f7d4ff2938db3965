"""The C++ extension: interpreter, sampler and tools. ``executable.py`` is its one user inside the package.

Faults of an argument raise ValueError, want of memory MemoryError.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict

import numpy as np
import numpy.typing as npt

_Int32 = npt.NDArray[np.int32]
_Float = npt.NDArray[np.float32]
Coefficients = tuple[int, int, int, int]
"""(constant, T, B, R)"""
OperandTuple = tuple[str, int, str, Sequence[Coefficients], Sequence[Coefficients], Coefficients, str]
"""(kind, index, dtype, shape, strides, offset, name)

index: of an input, a buffer, a weight or a cache what add_port, add_buffer, add_weight and find_cache returned.
"""
_Arrays = Mapping[str, npt.NDArray[np.generic]]
"""The arrays of a step by the names of the program's ports, all of them: ``StepInput.arrays``"""
_Sampling = Mapping[str, npt.NDArray[np.generic]]
"""``SamplingBatch.options()``; what is left out is off"""

class _Samples(TypedDict):
    tokens: _Int32  # [R]
    token_logprobs: _Float | None  # [R]; the last three are None if no logprobs were asked for
    top_ids: _Int32 | None  # [R, n]
    top_logprobs: _Float | None  # [R, n]

class Program:
    """A lowered program, verified while it is built: add groups, weights and buffers before the steps."""

    def __init__(self) -> None: ...
    def add_cache_group(
        self,
        name: str,
        layers: Sequence[int],
        kv_heads: int,
        key_size: int,
        value_size: int,
        block_size: int,
        dtype: str = "f32",
        summaries: bool = False,
        state_size: int = 0,
        values_in_keys: bool = False,
    ) -> int: ...
    def add_port(
        self, name: str, shape: Sequence[Coefficients], dtype: str = "i32", check: str = "none", group: int = -1
    ) -> int:
        """Declares an array of a step, after the cache groups; ``check``: see ``step_schema.Check``."""
    def add_tap(self, name: str, step: int, output: int) -> None:
        """Declares output ``output`` of a step, [T, width], [R, width] or [B, width], as an output of the program."""
    def add_output(self, name: str, operand: OperandTuple) -> None:
        """Declares a buffer, of such a shape, as an output of the program, once all steps are added."""
    def add_weight(
        self,
        name: str,
        dtype: str,
        shape: Sequence[int],
        layout: str,
        memory: npt.NDArray[np.uint8],
        offset: int,
        nbytes: int,
    ) -> int:
        """``nbytes`` bytes of ``memory`` from ``offset``, 64-byte aligned, are the weight; memory is kept alive."""
    def add_buffer(self, name: str, size: Coefficients, offset: Coefficients, region: int = 0) -> int: ...
    def set_arena(self, nbytes: Coefficients) -> None: ...
    def set_region(self, region: int, nbytes: Coefficients) -> None:
        """Says what buffers need of a region that ranks share; before these are added."""
    def set_ranks(self, first: int, count: int) -> None: ...
    def add_step(
        self,
        op: str,
        inputs: Sequence[OperandTuple],
        outputs: Sequence[OperandTuple],
        attributes: Mapping[str, int | float | bool | str],
        where: str,
    ) -> None: ...
    def set_logits(self, operand: OperandTuple) -> None: ...
    def finish(self) -> None: ...
    def find_cache(self, group: str, layer: int) -> int:
        """-1 if there is none."""

class OffloadError(RuntimeError):
    """Its arguments: the problem, and the number of the cache group and the block that are lost, or -1."""

    args: tuple[str, int, int]

class Exchange:
    """The channel through which a model's ranks exchange values; each rank has its own, or threads share one."""

class ThreadRanks:
    """The shared state of ranks that are threads of this process."""

    def __init__(self, ranks: int) -> None: ...
    def abandon(self, problem: str) -> None:
        """Ends every wait, now and later, with RuntimeError(problem)."""

class ThreadExchange(Exchange):
    """The exchange of one such rank."""

    def __init__(self, ranks: ThreadRanks, rank: int) -> None: ...

class Executor:
    """Runs a program, on caches, an arena and threads of its own. ``blocks`` has P for each cache group in order."""

    def __init__(
        self,
        program: Program,
        blocks: Sequence[int],
        threads: int,
        isa: str,
        tuning: Mapping[str, int],
        exchange: Exchange | None = None,
        folder: str = "",
        slots: Sequence[int] = (),
    ) -> None:
        """``slots``: for how many blocks of each cache group layers that choose have memory, 0 for all; the others wait
        in ``folder``."""

    @property
    def isa(self) -> str: ...
    @property
    def threads(self) -> int: ...
    @property
    def cache_bytes(self) -> int: ...
    @property
    def offload_counts(self) -> tuple[int, int, int, int]:
        """Blocks of a layer that were in memory when they were needed, read, written, and lost."""
    @property
    def arena_bytes(self) -> int: ...
    @property
    def ring_pairs(self) -> list[int]:
        """The work of each rank in attention, in (token, split of 512 keys) of a layer; [] if keys aren't divided."""

    def run(
        self,
        arrays: _Arrays,
        sampling: _Sampling | None = None,
        logprobs: int = -1,
        outputs: Sequence[str] = (),
        profile: bool = False,
        watch: Callable[[int, bool, list[npt.NDArray[Any] | None]], object] | None = None,
    ) -> dict[str, Any]:
        """Runs one step with the GIL released.

        The result has the keys of _Samples if sampling is given, the rows of each of ``outputs`` ("logits" [R, V], or a
        tap [R, width]) by its name, and ``seconds`` by step with ``profile``.

        ``watch(index, before, arrays)`` is called before each step with views of its inputs, and after it with views of
        its outputs, None for the others; bf16 and f16 as their bits, in uint16. They are valid until it returns;
        what it writes to them is what the program continues with.
        """

    def decode(
        self, arrays: _Arrays, sampling: _Sampling, runs: int, until: Sequence[int]
    ) -> tuple[npt.NDArray[np.int32], int]:
        """Runs a step in which each request has one token up to ``runs`` times, each time with the tokens drawn before.

        It ends after a run in which a row draws one of ``until`` or can't be sampled, and after ``interrupt``. Returns
        the tokens [runs, R], and how many runs there were; the rest of the array is uninitialised.
        """

    def interrupt(self) -> None:
        """Ends ``decode`` after the current run; if there is none, the next one after its first run."""

def isas() -> list[str]:
    """Returns the instruction sets that this processor can run, best first."""

def ops() -> list[str]:
    """The ops that programs may have; ``step_costs.OPS`` lists them too."""

def layout_depths() -> dict[str, int]:
    """Returns the number of adjacent values along K in each layout; ``panel_layouts.DEPTHS`` has them too."""

PANEL: int
"""Rows of a panel, as ``panel_layouts.PANEL``."""

def begin_for_tvm(executor: Executor, arrays: _Arrays) -> npt.NDArray[np.uint8]:
    """Begins a step on the calling thread, whose calls of the two functions below are the executor's; its arena."""

def end_for_tvm() -> None:
    """Raises ValueError with what went wrong in those calls."""

RUN_STEP_FOR_TVM: int
RUN_LOOP_FOR_TVM: int

def cache_arrays(executor: Executor, group: str, layer: int) -> tuple[_Float, _Float]:
    """The memory of a layer's f32 cache: k [P, Nkv, D, K] and v [P, Nkv, K, Dv]; else a copy of what it stands for."""

def cache_memory(executor: Executor, group: str, layer: int) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    """The bytes of a layer's keys and of its values: [P, Nkv, bytes of a block and head]."""

def copy_offloaded(executor: Executor, group: str, pairs: Sequence[tuple[int, int]]) -> None:
    """Copies blocks, (from, to), of a group of which some layers have memory for some blocks alone."""

def read_weights(executor: Executor) -> None:
    """Reads all weights that linears of the program multiply by, once, with the executor's threads."""

def trace(executor: Executor, on: bool) -> list[npt.NDArray[np.int64]]:
    """Keeps marks of the threads from now on, or no longer; returns those that were kept, [n, 2] for each thread.

    A mark is nanoseconds of the steady clock, and what happened: the index of a step that begins (the number of steps
    behind the last one), or -1 and -2 where tasks of a region begin and end, and -3 where the caller has waited for
    the others' tasks.
    """

def expert_rows(executor: Executor) -> dict[int, list[int]]:
    """By the step that routes tokens, how many rows each expert has been given."""

class RankLink(Exchange):
    """Ranks that are processes: the file of shared memory that joins them. See rank_link.h."""

    def __init__(self, fd: int, rank: int, cache_bytes: Sequence[int], spin: float, in_flight: int = 1) -> None:
        """``fd``: rank 0's file, which this object closes, or -1 to make it; ``spin``: seconds; ``in_flight``: steps
        that may be posted before rank 0 has run the first.

        MemoryError without shared memory; ValueError for a file that was made for others.
        """
    @property
    def fd(self) -> int: ...
    @property
    def problem(self) -> str:
        """The reason passed to ``abandon``; "" if there was none."""
    @property
    def progress(self) -> list[int]:
        """By rank, a number that changes whenever the rank gets further."""
    @property
    def sleeps(self) -> bool:
        """True if this rank is waiting for others, and has been for longer than ``spin``."""
    def caches(self, rank: int) -> npt.NDArray[np.uint8]:
        """The memory of a rank's KV caches: keys, then values of each layer, each from a multiple of CACHE_ALIGN."""
    def meet(self) -> None:
        """Waits for the others. RuntimeError if one is lost, or if its step has failed."""
    def wait_done(self) -> None:
        """Waits until the others are through with the last step. Of rank 0, as ``post`` and ``stop``."""
    def post(self, executor: Executor, arrays: _Arrays) -> None: ...
    def begin_step(self) -> None:
        """Runs the next step that rank 0 posted, if several may be in flight. Raises ValueError if there is none."""
    def stop(self) -> None: ...
    def release(self) -> None:
        """Gives the memory back to the system; what was in it is zero from now on."""
    def run_posted_steps(self, executor: Executor) -> None: ...
    def fail_step(self, problem: str) -> None:
        """Ends the step that runs, on all ranks."""
    def abandon(self, problem: str) -> None:
        """Ends every wait of every rank, now and later, with RuntimeError(problem)."""

class MessageExchange(Exchange):
    """The exchange of a rank that shares no memory with the others.

    ``move(to, own, sources, theirs)`` sends bytes to each of some ranks, and fills an array with what comes from each
    of others. The arrays are valid until it returns. What it raises ends the step.
    """

    def __init__(
        self,
        rank: int,
        move: Callable[[list[int], npt.NDArray[np.uint8], list[int], list[npt.NDArray[np.uint8]]], object],
    ) -> None: ...

def pack_step(executor: Executor, arrays: _Arrays) -> npt.NDArray[np.uint8]:
    """A step's inputs as bytes, as they go to another machine."""

def run_packed_step(step: npt.NDArray[np.uint8], executor: Executor) -> None:
    """Runs such a step, whose bytes begin where an int64 may. RuntimeError where some are missing."""

CACHE_ALIGN: int

def die_with_parent() -> None:
    """Has the system kill this process when the thread that started it ends, as with its process."""

class RowSampler:
    """The sampler alone, with threads of its own; calls run one at a time."""

    def __init__(self, threads: int = 1) -> None: ...
    @property
    def threads(self) -> int: ...
    def sample(self, logits: _Float, sampling: _Sampling, logprobs: int = -1) -> _Samples:
        """Samples rows of logits [R, V] as ``run`` does."""
    def distribution(self, logits: _Float, sampling: _Sampling) -> _Float:
        """The unnormalised weights [R, V] that ``sample`` draws from; the most likely token has 1, what is cut has 0.

        RuntimeError for logits that can't be sampled from.
        """

def measure_bandwidth(nbytes: int, threads: int) -> float:
    """GB/s (10^9) that ``threads`` threads read a working set of ``nbytes`` with; best of a few passes."""

def measure_peak(dtype: str, threads: int, isa: str) -> float:
    """Multiply-adds a second, in 10^9, of ``dtype`` (f32, bf16, i8) in registers alone; best of a few passes."""
