"""The executor of the cuda target: it runs a lowered program on a GPU with torch and Triton."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from traceback import clear_frames
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from enginewright.runtime.bundle.manifest import target_folder
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.executors.base import Pending
from enginewright.runtime.executors.host_blocks import cache_identity
from enginewright.runtime.kv_cache.block_store import Payload
from enginewright.runtime.kv_cache.kinds.table import cache_block_bytes
from enginewright.runtime.ranks.partition import Partition
from enginewright.runtime.ranks.rank_programs import rank_programs, whole_groups
from enginewright.runtime.shared.contracts import CacheGroup, ExecutorCaps, StepInput
from enginewright.runtime.shared.errors import BundleError, CapacityError, EnginewrightError, TargetError
from enginewright.runtime.shared.lowered_program import LoweredProgram
from enginewright.runtime.shared.memory import default_budget, format_bytes

from ...gpu.compile_ahead import interprets
from ...gpu.cuda_driver import Device, Graph, InstalledGpu, load_cuda
from ...gpu.graphed_steps import Capture
from ...gpu.health import GpuHealth, WatchedStep
from ...gpu.jit_launcher import JitLauncher
from ...gpu.sampling import check_options, lacks_of, missing_kernels
from ...gpu.specs import SamplingKernel
from ...gpu.tiles import GPUS, gpu_of, number_of
from ...steps.packed_steps import StepLimits
from ...steps.paged_section import KERNELS_FOLDER
from ..section import CudaSection
from .exchange import Exchange
from .host_copies import Event, Lane, PinnedCopies
from .kernels import CarriedLauncher
from .ops import Launcher
from .program import CudaProgram, Place, step_memory, weight_tensor
from .steps import CudaSteps


@dataclass(frozen=True)
class Part:
    """The part of a model that one of several ranks runs.

    Attributes:
        program: the rank's program.
        gpu: the index of its GPU among those with kernels in the bundle, from 0.
        exchange: the collectives with the other ranks.
    """

    program: LoweredProgram
    gpu: int
    exchange: Exchange


class CudaExecutor:
    """The executor of the cuda target. A step runs when it is submitted; its result waits for the sampled ids.

    It implements ``kv_cache.host_tier.HostCopies``.

    Args:
        bundle: a bundle with a ready target ``target``.
        blocks: cache group -> the number of blocks to allocate.
        context: the most tokens of a request.
        target: the target's name.
        capture: makes graphs, for tests; None uses CUDA graphs.
        part: the part of one of several ranks; None for a single rank.

    Raises:
        BundleError: the bundle has no such target, or is damaged.
        TargetError: torch has no CUDA, or the bundle has no kernels for the GPU.
        CapacityError: there is no memory for weights, caches and activations.
    """

    def __init__(
        self,
        bundle: Bundle,
        blocks: Mapping[str, int],
        context: int,
        *,
        target: str = "cuda",
        capture: Capture | None = None,
        part: Part | None = None,
    ) -> None:
        section = cuda_section(bundle, target)
        program = bundle.program(target) if part is None else part.program
        self.blocks = dict(blocks)
        self.cache_groups: tuple[CacheGroup, ...] = program.cache_groups
        self._bundle, self._target, self._closed, self._exact = bundle, target, False, section.exact
        chains = part is None  # a rank would have to know the tokens that another one draws
        self._place = place_of(section, 0 if part is None else part.gpu)
        self._copies: PinnedCopies | None = None
        self._health = GpuHealth(lambda: self._place.probe())
        kernels = bundle.path / target_folder(target) / KERNELS_FOLDER
        limits, exchange = limits_of(section, self.cache_groups, context), None if part is None else part.exchange
        try:
            missing = self._place.missing(kernels)
            self.caps = ExecutorCaps(
                max_tokens=section.chunk,
                max_requests=section.requests,
                shared_blocks=True,
                verifies=section.exact,
                masks="mask" not in missing,
                lacks=lacks_of(missing),
                ports=program.ports,
                outputs=tuple(program.taps) if part is None else (),
                in_flight=2 if chains else 1,
                chains=chains,
            )
            self._launcher = self._place.launcher(kernels, section)
            with self._place.entered():
                self._steps = self._load(program, limits, exchange, capture or self._place.capture)
        except BaseException as e:
            clear_frames(e.__traceback__)  # they hold tensors
            with suppress(RuntimeError, EnginewrightError):  # of a GPU that was lost; then the error says so
                self._place.close()
            if not isinstance(e, torch.OutOfMemoryError):
                raise
            caches = sum(cache_block_bytes(group) * self.blocks[group.name] for group in self.cache_groups)
            raise CapacityError(
                f"memory: weights, and caches of {format_bytes(caches)}, don't fit into the memory of "
                f"{self._place.name}",
                hint="Pass less memory for the caches, fewer max_requests or a smaller context.",
            ) from e

    def _load(
        self, program: LoweredProgram, limits: StepLimits, exchange: Exchange | None, capture: Capture | None
    ) -> CudaSteps:
        """Loads a program, with its weights and caches on the device. Returns the object that runs its steps."""
        device, launcher = self._place.device, self._launcher
        weights = {use.name: weight_tensor(use, self._bundle.part(use), device) for use in program.weights}
        place = Place(device, self._place.gpu, launcher, self._place.processors)
        bound = CudaProgram(
            program, weights, place, blocks=self.blocks, limits=limits, exchange=exchange, exact=self._exact
        )
        steps = CudaSteps(bound, self._bundle.model.vocab_size, launcher, capture)
        if exchange is None:  # collectives aren't open yet
            steps.warm()
        return steps

    @property
    def device(self) -> torch.device:
        """The device of its tensors."""
        return self._place.device

    def check(self, step: StepInput) -> None:
        """Raises RequestError for an invalid step, before any of it runs."""
        self._steps.check(step)
        check_options(step.sampling)

    @property
    def lost(self) -> str:
        """The reason why no further step can run; "" if steps can run."""
        return self._health.lost

    def submit(self, step: StepInput) -> Pending:
        self._bundle.check_unchanged()
        with self._running():
            return WatchedStep(self._running, self._steps.start(step))

    @contextmanager
    def _running(self) -> Iterator[None]:
        """A context in which the device's stream is the current one. It raises the errors of ``GpuHealth.watched``."""
        with self._health.watched(), self._place.entered():
            yield

    def describe(self) -> dict[str, str | int]:
        return {
            "target": self._target,
            "library": f"torch {torch.__version__}",
            "gpu": self._place.name,
            "kernels": self._launcher.loaded() if isinstance(self._launcher, CarriedLauncher) else "interpreted",
            **self._steps.graphs.describe(),
            **{name: round(self._steps.late[name]) for name in ("late_binds", "late_graphs", "late_ms", "late_memory")},
        }

    def copy_bytes(self, group: str) -> int:
        return self._steps.program.block_bytes(group)

    def open_copies(self, counts: Mapping[str, int]) -> None:
        program, sizes = self._steps.program, {name: self.copy_bytes(name) for name in counts}
        try:
            with self._running():
                pinned = {
                    name: torch.from_numpy(self._place.pinned(count * sizes[name])).view(count, sizes[name])
                    for name, count in counts.items()
                }
                self._copies = PinnedCopies(program, pinned, *self._place.lanes())
        except (CapacityError, torch.OutOfMemoryError) as e:
            total = sum(count * sizes[name] for name, count in counts.items())
            raise CapacityError(
                f"prefix_memory: {format_bytes(total)} of main memory can't be pinned: {e}",
                hint="Pass a smaller prefix_memory.",
            ) from e

    def save_copy(self, group: str, block: int, slot: int) -> None:
        with self._running():
            self._opened_copies.save(group, block, slot)

    def load_copy(self, group: str, slot: int, block: int) -> None:
        with self._running():
            self._opened_copies.load(group, slot, block)

    def read_copy(self, group: str, slot: int) -> Payload:
        with self._running():
            return self._opened_copies.read(group, slot)

    @property
    def _opened_copies(self) -> PinnedCopies:
        assert self._copies is not None
        return self._copies

    def close(self) -> None:
        """Frees the executor's memory on the GPU; a second call does nothing."""
        if not self._closed:
            self._closed = True
            self._copies = None
            with suppress(RuntimeError, EnginewrightError) if self.lost else nullcontext():
                with self._place.entered():
                    self._steps.close()
                self._place.close()


