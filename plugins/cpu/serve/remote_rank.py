"""A rank on another machine than rank 0: it connects to an address, and runs the steps that rank 0 sends.

    python -m enginewright.plugins.cpu.serve.remote_rank HOST:PORT RANK

RANK is a number from 1 on. ``plugins.ranks.rank`` describes how it starts and ends.

Rank 0 sends a step as the blocks to copy and the step's inputs, in the format of ``_cpu.pack_step``. The ranks'
programs exchange all other values through ``MessageExchange``.
"""

from __future__ import annotations

from typing import NoReturn

import msgspec

from enginewright.runtime.executors.target import Placement
from enginewright.runtime.ranks.partition import Partition

from ...ranks.messages import Mail, unpacked_copies
from ...ranks.rank import Part, run_process, serve_rank
from ..extension import cpu_extension as _cpu
from .executor import CpuExecutor
from .rank_process import CpuPartSetting


class RemoteSetting(CpuPartSetting, frozen=True, kw_only=True):
    """The settings of a rank on any machine.

    Attributes:
        machines: the address of each rank's machine.
        timeout: the seconds that a rank waits for a message of another one.
    """

    machines: tuple[str, ...]
    timeout: float


def serve(address: str, rank: int) -> None:
    """Runs a rank of the cpu target until rank 0 ends it."""
    serve_rank(address, rank, open_part)


def open_part(told: bytes, rank: int) -> Part:
    """Opens a rank's part of the model. ``told`` is a ``RemoteSetting`` as JSON.

    Raises EnginewrightError if this machine, the bundle or the installation differs from rank 0's.
    """
    setting = RemoteSetting.model_validate(msgspec.json.decode(told))
    bundle, lowered = setting.open(rank)
    mail = Mail(rank, setting.machines, setting.timeout)
    placement = Placement(threads=setting.threads, isa=setting.isa, load=setting.load)
    part = lowered, _cpu.MessageExchange(rank, mail.move)
    executor = CpuExecutor(bundle, setting.blocks, placement, tuning=setting.tuning, target=setting.target, part=part)
    return mail, lambda store: _run_steps(setting, executor, mail)


def _run_steps(setting: RemoteSetting, executor: CpuExecutor, mail: Mail) -> NoReturn:
    groups = [group.name for group in executor.cache_groups]
    alone = Partition.parse(setting.partition).stages == 1
    while True:
        step, copies = mail.next_step()
        executor.copy_blocks(unpacked_copies(groups, copies))
        moved = mail.moved
        try:
            executor.program.run_packed(step)
        except ValueError:
            if not alone or mail.moved != moved:
                raise
            # Its inputs are wrong: all ranks see that before they exchange anything, and rank 0 says so.


if __name__ == "__main__":
    run_process(open_part)
