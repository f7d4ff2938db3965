"""A rank other than 0: a process that runs the steps that rank 0 sends, on its own GPU.

    python -m enginewright.plugins.cuda.serve.rank HOST:PORT RANK

``plugins.ranks.rank`` describes how it starts and ends. It has no tokenizer, no scheduler and no sampler.
"""

from __future__ import annotations

from queue import SimpleQueue
from typing import NoReturn

import msgspec
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.executors.base import Pending
from enginewright.runtime.ranks.partition import Partition
from enginewright.runtime.ranks.rank_programs import rank_programs
from enginewright.runtime.shared.lowered_program import LoweredProgram

from ...ranks.messages import Mail, unpacked_step
from ...ranks.rank import Part as Opened
from ...ranks.rank import end_with, run_process
from ...ranks.records import PartSetting, check_same, facts
from .exchange import Collectives
from .executor import CudaExecutor, Part


class CudaRank(PartSetting, frozen=True, kw_only=True):
    """The settings of a rank, which rank 0 sends to it.

    Attributes:
        context: the most tokens of a request.
        patience: the seconds to wait for a message of another rank.
        machines: the address of each rank's machine.
        trust: the caller's ``trust`` for the bundle.
    """

    context: int
    patience: float
    machines: tuple[str, ...]
    trust: str | None


def cuda_facts(bundle: Bundle, program: LoweredProgram) -> dict[str, str]:
    """Returns the facts on which all ranks must agree, such as versions and hashes."""
    return facts(bundle, program, {"version of PyTorch": str(torch.__version__)})


def part_of(rank: int, program: LoweredProgram, setting: CudaRank) -> tuple[Part, Collectives]:
    """Returns a rank's part of the model, and its collectives, which aren't open yet."""
    count = Partition.parse(setting.partition).ranks
    collectives = Collectives(rank, count, program.ranks, setting.patience, setting.machines[rank])
    return Part(program, rank, collectives), collectives


def open_part(told: bytes, rank: int) -> Opened:
    """Opens a rank's part of the model. Returns its messages, and the function that runs steps until the rank ends.

    ``told`` is a ``CudaRank`` as JSON. Raises EnginewrightError if this machine, the bundle or the installation differs
    from rank 0's.
    """
    setting = CudaRank.model_validate(msgspec.json.decode(told))
    bundle = Bundle.open(setting.bundle, trust=setting.trust)
    program = rank_programs(bundle, setting.target, Partition.parse(setting.partition))[rank]
    check_same(cuda_facts(bundle, program), setting.same)
    mail = Mail(rank, setting.machines, setting.patience)
    part, collectives = part_of(rank, program, setting)
    executor = CudaExecutor(bundle, setting.blocks, setting.context, target=setting.target, part=part)
    groups = [group.name for group in program.cache_groups]

    submitted: SimpleQueue[Pending] = SimpleQueue()

    def wait_for_steps() -> NoReturn:
        while True:
            submitted.get().result()

    def run_steps(store: TCPStore) -> NoReturn:
        collectives.open(store, executor.device)
        end_with(store, rank, wait_for_steps)  # nobody else waits for this rank's GPU, and sees that it is lost
        while True:
            packed, _ = mail.next_step()
            submitted.put(executor.submit(unpacked_step(groups, packed, program.ports)))

    return mail, run_steps


if __name__ == "__main__":
    run_process(open_part)