class ExactCudaExecutor(CudaExecutor):
    """The executor of a bundle with exact steps. Implements ``kv_cache.disk_tier.BlockMemory``.

    Its blocks can be stored in a folder, because a later process computes the same bits.
    """

    @property
    def cache_identity(self) -> bytes:
        """Bytes that differ whenever cached blocks aren't interchangeable: of bundle, target, versions, GPU."""
        version = metadata.version("enginewright")
        return cache_identity(self._bundle, self._target, version, torch.__version__, self._place.name)

    def read_block(self, group: str, block: int) -> Payload:
        with self._running():
            payload = torch.empty(self.copy_bytes(group), dtype=torch.uint8, device=self.device)
            self._steps.program.read_block(group, block, payload)
            return payload.cpu().numpy()

    def write_block(self, group: str, block: int, payload: Payload) -> None:
        with self._running():
            self._steps.program.write_block(group, block, torch.from_numpy(payload))


class _AtOnce:
    """A ``Lane`` whose work is done when it is queued, and which is its own event."""

    def run(self, work: Callable[[], object]) -> None:
        work()

    def record(self) -> Event:
        return self

    def wait(self, event: Event) -> None:
        """Does nothing: the work is done."""

    def synchronize(self) -> None:
        """Does nothing: the work is done."""


