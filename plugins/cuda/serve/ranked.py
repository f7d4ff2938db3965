"""The executor of the cuda target on several ranks: processes of this machine, each with a GPU and a part of the model.

Rank 0 is in this process. ``submit`` sends a step's inputs to the other ranks, and starts rank 0's part on its GPU;
``result`` waits for the sampled ids. Within a step, ranks exchange data by NCCL's collectives (``exchange``). All ranks
have the same limits and get the same steps. So they launch the same collectives in the same order, and capture graphs
of the same steps.

If kernels are interpreted, all ranks are on the CPU, and ``submit`` waits for gloo's collectives.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.executors.base import Pending
from enginewright.runtime.ranks.partition import Partition
from enginewright.runtime.ranks.rank_programs import rank_programs, whole_groups
from enginewright.runtime.shared.contracts import StepInput, StepOutput
from enginewright.runtime.shared.errors import EnginewrightError

from ...ranks.messages import LostRanksError, SilentRankError, packed_step
from ...ranks.others import OtherRanks
from ...ranks.processes import ProcessPlaces
from .executor import CudaExecutor, check_ranks
from .rank import CudaRank, cuda_facts, part_of

_LOOK_SECONDS = 0.25


class RankedCudaExecutor:
    """The executor of several GPUs, one for each rank.

    Args:
        bundle: a bundle with a ready target ``target``.
        blocks: cache group -> the number of blocks to allocate; the same on all ranks.
        context: the most tokens of a request.
        how: the partition, with two ranks or more.
        target: the target's name.
        patience: the seconds to wait for a message of another rank.

    Raises:
        BundleError, CapacityError: as ``CudaExecutor``, with the rank's number; also if there are no kernels for the
            partition.
        TargetError: as ``CudaExecutor``; also if there are fewer GPUs than ranks.
        RequestError: the model can't be divided in this way.
        EnginewrightError: a rank died while it started.
    """

    def __init__(
        self,
        bundle: Bundle,
        blocks: Mapping[str, int],
        context: int,
        how: Partition,
        *,
        target: str = "cuda",
        patience: float = 30.0,
    ) -> None:
        check_ranks(bundle, target, how)
        programs = rank_programs(bundle, target, how)
        self._how, self._patience, self._closed = how, patience, False
        self._waiting = 0.0  # since when a step's result is waited for; 0: none is
        self._places = ProcessPlaces("enginewright.plugins.cuda.serve.rank", how.ranks)
        self._others = others = OtherRanks(how, self._places, patience)
        try:
            settings = [
                CudaRank(
                    bundle=str(bundle.path.absolute()),
                    target=target,
                    partition=str(how),
                    blocks=dict(blocks),
                    context=context,
                    patience=patience,
                    machines=self._places.machines,
                    same=cuda_facts(bundle, program),
                    trust=bundle.trust,
                )
                for program in programs
            ]
            others.start(dict(enumerate(settings[1:], 1)))
            part, self._collectives = part_of(0, programs[0], settings[0])
            self._own = CudaExecutor(bundle, blocks, context, target=target, part=part)
            others.wait_until_ready()
            self._open_collectives()
        except BaseException:
            self.close()
            raise
        self.cache_groups, self.blocks = whole_groups(programs, how), dict(blocks)
        self.caps = replace(self._own.caps, in_flight=how.stages)
        self._order = [group.name for group in self.cache_groups]
        threading.Thread(target=_watch, args=(weakref.ref(self),), name="ranks' steps", daemon=True).start()

    def _open_collectives(self) -> None:
        try:
            self._collectives.open(self._others.store, self._own.device)
        except LostRanksError as e:
            self._others.lose_one(str(e), e)

    def submit(self, step: StepInput) -> Pending:
        self._own.check(step)  # nothing has been sent yet: the others don't wait
        self._others.raise_if_lost()
        try:
            self._others.mail.post(packed_step(self._order, step, self.caps.ports), np.zeros(0, np.uint8))
            return _Sent(self, self._own.submit(step))
        except SilentRankError as e:
            self._others.lose(e.rank, e.problem, e)
        except LostRanksError as e:
            self._others.lose_one(str(e), e)
        except BaseException as e:  # the others wait for this one
            self._others.abandon(f"rank 0: {e}")
            raise

    def finish(self, pending: Pending) -> StepOutput:
        """Waits for a step and returns its output. Raises EnginewrightError if a rank was lost meanwhile."""
        self._waiting = time.monotonic()
        try:
            output = pending.result()
        except (RuntimeError, EnginewrightError) as e:  # of CUDA, where the others were aborted
            self._others.raise_if_lost()
            if self._own.lost:  # the others wait for this one
                self._others.abandon(f"rank 0: {self._own.lost}")
            raise EnginewrightError(f"a step failed: {e}") from e
        finally:
            self._waiting = 0.0
        self._others.raise_if_lost()
        return output

    def look_after(self) -> bool:
        """Aborts collectives on this GPU if a rank is lost or silent for too long. Returns False if a rank is lost."""
        since = self._waiting
        if since and not self._others.problem and time.monotonic() - since > self._patience:
            with contextlib.suppress(EnginewrightError):  # who waits for the step raises it
                self._others.lose_one(f"sent nothing for {self._patience:g} s", TimeoutError())
        if self._others.problem and self._own.device.type == "cuda":
            self._collectives.abort()
        return not self._others.problem

    @property
    def lost(self) -> str:
        """The reason why a rank, or this process's GPU, was lost; "" if none was."""
        return self._others.problem or self._own.lost

    @property
    def places(self) -> ProcessPlaces:
        """The processes of the other ranks."""
        return self._places

    def describe(self) -> dict[str, str | int]:
        return self._own.describe() | {"ranks": self._how.ranks, "partition": str(self._how)}

    def close(self) -> None:
        """Ends the other ranks, and frees this one's GPU memory."""
        self._others.close()
        if hasattr(self, "_own") and not self._closed:
            self._closed = True
            self._own.close()


class _Sent:
    """A step that all ranks have started. Implements ``executors.base.Pending``."""

    def __init__(self, executor: RankedCudaExecutor, pending: Pending) -> None:
        self._executor, self._pending = executor, pending

    def result(self) -> StepOutput:
        return self._executor.finish(self._pending)


def _watch(of: weakref.ref[RankedCudaExecutor]) -> None:
    while True:
        time.sleep(_LOOK_SECONDS)
        executor = of()
        if executor is None or not executor.look_after():
            return
        del executor
