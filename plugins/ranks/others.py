"""Controls the ranks other than 0 from rank 0: starts them, sends settings and steps, monitors and ends them.

``Places`` decides where they run. If a rank dies, or sends nothing for too long, all are ended, and every later step
raises an error that names the rank.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Mapping
from datetime import timedelta
from typing import NoReturn, Protocol

import msgspec
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from enginewright.runtime.ranks.partition import Partition
from enginewright.runtime.shared.errors import (
    BundleError,
    CapacityError,
    EnginewrightError,
    MissingDependencyError,
    RequestError,
    TargetError,
)
from enginewright.runtime.shared.records import Record

from .messages import Mail
from .rank import END, GO, START_SECONDS
from .records import RankReply, Report

_LOOK_SECONDS = 0.25
_REPORT_SECONDS = 3.0
"""The seconds that a rank which seems lost has for a report, in which it may name another rank that it waits for."""

_ERRORS = {
    kind.__name__: kind for kind in (BundleError, CapacityError, MissingDependencyError, RequestError, TargetError)
}


class Places(Protocol):
    """The places where the ranks other than 0 run."""

    @property
    def machines(self) -> tuple[str, ...]:
        """The address of each rank's machine, rank 0's included, at which the others reach it."""

    def start(self, address: str) -> None:
        """Starts each rank from 1 on, so that it runs ``rank.serve_rank(address, rank, ...)``."""

    def ended(self, rank: int) -> str:
        """Returns how a rank has ended, such as "was killed by SIGKILL"; "" while it runs."""

    def close(self) -> None:
        """Ends all ranks; may be called again."""


class OtherRanks:
    """Rank 0's control of the other ranks.

    Args:
        how: the partition, with as many ranks as there are places.
        places: the places where ranks run; ``close`` closes them too.
        patience: the seconds that a rank waits for a message of another one.

    Attributes:
        mail: the messages between rank 0 and the others, once they are ready.
        store: the store through which they connected.
        problem: how a rank was lost, or that this object was closed; "" while all run.

    Raises:
        EnginewrightError: no port can be opened.
    """

    def __init__(self, how: Partition, places: Places, patience: float) -> None:
        self._count, self._places, self._closed = how.ranks, places, threading.Event()
        self._lost_lock = threading.Lock()
        self.problem = ""
        weakref.finalize(self, places.close)
        try:
            self.store = self._open_store(patience)
        except BaseException:
            self.close()
            raise
        self.mail = Mail(0, places.machines, patience)

    def start(self, settings: Mapping[int, Record]) -> None:
        """Stores each rank's settings and starts the ranks, which then open their parts."""
        for rank, setting in settings.items():
            self.store.set(f"setting/{rank}", msgspec.json.encode(setting).decode())
        self._places.start(f"{self._places.machines[0]}:{self.store.port}")

    def wait_until_ready(self) -> None:
        """Waits until all ranks have opened their parts and are connected. From then on they are monitored.

        Raises a rank's error, and EnginewrightError if a rank died or they can't reach each other.
        """
        limit = time.monotonic() + START_SECONDS
        waiting = set(range(1, self._count))
        while waiting:
            for rank in sorted(waiting):
                if self.store.check([f"reply/{rank}"]):
                    self._check_reply(rank)
                    waiting.discard(rank)
                elif how := self._places.ended(rank):
                    raise EnginewrightError(f"{self._named(rank)} {how}")
            if time.monotonic() > limit:
                raise EnginewrightError(f"{self._named(min(waiting))} didn't start within {START_SECONDS:g} s")
            time.sleep(0.02)
        self.store.set(GO, "")
        try:
            self.mail.open(self.store)
        except RuntimeError as e:
            raise EnginewrightError(
                f"ranks on {', '.join(self._places.machines)} can't join: {_first_line(e)}",
                hint="Let these machines reach each other on all ports of the network of these addresses.",
            ) from e
        threading.Thread(target=_watch, args=(weakref.ref(self), self._closed), name="ranks", daemon=True).start()

    def raise_if_lost(self) -> None:
        """Raises EnginewrightError if a rank was lost."""
        if self.problem:
            raise EnginewrightError(self.problem, hint=self._hint)

    def lose(self, rank: int, problem: str, cause: BaseException) -> NoReturn:
        """Raises EnginewrightError after ``rank`` sent nothing in time.

        It first finds out which rank is lost: this one, or one that it waits for. ``problem`` says for the message what
        the rank did.
        """
        self.find_lost(rank, problem)
        raise EnginewrightError(self.problem, hint=self._hint) from cause

    def lose_one(self, problem: str, cause: BaseException) -> NoReturn:
        """Raises EnginewrightError after some rank missed a collective.

        It first finds the rank that has ended, is silent or has an error. ``problem`` says for the message what the
        rank did.
        """
        limit = time.monotonic() + _REPORT_SECONDS
        waiting = set(range(1, self._count))  # for those that come
        lost = None
        while lost is None and waiting and not self.problem:
            for rank in sorted(waiting):
                ended = self._places.ended(rank)
                report = self._said(rank)
                if report is not None and report.met:
                    waiting.discard(rank)
                elif report is not None or ended:
                    lost = rank
                    break
            if time.monotonic() > limit:
                break
            time.sleep(0.02)
        if lost is None and waiting:
            lost = min(waiting)
        if lost is not None:
            self.lose(lost, problem, cause)
        self.abandon(f"ranks can't reach each other: one {problem}")
        self.raise_if_lost()
        raise AssertionError("a problem was there") from cause

    def find_lost(self, rank: int, problem: str) -> None:
        """Finds the lost rank, beginning with a silent one, and ends all ranks; ``problem`` then names the lost one.

        A silent rank's report may name another rank that it waits for, and so on; the last one is lost.
        """
        with self._lost_lock:
            seen = {0}
            while not self.problem and rank not in seen:
                seen.add(rank)
                report = self._report_of(rank)
                if report is None:
                    problem = self._places.ended(rank) or problem
                    break
                problem = report.problem
                if report.of is None:
                    break
                rank = report.of
            self.abandon(f"{self._named(rank)} {problem}")

    def first_ended(self) -> int | None:
        """Returns a rank that has ended; None if all run."""
        return next((rank for rank in range(1, self._count) if self._places.ended(rank)), None)

    def abandon(self, problem: str) -> None:
        """Ends all ranks because of ``problem``, which is recorded unless there was an earlier one."""
        self.problem = self.problem or problem
        self.close()

    def close(self) -> None:
        """Ends all ranks; may be called again."""
        self._closed.set()
        if not self.problem:
            self.problem = "the model was closed"
        if hasattr(self, "store"):
            self.store.set(END, "")
        if hasattr(self, "mail"):
            self.mail.close()
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

    def _check_reply(self, rank: int) -> None:
        reply = RankReply.model_validate(msgspec.json.decode(self.store.get(f"reply/{rank}")))
        if reply.problem:
            kind = _ERRORS.get(reply.kind, EnginewrightError)
            elsewhere = kind is BundleError and self._several
            hint = "Have the same bundle at the same path on each machine." if elsewhere else reply.hint
            raise kind(f"{self._named(rank)}: {reply.problem}", hint=hint)

    @property
    def _several(self) -> bool:
        """True if the ranks are on several machines."""
        return len(set(self._places.machines)) > 1

    @property
    def _hint(self) -> str:
        return "Open the bundle again with LLM(path)" + (", when all machines are there." if self._several else ".")

    def _named(self, rank: int) -> str:
        return f"rank {rank} (machine {self._places.machines[rank]})" if self._several else f"rank {rank}"

    def _report_of(self, rank: int) -> Report | None:
        limit = time.monotonic() + _REPORT_SECONDS
        while time.monotonic() < limit:
            ended = self._places.ended(rank)
            if (report := self._said(rank)) is not None:
                return report
            if ended:
                return None
            time.sleep(0.02)
        return None

    def _said(self, rank: int) -> Report | None:
        """Returns the report of a rank on why it ended; None if there is none."""
        if not self.store.check([f"report/{rank}"]):
            return None
        return Report.model_validate(msgspec.json.decode(self.store.get(f"report/{rank}")))


def _watch(of: weakref.ref[OtherRanks], closed: threading.Event) -> None:
    """Looks for ranks that have ended while no step waits for them, until ``closed`` is set."""
    while not closed.wait(_LOOK_SECONDS):
        others = of()
        if others is None:
            return
        rank = others.first_ended()
        if rank is not None:
            others.find_lost(rank, "has ended")
        del others


def _first_line(e: Exception) -> str:
    return str(e).splitlines()[0] if str(e) else type(e).__name__
