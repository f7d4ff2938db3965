"""The cpu target on ranks of several machines: what they exchange goes through a gloo group of torch.distributed.

Rank 0 is in this process. ``submit`` sends a step's inputs to all others, which run it; ``result`` runs rank 0's part
and samples. Each rank has its own weights, read from a bundle at the same path, its own intermediate values and its own
KV cache, in which it copies blocks when a step says so.

Where the others live is said by ``Places``: on machines of a Ray cluster (``ray_ranks``), or wherever somebody starts
them. A rank that dies, or says nothing for too long, is lost, and with it all: every step from then on raises an error
that names the rank and its machine, and no other stays.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from typing import NoReturn, Protocol

import msgspec
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from enginewright.runtime.bundle.reader import Bundle, Load
from enginewright.runtime.ranks.partition import Partition
from enginewright.runtime.shared.contracts import StepInput, StepOutput
from enginewright.runtime.shared.errors import (
    BundleError,
    CapacityError,
    EnginewrightError,
    MissingDependencyError,
    RequestError,
)

from ..executable import isas
from ..extension import cpu_extension as _cpu
from ..step_profile import StepProfile
from .executor import CpuExecutor, tuning_of
from .rank_process import RankReply, facts
from .ranked import PATIENCE, rank_programs, whole_groups
from .remote_rank import END, GO, START_SECONDS, Mail, RemoteSetting, Report, SilentRankError, packed_copies

_LOOK_SECONDS = 0.25
_REPORT_SECONDS = 3.0
"""That a rank which seems lost has to say whom it waits for itself."""

_LOST = "Open the bundle again with LLM(path), when all machines are there."
_ERRORS = {kind.__name__: kind for kind in (BundleError, CapacityError, MissingDependencyError, RequestError)}


class Places(Protocol):
    """Where the ranks but the first live."""

    @property
    def machines(self) -> tuple[str, ...]:
        """The address of each rank's machine, rank 0's included, that the others reach it by."""

    def start(self, address: str) -> None:
        """Has ``remote_rank.serve_rank(address, rank)`` run for each rank from 1 on."""

    def ended(self, rank: int) -> str:
        """How a rank has ended, such as "was killed by SIGKILL"; "" while it runs."""

    def close(self) -> None:
        """Ends them all; may be called again."""


class RemoteExecutor:
    """See the module, and ``executors.base.Executor``.

    Args:
        bundle: with a ready target ``target``; it lies at the same path on all machines.
        blocks: cache group -> blocks to allocate; the same on all ranks.
        how: the partition, of as many ranks as there are places.
        places: where ranks live; closed with the executor.
        threads: of each rank.
        isa: what all machines must have; None takes the best that this one has.
        tuning, load, target: as ``CpuExecutor`` has them.
        patience: seconds that a rank waits for what another one is to send.

    Raises:
        BundleError, CapacityError, RequestError: as ``RankedExecutor`` does, of any rank, whose machine is named.
        EnginewrightError: a rank died while it started, or can't be reached.
    """

    def __init__(
        self,
        bundle: Bundle,
        blocks: Mapping[str, int],
        how: Partition,
        places: Places,
        *,
        threads: int = 1,
        isa: str | None = None,
        tuning: Mapping[str, int] | None = None,
        load: Load = "map",
        target: str = "cpu",
        patience: float = PATIENCE,
    ) -> None:
        self._how, self._places = how, places
        self._pending: deque[_Sent] = deque()
        self._problem, self._closed = "", threading.Event()
        self._lost_lock = threading.Lock()
        weakref.finalize(self, places.close)
        try:
            check_partition(how)
            self._store = self._open_store(patience)
            programs = rank_programs(bundle, target, how)
            isa = isa or isas()[0]
            tuning = _tuning(bundle, isa) if tuning is None else tuning
            for rank in range(1, how.ranks):
                setting = RemoteSetting(
                    bundle=str(bundle.path.absolute()),
                    target=target,
                    partition=str(how),
                    blocks=dict(blocks),
                    threads=threads,
                    isa=isa,
                    load=load,
                    tuning=dict(tuning),
                    machines=places.machines,
                    timeout=patience,
                    same=facts(bundle, isa, programs[rank]),
                )
                self._store.set(f"setting/{rank}", msgspec.json.encode(setting).decode())
            places.start(f"{places.machines[0]}:{self._store.port}")
            self._mail = Mail(0, places.machines, patience)
            part = programs[0], _cpu.MessageExchange(0, self._mail.move)
            self._own = CpuExecutor(
                bundle, blocks, threads=threads, isa=isa, tuning=tuning, load=load, target=target, part=part
            )
            self._wait_until_ready()
        except BaseException:
            self.close()
            raise
        self.cache_groups, self.blocks = whole_groups(programs, how), dict(blocks)
        hidden = self._own.caps.hidden if how.pipeline == 1 else ()
        self.caps = replace(self._own.caps, row_seconds={}, hidden=hidden, in_flight=how.pipeline)
        self._order = [group.name for group in self._own.cache_groups]
        threading.Thread(target=_watch, args=(weakref.ref(self), self._closed), name="ranks", daemon=True).start()

    def submit(self, step: StepInput) -> _Sent:
        while len(self._pending) > self._how.pipeline - 1:  # whose results were never asked for, or are later
            self._pending[0].run()
        self._raise_if_lost()
        packed = self._own.program.packed(step)
        try:
            self._mail.post(packed, packed_copies(self._order, step.copies))
        except SilentRankError as e:
            self._lose(e.rank, e.problem, e)
        self._pending.append(_Sent(self, step))
        return self._pending[-1]

    def run_first(self) -> StepOutput:
        """Runs rank 0's part of the step that was sent first."""
        step = self._pending.popleft().step
        self._raise_if_lost()
        moved = self._mail.moved
        try:
            return self._own.submit(step).result()
        except SilentRankError as e:
            self._lose(e.rank, e.problem, e)
        except BaseException as e:
            # Wrong inputs are seen by all ranks before they exchange anything. Else the others wait for this one.
            if not isinstance(e, RequestError) or self._how.pipeline > 1 or self._mail.moved != moved:
                self._abandon(f"rank 0: {e}")
            raise

    @property
    def queue(self) -> deque[_Sent]:
        """Steps that were sent, and not yet run here."""
        return self._pending

    @property
    def profile(self) -> StepProfile | None:
        """See ``CpuExecutor``; of rank 0."""
        return self._own.profile

    @profile.setter
    def profile(self, profile: StepProfile | None) -> None:
        self._own.profile = profile

    @property
    def lost(self) -> str:
        """How a rank was lost; "" as long as all are there."""
        return self._problem

    @property
    def sent_bytes(self) -> int:
        """Bytes that rank 0 has sent of what steps compute."""
        return self._mail.sent_bytes

    def describe(self) -> dict[str, str | int]:
        about = self._own.describe() | {"ranks": self._how.ranks, "partition": str(self._how)}
        return about | {"machines": ", ".join(self._places.machines)}

    def close(self) -> None:
        """Ends the other ranks."""
        self._closed.set()
        if not self._problem:
            self._problem = "the model was closed"
        if hasattr(self, "_store"):
            self._store.set(END, "")
        self._places.close()

    def _open_store(self, patience: float) -> TCPStore:
        host = self._places.machines[0]
        try:
            return TCPStore(
                host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=max(patience, 30.0))
            )
        except RuntimeError as e:
            raise EnginewrightError(
                f"ranks: a port of {host} can't be opened: {_first_line(e)}",
                hint="Free the ports of the machine that rank 0 runs on, or give it another address.",
            ) from e

    def _wait_until_ready(self) -> None:
        limit = time.monotonic() + START_SECONDS
        waiting = set(range(1, self._how.ranks))
        while waiting:
            for rank in sorted(waiting):
                if self._store.check([f"reply/{rank}"]):
                    self._check_reply(rank)
                    waiting.discard(rank)
                elif how := self._places.ended(rank):
                    raise EnginewrightError(f"{self._named(rank)} {how}")
            if time.monotonic() > limit:
                raise EnginewrightError(f"{self._named(min(waiting))} didn't start within {START_SECONDS:g} s")
            time.sleep(0.02)
        self._store.set(GO, "")
        try:
            self._mail.open(self._store)
        except RuntimeError as e:
            raise EnginewrightError(
                f"ranks on {', '.join(self._places.machines)} can't join: {_first_line(e)}",
                hint="Let these machines reach each other on all ports of the network of these addresses.",
            ) from e

    def _check_reply(self, rank: int) -> None:
        reply = RankReply.model_validate(msgspec.json.decode(self._store.get(f"reply/{rank}")))
        if reply.problem:
            kind = _ERRORS.get(reply.kind, EnginewrightError)
            hint = "Have the same bundle at the same path on each machine." if kind is BundleError else reply.hint
            raise kind(f"{self._named(rank)}: {reply.problem}", hint=hint)

    def _named(self, rank: int) -> str:
        return f"rank {rank} (machine {self._places.machines[rank]})"

    def _raise_if_lost(self) -> None:
        if self._problem:
            raise EnginewrightError(self._problem, hint=_LOST)

    def _lose(self, rank: int, problem: str, cause: BaseException) -> NoReturn:
        """A rank was silent: it, or the one that it waits for, is lost."""
        self.find_lost(rank, problem)
        raise EnginewrightError(self._problem, hint=_LOST) from cause

    def find_lost(self, rank: int, problem: str) -> None:
        """Asks a rank that seems lost whom it waits for, and so on; the last one is to blame. Then all are ended."""
        with self._lost_lock:
            seen = {0}
            while not self._problem and rank not in seen:
                seen.add(rank)
                report = self._report_of(rank)
                if report is None:
                    problem = self._places.ended(rank) or problem
                    break
                problem = report.problem
                if report.of is None:
                    break
                rank = report.of
            self._abandon(f"{self._named(rank)} {problem}")

    def _report_of(self, rank: int) -> Report | None:
        limit = time.monotonic() + _REPORT_SECONDS
        while time.monotonic() < limit:
            ended = self._places.ended(rank)
            if self._store.check([f"report/{rank}"]):
                return Report.model_validate(msgspec.json.decode(self._store.get(f"report/{rank}")))
            if ended:
                return None
            time.sleep(0.02)
        return None

    def first_ended(self) -> int | None:
        """A rank that runs no more."""
        return next((rank for rank in range(1, self._how.ranks) if self._places.ended(rank)), None)

    def _abandon(self, problem: str) -> None:
        self._problem = self._problem or problem
        self.close()


