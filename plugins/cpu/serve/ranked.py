"""The executor of the cpu target on several ranks of this machine: processes that each run a part of the model.

Rank 0 is in this process. ``submit`` writes a step's arrays into shared memory and wakes the other ranks. ``result``
runs rank 0's part, which waits for the others wherever values are gathered, and samples. All KV caches are in shared
memory too, so that blocks are copied and offloaded as with one process.

A thread monitors the processes. If one dies, or makes no progress for too long while rank 0 waits for it, the thread
kills them all, and every later step raises an error with the reason. Nothing is left over: the memory has no name, and
the system kills the processes with this one.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import subprocess
import sys
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, NoReturn

import msgspec
import numpy as np
import numpy.typing as npt

from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.executors.host_blocks import cache_identity
from enginewright.runtime.executors.target import Placement
from enginewright.runtime.kv_cache.kinds.table import cache_block_bytes
from enginewright.runtime.ranks.kinds.tensor import expert_shares
from enginewright.runtime.ranks.rank_programs import rank_programs, whole_groups
from enginewright.runtime.shared.contracts import StepInput, StepOutput
from enginewright.runtime.shared.errors import BundleError, CapacityError, EnginewrightError, RequestError
from enginewright.runtime.shared.lowered_program import LoweredProgram
from enginewright.runtime.shared.memory import check_free
from enginewright.runtime.shared.threads import available_threads, core_shares

from ...native.executable import NUMERICS_VERSION, isas
from ...ranks.processes import errors_of, how_it_ended, last_lines
from ...ranks.queued_step import QueuedStep
from ...ranks.records import RankReply
from ..extension import cpu_extension as _cpu
from .executor import CpuExecutor, tuned_choices
from .rank_process import RankSetting, cache_sizes, cpu_facts

RANKS_A_CORE = 8
"""The most ranks for each core; more are refused. More than one is for tests, as ranks on one core run one after the
other.
"""

_SPIN = 50e-6  # seconds that a rank waits awake for the others, where each has cores of its own
_START_SECONDS = 600.0
_END_SECONDS = 5.0
_LOST = "Open the bundle again with LLM(path)."
_ERRORS = {kind.__name__: kind for kind in (BundleError, CapacityError, RequestError)}


class RankedExecutor(CpuExecutor):
    """The executor of several ranks on this machine.

    Args:
        bundle: a bundle with a ready target ``target``.
        blocks: the number of blocks to allocate for each cache group; the same on all ranks.
        placement: its partition has two ranks or more. ``threads`` is the number for each rank; 0 divides the cores,
            with at least one thread for each rank. ``rank_timeout``: the seconds that rank 0 waits for a rank without
            progress.
        tuning, target: see ``CpuExecutor``.

    Raises:
        BundleError, CapacityError: as ``CpuExecutor`` does, of any rank; CapacityError also without shared memory.
        RequestError: the model can't be partitioned so, or there are more ranks than cores.
        EnginewrightError: a rank died while it started.
    """

    def __init__(
        self,
        bundle: Bundle,
        blocks: Mapping[str, int],
        placement: Placement,
        *,
        tuning: Mapping[str, int] | None = None,
        target: str = "cpu",
    ) -> None:
        how, isa, note = placement.partition, placement.isa or isas()[0], ""
        programs = rank_programs(bundle, target, how)
        threads, cores = _placed(how.ranks, placement.threads)
        if tuning is None:
            tuning, note = tuned_choices(bundle, isa)
        groups = whole_groups(programs, how)
        check_free(sum(cache_block_bytes(g) * blocks.get(g.name, 0) for g in groups), "a KV cache")
        places = [list(_places(program, blocks)) for program in programs]
        sizes = [max((_end(place) for place in of_rank), default=0) for of_rank in places]
        spin = _SPIN if threads * how.ranks <= available_threads() else 0.0
        try:
            self._link = _cpu.RankLink(-1, 0, sizes, spin, how.stages)
        except MemoryError as e:
            raise CapacityError(f"ranks: {e}", hint="Use fewer blocks, free some memory, or use one rank.") from e
        settings = [
            RankSetting(
                rank=rank,
                bundle=os.path.abspath(bundle.path),
                target=target,
                partition=str(how),
                blocks=dict(blocks),
                threads=threads,
                isa=isa,
                load=placement.load,
                tuning=dict(tuning),
                cores=cores[rank] if cores else (),
                file=self._link.fd,
                cache_bytes=tuple(sizes),
                spin=spin,
                in_flight=how.stages,
                parent=os.getpid(),
                same=cpu_facts(bundle, isa, programs[rank]),
            )
            for rank in range(1, how.ranks)
        ]
        self._cores = cores[0] if cores else ()
        self._how, self._pinned = how, 0
        self._pending: deque[QueuedStep] = deque()
        self._processes = RankProcesses(settings, self._link, placement.rank_timeout)
        try:
            with _on_cores(self._cores):
                part = programs[0], self._link
                of_rank_0 = replace(placement, threads=threads, isa=isa, offload=None)
                super().__init__(bundle, blocks, of_rank_0, tuning=tuning, target=target, part=part)
            self._processes.wait_until_ready()
        except BaseException:
            self._processes.close()
            raise
        self._tuned, self.cache_groups = note, groups
        outputs = self.caps.outputs if how.stages == 1 else ()
        self.caps = replace(self.caps, row_seconds={}, outputs=outputs, in_flight=how.stages, owners=how.owners)
        self._memory: list[dict[str, list[npt.NDArray[np.uint8]]]] = [
            {group.name: [] for group in groups} for _ in range(how.ranks)
        ]
        for rank, of_rank in enumerate(places):
            memory = self._link.caches(rank)
            for name, at, shape in of_rank:
                self._memory[rank][name].append(memory[at : at + math.prod(shape)].reshape(shape))
        weakref.finalize(self, self._processes.close).atexit = False  # at exit the system does it, after the last step

    def submit(self, step: StepInput) -> QueuedStep:
        self._bundle.check_unchanged()
        while len(self._pending) > self._how.stages - 1:  # their results were never asked for, or are asked for later
            self._pending[0].run()
        self._pin()
        run = self._program.run if self.profile is None else partial(self.profile.run, self._program)
        try:
            if step.copies:
                self._wait_for_ranks()
                self.copy_blocks(step.copies)
            self._program.post(step, self._link)
        except RuntimeError as e:
            self._raise(e)
        self._pending.append(QueuedStep(self._pending, partial(self._run, run), step))
        return self._pending[-1]

    def _run(self, run: Callable[[StepInput], StepOutput], step: StepInput) -> StepOutput:
        """Runs rank 0's part of the oldest posted step, by ``run``."""
        self._pending.popleft()
        try:
            if self._how.stages > 1:
                self._link.begin_step()
            return run(step)
        except BaseException as e:
            self._link.fail_step(str(e))
            if isinstance(e, RuntimeError):
                self._raise(e)
            raise

    def _raise(self, cause: RuntimeError) -> NoReturn:
        if self._link.problem:
            raise EnginewrightError(self._link.problem, hint=_LOST) from cause
        raise EnginewrightError(f"a step failed: {cause}") from cause

    def _pin(self) -> None:
        """Pins the calling thread to rank 0's cores, unless it is the main thread, which belongs to the caller."""
        thread = threading.get_native_id()
        if self._cores and thread not in (self._pinned, os.getpid()):
            os.sched_setaffinity(0, self._cores)
        self._pinned = thread

    @property
    def cache_identity(self) -> bytes:
        from importlib import metadata  # later than the first token

        version = metadata.version("enginewright")
        further = NUMERICS_VERSION, version, self._program.isa, str(self._how)
        return cache_identity(self._bundle, self._target, *further)

    def memory_of(self, group: str) -> Iterator[npt.NDArray[np.uint8]]:
        return chain.from_iterable(of_rank[group] for of_rank in self._memory)

    def memory_with(self, group: str, block: int) -> Iterator[npt.NDArray[np.uint8]]:
        return iter(self._memory[block % self._how.owners][group]) if self._how.owners > 1 else self.memory_of(group)

    def read_block(self, group: str, block: int) -> npt.NDArray[np.uint8]:
        self._wait_for_ranks()
        return super().read_block(group, block)

    def write_block(self, group: str, block: int, payload: npt.NDArray[np.uint8]) -> None:
        self._wait_for_ranks()
        super().write_block(group, block, payload)

    def _wait_for_ranks(self) -> None:
        """Waits until no rank runs a step. A rank may still write to its memory when rank 0 already has the step's
        result.
        """
        while self._pending:
            self._pending[0].run()
        self._link.wait_done()

    def copy_blocks(self, copies: Mapping[str, npt.NDArray[np.int32]]) -> None:
        if self._how.owners == 1:
            super().copy_blocks(copies)
            return
        for group, pairs in copies.items():
            for source, to in pairs.tolist():
                self.write_block(group, to, self.read_block(group, source))

    @property
    def lost(self) -> str:
        """A text on how a rank was lost; "" as long as all are running."""
        return self._link.problem

    @property
    def processes(self) -> RankProcesses:
        """The other ranks."""
        return self._processes

    def expert_loads(self) -> dict[str, Any]:
        loads = super().expert_loads()
        ranks = self._how.ranks // self._how.stages
        if loads and ranks > 1:
            layers = [expert_shares(rows, ranks) for rows in loads["rows"].values()]
            loads["of_ranks"] = [sum(rows) for rows in zip(*layers, strict=True)]
        return loads

    def describe(self) -> dict[str, str | int]:
        about = super().describe() | {"ranks": self._how.ranks, "partition": str(self._how)}
        if self._how.owners > 1:
            about["attended"] = " ".join(map(str, self._program.ring_pairs))
        return about

    def close(self) -> None:
        """Ends the other ranks' processes."""
        if self._pending:  # they wait for rank 0, which isn't coming
            self._link.abandon("the model was closed")
        self._processes.close()


