"""Loads a lowered program into the C++ interpreter, to run it on the CPU. It doesn't import torch.

The interpreter verifies everything that doesn't depend on sizes when the program is built, and the rest on every step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from enginewright.runtime.shared.contracts import (
    FloatArray,
    SamplingBatch,
    StepInput,
    StepOutput,
)
from enginewright.runtime.shared.dtypes import DTYPES
from enginewright.runtime.shared.errors import BundleError, CapacityError, EnginewrightError, OffloadError, RequestError
from enginewright.runtime.shared.lowered_program import Affine, LoweredProgram, Operand
from enginewright.runtime.shared.step_schema import LOGITS, port_of, ports_of
from enginewright.runtime.shared.threads import available_threads, cpu_quota

from ..cpu.extension import cpu_extension as _cpu

if TYPE_CHECKING:
    from enginewright.runtime.executors.target import Offload

    from ..cpu._cpu import OperandTuple

NUMERICS_VERSION = 3
"""The version of the order of sums and of the contents of KV caches (docs/inside/numerics.md). A change that gives
other bits raises it, so that keys and values stored on disk are computed again.
"""

_SIZES = {"T": (0, 1, 0, 0), "B": (0, 0, 1, 0), "B+1": (1, 0, 1, 0), "R": (0, 0, 0, 1)}  # as Affine has them
_EXPORT_AGAIN = "Export the bundle again."
_MOST_THREADS = 1024
_AS_BITS = ("bf16", "f16")  # what _cpu hands over as uint16
TUNABLES: Mapping[str, int] = {
    "small_work": 1 << 40,
    "task_bytes": 1 << 40,
    "task_rows": 1 << 20,
    "thread_tasks": 1 << 20,
    "split_tiles": 1 << 20,
    "spin_microseconds": 1_000_000,
}
"""The fields of ``Tuning`` in plugins/cpu/kernels/tuning.h -> the largest value of each, for ``CpuProgram``'s
``tuning``.
"""

_PROBES = (1, 1, 1), (1, 29, 1), (2, 7, 3), (5, 1, 5)
"""Sizes of the steps for which ``check_memory`` checks the layout: (requests, tokens of each, rows).

They tell T, B and R apart, and are small enough for the memory of any machine that holds the weights.
"""

RUN_STEP_FOR_TVM, RUN_LOOP_FOR_TVM = _cpu.RUN_STEP_FOR_TVM, _cpu.RUN_LOOP_FOR_TVM
"""Addresses of C functions: a packed function of TVM that runs a step, and a replacement of
TVMBackendParallelLaunch.
"""

_Result = TypeVar("_Result")
_LARGEST = 2**31 - 1  # of a weight's or a cache's sizes, so that C++ takes them


Watcher = Callable[[int, bool, list[npt.NDArray[Any] | None]], None]
"""A function that is called before and after each step of a program.

