"""A plan for a model on several ranks: what each holds, what moves over links, how fast partitions are, and the best.

A rank's program is what ``runtime/ranks/partition.py`` makes of the cpu target's. Its kernels take as long as on a
device alone (``Planning``); where ranks gather or hand on, they wait for the link (``links``), and compute nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from enginewright.plugins.native.threads import available_threads
from enginewright.plugins.steps.planning import Gpu, StepModel
from enginewright.runtime.ranks.kinds.table import kind_of_collective, planned_sizes
from enginewright.runtime.ranks.partition import MOST_RANKS, Partition, partition
from enginewright.runtime.shared.arena import plan_arena
from enginewright.runtime.shared.dtypes import DTYPES
from enginewright.runtime.shared.errors import BundleError, CapacityError, RequestError
from enginewright.runtime.shared.lowered_program import Affine, LoweredProgram, Operand, Step
from enginewright.runtime.shared.memory import format_bytes
from enginewright.runtime.shared.progress import Progress, ProgressEvent, silent
from enginewright.runtime.shared.step_costs import StepSizes, stored_bytes

from .devices import find_devices, read_devices
from .links import MEMORY, Link, default_share, find_link, split_links
from .options import MOST_REQUESTS, PlanOptions, check_range, shares_of, within
from .planner import (
    CHUNK,
    MakeModel,
    Memory,
    model_maker,
    most_that,
    name_of,
    planned_model,
    processes_waiting,
    room_of,
)
from .programs import PlannedProgram, planning_of, target_on
from .result import BatchSpeed, DeviceSection, Omitted

FORMAT_VERSION = 1
_PER_MACHINE = 8
"""Ranks of a machine where links within and between machines are named."""


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
        """Gives the machine of a rank: neighbours are together."""
        return rank // self.per_machine

    def waited(self, ranks: Sequence[int], at: int) -> float:
        """Predicts the seconds for which one of them waits in a collective of these ranks, beside its bytes."""
        machines = {self.machine(rank) for rank in ranks}
        near = sum(self.machine(rank) == self.machine(at) for rank in ranks)
        used = [link for link, more in ((self.inside, near > 1), (self.between, len(machines) > 1)) if more and link]
        hops = (near - 1) * (self.inside.hop if self.inside else 0.0)
        hops += (len(machines) - 1) * (self.between.hop if self.between else 0.0)
        return max((link.base for link in used), default=0.0) + hops

    def seconds(self, inside: float, between: float) -> float:
        """Predicts the seconds for so many bytes from ranks of the same machine, and of others; both come at once."""
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
        rows: T, or R.
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
        """Predicts how long the rank waits."""
        rows = sizes.at(self.rows)
        return self.waited + wires.seconds(rows * self.inside, rows * self.between)


def received(program: LoweredProgram, rank: int, wires: Wires) -> Counter[Received]:
    """Counts what a rank gets in a step of its program, by equal collectives. Messages count where they arrive."""
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
    """A rank's program without what it exchanges, all buffers being its own: what its device holds and computes."""
    without = {"receive": "inputs", "send": "outputs"}  # what lies between stages isn't a rank's
    steps = tuple(s.model_copy(update={without[s.op]: ()}) if s.op in without else s for s in program.steps)
    buffers = tuple(b.model_copy(update={"region": 0, "offset": None}) for b in program.buffers)
    planned = plan_arena(
        program.model_copy(update={"steps": steps, "buffers": buffers, "regions": (), "ranks": (0, 1), "taps": {}})
    )
    return planned.model_copy(update={"steps": tuple(s for s in program.steps if kind_of_collective(s.op) is None)})


def _shape(program: LoweredProgram) -> Hashable:
    """Equal for ranks that hold and compute as much."""
    weights = sum(map(stored_bytes, program.weights))
    return weights, program.arena_bytes, tuple((g.name, g.planes, len(g.layers)) for g in program.cache_groups)


@dataclass(frozen=True)
class Stage:
    """The ranks that compute some layers together.

    Attributes:
        first, count: its ranks.
        programs: of ranks that differ, without what they exchange.
        waits: of each rank.
    """

    first: int
    count: int
    programs: tuple[LoweredProgram, ...]
    waits: tuple[Counter[Received], ...]


