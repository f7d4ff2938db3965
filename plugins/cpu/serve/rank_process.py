"""A rank other than 0 on rank 0's machine: a process that runs rank 0's steps on its own part of the weights.

Rank 0 starts it (``ranked``), writes the settings as a line of JSON, and reads a reply: a problem, or nothing. The
process then runs steps until rank 0 ends. It has no tokenizer, no scheduler and no sampler.

It always ends with rank 0's process. The system kills it (PR_SET_PDEATHSIG), even while it is stopped, and one of its
threads waits for the end of its input.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import Any

import msgspec

from enginewright.runtime.bundle.reader import Bundle, Load
from enginewright.runtime.ranks.partition import Partition
from enginewright.runtime.ranks.rank_programs import partition
from enginewright.runtime.shared.contracts import STATE, CacheGroup
from enginewright.runtime.shared.errors import EnginewrightError
from enginewright.runtime.shared.lowered_program import LoweredProgram
from enginewright.runtime.shared.memory import return_freed_memory

from ...native.executable import NUMERICS_VERSION, CpuProgram, isas
from ...ranks.records import PartSetting, RankReply, check_same, facts
from ..extension import cpu_extension as _cpu


class CpuPartSetting(PartSetting, frozen=True, kw_only=True):
    """The settings that every rank of the cpu target needs to open its part of the model.

    Attributes:
        threads, isa, load, tuning: the same values as rank 0's.
    """

    threads: int
    isa: str
    load: Load
    tuning: dict[str, int]

    def open(self, rank: int) -> tuple[Bundle, LoweredProgram]:
        """Opens the bundle, and returns it with the program of ``rank``.

        Raises EnginewrightError if this machine, the bundle or the installation differs from rank 0's.
        """
        if self.isa not in isas():
            raise EnginewrightError(f"its processor has no {self.isa}, the instruction set of rank 0")
        bundle = Bundle.open(self.bundle)
        lowered = partition(bundle.program(self.target), Partition.parse(self.partition))[rank]
        check_same(cpu_facts(bundle, self.isa, lowered), self.same)
        return bundle, lowered


class RankSetting(CpuPartSetting, frozen=True, kw_only=True):
    """The settings of a rank on rank 0's machine.

    Attributes:
        rank: the number of the rank, from 1 on.
        cores: the cores that it runs on; () for any.
        file: the file descriptor of the memory that all ranks share.
        cache_bytes: the bytes of each rank's caches.
        spin: the seconds for which a rank waits awake before it sleeps.
        in_flight: the steps that may be posted before rank 0 has run the first of them.
        parent: the process id of rank 0.
    """

    rank: int
    cores: tuple[int, ...]
    file: int
    cache_bytes: tuple[int, ...]
    spin: float
    in_flight: int
    parent: int


def cpu_facts(bundle: Bundle, isa: str, program: LoweredProgram) -> dict[str, str]:
    """Returns the facts that all ranks must agree on, including those of the cpu target, by name."""
    return facts(bundle, program, {"order of sums": str(NUMERICS_VERSION), "instruction set": isa})


def cache_sizes(group: CacheGroup, blocks: int) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Returns the shapes of a layer's keys and of its values, in bytes: [P, Nkv, bytes of a block and head] each.

    ``blocks`` is P. A state takes the place of keys, and then there are no values.
    """
    if group.kind == STATE:
        return (blocks, 1, 4 * group.state_size), (blocks, 1, 0)
    keys, values = ((blocks, plane.heads, plane.piece_bytes * group.block_size) for plane in group.planes)
    return keys, values


def main() -> None:
    """Reads a ``RankSetting``, writes a ``RankReply``, and runs steps until there are no more."""
    for one in (signal.SIGINT, signal.SIGTERM):  # they are rank 0's, which may let answers end first
        signal.signal(one, signal.SIG_IGN)
    setting = RankSetting.model_validate(msgspec.json.decode(sys.stdin.buffer.readline()))
    _cpu.die_with_parent()
    if os.getppid() != setting.parent:
        return
    threading.Thread(target=_end_with_input, daemon=True).start()
    if setting.cores:
        os.sched_setaffinity(0, setting.cores)
    try:
        link, program = _opened(setting)
    except EnginewrightError as e:
        _reply(RankReply(problem=e.message, kind=type(e).__name__, hint=e.hint))
        return
    return_freed_memory()
    _reply(RankReply())
    try:
        program.run_posted_steps(link)
    except RuntimeError:  # rank 0 knows why, and has ended the others
        os._exit(1)
    os._exit(0)


def _opened(setting: RankSetting) -> tuple[_cpu.RankLink, CpuProgram]:
    bundle, lowered = setting.open(setting.rank)
    weights = {use.name: bundle.part(use, setting.load) for use in lowered.weights}
    link = _cpu.RankLink(setting.file, setting.rank, setting.cache_bytes, setting.spin, setting.in_flight)
    further: dict[str, Any] = {"threads": setting.threads, "isa": setting.isa, "tuning": setting.tuning}
    return link, CpuProgram(lowered, weights, blocks=setting.blocks, exchange=link, **further)


def _reply(reply: RankReply) -> None:
    os.write(sys.stdout.fileno(), msgspec.json.encode(reply) + b"\n")


def _end_with_input() -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os._exit(0)


if __name__ == "__main__":
    main()