class RankProcesses:
    """The processes of the ranks from 1 on, and the thread that monitors them.

    This thread also starts the processes, because the system kills them when the thread that started them ends.

    Args:
        settings: the settings of each rank.
        link: rank 0's link; it is abandoned if a rank is lost.
        patience: the ``rank_timeout`` of ``RankedExecutor``, in seconds.

    Raises:
        CapacityError: a process can't be started.
    """

    def __init__(self, settings: Sequence[RankSetting], link: _cpu.RankLink, patience: float) -> None:
        self._settings, self._link, self._patience = settings, link, patience
        self._owner, self._closed = os.getpid(), False
        self._processes: list[_Process] = []
        self._begun, self._errors = threading.Event(), list[OSError]()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)
        weakref.finalize(self, os.close, self._wake)
        self._thread = threading.Thread(target=self._look_after, name="ranks", daemon=True)
        self._thread.start()
        self._begun.wait()
        for error in self._errors:
            self.close()
            hint = "End other processes, or raise the limit (ulimit -u)."
            raise CapacityError(f"the process of a rank can't be started: {error}", hint=hint) from error

    @property
    def pids(self) -> list[int]:
        """The process ids of ranks 1, 2, ..."""
        return [process.pid for process in self._processes]

    def wait_until_ready(self) -> None:
        """Waits until all ranks have opened their parts. Raises the error of a rank that can't."""
        limit = time.monotonic() + _START_SECONDS
        for process in self._processes:
            line = process.read_line(limit)
            if not line:
                self._thread.join()  # it ends when one has died
                raise EnginewrightError(self._link.problem or f"rank {process.rank} didn't start")
            reply = RankReply.model_validate(msgspec.json.decode(line))
            if reply.problem:
                kind = _ERRORS.get(reply.kind, EnginewrightError)
                raise kind(f"rank {process.rank}: {reply.problem}", hint=reply.hint)

    def close(self) -> None:
        """Ends all processes. It may be called again, and does nothing in a forked child."""
        if self._closed or os.getpid() != self._owner:
            return
        self._closed = True
        self._link.stop()
        os.eventfd_write(self._wake, 1)
        for process in self._processes:
            process.end(_END_SECONDS)
        self._link.release()

    def _look_after(self) -> None:
        try:
            for setting in self._settings:
                self._processes.append(_Process(setting))
        except OSError as e:
            self._errors.append(e)
        self._begun.set()
        if not self._errors:
            problem = self._wait_for_problem()
            if problem:
                self._link.abandon(problem)
                for process in self._processes:
                    process.kill()
        # A process ends with this thread: one that was told to stop has its time until ``close`` is through with it.
        for process in self._processes:
            process.wait()

    def _wait_for_problem(self) -> str:
        """Waits until a rank is lost, and returns how; returns "" when the ranks are closed."""
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        by_descriptor = {process.pidfd: process for process in self._processes}
        for descriptor in by_descriptor:
            poll.register(descriptor, select.POLLIN)
        interval = min(1.0, self._patience / 4)
        idle, before, seen = 0.0, time.monotonic(), None
        while True:
            events = dict(poll.poll(interval * 1000))
            if self._closed:
                return ""
            for descriptor, process in by_descriptor.items():
                if descriptor in events:
                    return process.how_it_ended()
            now = time.monotonic()  # no tick counts more than it should have taken: this process may have been stopped
            passed, before = min(now - before, 2 * interval), now
            state = self._state()
            idle = idle + passed if state is not None and state == seen else 0.0
            seen = state
            if idle >= self._patience:
                return self._who_is_late()

    def _state(self) -> object:
        """Returns a value that changes whenever another rank makes progress; None while rank 0 isn't waiting for
        them.
        """
        if not self._link.sleeps:
            return None
        return tuple(self._link.progress), tuple(process.cpu_ticks() for process in self._processes)

    def _who_is_late(self) -> str:
        progress = self._link.progress
        late = min(self._processes, key=lambda process: progress[process.rank])
        stopped = ": it is stopped" if late.is_stopped() else ""
        return f"rank {late.rank} (process {late.pid}) has made no progress for {self._patience:g} s{stopped}"


