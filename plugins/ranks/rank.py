"""A rank other than 0: a process that connects to rank 0's address, and runs the steps that rank 0 sends.

At the address, HOST:PORT, is rank 0's store (a TCPStore of torch.distributed). The rank reads its settings there, and
replies that it is ready or has an error. Then all ranks connect to each other.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial

import msgspec
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from enginewright.runtime.shared.errors import EnginewrightError
from enginewright.runtime.shared.memory import return_freed_memory
from enginewright.runtime.shared.records import Record

from .messages import LostRanksError, Mail, SilentRankError
from .records import RankReply, Report

START_SECONDS = 600.0
"""The seconds that a rank may take to open its part."""

GO, END = "go", "end"
"""Keys of the store: the first means that all ranks are ready, the second that rank 0 has ended."""

_LOOK_SECONDS = 0.5

Part = tuple[Mail, Callable[[TCPStore], None]]
"""A rank's opened part of the model: its messages, not connected yet, and the function that runs steps until the rank
ends.
"""


def join(address: str, timeout: float = START_SECONDS) -> TCPStore:
    """Connects to rank 0's store and returns it. Raises RuntimeError if rank 0 doesn't answer within ``timeout``
    seconds.
    """
    host, _, port = address.rpartition(":")
    return TCPStore(host.strip("[]"), int(port), is_master=False, timeout=timedelta(seconds=timeout))


def serve_rank(address: str, rank: int, open_part: Callable[[bytes, int], Part]) -> None:
    """Runs a rank until rank 0 ends, or an error occurs, which is reported to rank 0.

    ``open_part`` opens the rank's part; it gets rank 0's settings for this rank, and the rank's number.
    """
    store = join(address)
    try:
        mail, run_steps = open_part(store.get(f"setting/{rank}"), rank)
    except EnginewrightError as e:
        say(store, f"reply/{rank}", RankReply(problem=e.message, kind=type(e).__name__, hint=e.hint))
        return
    return_freed_memory()
    say(store, f"reply/{rank}", RankReply())
    store.wait([GO], timedelta(seconds=START_SECONDS))
    mail.open(store)
    threading.Thread(target=_end_with_rank_0, args=(address,), daemon=True).start()
    _report_errors(store, rank, partial(run_steps, store))


def end_with(store: TCPStore, rank: int, run: Callable[[], None]) -> None:
    """Runs a function on a thread of its own, and ends this process when it returns. Its error is reported to rank
    0.
    """

    def end() -> None:
        try:
            _report_errors(store, rank, run)
        finally:
            os._exit(1)

    threading.Thread(target=end, daemon=True).start()


def _report_errors(store: TCPStore, rank: int, run: Callable[[], None]) -> None:
    try:
        run()
    except SilentRankError as e:
        say(store, f"report/{rank}", Report(problem=e.problem, of=e.rank))
    except LostRanksError as e:
        say(store, f"report/{rank}", Report(problem=str(e), met=True))
    except Exception as e:  # noqa: BLE001  whatever it is, rank 0 says it
        say(store, f"report/{rank}", Report(problem=f"failed: {type(e).__name__}: {e}"))


def say(store: TCPStore, key: str, what: Record) -> None:
    """Stores the record ``what`` under ``key`` in the store that all ranks share."""
    store.set(key, msgspec.json.encode(what).decode())


def _end_with_rank_0(address: str) -> None:
    """Ends this process when rank 0's store asks for it, or can't be reached any more."""
    try:
        store = join(address)
        while not store.check([END]):
            time.sleep(_LOOK_SECONDS)
    finally:
        os._exit(0)


def run_process(open_part: Callable[[bytes, int], Part]) -> None:
    """Runs the rank that the command line names, HOST:PORT RANK. It is the main function of a rank's process."""
    for one in (signal.SIGINT, signal.SIGTERM):  # they are rank 0's, which may let answers end first
        signal.signal(one, signal.SIG_IGN)
    address, rank = sys.argv[1:3]
    with contextlib.suppress(RuntimeError):  # rank 0 has gone
        serve_rank(address, int(rank), open_part)
    sys.stdout.flush()
    os._exit(1)
