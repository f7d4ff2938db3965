"""The C++ extension: interpreter, sampler and tools. In the package, only ``executable.py`` uses it.

Invalid arguments raise ValueError, too little memory raises MemoryError.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict

import numpy as np
import numpy.typing as npt

_Int32 = npt.NDArray[np.int32]
_Float = npt.NDArray[np.float32]
Coefficients = tuple[int, int, int, int]
"""The coefficients of an affine size: (constant, T, B, R)."""
OperandTuple = tuple[str, int, str, Sequence[Coefficients], Sequence[Coefficients], Coefficients, str]
"""An operand: (kind, index, dtype, shape, strides, offset, name).

The index is the result of add_port, add_buffer, add_weight or find_cache for the input, buffer, weight or cache.
"""
_Arrays = Mapping[str, npt.NDArray[np.generic]]
"""The arrays of a step, ``StepInput.arrays``: all ports of the program by name."""
_Sampling = Mapping[str, npt.NDArray[np.generic]]
"""The options of sampling, ``SamplingBatch.options()``. Missing options are off."""

class _Samples(TypedDict):
    tokens: _Int32  # [R]
    token_logprobs: _Float | None  # [R]; the last three are None if no logprobs were asked for
    top_ids: _Int32 | None  # [R, n]
    top_logprobs: _Float | None  # [R, n]

class Program:
    """A lowered program under construction, which is verified while it is built. Cache groups, weights and buffers come
    before steps.
    """

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
        """Declares an array of a step and returns its index. Call it after all cache groups are added.

        ``check`` is a ``step_schema.Check``; ``group`` is the index of the cache group that the array is for, -1 for
        none.
        """
    def add_tap(self, name: str, step: int, output: int) -> None:
        """Declares a tap: an output of a step, [T, width], [R, width] or [B, width], that is also an output of the
        program.

        ``step`` and ``output`` are the indices of the step and of its output.
        """
    def add_output(self, name: str, operand: OperandTuple) -> None:
        """Declares a buffer [T, width], [R, width] or [B, width] as an output of the program, after all steps are
        added.
        """
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
        """Declares a weight in ``nbytes`` bytes of ``memory`` from ``offset`` on, 64-byte aligned, and returns its
        index.

        The program keeps a reference to the memory.
        """
    def add_buffer(self, name: str, size: Coefficients, offset: Coefficients, region: int = 0) -> int: ...
    def set_arena(self, nbytes: Coefficients) -> None: ...
    def set_region(self, region: int, nbytes: Coefficients) -> None:
        """Sets the size of a memory region that ranks share, before its buffers are added."""
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
        """Returns the index of a layer's cache; -1 if there is none."""

class OffloadError(RuntimeError):
    """An error of offloaded blocks. Its arguments: the problem, and the indices of the cache group and the block that
    are lost, or -1.
    """

    args: tuple[str, int, int]

class Exchange:
    """The channel through which a model's ranks exchange values. Each rank that is a process has its own; threads share
    one.
    """

class ThreadRanks:
    """The shared state of ranks that are threads of this process."""

    def __init__(self, ranks: int) -> None: ...
    def abandon(self, problem: str) -> None:
        """Ends every wait of a rank, now and later, with RuntimeError(problem)."""

class ThreadExchange(Exchange):
    """The exchange of a rank that is a thread of this process."""

    def __init__(self, ranks: ThreadRanks, rank: int) -> None: ...