class _Process:
    """One rank's process. Its stderr is stored in memory, and shown if it dies. Raises OSError if it can't be
    started.
    """

    def __init__(self, setting: RankSetting) -> None:
        self.rank = setting.rank
        self._errors = errors_of(setting.rank)
        weakref.finalize(self, os.close, self._errors)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "enginewright.plugins.cpu.serve.rank_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            pass_fds=[setting.file],
            process_group=0,  # a Ctrl-C or Ctrl-Z is for rank 0 alone
        )
        self.pid = self._process.pid
        self.pidfd = os.pidfd_open(self.pid)
        weakref.finalize(self, os.close, self.pidfd)
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has died: its pidfd says so
            self._process.stdin.write(msgspec.json.encode(setting) + b"\n")
            self._process.stdin.flush()

    def read_line(self, limit: float) -> bytes:
        """Returns the process's output up to a newline; b"" if it ends first, or at the time ``limit`` (of
        ``time.monotonic()``).
        """
        assert self._process.stdout is not None
        descriptor, line = self._process.stdout.fileno(), b""
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        while not line.endswith(b"\n"):
            if not poll.poll(max(0.0, limit - time.monotonic()) * 1000):
                self._process.kill()
                return b""
            piece = os.read(descriptor, 1 << 16)
            if not piece:
                return b""
            line += piece
        return line

    def how_it_ended(self) -> str:
        """Returns a description of how the process ended, with the last lines of its stderr."""
        how = how_it_ended(self._process.wait())
        return f"rank {self.rank} (process {self.pid}) {how}{last_lines(self._errors)}"

    def cpu_ticks(self) -> str:
        """Returns the CPU time that the process has used, in clock ticks, as a text that can be compared."""
        return " ".join(self._stat()[11:13])

    def is_stopped(self) -> bool:
        return self._stat()[:1] in (["T"], ["t"])

    def _stat(self) -> list[str]:
        """Returns the fields of /proc/PID/stat after the name; [] if the process is gone."""
        try:
            with open(f"/proc/{self.pid}/stat", "rb") as file:
                return file.read().rpartition(b") ")[2].decode().split()
        except OSError:
            return []

    def kill(self) -> None:
        self._process.kill()

    def end(self, seconds: float) -> None:
        """Closes the pipes, waits up to ``seconds`` for the process to end, then kills it."""
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):
                pipe.close()
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def wait(self) -> None:
        self._process.wait()