def check_partition(how: Partition) -> None:
    """Raises RequestError for a partition that ranks on several machines don't have."""
    if how.ring > 1:
        raise RequestError(
            f"partition: {how}: keys are divided among ranks of one machine alone",
            hint="Leave ray out, or use tensor=N and pipeline=N.",
        )


class _Sent:
    """A step that the other ranks have begun. See ``executors.base.Pending``."""

    def __init__(self, executor: RemoteExecutor, step: StepInput) -> None:
        self._executor, self.step = executor, step
        self._output: StepOutput | None = None
        self._error: Exception | None = None

    def run(self) -> None:
        """Runs it if that hasn't been done, and those before it; what goes wrong is raised by ``result``."""
        queue = self._executor.queue
        while self in queue and queue[0] is not self:
            queue[0].run()
        if self._output is None and self._error is None:
            try:
                self._output = self._executor.run_first()
            except Exception as e:  # noqa: BLE001  who asks for the result gets it
                self._error = e

    def result(self) -> StepOutput:
        self.run()
        if self._error is not None:
            raise self._error
        assert self._output is not None
        return self._output


def _watch(of: weakref.ref[RemoteExecutor], closed: threading.Event) -> None:
    """Notices a rank that has ended, as nobody waits for it while there is no step."""
    while not closed.wait(_LOOK_SECONDS):
        executor = of()
        if executor is None:
            return
        rank = executor.first_ended()
        if rank is not None:
            executor.find_lost(rank, "has ended")
        del executor


def _tuning(bundle: Bundle, isa: str) -> Mapping[str, int]:
    found, _ = tuning_of(bundle, isa)
    return found.choices if found is not None else {}


def _first_line(e: Exception) -> str:
    return str(e).splitlines()[0] if str(e) else type(e).__name__
