"""Exchanges between ranks within a step: collectives of torch.distributed on tensors at fixed addresses.

On GPUs they are NCCL's, which a CUDA graph holds (NCCL 2.9.6 and later). For that a communicator must have been used
before, as a step runs call by call first; all ranks must launch the same collectives in the same order, as they do that
run one program; and capture must be "thread_local", since NCCL's own thread asks for events meanwhile. On CPUs, where
kernels are interpreted, they are gloo's.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed import (  # type: ignore[attr-defined]
    GatherOptions,
    PrefixStore,
    ProcessGroupGloo,
    Store,
)

from ...ranks.messages import LostRanksError


class Exchange(Protocol):
    """The collectives that the ops of ranks use. Tensors are contiguous, of the program's device, and at fixed
    addresses.

    Attributes:
        place: this rank's number among those that compute the same steps.
    """

    place: int

    def all_gather(self, received: Tensor, own: Tensor) -> None:
        """Gathers bytes [n] of each rank into ``received`` [ranks, n]."""

    def gather(self, to: int, received: Tensor, own: Tensor) -> None:
        """Gathers bytes of each rank at the rank ``to`` alone."""

    def add(self, numbers: Tensor) -> None:
        """Replaces integers by their sums over all ranks."""

    def send(self, own: Tensor, to: Sequence[int]) -> None:
        """Sends bytes to ranks, which are numbered among all."""

    def receive(self, theirs: Sequence[Tensor], sources: Sequence[int]) -> None:
        """Receives bytes from ranks, which are numbered among all."""


class Unjoined:
    """An exchange that only knows the rank's place, for steps that are bound and don't run."""

    def __init__(self, place: int) -> None:
        self.place = place

    def _refuse(self, *_: object) -> None:
        raise AssertionError("a rank that hasn't joined the others runs no steps")

    all_gather = gather = add = send = receive = _refuse


class Collectives:
    """An exchange by process groups: one of all ranks, and one of those that compute the same steps.

    Args:
        rank: the number of this rank.
        count: the number of all ranks.
        stage: the first rank of those that compute the same steps, and how many they are.
        patience: seconds that a rank waits for others, where no GPU does.
        address: this machine's address, for gloo.

    Its methods raise LostRanksError where others can't be reached.
    """

    def __init__(self, rank: int, count: int, stage: tuple[int, int], patience: float, address: str) -> None:
        self._rank, self._count, self._stage = rank, count, stage
        self._patience, self._address = timedelta(seconds=patience), address
        self.place = rank - stage[0]
        self._all: Any = None
        self._same: Any = None

    def open(self, store: Store, device: torch.device) -> None:
        """Joins the groups, when all ranks do: NCCL's where tensors are on a GPU. Raises LostRanksError if one doesn't
        in time."""
        first, count = self._stage
        join = _nccl_group if device.type == "cuda" else self._gloo_group
        with _lost(self._patience):
            self._all = join(PrefixStore("ranks", store), self._rank, self._count)
            self._same = join(PrefixStore(f"ranks from {first}", store), self.place, count)

    def _gloo_group(self, store: Store, rank: int, count: int) -> Any:
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [ProcessGroupGloo.create_device(hostname=self._address)]
        options._timeout = self._patience
        options._threads = 1
        return ProcessGroupGloo(store, rank, count, options)

    def all_gather(self, received: Tensor, own: Tensor) -> None:
        """Gathers bytes [n] of each rank into ``received`` [ranks, n]."""
        with _lost(self._patience):
            self._same._allgather_base(received.view(-1), own).wait()

    def gather(self, to: int, received: Tensor, own: Tensor) -> None:
        """Gathers bytes of each rank at the rank ``to`` alone."""
        options = GatherOptions()
        options.rootRank = to
        with _lost(self._patience):
            self._same.gather([list(received)] if self.place == to else [], [own], options).wait()

    def add(self, numbers: Tensor) -> None:
        """Sums numbers over the ranks, in place."""
        with _lost(self._patience):
            self._same.allreduce([numbers]).wait()

    def send(self, own: Tensor, to: Sequence[int]) -> None:
        """Sends bytes to other ranks."""
        with _lost(self._patience):
            for rank in to:
                self._all.send([own], rank, 0).wait()

    def receive(self, theirs: Sequence[Tensor], sources: Sequence[int]) -> None:
        """Receives bytes from other ranks."""
        with _lost(self._patience):
            for one, source in zip(theirs, sources, strict=True):
                self._all.recv([one], source, 0).wait()

    def abort(self) -> None:
        """Ends what waits for a rank that is lost."""
        for group in (self._all, self._same):
            if group is not None:
                group.abort()


def _nccl_group(store: Store, rank: int, count: int) -> Any:
    """A group that leaves it to us what happens when a rank is lost: by default NCCL's watchdog ends the process."""
    from torch.distributed import ProcessGroupNCCL  # a build of torch with CUDA has it

    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    before = os.environ.get(name)
    os.environ[name] = "0"
    try:
        return ProcessGroupNCCL(store, rank, count, ProcessGroupNCCL.Options())
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


@contextlib.contextmanager
def _lost(patience: timedelta) -> Iterator[None]:
    begun = time.monotonic()
    try:
        yield
    except RuntimeError as e:
        seconds = patience.total_seconds()
        late = time.monotonic() - begun >= seconds
        problem = f"sent nothing for {seconds:g} s" if late else "can't be reached any more"
        raise LostRanksError(problem) from e