Place = tuple[str, int, tuple[int, int, int]]
"""The memory of a layer's keys or values: the cache group, the first byte in the rank's memory, and the shape."""


def _places(program: LoweredProgram, blocks: Mapping[str, int]) -> Iterator[Place]:
    """Yields the memory of a rank's caches in shared memory, in the order in which the interpreter allocates it.

    ``blocks`` has the number of blocks of each cache group.
    """
    at = 0
    for group in program.cache_groups:
        for _ in group.layers:
            for shape in cache_sizes(group, blocks.get(group.name, 0)):
                yield group.name, at, shape
                at = _end((group.name, at, shape))


def _end(place: Place) -> int:
    _, at, shape = place
    return -(-(at + math.prod(shape)) // _cpu.CACHE_ALIGN) * _cpu.CACHE_ALIGN


def _placed(ranks: int, threads: int) -> tuple[int, tuple[tuple[int, ...], ...]]:
    """Returns the number of threads of each rank, and the cores of each; no cores if they don't suffice for all
    threads.

    Raises RequestError if there are too many ranks for the cores.
    """
    cores = available_threads()
    if ranks > RANKS_A_CORE * cores:
        raise RequestError(
            f"ranks: {ranks} are too many for {cores} cores", hint=f"Use at most {RANKS_A_CORE} for each core."
        )
    each = threads or max(1, cores // ranks)
    if ranks * each > cores:
        warnings.warn(
            f"ranks: {ranks} of {each} threads each share {cores} cores, and wait for each other; use fewer",
            RuntimeWarning,
            stacklevel=2,
        )
    shares = core_shares(ranks)
    return each, shares if shares and min(map(len, shares)) >= each else ()


@contextlib.contextmanager
def _on_cores(cores: Sequence[int]) -> Iterator[None]:
    """Starts the processes that are created in the ``with`` block on these cores; on any if there are none."""
    before = os.sched_getaffinity(0)
    if cores:
        os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        if cores:
            os.sched_setaffinity(0, before)
