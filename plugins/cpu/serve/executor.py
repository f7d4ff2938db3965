"""The executor of the cpu target, which runs our C++ interpreter of lowered programs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from enginewright.runtime.bundle.reader import DECODE, Bundle, tuning_path
from enginewright.runtime.executors.base import Deferred, Pending
from enginewright.runtime.executors.host_blocks import HostBlocks, cache_identity
from enginewright.runtime.executors.target import Placement
from enginewright.runtime.kv_cache.kinds.table import cache_block_bytes
from enginewright.runtime.shared.contracts import STATE, CacheGroup, ExecutorCaps, StepInput, StepOutput
from enginewright.runtime.shared.errors import OffloadError, RequestError
from enginewright.runtime.shared.memory import check_free
from enginewright.runtime.shared.step_schema import LOGITS

from ...native.executable import NUMERICS_VERSION, CpuProgram, isas

if TYPE_CHECKING:
    from enginewright.runtime.shared.lowered_program import LoweredProgram

    from ...native.step_profile import StepProfile
    from .._cpu import Exchange
    from .tuning import TuningFile


_MOST_RUNS = 8
"""The most runs of a step. The scheduler uses fewer unless a run takes less than a millisecond."""
_OFFLOADED = "Open the bundle without offload_folder, with memory for what is to be kept."


def read_tuning(bundle: Bundle, isa: str | None) -> tuple[TuningFile | None, str]:
    """Returns the tuning file that `optimize tune` wrote for a bundle and this machine, and a note about it; None and
    "" if there is none.
    """
    if not tuning_path(bundle).exists():
        return None, ""
    from .tuning import load_tuning

    return load_tuning(bundle, isa or isas()[0])


def tuned_choices(bundle: Bundle, isa: str) -> tuple[Mapping[str, int], str]:
    """Returns the values of tunables in the tuning file, which all ranks use, and a note about it; {} without a
    file.
    """
    tuned, note = read_tuning(bundle, isa)
    return tuned.choices if tuned is not None else {}, note


class CpuExecutor(HostBlocks):
    """The executor of the cpu target. A step runs on the thread that calls ``result``, with the GIL released.

    Args:
        bundle: a bundle with a ready target ``target``.
        blocks: the number of blocks to allocate for each cache group.
        placement: the kernels' threads, their instruction set ("avx512_amx", "avx512_bf16", "avx512_vnni", "avx512",
            "avx2_vnni", "avx2", "portable"), the folder for offloaded blocks, and if weights are read or mapped.
            Weights that are read don't change with their files.
        tuning: values of tunables, which decide how work is divided into tasks: see ``CpuProgram``. None uses the
            result of ``optimize tune`` for this bundle and machine, if there is one, and its number of threads if the
            placement has none.
        target: a target whose program is the cpu target's.
        part: the program of rank 0 if it isn't the target's, and its link to the other ranks.
        entry: the name of the target's program to run.

    Attributes:
        profile: the profile to which steps add their times; initially None, which times nothing. Set it between steps.

    Raises:
        BundleError: the program is inconsistent.
        CapacityError: less memory is free than the caches need.
        OffloadError: no file can be created in the folder of the placement's ``offload``.
    """

    def __init__(
        self,
        bundle: Bundle,
        blocks: Mapping[str, int],
        placement: Placement = Placement(),
        *,
        tuning: Mapping[str, int] | None = None,
        target: str = "cpu",
        part: tuple[LoweredProgram, Exchange] | None = None,
        entry: str = DECODE,
    ) -> None:
        program, exchange = part or (bundle.program(target, entry), None)
        self._bundle, self._target = bundle, target
        threads, isa, offload = placement.threads, placement.isa, placement.offload
        weights = {use.name: bundle.part(use, placement.load) for use in program.weights}
        self.blocks = dict(blocks)
        self.cache_groups: tuple[CacheGroup, ...] = program.cache_groups
        self._slots = dict(offload.slots) if offload is not None else {}
        in_memory = {**self.blocks, **self._slots}
        check_free(sum(cache_block_bytes(g) * in_memory.get(g.name, 0) for g in self.cache_groups), "a KV cache")
        self._tuned, row_seconds = "", dict[int, tuple[float, ...]]()
        if tuning is None:
            tuned, self._tuned = read_tuning(bundle, isa)
            if tuned is not None:
                tuning, threads, row_seconds = tuned.choices, threads or tuned.threads, tuned.row_seconds
        self._program = CpuProgram(
            program,
            weights,
            blocks=self.blocks,
            threads=threads,
            isa=isa,
            tuning=tuning,
            exchange=exchange,
            offload=offload,
        )
        longest = bundle.model.context_length if bundle.model.pooling is not None else 0
        once = part is not None or bool(self._slots or program.ports)
        once = once or any(g.kind == STATE or g.holds_ends for g in self.cache_groups)
        self.caps = ExecutorCaps(
            max_tokens=max(ExecutorCaps.max_tokens, longest),  # a step computes the whole of a text
            shared_blocks=True,
            verifies=True,
            most_runs=1 if once else _MOST_RUNS,
            row_seconds=row_seconds,
            masks=True,
            ports=program.ports,
            outputs=(*(name for name in program.outputs if name != LOGITS), *program.taps),
        )
        self.profile: StepProfile | None = None

    def submit(self, step: StepInput) -> Pending:
        self._bundle.check_unchanged()
        run = self._program.run if self.profile is None else partial(self.profile.run, self._program)
        return Deferred(partial(self._copy_and_run, run) if step.copies else run, step)

    def _copy_and_run(self, run: Callable[[StepInput], StepOutput], step: StepInput) -> StepOutput:
        self.copy_blocks(step.copies)
        return run(step)

    def interrupt(self) -> None:
        """Ends a step with several runs after the current run. It can be called from any thread."""
        self._program.interrupt()

    def copy_blocks(self, copies: Mapping[str, npt.NDArray[Any]]) -> None:
        super().copy_blocks({group: pairs for group, pairs in copies.items() if group not in self._slots})
        try:
            for group in copies.keys() & self._slots:
                self._program.copy_offloaded(group, [(int(source), int(to)) for source, to in copies[group]])
        except OffloadError as e:  # nothing counts as copied
            for group, pairs in copies.items():
                e.lost.setdefault(group, []).extend(map(int, pairs[:, 1]))
            raise

    def offload_counts(self) -> dict[str, Any]:
        """Returns, for each cache group with offloaded blocks, the blocks in memory, their bytes, and the blocks read
        and written.

        It is empty if nothing is offloaded.
        """
        if not self._slots:
            return {}
        return {"blocks": self._slots, "memory_bytes": self._program.cache_bytes, **self._program.offload_counts}

    @property
    def cache_identity(self) -> bytes:
        """Bytes that two executors share only if each can use the cache blocks of the other.

        They depend on the bundle, the target, the version, the version of the numerics, and the instruction set.
        """
        from importlib import metadata  # later than the first token

        version = metadata.version("enginewright")
        return cache_identity(self._bundle, self._target, NUMERICS_VERSION, version, self._program.isa)

    def memory_of(self, group: str) -> Iterator[npt.NDArray[np.uint8]]:
        if group in self._slots:
            raise RequestError("prefixes: blocks that may wait in offload_folder aren't kept twice", hint=_OFFLOADED)
        layers = next(g.layers for g in self.cache_groups if g.name == group)
        return chain.from_iterable(self._program.cache_memory(group, layer) for layer in layers)

    @property
    def program(self) -> CpuProgram:
        return self._program

    def expert_loads(self) -> dict[str, Any]:
        """Returns the number of rows that each expert has computed, by the layer's module.

        It also has the rows of the busiest expert in each layer, as a multiple of the mean, and with several ranks the
        rows of each rank. In a pipeline only the last stage's layers are counted. It is empty for a model without
        experts.
        """
        layers = self._program.expert_rows
        if not layers:
            return {}
        even = {where: sum(rows) / len(rows) for where, rows in layers.items()}
        busiest = {where: round(max(rows) / even[where], 2) if even[where] else 0.0 for where, rows in layers.items()}
        return {"rows": layers, "busiest": busiest}

    def describe(self) -> dict[str, str | int]:
        about: dict[str, str | int] = {
            "target": self._target,
            "isa": self._program.isa,
            "threads": self._program.threads,
            "numerics": NUMERICS_VERSION,
        }
        if self._tuned:
            about["tuning"] = self._tuned
        return about

    def close(self) -> None:
        """Does nothing: nothing runs between steps, and memory is freed with the object."""
