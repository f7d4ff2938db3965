"""Plans a model on several ranks: the memory of each rank, the bytes on links, the times, and the best partition.

``runtime/ranks/partition.py`` makes the program of a rank from the cpu target's. The kernels of a rank take as long as
on a device alone (``Planning``). While ranks gather or send, they wait for the link (``links``) and compute nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from enginewright.plugins.steps.planning import Gpu, Shares, StepModel
from enginewright.runtime.kv_cache.pool_plan import most_requests, pool_unit
from enginewright.runtime.ranks.kinds.table import kind_of_collective, planned_sizes
from enginewright.runtime.ranks.partition import MOST_RANKS, Partition
from enginewright.runtime.ranks.rank_programs import partition
from enginewright.runtime.shared.arena import plan_arena
from enginewright.runtime.shared.dtypes import DTYPES
from enginewright.runtime.shared.errors import BundleError, CapacityError, RequestError
from enginewright.runtime.shared.lowered_program import Affine, LoweredProgram, Operand, Step
from enginewright.runtime.shared.memory import format_bytes
from enginewright.runtime.shared.progress import Progress, ProgressEvent, silent
from enginewright.runtime.shared.step_costs import StepSizes, stored_bytes
from enginewright.runtime.shared.threads import available_threads

from .devices import find_devices, read_devices
from .links import MEMORY, Link, default_share, find_link, split_links
from .options import MOST_REQUESTS, PlanOptions, check_range, shares_of, within
from .planner import (
    CHUNK,
    MakeModel,
    Memory,
    largest_batch,
    model_maker,
    most_that,
    name_of,
    planned_model,
    processes_waiting,
    room_of,
)
from .programs import PlannedModel, PlannedProgram, planning_of, target_on
from .result import BatchSpeed, DeviceSection, Omitted

FORMAT_VERSION = 1
_PER_MACHINE = 8
"""The default number of ranks of a machine if two links are named, within and between machines."""


@dataclass(frozen=True)
class Wires:
    """The links between the ranks of a plan.

    Attributes:
        inside, between: the link within a machine, and the one between machines; None if there is none.
        per_machine: ranks of a machine.
        share: the share of their bandwidth that is reached.
        float_bytes: bytes of a number that the cpu target's program computes with 32 bits.
    """

    inside: Link | None
    between: Link | None
    per_machine: int
    share: float
    float_bytes: int = 4

    def machine(self, rank: int) -> int:
        """Returns the index of the machine that has a rank. Consecutive ranks share a machine."""
        return rank // self.per_machine

    def waited(self, ranks: Sequence[int], at: int) -> float:
        """Predicts the seconds that rank ``at`` waits in a collective of ``ranks``, besides the transfer of bytes."""
        machines = {self.machine(rank) for rank in ranks}
        near = sum(self.machine(rank) == self.machine(at) for rank in ranks)
        used = [link for link, more in ((self.inside, near > 1), (self.between, len(machines) > 1)) if more and link]
        hops = (near - 1) * (self.inside.hop if self.inside else 0.0)
        hops += (len(machines) - 1) * (self.between.hop if self.between else 0.0)
        return max((link.base for link in used), default=0.0) + hops

    def seconds(self, inside: float, between: float) -> float:
        """Predicts the seconds to receive ``inside`` bytes from ranks of the same machine and ``between`` bytes from
        others.

        Both arrive at the same time.
        """
        pairs = (inside, self.inside), (between, self.between)
        return max(n / self._bandwidth(link) if link and link.bandwidth else 0.0 for n, link in pairs)

    def _bandwidth(self, link: Link) -> float:
        return link.bandwidth * (1.0 if link.reached else self.share)


@dataclass(frozen=True)
class Received:
    """The data that a rank receives, and waits for, in one collective of a step.

    Attributes:
        op: ``all_gather``, ``gather_experts`` or ``receive``.
        where: the module that it belongs to, without the layer's number.
        rows: the number of rows: T, or R.
        inside, between: bytes for each row, from ranks of its own machine, and of others.
        waited: seconds in addition to the transfer of the bytes.
    """

    op: str
    where: str
    rows: Affine
    inside: float
    between: float
    waited: float

    def seconds(self, sizes: StepSizes, wires: Wires) -> float:
        """Predicts the seconds that the rank waits in this collective."""
        rows = sizes.at(self.rows)
        return self.waited + wires.seconds(rows * self.inside, rows * self.between)


def received(program: LoweredProgram, rank: int, wires: Wires) -> Counter[Received]:
    """Counts the bytes that a rank receives in a step of its program, grouped by equal collectives.

    Messages are counted at the receiver.
    """
    first, count = program.ranks
    ranks, element = range(first, first + count), partial(_element, wires=wires)
    counts: Counter[Received] = Counter()
    for step in program.steps:
        kind = kind_of_collective(step.op)
        arrivals = None if kind is None else kind.arrivals(step, ranks, rank, element)
        if arrivals is None:
            continue
        bytes_of, waited = arrivals.row_bytes, wires.waited(arrivals.meeting, rank)
        near = {r: n for r, n in bytes_of.items() if r != rank and wires.machine(r) == wires.machine(rank)}
        far = sum(n for r, n in bytes_of.items() if wires.machine(r) != wires.machine(rank))
        rows = step.outputs[0].shape[0]
        counts[Received(step.op, _where(step), rows, sum(near.values()), far, waited)] += 1
    return counts


def _where(step: Step) -> str:
    last = step.where.split(" + ")[0].split(".")
    return ".".join("*" if part.isdigit() else part for part in last)


def _element(operand: Operand, wires: Wires) -> float:
    return wires.float_bytes if operand.dtype == "f32" else DTYPES[operand.dtype].bits / 8


def alone(program: LoweredProgram) -> LoweredProgram:
    """Returns the work of a rank's device: its program without collectives, and with all buffers as its own."""
    without = {"receive": "inputs", "send": "outputs"}  # buffers between stages aren't a rank's
    steps = tuple(s.model_copy(update={without[s.op]: ()}) if s.op in without else s for s in program.steps)
    buffers = tuple(b.model_copy(update={"region": 0, "offset": None}) for b in program.buffers)
    planned = plan_arena(
        program.model_copy(update={"steps": steps, "buffers": buffers, "regions": (), "ranks": (0, 1), "taps": {}})
    )
    return planned.model_copy(update={"steps": tuple(s for s in program.steps if kind_of_collective(s.op) is None)})


