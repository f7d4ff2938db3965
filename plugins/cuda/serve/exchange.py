"""Exchanges data between ranks within a step: collectives of torch.distributed on tensors at fixed addresses.

On GPUs they are NCCL's, which a CUDA graph can contain (NCCL 2.9.6 and later). Three conditions must hold. The
communicator was used before; so a step's first run is without a graph. All ranks launch the same collectives in the
same order; they run the same program. The capture mode is "thread_local", because NCCL's own thread queries events
meanwhile. On CPUs, where kernels are interpreted, the collectives are gloo's.
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
    """The collectives that ops of ranks use, on contiguous tensors at fixed addresses on the program's device.

    Attributes:
        place: this rank's index among the ranks of its stage.
    """

    place: int

    def all_gather(self, received: Tensor, own: Tensor) -> None:
        """Collects the bytes ``own`` [n] of each rank of the stage in ``received`` [ranks, n], on all of them."""

    def gather(self, to: int, received: Tensor, own: Tensor) -> None:
        """Collects the bytes ``own`` [n] of each rank of the stage in ``received`` [ranks, n], only on rank ``to``."""

    def add(self, numbers: Tensor) -> None:
        """Replaces integers by their sums over the ranks of the stage."""

    def send(self, own: Tensor, to: Sequence[int]) -> None:
        """Sends the bytes ``own`` to each of the ranks ``to``, which are numbers among all ranks."""

    def receive(self, theirs: Sequence[Tensor], sources: Sequence[int]) -> None:
        """Receives the message of each rank in ``sources``, numbers among all ranks, in the tensor at the same index of
        ``theirs``.
        """


class Unjoined:
    """An exchange that only knows the rank's index, for compiling kernels. Its collectives can't run."""

    def __init__(self, place: int) -> None:
        self.place = place

    def _refuse(self, *_: object) -> None:
        raise AssertionError("a rank that hasn't joined the others runs no steps")

    all_gather = gather = add = send = receive = _refuse


class Collectives:
    """An exchange that uses torch's process groups: one of all ranks, and one of the ranks of a stage.

    Its methods raise LostRanksError if other ranks can't be reached.

    Args:
        rank: the number of this rank.
        count: the number of all ranks.
        stage: the first rank of the stage, and the number of its ranks.
        patience: the seconds to wait for other ranks with gloo; NCCL doesn't use it.
        address: this machine's address, for gloo.
    """

    def __init__(self, rank: int, count: int, stage: tuple[int, int], patience: float, address: str) -> None:
        self._rank, self._count, self._stage = rank, count, stage
        self._patience, self._address = timedelta(seconds=patience), address
        self.place = rank - stage[0]
        self._all: Any = None
        self._same: Any = None

    def open(self, store: Store, device: torch.device) -> None:
        """Joins the groups, with NCCL if ``device`` is a GPU. All ranks must call it. Raises LostRanksError after
        ``patience``.
        """
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
        """Sends this rank's part to all ranks and receives theirs. Implements ``Exchange``."""
        with _lost(self._patience):
            self._same._allgather_base(received.view(-1), own).wait()

    def gather(self, to: int, received: Tensor, own: Tensor) -> None:
        """Sends this rank's part to rank ``to``, which receives all parts. Implements ``Exchange``."""
        options = GatherOptions()
        options.rootRank = to
        with _lost(self._patience):
            self._same.gather([list(received)] if self.place == to else [], [own], options).wait()

    def add(self, numbers: Tensor) -> None:
        """Replaces integers by their sums over the ranks of the stage. Implements ``Exchange``."""
        with _lost(self._patience):
            self._same.allreduce([numbers]).wait()

    def send(self, own: Tensor, to: Sequence[int]) -> None:
        """Sends this rank's part to the ranks ``to``. Implements ``Exchange``."""
        with _lost(self._patience):
            for rank in to:
                self._all.send([own], rank, 0).wait()

    def receive(self, theirs: Sequence[Tensor], sources: Sequence[int]) -> None:
        """Receives the parts of the ranks ``sources``. Implements ``Exchange``."""
        with _lost(self._patience):
            for one, source in zip(theirs, sources, strict=True):
                self._all.recv([one], source, 0).wait()

    def abort(self) -> None:
        """Aborts collectives that wait for a lost rank."""
        for group in (self._all, self._same):
            if group is not None:
                group.abort()


def _nccl_group(store: Store, rank: int, count: int) -> Any:
    """Returns an NCCL group whose watchdog doesn't end the process when a rank is lost, as the default watchdog
    would.
    """
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