Its arguments are the step's index, True before and False after the step, and views of its inputs (before) or of its
outputs (after). A view is None for weights, step inputs and caches. The views are valid until the function returns; the
program continues with the values that it writes to them. Steps that have nothing to do are left out.
"""


class CpuProgram:
    """A program with its weights, KV caches and threads.

    ``run`` may be called from several threads; the calls run one at a time.

    Args:
        lowered: the program, with memory planned (every buffer has an offset).
        weights: the memory of every weight that the program uses, by name: C-contiguous, 64-byte aligned, packed in the
            program's layout. Only the bytes matter, not the array's dtype and shape. The arrays are kept alive, and may
            be read-only maps of a file.
        blocks: the number of KV blocks P of each cache group, by name. Cache memory is only address space until it is
            written.
        threads: the number of threads; 0 means the cores that this process may use, by affinity and cgroup quota.
        isa: one of ``isas()``; None means the best. Logits are bit-equal for any ``threads``, but not for any ``isa``.
        tuning: ``TUNABLES`` by name, for the division of work into tasks and the time that threads spin. A missing one,
            or 0, means the kernels' own choice. Logits are bit-equal for all values.
        exchange: the exchange with the other ranks, if the program has several. Every rank runs the same steps.
        offload: the number of blocks in memory for each cache group, in layers with adaptive context. Their other
            blocks are in an unnamed file in its folder. Other layers have all blocks in memory. None: all layers have.

    Raises:
        BundleError: the program or a weight is inconsistent; names step, operand and module path.
        CapacityError: the caches don't fit into the address space, or the system refuses to start the threads.
        OffloadError: no file can be created in the folder of ``offload``.
        EnginewrightError: ``blocks``, ``threads``, ``isa`` or ``tuning`` is out of range.
    """

    def __init__(
        self,
        lowered: LoweredProgram,
        weights: Mapping[str, npt.NDArray[np.generic]],
        *,
        blocks: Mapping[str, int],
        threads: int = 0,
        isa: str | None = None,
        tuning: Mapping[str, int] | None = None,
        exchange: _cpu.Exchange | None = None,
        offload: Offload | None = None,
    ) -> None:
        self.lowered = lowered
        self._groups = tuple(group.name for group in lowered.cache_groups)
        if set(blocks) != set(self._groups):
            raise EnginewrightError(f"blocks must name the cache groups {list(self._groups)}, not {list(blocks)}")
        if not 0 <= threads <= _MOST_THREADS:
            raise EnginewrightError(f"threads = {threads} is not in [0, {_MOST_THREADS}]")
        try:
            program = _build(lowered, weights)
        except ValueError as e:
            raise BundleError(f"program: {e}", hint=_EXPORT_AGAIN) from e
        counts = [blocks[name] for name in self._groups]
        threads = threads or min(available_threads(), _MOST_THREADS)
        some = [offload.slots.get(name, 0) for name in self._groups] if offload and offload.slots else []
        folder = "" if offload is None else offload.folder
        self._executor = self._asked(
            lambda: _executor(program, counts, threads, isa, tuning or {}, exchange, folder, some)
        )
        if (quota := cpu_quota()) is not None:
            self._executor.limit_cores(quota)

    @property
    def cache_bytes(self) -> int:
        """The bytes of all KV caches together."""
        return self._executor.cache_bytes

    @property
    def offload_counts(self) -> dict[str, int]:
        """The numbers of a layer's blocks that were in memory when needed, and that were read, written and lost, by
        name.
        """
        return dict(zip(("in_memory", "read", "written", "lost"), self._executor.offload_counts, strict=True))

    def copy_offloaded(self, group: str, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies blocks, as pairs (from, to), of a cache group with offloaded blocks. Raises OffloadError."""
        self._asked(lambda: _cpu.copy_offloaded(self._executor, group, pairs))

    @property
    def ring_pairs(self) -> list[int]:
        """The attention work of each rank if ranks divide keys, as pairs (token, split of 512 keys) of a layer; [] if
        they don't.
        """
        return self._executor.ring_pairs

    @property
    def arena_bytes(self) -> int:
        """The bytes of intermediate values. They grow with the largest step so far."""
        return self._executor.arena_bytes

    @property
    def threads(self) -> int:
        return self._executor.threads

    @property
    def isa(self) -> str:
        return self._executor.isa

    @property
    def expert_rows(self) -> dict[str, list[int]]:
        """The number of rows that each expert has computed since the program was opened, by the layer's module."""
        return {self.lowered.steps[step].where: rows for step, rows in _cpu.expert_rows(self._executor).items()}

    def run(self, step: StepInput) -> StepOutput:
        """Runs one step. Raises RequestError naming the input that is wrong; then no KV slot was written.

        A sampled row whose logits are NaN or infinite gets ``NO_TOKEN``. Raises CapacityError if memory runs out.
        """
        if step.runs == 1:
            return self._run(step)[0]
        assert step.sampling is not None and step.sampling.logprobs is None and step.sampling.masks is None
        options, until = step.sampling.options(), list(step.until)
        tokens, runs = self._asked(lambda: self._executor.decode(step.arrays, options, step.runs, until))
        return StepOutput(tokens=tokens[:runs])

    def interrupt(self) -> None:
        """Ends a step with several runs after the current run. It can be called from any thread."""
        self._executor.interrupt()

    def profile(self, step: StepInput) -> tuple[StepOutput, npt.NDArray[np.float64]]:
        """Runs a step. Returns its output, and the seconds of each step of the program, [steps]."""
        output, extra = self._run(step, profile=True)
        return output, np.asarray(extra["seconds"])

    def trace(self, step: StepInput, index: int) -> list[npt.NDArray[np.generic]]:
        """Runs a step, and returns copies of the outputs of the program's step ``index``.

        The list is empty if that step had nothing to do. Raises RequestError if there is no such step.
        """
        if not 0 <= index < len(self.lowered.steps):
            raise RequestError(f"step {index} is not in [0, {len(self.lowered.steps)})")
        written: list[npt.NDArray[np.generic]] = []

        def keep(at: int, before: bool, arrays: list[npt.NDArray[Any] | None]) -> None:
            if at == index and not before:
                written.extend(np.array(a, order="C") for a in arrays if a is not None)

        self.watch(step, keep)
        return written

    def watch(self, step: StepInput, watcher: Watcher) -> StepOutput:
        """Runs a step, and calls ``watcher`` before and after each step of the program."""

        def named(index: int, before: bool, arrays: list[npt.NDArray[Any] | None]) -> None:
            one = self.lowered.steps[index]
            operands = one.inputs if before else one.outputs
            watcher(
                index,
                before,
                [
                    a if a is None else a.view(DTYPES[o.dtype].numpy if o.dtype in _AS_BITS else a.dtype)
                    for a, o in zip(arrays, operands, strict=True)
                ],
            )

        return self._run(step, watch=named)[0]

    def cache_arrays(self, group: str, layer: int) -> tuple[FloatArray, FloatArray]:
        """Returns a layer's cache: k [P, Nkv, D, K] and v [P, Nkv, K, Dv]. For tests and tools.

        An f32 cache is returned as views of its memory; other formats as decoded copies.
        """
        return _cpu.cache_arrays(self._executor, group, layer)

    def cache_memory(self, group: str, layer: int) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
        """Returns views of the bytes of a layer's keys and values, [P, Nkv, bytes of a block and head]. For tests and
        tools.
        """
        return _cpu.cache_memory(self._executor, group, layer)

    def check_memory(self) -> None:
        """Checks the memory layout of steps of some sizes without running them. Each cache group needs at least one
        block.

        Raises BundleError if a buffer exceeds the arena or overwrites one that is still read, CapacityError if there is
        too little memory.
        """
        for sizes in _PROBES:
            try:
                self.begin_for_tvm(_probe(self.lowered, *sizes))
            except RequestError as e:
                raise BundleError(f"program: {e.message.removeprefix('step: ')}", hint=_EXPORT_AGAIN) from e

    def begin_for_tvm(self, step: StepInput) -> npt.NDArray[np.uint8]:
        """Begins a step that a library compiled by TVM runs on the calling thread; returns the arena.

        The library calls ``RUN_STEP_FOR_TVM`` and ``RUN_LOOP_FOR_TVM``. Raises the errors of ``run``.
        """
        return self._asked(lambda: _cpu.begin_for_tvm(self._executor, step.arrays))

    def end_for_tvm(self) -> None:
        """Ends the step that ``begin_for_tvm`` began. Raises RequestError if a call of the library's failed."""
        self._asked(_cpu.end_for_tvm)

    def post(self, step: StepInput, link: _cpu.RankLink) -> None:
        """Starts a step on all other ranks.

        Raises RequestError for an invalid step, CapacityError without shared memory for its inputs, and RuntimeError if
        a rank is lost.
        """
        self._asked(lambda: link.post(self._executor, step.arrays))

    def run_posted_steps(self, link: _cpu.RankLink) -> None:
        """Runs the steps that rank 0 posts, until rank 0 ends. Raises RuntimeError if a rank is lost."""
        link.run_posted_steps(self._executor)

    def packed(self, step: StepInput) -> npt.NDArray[np.uint8]:
        """Returns a step's inputs as bytes, for ``run_packed`` on another machine. Raises RequestError for an invalid
        step.
        """
        return self._asked(lambda: _cpu.pack_step(self._executor, step.arrays))

    def run_packed(self, step: npt.NDArray[np.uint8]) -> None:
        """Runs a step from the bytes of ``packed``.

        Raises ValueError naming the input that is wrong, RuntimeError if bytes are missing.
        """
        _cpu.run_packed_step(step, self._executor)

    def _asked(self, run: Callable[[], _Result]) -> _Result:
        try:
            return run()
        except _cpu.OffloadError as e:
            problem, group, block = e.args
            lost = {self._groups[group]: [block]} if group >= 0 else {}
            raise OffloadError(f"offload_folder: {problem}", lost, full=not lost) from e
        except ValueError as e:
            raise RequestError(f"step: {e}") from e
        except MemoryError as e:
            what = str(e) if "shared memory" in str(e) else "no memory"
            raise CapacityError(f"{what} for a step of this size", hint="Run fewer tokens in a step.") from e

    def _run(self, step: StepInput, *, profile: bool = False, watch: Any = None) -> tuple[StepOutput, dict[str, Any]]:
        sampling = step.sampling
        further = {
            "sampling": sampling.options() if sampling is not None else None,
            "logprobs": logprobs_wanted(sampling),
            "outputs": list(step.outputs),
            "profile": profile,
            "watch": watch,
        }
        result = self._asked(lambda: self._executor.run(step.arrays, **further))
        tokens = result.get("tokens")
        output = StepOutput(
            tokens=tokens if step.runs == 1 or tokens is None else tokens[np.newaxis],  # of one run
            outputs={name: result[name] for name in step.outputs},
            token_logprobs=result.get("token_logprobs"),
            top_ids=result.get("top_ids"),
            top_logprobs=result.get("top_logprobs"),
        )
        return output, result