def stages_of(parts: Sequence[LoweredProgram], how: Partition, wires: Wires) -> tuple[Stage, ...]:
    """The ranks' programs by stage, the first layers first."""
    stages, count = [], how.ranks // how.stages
    for index in reversed(range(how.stages)):
        ranks = range(index * count, (index + 1) * count)
        local = {_shape(one): one for one in (alone(parts[rank]) for rank in ranks)}
        waits = tuple(received(parts[rank], rank, wires) for rank in ranks)
        stages.append(Stage(ranks[0], count, tuple(local.values()), waits))
    return tuple(stages)


class PartitionModel:
    """The predicted times of a partition's steps. Steps of different requests are in different stages at a time.

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
        """Predicts the seconds between two tokens of each of so many requests."""
        groups = min(len(self._stages), batch)  # of requests, one in each stage
        sizes = _decode(-(-batch // groups), context)
        stages = self._of_stages(sizes)
        return max(sum(stages) + self._around(sizes), groups * max(stages))

    def ttft(self, prompt: int, others: int, context: int) -> float:
        """Predicts the time of a prompt that comes in chunks, while ``others`` requests get tokens."""
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
        """The main limit of a decode step: "links", or the limit of most ranks' kernels."""
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
    """Equal collectives of a step, as the rank sees them that waits longest.

    Attributes:
        count: of a step.
        rows: whose rows come: "T", one for each token, or "R", one for each sampled one.
        inside, between: bytes that the rank gets for each row, from its own machine and from others.
        seconds: that one takes in a step of one token.
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
    """One partition of one program on some devices; bytes and seconds.

    Attributes:
        partition: such as "tensor=4,pipeline=2".
        weights: of the rank that holds most; weights_total: of all, of which ``weights_once`` would do without ranks.
        kv_per_token, kv_total, kv_once: the same of keys and values: heads that don't divide are on several ranks.
        received: bytes that a rank gets for each token of a step, of the rank that gets most.
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
    """The best partition of a program on so many ranks of a device, for each goal; None where none meets the goals."""

    device: str
    recipes: tuple[str, ...]
    ranks: int
    latency: str | None
    throughput: str | None


@dataclass(frozen=True)
class RankPlans:
    """All of it."""

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
        """Plain values: seconds, bytes, tokens a second."""
        return {"format_version": FORMAT_VERSION} | asdict(self)


