"""The executor of the cpu target on ranks of several machines, which exchange messages by TCP.

Rank 0 is in this process. ``submit`` sends a step's inputs to all other ranks, which run it; ``result`` runs rank 0's
part and samples. Each rank has its own weights, read from a bundle at the same path, its own intermediate values and
its own KV cache. It copies cache blocks itself when a step lists them.

``Places`` decides where the other ranks run: on machines of a Ray cluster (``ray_ranks``), or where a user starts them.
If a rank dies, or sends nothing for too long, all are ended. Every later step then raises an error that names the rank
and its machine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import replace

from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.executors.target import Placement
from enginewright.runtime.ranks.partition import Partition
from enginewright.runtime.ranks.rank_programs import rank_programs, whole_groups
from enginewright.runtime.shared.contracts import StepInput, StepOutput
from enginewright.runtime.shared.errors import RequestError

from ...native.executable import isas
from ...native.step_profile import StepProfile
from ...ranks.messages import SilentRankError, packed_copies
from ...ranks.others import OtherRanks, Places
from ...ranks.queued_step import QueuedStep
from ..extension import cpu_extension as _cpu
from .executor import CpuExecutor, tuned_choices
from .rank_process import cpu_facts
from .remote_rank import RemoteSetting


class RemoteExecutor:
    """The executor of ranks in other processes, on this machine or on others.

    Args:
        bundle: a bundle with a ready target ``target``, at the same path on all machines.
        blocks: the number of blocks to allocate for each cache group; the same on all ranks.
        placement: its partition has as many ranks as there are places. ``threads`` is the number for each rank, 0 for
            one. All machines must have ``isa``; None is the best that this one has. ``rank_timeout``: the seconds that
            a rank waits for a message of another one.
        places: the places where ranks run; closed with the executor.
        tuning, target: see ``CpuExecutor``.

    Raises:
        BundleError, CapacityError, RequestError: as ``RankedExecutor`` does, of any rank, whose machine is named.
        EnginewrightError: a rank died while it started, or can't be reached.
    """

    def __init__(
        self,
        bundle: Bundle,
        blocks: Mapping[str, int],
        placement: Placement,
        places: Places,
        *,
        tuning: Mapping[str, int] | None = None,
        target: str = "cpu",
    ) -> None:
        how, patience = placement.partition, placement.rank_timeout
        self._how, self._machines = how, places.machines
        self._pending: deque[QueuedStep] = deque()
        self._others = others = OtherRanks(how, places, patience)
        self._mail = others.mail
        try:
            check_partition(how)
            programs = rank_programs(bundle, target, how)
            threads, isa = placement.threads or 1, placement.isa or isas()[0]
            tuning = tuned_choices(bundle, isa)[0] if tuning is None else tuning
            settings = {
                rank: RemoteSetting(
                    bundle=str(bundle.path.absolute()),
                    target=target,
                    partition=str(how),
                    blocks=dict(blocks),
                    threads=threads,
                    isa=isa,
                    load=placement.load,
                    tuning=dict(tuning),
                    machines=places.machines,
                    timeout=patience,
                    same=cpu_facts(bundle, isa, programs[rank]),
                )
                for rank in range(1, how.ranks)
            }
            others.start(settings)
            part = programs[0], _cpu.MessageExchange(0, self._mail.move)
            of_rank_0 = replace(placement, threads=threads, isa=isa, offload=None)
            self._own = CpuExecutor(bundle, blocks, of_rank_0, tuning=tuning, target=target, part=part)
            others.wait_until_ready()
        except BaseException:
            self.close()
            raise
        self.cache_groups, self.blocks = whole_groups(programs, how), dict(blocks)
        outputs = self._own.caps.outputs if how.stages == 1 else ()
        self.caps = replace(self._own.caps, row_seconds={}, outputs=outputs, in_flight=how.stages)
        self._order = [group.name for group in self._own.cache_groups]

    def submit(self, step: StepInput) -> QueuedStep:
        while len(self._pending) > self._how.stages - 1:  # whose results were never asked for, or are later
            self._pending[0].run()
        self._others.raise_if_lost()
        packed = self._own.program.packed(step)
        try:
            self._mail.post(packed, packed_copies(self._order, step.copies))
        except SilentRankError as e:
            self._others.lose(e.rank, e.problem, e)
        self._pending.append(QueuedStep(self._pending, self._run_first, step))
        return self._pending[-1]

    def _run_first(self, step: StepInput) -> StepOutput:
        """Runs rank 0's part of the oldest step that was sent."""
        self._pending.popleft()
        self._others.raise_if_lost()
        moved = self._mail.moved
        try:
            return self._own.submit(step).result()
        except SilentRankError as e:
            self._others.lose(e.rank, e.problem, e)
        except BaseException as e:
            # Wrong inputs are seen by all ranks before they exchange anything. Else the others wait for this one.
            if not isinstance(e, RequestError) or self._how.stages > 1 or self._mail.moved != moved:
                self._others.abandon(f"rank 0: {e}")
            raise

    @property
    def profile(self) -> StepProfile | None:
        """The profile of rank 0: see ``CpuExecutor``."""
        return self._own.profile

    @profile.setter
    def profile(self, profile: StepProfile | None) -> None:
        self._own.profile = profile

    @property
    def lost(self) -> str:
        """A text on how a rank was lost; "" as long as all are running."""
        return self._others.problem

    @property
    def sent_bytes(self) -> int:
        """The bytes of computed values that rank 0 has sent to other ranks."""
        return self._mail.sent_bytes

    def describe(self) -> dict[str, str | int]:
        about = self._own.describe() | {"ranks": self._how.ranks, "partition": str(self._how)}
        return about | {"machines": ", ".join(self._machines)}

    def close(self) -> None:
        """Ends the other ranks."""
        self._others.close()


def check_partition(how: Partition) -> None:
    """Raises RequestError for a partition that ranks on several machines don't support."""
    if how.owners > 1:
        raise RequestError(
            f"partition: {how}: keys are divided among ranks of one machine alone",
            hint="Leave ray out, or use tensor=N and pipeline=N.",
        )
