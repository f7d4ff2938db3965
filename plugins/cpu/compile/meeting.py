"""Measures how long ranks wait for each other at a barrier, with processes that do nothing else."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from statistics import median

from enginewright.runtime.shared.errors import CapacityError, EnginewrightError
from enginewright.runtime.shared.threads import available_threads

from ..extension import cpu_extension

_ROUNDS = 2000
_SPIN = 1e-3
"""The seconds for which a rank waits awake, since each rank has a core."""

_PEER = "import sys; from enginewright.plugins.cpu.compile.meeting import meet; meet(*map(int, sys.argv[1:]))"


def meeting_seconds(ranks: int) -> float:
    """Returns the median seconds of a barrier between ``ranks`` processes, at most one for each core.

    Raises CapacityError if there is no shared memory, EnginewrightError if a process can't be started.
    """
    ranks = min(ranks, available_threads())
    if ranks < 2:
        return 0.0
    try:
        link = cpu_extension.RankLink(-1, 0, [1] * ranks, _SPIN)
    except MemoryError as e:
        raise CapacityError(f"no shared memory to measure a meeting of ranks: {e}") from e
    peers: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(1, ranks):
            command = [sys.executable, "-c", _PEER, str(link.fd), str(rank), str(ranks)]
            peers.append(
                subprocess.Popen(command, pass_fds=(link.fd,), stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            )
        for peer in peers:
            threading.Thread(target=_watch, args=(peer, link), daemon=True).start()
        link.meet()  # all are there
        seconds = []
        for _ in range(_ROUNDS):
            start = time.perf_counter()
            link.meet()
            seconds.append(time.perf_counter() - start)
    except (OSError, RuntimeError) as e:
        raise EnginewrightError(f"the meeting of {ranks} ranks can't be measured: {e}") from e
    finally:
        link.abandon("the measurement is over")
        for peer in peers:
            peer.wait()
    return median(seconds)


def _watch(peer: subprocess.Popen[bytes], link: cpu_extension.RankLink) -> None:
    """Waits until a rank's process ends. If it failed, the other ranks stop waiting for it."""
    if peer.wait():
        link.abandon("a rank's process ended")


def meet(fd: int, rank: int, ranks: int) -> None:
    """Runs another rank's side of the measurement, as the main function of its process.

    Args:
        fd: the descriptor of the shared memory.
        rank: this rank.
        ranks: the number of ranks.
    """
    link = cpu_extension.RankLink(fd, rank, [1] * ranks, _SPIN)
    for _ in range(1 + _ROUNDS):
        link.meet()