def plan_ranks(source: str | Path, options: PlanOptions, progress: Progress = silent) -> RankPlans:
    """Plans each recipe on each device in each partition of each number of ranks.

    Args:
        source: a bundle, or a model: see ``planned_model``.
        options: see there; ``ranks`` isn't empty, or ``partition`` is given.
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
    programs = [p for p in model.programs if p.program is not None and p.target == target_on(gpu=False)]
    if not programs:
        why = "; ".join(f"{', '.join(p.recipes)}: {p.omitted}" for p in model.programs if p.omitted)
        raise BundleError(
            f"{model.info.name}: nothing can be cut into ranks{f': {why}' if why else ''}",
            hint=f"Export the model with --target {target_on(gpu=False)}, whose programs are cut.",
        )
    fitted = within(options, model.info)
    rooms = {name_of(gpu): room_of(gpu, fitted, shares) for gpu in devices}
    plans: list[PartitionPlan] = []
    refused: list[RequestError] = []
    for gpu in devices:
        here = wires[name_of(gpu)]
        for planned in programs:
            for done, how in enumerate(partitions):
                progress(ProgressEvent("partitions", done, len(partitions), str(how)))
                share = 1 if gpu is not None else min(here.per_machine, how.ranks)  # of one machine's cores and memory
                room = rooms[name_of(gpu)] if fitted.memory is not None else rooms[name_of(gpu)] // share
                threads = fitted.threads or max(1, available_threads() // share)
                make = model_maker(replace(fitted, threads=threads), shares, model.info.context_length, progress)
                try:
                    plans.append(_plan(planned, how, gpu, room, here, fitted, make))
                except RequestError as e:
                    refused.append(e)
            progress(ProgressEvent("partitions", len(partitions), len(partitions)))
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


def _partitions(options: PlanOptions) -> list[Partition]:
    """The requested partition, or all of the requested numbers of ranks. Raises RequestError."""
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
    """Raises TargetError or RequestError."""
    names = split_links(options.links)
    if not names and gpu is not None and ranks > 1:
        raise RequestError(f"link: what joins {gpu.name}s isn't given", hint="Name it: --link nvlink, or --link pcie4.")
    links = [find_link(name, gpu) for name in names or (MEMORY,)]
    if len(links) == 2 and ((links[0] and links[0].between) or links[1] is None or not links[1].between):
        raise RequestError(
            f"link: {names[0]} and {names[1]} aren't a link within machines and one between them",
            hint="Name them in this order, such as --link nvlink,ndr.",
        )
    share = default_share() if options.link_share is None else options.link_share
    if not 0 < share <= 1:
        raise RequestError(f"link_share: {share:g} is out of range", hint="It must be above 0, and 1 at most.")
    per_machine = _PER_MACHINE if options.per_machine is None else options.per_machine
    check_range("per_machine", (per_machine,), MOST_RANKS)
    float_bytes = 4 if gpu is None else 2
    if len(links) == 1 and (one := links[0]) is not None and one.between:
        return Wires(None, one, 1, share, float_bytes)
    inside = links[0] or _memory(ranks if len(links) == 1 else per_machine)
    between = links[1] if len(links) == 2 else None
    return Wires(inside, between, per_machine if between else MOST_RANKS, share, float_bytes)


def _memory(ranks: int) -> Link:
    """This machine's memory, measured."""
    planning = planning_of(target_on(gpu=False))
    assert planning is not None and planning.meeting is not None, "it runs ranks"
    seconds = planning.meeting(ranks) if ranks > 1 else 0.0
    return Link(MEMORY, 0.0, seconds, 0.0, "a meeting of ranks, timed on this machine")


class _Held:
    """The memory that the ranks of a partition need on their devices."""

    def __init__(self, planned: PlannedProgram, stages: Sequence[Stage]) -> None:
        self.ranks = [Memory(program, planned.target) for stage in stages for program in stage.programs]

    def needed(self, requests: int, context: int, prompt: int) -> int:
        """Counts bytes of the rank that needs most."""
        return max(rank.needed(requests, context, prompt) for rank in self.ranks)

    @cached_property
    def block(self) -> int:
        return max((g.block_size for rank in self.ranks for g in rank.program.cache_groups), default=1)


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
    held = _Held(planned, stages)
    block = held.block
    requests = most_that(MOST_REQUESTS, lambda n: held.needed(n, context, prompt) <= room)
    longest = most_that(1 << 20, lambda n: held.needed(1, n * block, n * block) <= room) * block
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
        weights=max(rank.weights for rank in held.ranks),
        weights_total=sum(Memory(part, planned.target).weights for part in parts),
        weights_once=whole.weights,
        kv_per_token=max(rank.cache(block) for rank in held.ranks) // block,
        kv_total=sum(Memory(part, planned.target).cache(block) for part in parts) // block,
        kv_once=whole.cache(block) // block,
        workspace=max(rank.workspace(1, prompt, context) for rank in held.ranks),
        needed=held.needed(1, context, prompt),
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

    def late(batch: int) -> str:
        if options.tpot is not None and model.tpot(batch, context) > options.tpot:
            return "tpot"
        if options.ttft is not None and model.ttft(prompt, batch - 1, context) > options.ttft:
            return "ttft"
        return ""

    most = most_that(requests, lambda n: not late(n))
    limit = late(most + 1) if most < requests else "memory" if requests < MOST_REQUESTS else "requests"
    speeds = tuple(speed(batch) if batch <= requests else BatchSpeed(batch) for batch in options.batches)
    return replace(partition_plan, speeds=speeds, largest=speed(most) if most else None, largest_limit=limit)


def _measured(programs: Sequence[LoweredProgram], gpu: Gpu | None) -> Sequence[LoweredProgram]:
    """Whose kernels are looked at: on this machine, where that takes seconds, the one with most weights."""
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