def _shape(program: LoweredProgram) -> Hashable:
    """Returns a key that is equal for programs with the same memory and the same work."""
    weights = sum(map(stored_bytes, program.weights))
    return weights, program.arena_bytes, tuple((g.name, g.planes, len(g.layers)) for g in program.cache_groups)


@dataclass(frozen=True)
class Stage:
    """The ranks that compute the same layers together.

    Attributes:
        first, count: the first of its ranks, and their number.
        programs: the different programs of its ranks, without collectives.
        waits: for each rank, the data that it receives in a step, by equal collectives.
    """

    first: int
    count: int
    programs: tuple[LoweredProgram, ...]
    waits: tuple[Counter[Received], ...]


def stages_of(parts: Sequence[LoweredProgram], how: Partition, wires: Wires) -> tuple[Stage, ...]:
    """Returns the pipeline stages of a partitioned model, the stage with the first layers first.

    Args:
        parts: the program of each rank.
        how: the partition.
        wires: the links between ranks.
    """
    stages, count = [], how.ranks // how.stages
    for index in reversed(range(how.stages)):
        ranks = range(index * count, (index + 1) * count)
        local = {_shape(one): one for one in (alone(parts[rank]) for rank in ranks)}
        waits = tuple(received(parts[rank], rank, wires) for rank in ranks)
        stages.append(Stage(ranks[0], count, tuple(local.values()), waits))
    return tuple(stages)