def isas() -> list[str]:
    """Returns the instruction sets that this CPU can run, best first. A build for a single CPU model has one.

    All are avx512_amx (with BF16 and VNNI), avx512_bf16 (with VNNI), avx512_vnni, avx512, avx2_vnni, avx2 and portable.
    """
    return _cpu.isas()


def _executor(
    program: _cpu.Program,
    blocks: list[int],
    threads: int,
    isa: str | None,
    tuning: Mapping[str, int],
    exchange: _cpu.Exchange | None,
    folder: str,
    slots: list[int],
) -> _cpu.Executor:
    try:
        return _cpu.Executor(program, blocks, threads, isa or isas()[0], dict(tuning), exchange, folder, slots)
    except _cpu.OffloadError:
        raise
    except ValueError as e:
        raise EnginewrightError(str(e)) from e
    except MemoryError as e:
        raise CapacityError("no memory for the KV caches", hint="Use fewer blocks.") from e
    except RuntimeError as e:
        raise CapacityError(f"{threads} threads could not be started: {e}", hint="Use fewer threads.") from e


def logprobs_wanted(sampling: SamplingBatch | None) -> int:
    """Returns the number of log-probabilities that the sampling options request for each row; -1 for none, as C++ needs
    it.
    """
    return -1 if sampling is None or sampling.logprobs is None else sampling.logprobs