@dataclass(frozen=True)
class _StreamLane:
    """A CUDA stream as a ``Lane``."""

    stream: torch.cuda.Stream

    def run(self, work: Callable[[], object]) -> None:
        with torch.cuda.stream(self.stream):
            work()

    def record(self) -> Event:
        event: Event = self.stream.record_event()
        return event

    def wait(self, event: Any) -> None:
        self.stream.wait_event(event)


class _Interpreted:
    """Triton's interpreter on the CPU in place of a GPU, for tests. It is slow."""

    name = "no GPU: kernels interpreted on the CPU"
    device = torch.device("cpu")
    gpu = GPUS[80]  # tiles as this GPU has them; any would do
    processors = 1
    capture: Capture | None = None

    def entered(self) -> AbstractContextManager[None]:
        """Returns a context that does nothing: there is no stream."""
        return nullcontext()

    def probe(self) -> None:
        """Does nothing: the CPU can't be lost."""

    def close(self) -> None:
        """Does nothing: there is no memory to free."""

    def launcher(self, folder: object, section: object) -> Launcher:
        return JitLauncher()

    def pinned(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Returns memory; nothing has to be pinned."""
        return np.empty(nbytes, np.uint8)

    def lanes(self) -> tuple[Lane, Lane]:
        """Returns two lanes whose work is done at once."""
        return _AtOnce(), _AtOnce()

    def missing(self, folder: object) -> tuple[SamplingKernel, ...]:
        """Returns (): kernels of this version are interpreted, so none is missing."""
        return ()


@dataclass(frozen=True)
class _TorchGraph:
    """A CUDA graph of torch. Implements ``Graph``."""

    graph: torch.cuda.CUDAGraph

    def launch(self) -> None:
        self.graph.replay()

    def close(self) -> None:
        self.graph.reset()


_idle: dict[int, list[Device]] = {}
"""The opened devices that no executor uses, by the number of their GPU.

Their streams must outlive all tensors of the process: when torch frees pinned memory, it records an event on each
stream that copied from or to it. A stream that was destroyed makes that fail, and the process aborts.
"""


class _OnGpu:
    """A GPU for which the bundle has kernels, and the stream on which all work runs."""

    def __init__(self, found: InstalledGpu, capability: str) -> None:
        self.name = f"{found.name} ({found.capability})"
        self.gpu = gpu_of(number_of(capability))
        self.device = torch.device("cuda", found.index)
        torch.cuda.init()
        self.processors = torch.cuda.get_device_properties(self.device).multi_processor_count
        idle = _idle.get(found.index)
        self._opened = idle.pop() if idle else load_cuda().open(found)
        self._opened.enter()
        self._stream = torch.cuda.ExternalStream(self._opened.stream, device=self.device)
        self._copying: torch.cuda.Stream | None = None
        self._pool = torch.cuda.graph_pool_handle()

    def entered(self) -> AbstractContextManager[None]:
        """Returns a context in which its stream is the calling thread's current stream; then the former one is."""
        return torch.cuda.stream(self._stream)

    def probe(self) -> None:
        """Waits for the stream. Raises RuntimeError if the GPU is lost to this process."""
        self._stream.synchronize()

    def close(self) -> None:
        """Frees torch's cached memory and the kernels. The stream is kept for the next executor."""
        if self._copying is not None:  # pinned memory is freed
            self._copying.synchronize()
        with torch.cuda.device(self.device):
            torch.cuda.empty_cache()
            self._opened.empty()
        _idle.setdefault(self._opened.gpu.index, []).append(self._opened)

    def pinned(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Allocates pinned memory, which is freed when the place is closed."""
        return self._opened.pinned(nbytes)

    def lanes(self) -> tuple[Lane, Lane]:
        """Returns the stream of all work, and another stream for copies."""
        self._copying = self._copying or torch.cuda.Stream(self.device)
        return _StreamLane(self._stream), _StreamLane(self._copying)

    def launcher(self, folder: Any, section: CudaSection) -> Launcher:
        return CarriedLauncher(self._opened, folder, self.gpu.capability)

    def missing(self, folder: Path) -> tuple[SamplingKernel, ...]:
        """Returns the sampling kernels that the bundle doesn't have, as an older one."""
        return missing_kernels(folder, self.gpu.capability)

    def capture(self, work: Callable[[], None]) -> Graph:
        """Captures work as a graph. All graphs share temporary memory, so only one may run at a time."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, self._pool, stream=self._stream, capture_error_mode="thread_local"):
            work()
        return _TorchGraph(graph)


def place_of(section: CudaSection, number: int = 0) -> _Interpreted | _OnGpu:
    """Returns the device that runs a bundle's target: a GPU, or the CPU if Triton interprets kernels in this process.

    ``number`` is the index of the GPU among those for which the bundle has kernels. Raises TargetError if there is
    none.
    """
    return _Interpreted() if interprets() else _OnGpu(*gpus_for(section, number + 1)[number])


def check_ranks(bundle: Bundle, target: str, how: Partition) -> None:
    """Raises BundleError if a bundle has no kernels for a partition, TargetError if there are fewer GPUs than ranks.

    Nothing is checked if Triton interprets kernels.
    """
    if interprets():
        return
    section = cuda_section(bundle, target)
    if str(how) not in section.partitions:
        known = " or ".join(section.partitions) or "one rank alone"
        raise BundleError(
            f"{bundle.path}: target {target!r} has no kernels for partition {how}: it has those for {known}",
            hint=f"Export again with --partition {how}.",
        )
    gpus_for(section, how.ranks)


def gpus_for(section: CudaSection, ranks: int) -> list[tuple[InstalledGpu, str]]:
    """Returns this machine's GPUs that the bundle's kernels run on, each with the compute capability of its kernels.

    Raises TargetError if there are fewer than ``ranks``.
    """
    if not torch.cuda.is_available():
        what = "is a build without CUDA" if torch.version.cuda is None else "sees no GPU"
        raise TargetError(
            f"target cuda: PyTorch {torch.__version__} {what}",
            hint="Install a build of PyTorch with CUDA on a machine with an NVIDIA GPU, or take target cpu.",
        )
    gpus = load_cuda().gpus
    fit = [(gpu, capability) for gpu in gpus if (capability := section.kernels_for(gpu.capability)) is not None]
    if len(fit) >= ranks:
        return fit
    if fit:
        raise TargetError(
            f"ranks: {ranks} need a GPU each, and here are {len(fit)} that target cuda has kernels for",
            hint=f"Use at most {len(fit)} ranks, or export again with --gpu and the capabilities of all GPUs here.",
        )
    here = ", ".join(f"{gpu.name} ({gpu.capability})" for gpu in gpus) or "none"
    raise TargetError(
        f"target cuda: its kernels are for compute capability {', '.join(section.compute_capabilities)}; here: {here}",
        hint="Export again with --gpu and the capability of this GPU.",
    )


def cuda_section(bundle: Bundle, target: str) -> CudaSection:
    """Returns a ready target's section of the manifest. Raises BundleError if it has none."""
    return bundle.section(target, CudaSection, "kernels")


def limits_of(section: CudaSection, groups: Iterable[CacheGroup], context: int) -> StepLimits:
    """Returns the limits of steps for requests of at most ``context`` tokens."""
    smallest = min(group.block_size for group in groups)
    blocks = -(-context // smallest)
    return StepLimits(tokens=section.chunk, requests=section.requests, rows=section.requests, blocks=blocks)


def cuda_budget(bundle: Bundle, target: str, context: int, how: Partition = Partition()) -> int:
    """Returns the default bytes for the caches of all ranks: most of the GPU's free memory after weights and steps.

    The free memory of the first GPU is taken for all. ``context`` is the most tokens of a request. Raises CapacityError
    if nothing is left.
    """
    section, programs = cuda_section(bundle, target), rank_programs(bundle, target, how)
    if interprets():
        return default_budget()
    gpu, _ = gpus_for(section, how.ranks)[0]
    free, _ = torch.cuda.mem_get_info(gpu.index)
    return _budget(bundle, section, programs, how, context, free, gpu.name)


def _budget(
    bundle: Bundle,
    section: CudaSection,
    programs: Sequence[LoweredProgram],
    how: Partition,
    context: int,
    free: int,
    gpu: str,
) -> int:
    """Returns the bytes for the caches of all ranks together, if each rank's GPU has ``free`` bytes.

    The rank with room for the fewest blocks determines the number of blocks.
    """
    whole = sum(cache_block_bytes(group) for group in whole_groups(programs, how))
    budgets = []
    for program in programs:
        weights = sum(bundle.part(use).nbytes for use in program.weights)
        limits = limits_of(section, program.cache_groups, context)
        steps = step_memory(program, limits, bundle.model.vocab_size, section.exact)
        if free <= weights + steps:
            raise CapacityError(
                f"memory: {gpu} has {format_bytes(free)} free, and weights ({format_bytes(weights)}) and steps with "
                f"contexts of {context:,} tokens ({format_bytes(steps)}) need more",
                hint="Pass a smaller context, export with fewer bits or a smaller engines.chunk, end what else uses "
                "the GPU, or take a larger one.",
            )
        rank_bytes = sum(cache_block_bytes(group) for group in program.cache_groups)
        budgets.append(int((free - weights - steps) * _FREE_SHARE) * whole // max(rank_bytes, 1))
    return min(budgets)


_FREE_SHARE = 0.85
"""The share of the remaining GPU memory that caches get: graphs, libraries' workspaces and fragments need the rest."""