class Executor:
    """Runs a program, with caches, an arena and threads of its own. ``blocks`` has P, the number of blocks, for each
    cache group in order.
    """

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
        """Allocates the caches and starts the threads.

        ``slots`` has, for each cache group, the number of blocks that layers with a choice of blocks have memory for; 0
        for all. Their other blocks are in files in ``folder``.
        """

    def limit_cores(self, cores: int) -> None:
        """Sets the cores that the process has CPU time of; with more threads, none spins."""
    @property
    def isa(self) -> str: ...
    @property
    def threads(self) -> int: ...
    @property
    def cache_bytes(self) -> int: ...
    @property
    def offload_counts(self) -> tuple[int, int, int, int]:
        """The numbers of a layer's blocks that were in memory when needed, were read, were written, and were lost."""
    @property
    def arena_bytes(self) -> int: ...
    @property
    def ring_pairs(self) -> list[int]:
        """The work of each rank in attention, as pairs (token, split of 512 keys) of a layer; [] if keys aren't divided
        among ranks.
        """

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

        Returns the keys of _Samples if there is ``sampling``; the rows of each of ``outputs`` by name ("logits" [R, V],
        or a tap [R, width]); with ``profile`` also ``seconds``, by step.

        ``watch(index, before, arrays)`` is called before each step of the program with views of its inputs, and after
        it with views of its outputs, with None for operands that have no array. bf16 and f16 are passed as their bits,
        in uint16. The views are valid until the function returns. The program continues with the values that it writes
        to them.
        """

    def decode(
        self, arrays: _Arrays, sampling: _Sampling, runs: int, until: Sequence[int]
    ) -> tuple[npt.NDArray[np.int32], int]:
        """Runs a step with one token per request up to ``runs`` times, each time with the tokens that the previous run
        drew.

        It ends after a run in which a row draws one of the tokens ``until`` or can't be sampled, and after
        ``interrupt``. Returns the tokens [runs, R], and the number of runs; the rest of the array is uninitialised.
        """

    def interrupt(self) -> None:
        """Ends ``decode`` after the current run. If none is running, the next ``decode`` ends after its first run."""

def isas() -> list[str]:
    """Returns the instruction sets that this processor can run, best first."""

def ops() -> list[str]:
    """Returns the ops that programs may have, which ``step_costs.OPS`` lists too."""

def layout_depths() -> dict[str, int]:
    """Returns the number of adjacent values along K in each layout; ``panel_layouts.DEPTHS`` has them too."""

PANEL: int
"""The number of rows of a panel, as ``panel_layouts.PANEL``."""

def begin_for_tvm(executor: Executor, arrays: _Arrays) -> npt.NDArray[np.uint8]:
    """Begins a step on the calling thread and returns its arena.

    Until ``end_for_tvm``, this thread's calls of RUN_STEP_FOR_TVM and RUN_LOOP_FOR_TVM belong to the executor.
    """

def end_for_tvm() -> None:
    """Ends the step. Raises ValueError with the error of those calls, if there was one."""

RUN_STEP_FOR_TVM: int
RUN_LOOP_FOR_TVM: int

def cache_arrays(executor: Executor, group: str, layer: int) -> tuple[_Float, _Float]:
    """Returns the memory of a layer's f32 cache, k [P, Nkv, D, K] and v [P, Nkv, K, Dv]; for other formats a copy of
    the decoded values.
    """

def cache_memory(executor: Executor, group: str, layer: int) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    """Returns the bytes of a layer's keys and of its values: [P, Nkv, bytes of a block and head]."""

def copy_offloaded(executor: Executor, group: str, pairs: Sequence[tuple[int, int]]) -> None:
    """Copies blocks, as pairs (from, to), of a group in which some layers have memory for some blocks only."""

def read_weights(executor: Executor) -> None:
    """Reads all weights of the program's linears once, with the executor's threads."""

def trace(executor: Executor, on: bool) -> list[npt.NDArray[np.int64]]:
    """Starts or ends the recording of the threads' marks. Returns those that were recorded, [n, 2] for each thread.

    A mark is a time, in nanoseconds of the steady clock, and an event. An event from 0 on is the index of a step that
    begins; the number of steps means the end of the last one. -1 and -2 are the beginning and the end of a thread's
    tasks in a region. -3 means that the caller has waited for the other threads' tasks.
    """

def expert_rows(executor: Executor) -> dict[int, list[int]]:
    """Returns the number of rows that each expert has got, by the index of the step that routes the tokens."""