def _probe(lowered: LoweredProgram, requests: int, tokens: int, rows: int) -> StepInput:
    """Returns a step of the program for ``check_memory``: new requests of ``tokens`` tokens each, in block 0.

    The first ``rows`` tokens of the step get logits.
    """
    groups, axes = lowered.cache_groups, (requests * tokens, requests, rows, 1)
    return StepInput.packed(
        more={name: np.zeros(port_of(name).sizes(*axes), np.int32) for name in lowered.ports},
        ids=np.zeros(requests * tokens, np.int32),
        counts=np.full(requests, tokens),
        kv_len=np.full(requests, tokens),
        tables={group.name: np.zeros((requests, 1), np.int32) for group in groups},
        groups=groups,
        rows=np.arange(rows),
    )


def _memory(name: str, array: npt.NDArray[np.generic]) -> npt.NDArray[np.uint8]:
    if not array.flags.c_contiguous:
        raise ValueError(f"weight {name}: its memory is not contiguous")
    return np.asarray(array).reshape(-1).view(np.uint8)


def _check_sizes(subject: str, sizes: Iterable[int]) -> None:
    for size in sizes:
        if not 0 <= size <= _LARGEST:
            raise ValueError(f"{subject}: {size} is not in [0, {_LARGEST}]")


def _build(lowered: LoweredProgram, weights: Mapping[str, npt.NDArray[np.generic]]) -> _cpu.Program:
    """Builds the C++ program. Raises ValueError naming the invalid part."""
    program = _cpu.Program()
    for region, size in lowered.regions:
        program.set_region(region, Affine.parse(size).coefficients())
    program.set_ranks(*lowered.ranks)
    indices: dict[tuple[str, str], int] = {}
    for group in lowered.cache_groups:
        _check_sizes(
            f"cache group {group.name}",
            [*group.layers, *group.sizes],
        )
        part = {"values_in_keys": True} if group.values_in_keys else {}
        program.add_cache_group(
            group.name, group.layers, *group.sizes, group.dtype, group.summaries, group.state_size, **part
        )
        for layer in group.layers:
            indices["cache", f"{group.name}/{layer}"] = program.find_cache(group.name, layer)
    groups = [group.name for group in lowered.cache_groups]
    for name, port in ports_of(groups, lowered.ports):
        shape = [_SIZES[size] if isinstance(size, str) else (size, 0, 0, 0) for size in port.shape if size != "M"]
        group_of = groups.index(name.partition(":")[2]) if port.by_group else -1
        indices["input", name] = program.add_port(name, shape, port.dtype, port.check, group_of)
    for use in lowered.weights:
        if use.name not in weights:
            raise ValueError(f"weight {use.name} is missing")
        _check_sizes(f"weight {use.name}", use.shape)
        memory = _memory(use.name, weights[use.name])
        index = program.add_weight(use.name, use.dtype, use.shape, use.layout, memory, 0, memory.size)
        indices["weight", use.name] = index
    for buffer in lowered.buffers:
        if buffer.offset is None:
            raise ValueError(f"buffer {buffer.name} has no offset: memory was not planned")
        indices["buffer", buffer.name] = program.add_buffer(
            buffer.name,
            Affine.parse(buffer.size).coefficients(),
            Affine.parse(buffer.offset).coefficients(),
            buffer.region,
        )
    program.set_arena(Affine.parse(lowered.arena_bytes).coefficients())

    def operand(o: Operand, subject: str) -> OperandTuple:
        if (o.kind, o.name) not in indices:
            raise ValueError(f"{subject}: there is no {o.kind} {o.name}")
        shape = [size.coefficients() for size in o.shape]
        strides = [stride.coefficients() for stride in o.strides]
        return o.kind, indices[o.kind, o.name], o.dtype, shape, strides, o.offset.coefficients(), o.name

    for i, step in enumerate(lowered.steps):
        subject = f"step {i} {step.op} ({step.where})"
        inputs = [operand(o, subject) for o in step.inputs]
        outputs = [operand(o, subject) for o in step.outputs]
        program.add_step(step.op, inputs, outputs, step.attrs, step.where)
    if LOGITS in lowered.outputs:
        program.set_logits(operand(lowered.outputs[LOGITS], "output logits"))
    for name, result in lowered.outputs.items():
        if name != LOGITS:
            program.add_output(name, operand(result, f"output {name}"))
    for name, (step_number, output) in lowered.taps.items():
        program.add_tap(name, step_number, output)
    program.finish()
    return program