class PartitionModel:
    """The predicted times of a partition's steps. At any time, the stages compute steps of different requests.

    Args:
        stages: the stages, in order.
        models: for each stage, the models of its programs.
        wires: the links between ranks.
    """

    def __init__(self, stages: Sequence[Stage], models: Sequence[Sequence[StepModel]], wires: Wires) -> None:
        self._stages, self._models, self._wires = stages, models, wires

    def waited(self, sizes: StepSizes) -> float:
        """Predicts the seconds of a step in which ranks wait for links."""
        return sum(self._waited(stage, sizes) for stage in self._stages)

    def tpot(self, batch: int, context: int) -> float:
        """Predicts the seconds between two tokens of a request, with ``batch`` requests."""
        groups = min(len(self._stages), batch)  # of requests, one in each stage
        sizes = _decode(-(-batch // groups), context)
        stages = self._of_stages(sizes)
        return max(sum(stages) + self._around(sizes), groups * max(stages))

    def ttft(self, prompt: int, others: int, context: int) -> float:
        """Predicts the time to the first token of a prompt that is read in chunks, while ``others`` requests get
        tokens.
        """
        beside = -(-others // len(self._stages))
        seconds, done = 0.0, 0
        while done < prompt:
            chunk = min(CHUNK, prompt - done)
            begins, done = not done, done + chunk
            sizes = StepSizes((*(1,) * beside, chunk), (*(context,) * beside, done))
            stages = self._of_stages(sizes)
            alone_in_flight = begins or len(stages) == 1
            seconds += sum(stages) + self._around(sizes) if alone_in_flight else max(stages)
        return seconds

    def bound(self, batch: int, context: int) -> str:
        """Returns the main limit of a decode step: "links", or the limit of most ranks' kernels."""
        sizes = _decode(-(-batch // min(len(self._stages), batch)), context)
        if 2 * self.waited(sizes) > sum(self._of_stages(sizes)):
            return "links"
        return self._models[0][0].bound(sizes)

    def _of_stages(self, sizes: StepSizes) -> list[float]:
        seconds = []
        for stage, models in zip(self._stages, self._models, strict=True):
            kernels = max(model.seconds(sizes) - model.around(sizes) for model in models)
            seconds.append(kernels + self._waited(stage, sizes))
        return seconds

    def _waited(self, stage: Stage, sizes: StepSizes) -> float:
        return max(sum(n * r.seconds(sizes, self._wires) for r, n in waits.items()) for waits in stage.waits)

    def _around(self, sizes: StepSizes) -> float:
        return max(model.around(sizes) for models in self._models for model in models)


def _decode(requests: int, context: int) -> StepSizes:
    return StepSizes((1,) * requests, (context,) * requests)


@dataclass(frozen=True)
class Collective:
    """A group of equal collectives in a step: same op, module and sizes. Figures are for the rank of the stage whose
    collectives take longest.

    Attributes:
        op, where: the name of the op, and the module that it belongs to.
        count: the number of these collectives in a step.
        rows: "T" if the rank receives a row for each token, "R" for each sampled token.
        inside, between: bytes that the rank receives for each row, from its own machine and from others.
        seconds: the time of one of them in a step of one token.
    """

    op: str
    where: str
    count: int
    rows: str
    inside: float
    between: float
    seconds: float


@dataclass(frozen=True)
class PartitionPlan:
    """One partition of one program on some devices, in bytes and seconds.

    Attributes:
        partition: the partition, such as "tensor=4,pipeline=2".
        weights, weights_total, weights_once: bytes of weights on the rank with most, on all ranks together, and of the
            model without ranks.
        kv_per_token, kv_total, kv_once: the same for keys and values of a token. Heads that can't be divided among the
            ranks are on several of them.
        received: bytes that the rank with most receives in a step of one token.
        meetings: collectives of a step, on the rank that has most.
        waited: seconds of a step of one token in which ranks wait for links.
    """

    device: str
    recipes: tuple[str, ...]
    partition: str
    ranks: int
    tensor: int
    pipeline: int
    fits: bool
    room: int
    weights: int
    weights_total: int
    weights_once: int
    kv_per_token: int
    kv_total: int
    kv_once: int
    workspace: int
    needed: int
    most_requests: int
    most_tokens: int
    received: float
    meetings: int
    waited: float
    collectives: tuple[Collective, ...] = ()
    speeds: tuple[BatchSpeed, ...] = ()
    largest: BatchSpeed | None = None
    largest_limit: str = ""


@dataclass(frozen=True)
class Best:
    """The partitions of a program on a number of ranks that are best for a goal.

    Attributes:
        device: the name of the device of each rank.
        recipes: the names of the recipes.
        ranks: the number of ranks.
        latency, throughput: the partition that is best for this goal; None if no partition meets the goals.
    """

    device: str
    recipes: tuple[str, ...]
    ranks: int
    latency: str | None
    throughput: str | None


@dataclass(frozen=True)
class RankPlans:
    """The result of ``plan_ranks``: devices, links, the plan of each partition, and the best ones."""

    model: str
    parameters: int
    context_length: int
    options: dict[str, Any]
    devices: tuple[DeviceSection, ...]
    links: dict[str, dict[str, Any]]
    plans: tuple[PartitionPlan, ...]
    best: tuple[Best, ...]
    omitted: tuple[Omitted, ...] = field(default=())

    def to_json(self) -> dict[str, Any]:
        """Returns plain values: seconds, bytes, tokens per second."""
        return {"format_version": FORMAT_VERSION} | asdict(self)


def plan_ranks(source: str | Path, options: PlanOptions, progress: Progress = silent) -> RankPlans:
    """Plans each recipe on each device in each partition of each number of ranks.

    Args:
        source: a bundle, or a model: see ``planned_model``.
        options: with numbers of ``ranks``, or one ``partition``.
        progress: called as the work goes on.

    Raises:
        TargetError: a device or a link isn't known.
        RequestError: an option is out of range; there are more ranks than heads and layers allow.
        CapacityError: no partition fits.
        What ``planned_model`` raises.
    """
    load = processes_waiting()
    devices = find_devices(options.devices, {} if options.device_file is None else read_devices(options.device_file))
    shares = shares_of(options)
    check_range("batch", options.batches, MOST_REQUESTS)
    partitions = _partitions(options)
    wires = {name_of(gpu): _wires(options, gpu, max(how.ranks for how in partitions)) for gpu in devices}
    model = planned_model(source, options.recipes, (target_on(gpu=False),), progress)
    fitted = within(options, model.info)
    planner = _Planner(_cut_programs(model), partitions, fitted, shares, model.info.context_length, progress)
    rooms = {name_of(gpu): room_of(gpu, fitted, shares) for gpu in devices}
    plans: list[PartitionPlan] = []
    refused: list[RequestError] = []
    for gpu in devices:
        for plan in planner.plans(gpu, rooms[name_of(gpu)], wires[name_of(gpu)]):
            if isinstance(plan, PartitionPlan):
                plans.append(plan)
            else:
                refused.append(plan)
    if not plans:
        raise refused[0]
    if not any(plan.fits for plan in plans):
        raise _no_room(model.info.name, plans, fitted)
    sections = tuple(DeviceSection.of(gpu, rooms[name_of(gpu)], shares, load) for gpu in devices)
    shown = ("ranks", "partition", "batches", "context", "prompt", "tpot", "ttft")
    return RankPlans(
        model.info.name,
        model.info.parameters,
        model.info.context_length,
        {name: getattr(fitted, name) for name in shown},
        sections,
        {name: asdict(one) for name, one in wires.items()},
        tuple(plans),
        tuple(_best(plans)),
        tuple(Omitted(p.recipes, None, p.omitted) for p in model.programs if p.program is None),
    )


def _cut_programs(model: PlannedModel) -> list[PlannedProgram]:
    """Returns the programs that can be divided among ranks. Raises BundleError if there are none."""
    programs = [p for p in model.programs if p.program is not None and p.target == target_on(gpu=False)]
    if not programs:
        why = "; ".join(f"{', '.join(p.recipes)}: {p.omitted}" for p in model.programs if p.omitted)
        raise BundleError(
            f"{model.info.name}: nothing can be cut into ranks{f': {why}' if why else ''}",
            hint=f"Export the model with --target {target_on(gpu=False)}, whose programs are cut.",
        )
    return programs


@dataclass(frozen=True)
class _Planner:
    """Plans each program in each partition on a device.

    Attributes:
        programs: the programs, before they are cut.
        partitions: the partitions to plan.
        options, shares: of the plan.
        context_length: tokens of the model's context.
        progress: called with the stage "partitions".
    """

    programs: Sequence[PlannedProgram]
    partitions: Sequence[Partition]
    options: PlanOptions
    shares: Shares
    context_length: int
    progress: Progress

    def plans(self, gpu: Gpu | None, room: int, wires: Wires) -> Iterator[PartitionPlan | RequestError]:
        """Yields the plan of each program in each partition, or the error that there are too many ranks for it.

        Args:
            gpu: the device of each rank; None for this machine.
            room: bytes of memory of a device.
            wires: the links between ranks.
        """
        for planned in self.programs:
            for done, how in enumerate(self.partitions):
                self.progress(ProgressEvent("partitions", done, len(self.partitions), str(how)))
                # Ranks on one machine without GPUs share its cores and its memory.
                ranks = 1 if gpu is not None else min(wires.per_machine, how.ranks)
                rank_room = room if self.options.memory is not None else room // ranks
                threads = self.options.threads or max(1, available_threads() // ranks)
                options = replace(self.options, threads=threads)
                make = model_maker(options, self.shares, self.context_length, self.progress)
                try:
                    yield _plan(planned, how, gpu, rank_room, wires, self.options, make)
                except RequestError as e:
                    yield e
            self.progress(ProgressEvent("partitions", len(self.partitions), len(self.partitions)))


def _partitions(options: PlanOptions) -> list[Partition]:
    """Returns the requested partition, or all partitions into the requested numbers of ranks. Raises RequestError."""
    if options.partition is not None:
        how = Partition.parse(options.partition)
        if options.ranks and options.ranks != (how.ranks,):
            raise RequestError(
                f"partition: {options.partition} has {how.ranks} ranks",
                hint="Leave --ranks out, or name as many ranks there.",
            )
        for kind in how.kinds:
            if kind.unplanned:
                same = f"Plan {kind.alike}={how.ranks}, which cuts weights in the same way." if kind.alike else None
                raise RequestError(f"partition: {how} isn't planned: {kind.unplanned}", hint=same)
        return [how]
    check_range("ranks", options.ranks, MOST_RANKS)
    return [Partition(**sizes) for ranks in sorted(set(options.ranks)) for sizes in planned_sizes(ranks)]


def _wires(options: PlanOptions, gpu: Gpu | None, ranks: int) -> Wires:
    """Returns the links of a plan. Raises TargetError or RequestError for impossible options.

    Args:
        options: the options of the plan.
        gpu: the device of each rank; None for this machine.
        ranks: the largest number of ranks.
    """
    links = _links(options, gpu, ranks)
    share = default_share() if options.link_share is None else options.link_share
    if not 0 < share <= 1:
        raise RequestError(f"link_share: {share:g} is out of range", hint="It must be above 0, and 1 at most.")
    per_machine = _PER_MACHINE if options.per_machine is None else options.per_machine
    check_range("per_machine", (per_machine,), MOST_RANKS)
    float_bytes = 4 if gpu is None else 2
    if len(links) == 2:
        return Wires(links[0] or _memory(per_machine), links[1], per_machine, share, float_bytes)
    if links[0] is not None and links[0].between:
        return Wires(None, links[0], 1, share, float_bytes)
    return Wires(links[0] or _memory(ranks), None, MOST_RANKS, share, float_bytes)


def _links(options: PlanOptions, gpu: Gpu | None, ranks: int) -> list[Link | None]:
    """Returns the link between ranks; or two, within a machine and between machines.

    None stands for this machine's memory.

    Raises TargetError for an unknown link, RequestError if there is none, or two can't be combined.
    """
    names = split_links(options.links)
    if not names and gpu is not None and ranks > 1:
        raise RequestError(f"link: what joins {gpu.name}s isn't given", hint="Name it: --link nvlink, or --link pcie4.")
    links = [find_link(name, gpu) for name in names or (MEMORY,)]
    if len(links) == 2 and ((links[0] and links[0].between) or links[1] is None or not links[1].between):
        raise RequestError(
            f"link: {names[0]} and {names[1]} aren't a link within machines and one between them",
            hint="Name them in this order, such as --link nvlink,ndr.",
        )
    return links


def _memory(ranks: int) -> Link:
    """Returns the memory of this machine as a link, with the measured time of a collective of ``ranks`` ranks."""
    planning = planning_of(target_on(gpu=False))
    assert planning is not None and planning.meeting is not None, "it runs ranks"
    seconds = planning.meeting(ranks) if ranks > 1 else 0.0
    return Link(MEMORY, 0.0, seconds, 0.0, "a meeting of ranks, timed on this machine")


class _RankMemory:
    """The memory that the ranks of a partition need on their devices."""

    def __init__(self, planned: PlannedProgram, stages: Sequence[Stage]) -> None:
        self.ranks = [Memory(program, planned.target) for stage in stages for program in stage.programs]

    def needed(self, requests: int, context: int, prompt: int) -> int:
        """Returns the bytes that the rank with the largest need takes. The arguments are those of ``Memory.needed``."""
        return max(rank.needed(requests, context, prompt) for rank in self.ranks)

    @cached_property
    def block(self) -> int:
        return pool_unit([group for rank in self.ranks for group in rank.program.cache_groups])


def _plan(
    planned: PlannedProgram,
    how: Partition,
    gpu: Gpu | None,
    room: int,
    wires: Wires,
    options: PlanOptions,
    make: MakeModel,
) -> PartitionPlan:
    assert planned.program is not None and options.context is not None and options.prompt is not None
    context, prompt = options.context, options.prompt
    whole = Memory(planned.program, planned.target)
    parts = partition(planned.program, how)
    stages = stages_of(parts, how, wires)
    memory = _RankMemory(planned, stages)
    block = memory.block
    planned_most = min(MOST_REQUESTS, most_requests(planned.program.cache_groups))
    requests = most_that(planned_most, lambda n: memory.needed(n, context, prompt) <= room)
    longest = most_that(1 << 20, lambda n: memory.needed(1, n * block, n * block) <= room) * block
    one_token = _decode(1, context)
    partition_plan = PartitionPlan(
        device=name_of(gpu),
        recipes=planned.recipes,
        partition=str(how),
        ranks=how.ranks,
        tensor=how.ranks // how.stages,
        pipeline=how.stages,
        fits=requests > 0,
        room=room,
        weights=max(rank.weights for rank in memory.ranks),
        weights_total=sum(Memory(part, planned.target).weights for part in parts),
        weights_once=whole.weights,
        kv_per_token=max(rank.kv_per_token for rank in memory.ranks),
        kv_total=sum(Memory(part, planned.target).kv_per_token for part in parts),
        kv_once=whole.kv_per_token,
        workspace=max(rank.workspace(1, prompt, context) for rank in memory.ranks),
        needed=memory.needed(1, context, prompt),
        most_requests=requests,
        most_tokens=longest,
        received=max(_bytes(waits, one_token) for stage in stages for waits in stage.waits),
        meetings=max(sum(waits.values()) for stage in stages for waits in stage.waits),
        waited=PartitionModel(stages, (), wires).waited(one_token),
        collectives=tuple(_collectives(stages, wires, one_token)),
    )
    if not partition_plan.fits:
        return partition_plan
    models = [
        [make(replace(planned, program=program), gpu) for program in _measured(stage.programs, gpu)] for stage in stages
    ]
    model = PartitionModel(stages, models, wires)

    def speed(batch: int) -> BatchSpeed:
        tpot = model.tpot(batch, context)
        return BatchSpeed(
            batch, model.ttft(prompt, batch - 1, context), tpot, batch / tpot, model.bound(batch, context)
        )

    most, limit = largest_batch(
        requests, planned_most, options, lambda n: model.tpot(n, context), lambda n: model.ttft(prompt, n - 1, context)
    )
    speeds = tuple(speed(batch) if batch <= requests else BatchSpeed(batch) for batch in options.batches)
    return replace(partition_plan, speeds=speeds, largest=speed(most) if most else None, largest_limit=limit)


def _measured(programs: Sequence[LoweredProgram], gpu: Gpu | None) -> Sequence[LoweredProgram]:
    """Returns the programs whose kernels are timed: all for a GPU; on this machine, which is slow, the largest one."""
    return programs if gpu is not None else [max(programs, key=lambda p: sum(map(stored_bytes, p.weights)))]


def _bytes(waits: Counter[Received], sizes: StepSizes) -> float:
    return sum(n * sizes.at(r.rows) * (r.inside + r.between) for r, n in waits.items())


def _collectives(stages: Sequence[Stage], wires: Wires, sizes: StepSizes) -> Iterator[Collective]:
    for stage in stages:
        waits = max(stage.waits, key=lambda waits: sum(n * r.seconds(sizes, wires) for r, n in waits.items()))
        for one, count in waits.items():
            seconds = one.seconds(sizes, wires)
            yield Collective(one.op, one.where, count, "R" if one.rows.r else "T", one.inside, one.between, seconds)


def _best(plans: Sequence[PartitionPlan]) -> Iterator[Best]:
    for device, recipes, ranks in dict.fromkeys((p.device, p.recipes, p.ranks) for p in plans):
        fit = [p for p in plans if (p.device, p.recipes, p.ranks) == (device, recipes, ranks) and p.largest]
        by_latency = [(s.tpot, p.partition) for p in fit for s in p.speeds[:1] if s.tpot is not None]
        by_rate = [(-(p.largest.tokens_per_second or 0.0), p.partition) for p in fit if p.largest]
        yield Best(
            device,
            recipes,
            ranks,
            min(by_latency)[1] if by_latency else None,
            min(by_rate)[1] if by_rate else None,
        )


def _no_room(name: str, plans: Sequence[PartitionPlan], options: PlanOptions) -> CapacityError:
    best = max(plans, key=lambda p: p.room - p.needed)
    return CapacityError(
        f"{name} doesn't fit: with recipe {best.recipes[0]} and {best.partition} a rank's weights of "
        f"{format_bytes(best.weights)} and a request of {options.context:,} tokens need {format_bytes(best.needed)}, "
        f"and {format_bytes(best.room)} may be used on each {best.device}",
        hint="Take more ranks, a shorter context, or a recipe of fewer bits: int8 has 8, int4 4.5.",
    )