class RankLink(Exchange):
    """The exchange of ranks that are processes of one machine, which share a memory file. See rank_link.h."""

    def __init__(self, fd: int, rank: int, cache_bytes: Sequence[int], spin: float, in_flight: int = 1) -> None:
        """Creates or opens the shared memory.

        Args:
            fd: the descriptor of rank 0's file, which this object closes; -1 creates the file.
            rank: this rank.
            cache_bytes: the bytes of each rank's caches.
            spin: the seconds for which a rank waits awake before it sleeps.
            in_flight: the steps that may be posted before rank 0 has run the first of them.

        Raises:
            MemoryError: there is too little shared memory.
            ValueError: the file was created for other arguments.
        """
    @property
    def fd(self) -> int: ...
    @property
    def problem(self) -> str:
        """The reason passed to ``abandon``; "" if there was none."""
    @property
    def progress(self) -> list[int]:
        """For each rank, a number that changes whenever the rank makes progress."""
    @property
    def sleeps(self) -> bool:
        """True if this rank has been waiting for others for longer than ``spin``."""
    def caches(self, rank: int) -> npt.NDArray[np.uint8]:
        """Returns the memory of a rank's KV caches: for each layer keys, then values, each aligned to CACHE_ALIGN."""
    def meet(self) -> None:
        """Waits until all ranks have called this. Raises RuntimeError if a rank is lost, or if its step has failed."""
    def wait_done(self) -> None:
        """Waits until the other ranks have finished the last step. Only rank 0 calls it, as well as ``post`` and
        ``stop``.
        """
    def post(self, executor: Executor, arrays: _Arrays) -> None: ...
    def begin_step(self) -> None:
        """Begins the next step that rank 0 posted, if several may be in flight. Raises ValueError if there is none."""
    def stop(self) -> None: ...
    def release(self) -> None:
        """Gives the memory back to the system; it reads as zeros afterwards."""
    def run_posted_steps(self, executor: Executor) -> None: ...
    def fail_step(self, problem: str) -> None:
        """Ends the running step on all ranks with an error."""
    def abandon(self, problem: str) -> None:
        """Ends every wait of every rank, now and later, with RuntimeError(problem)."""

class MessageExchange(Exchange):
    """The exchange of a rank that shares no memory with the others.

    ``move(to, own, sources, theirs)`` sends the bytes ``own`` to each rank in ``to``, and fills each array in
    ``theirs`` with the bytes from the rank in ``sources``. The arrays are valid until it returns. An exception that it
    raises ends the step.
    """

    def __init__(
        self,
        rank: int,
        move: Callable[[list[int], npt.NDArray[np.uint8], list[int], list[npt.NDArray[np.uint8]]], object],
    ) -> None: ...

def pack_step(executor: Executor, arrays: _Arrays) -> npt.NDArray[np.uint8]:
    """Returns a step's inputs as bytes, which are sent to ranks on other machines."""

def run_packed_step(step: npt.NDArray[np.uint8], executor: Executor) -> None:
    """Runs a step from the bytes of ``pack_step``, which must be aligned to 8. Raises RuntimeError if some are
    missing.
    """

CACHE_ALIGN: int

def die_with_parent() -> None:
    """Makes the system kill this process when the thread that started it, or that thread's process, ends."""

class RowSampler:
    """The sampler alone, with threads of its own. Calls from several threads run one at a time."""

    def __init__(self, threads: int = 1) -> None: ...
    @property
    def threads(self) -> int: ...
    def sample(self, logits: _Float, sampling: _Sampling, logprobs: int = -1) -> _Samples:
        """Samples rows of logits [R, V] as ``Executor.run`` does."""
    def distribution(self, logits: _Float, sampling: _Sampling) -> _Float:
        """Returns the weights [R, V] that ``sample`` draws by: 1 for the most likely token, 0 for tokens that can't be
        drawn.

        The weights aren't normalised. Raises RuntimeError for logits that can't be sampled from.
        """

def measure_bandwidth(nbytes: int, threads: int) -> float:
    """Returns the GB/s (10^9) at which ``threads`` threads read ``nbytes`` bytes, the best of a few passes."""

def measure_peak(dtype: str, threads: int, isa: str) -> float:
    """Returns multiply-adds of ``dtype`` (f32, bf16, i8) per second, in 10^9, with all operands in registers; the best
    of a few passes.
    """
