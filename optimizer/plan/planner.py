"""Plans a model on devices: the memory that it needs, the time of its steps, and the largest batch that meets the
goals.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from enginewright.optimizer.capture.find_source import check_named
from enginewright.optimizer.recipes.recipe import list_recipes, load_recipe
from enginewright.plugins.gpu.formats import check_formats
from enginewright.plugins.steps.planning import (
    CountedSteps,
    Device,
    Gpu,
    PlannedSteps,
    Shares,
    StepModel,
    stored_formats,
)
from enginewright.runtime.bundle import MANIFEST_PATH
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.kv_cache.kinds.table import kind_of, token_bytes
from enginewright.runtime.kv_cache.pool_plan import bytes_for, enough_for_windows, most_requests, pool_unit
from enginewright.runtime.scheduler.limits import SchedulerConfig
from enginewright.runtime.shared.errors import BundleError, CapacityError, MissingDependencyError, TargetError
from enginewright.runtime.shared.lowered_program import LoweredProgram
from enginewright.runtime.shared.memory import format_bytes, free_memory
from enginewright.runtime.shared.progress import Progress, loading, silent
from enginewright.runtime.shared.step_costs import StepSizes, stored_bytes
from enginewright.runtime.shared.targets import PROCESSOR
from enginewright.runtime.shared.threads import available_threads

from .devices import find_devices, known_gpus, read_devices
from .engine_seconds import engine_seconds
from .options import MOST_REQUESTS, PlanOptions, check_range, shares_of, within
from .programs import PlannedModel, PlannedProgram, planning_of, target_on
from .result import BatchSpeed, DevicePlan, DeviceSection, Omitted, PlanResult, StepTime

CHUNK = SchedulerConfig().prefill_tokens
"""The most prompt tokens of a step, as in ``LLM``."""


_STEP_ROWS, _STEP_PROMPTS, _STEP_CONTEXT = (1, 4, 16, 64), (64, CHUNK), 128


def plan(source: str | Path, options: PlanOptions = PlanOptions(), progress: Progress = silent) -> PlanResult:
    """Predicts memory and speed of each recipe's program on each device.

    Args:
        source: a bundle, or a model: see ``planned_model``.
        options: the options of the plan.
        progress: called with the stages of an export, and of the measurements.

    Raises:
        TargetError: a device isn't known, or lacks the formats of the only recipe.
        RequestError: an option is out of range, or the bundle's model computes whole texts.
        CapacityError: no recipe fits on any of the devices; the hint names devices on which one would.
        BundleError, SourceError, UnsupportedModelError, RecipeError, MissingDependencyError: as for ``planned_model``.
    """
    load = processes_waiting()  # before there is work of our own
    devices = find_devices(options.devices, {} if options.device_file is None else read_devices(options.device_file))
    shares = shares_of(options)
    check_range("batch", options.batches, MOST_REQUESTS)
    targets = dict.fromkeys(target_on(gpu=gpu is not None) for gpu in devices)
    model = planned_model(source, options.recipes, tuple(targets), progress)
    fitted = within(options, model.info)
    make = model_maker(fitted, shares, model.info.context_length, progress)
    rooms = {name_of(gpu): room_of(gpu, fitted, shares) for gpu in devices}  # what is free here changes while we look
    plans: list[DevicePlan] = []
    omitted = _omitted(model, devices)
    refused: TargetError | None = None
    for gpu in devices:
        programs = model.programs_on(gpu=gpu is not None)
        if not programs:
            raise BundleError(
                f"{model.info.name}: the bundle has no program for this machine",
                hint=f"Name a GPU with --gpu, or export the model with --target {target_on(gpu=False)} as well.",
            )
        for planned in (p for p in programs if p.program is not None):
            try:
                check_formats([gpu.capability] if gpu is not None else [], planned.formats)
            except TargetError as e:
                refused = refused or e
                omitted.append(Omitted(planned.recipes, name_of(gpu), e.message.removeprefix("gpu: ")))
                continue
            plans.append(_plan(planned, gpu, rooms[name_of(gpu)], fitted, make))
    if not plans and refused is not None:
        raise refused
    if not any(p.fits for p in plans):
        raise _no_room(model, plans, fitted, shares)
    plans = [p if p.fits else replace(p, advice=_advice(p, model, plans, fitted, shares)) for p in plans]
    sections = tuple(DeviceSection.of(gpu, rooms[name_of(gpu)], shares, load) for gpu in devices)
    return PlanResult.of(model.info, fitted, sections, plans, omitted)


def planned_model(
    source: str | Path, recipes: Sequence[str | Path], targets: Sequence[str] = (), progress: Progress = silent
) -> PlannedModel:
    """Returns the programs of a bundle, or those that recipes would make of a model.

    Args:
        source: a bundle's folder; or a model's folder, of which config.json is enough, a GGUF file, or a Hub id.
        recipes: the names or TOML files of the recipes for a model; none for all built-in ones, and for a bundle.
        targets: the targets whose programs are made of a model; none for the target of this machine. See ``target_on``.
        progress: called with the stages of an export.

    Raises:
        BundleError: the bundle has no lowered program, or recipes are named for a bundle.
        RequestError: the bundle's model computes whole texts.
        SourceError, UnsupportedModelError, RecipeError, MissingDependencyError: as for an export.
    """
    if (Path(source) / MANIFEST_PATH).is_file():
        return _of_bundle(Bundle.open(source), recipes)
    chosen = [load_recipe(name) for name in recipes] or list_recipes()
    listed = check_named(source)
    loading(progress)
    with MissingDependencyError.of_export("planning for a model that wasn't exported yet"):
        from .model_programs import programs_of_model
    return PlannedModel(*programs_of_model(source, chosen, progress, targets or (target_on(gpu=False),), listed))


def _of_bundle(bundle: Bundle, recipes: Sequence[str | Path]) -> PlannedModel:
    if recipes:
        raise BundleError(
            f"{bundle.path} is a bundle, which has the recipe that it was exported with",
            hint="Leave --recipe out, or pass the model that it was made from.",
        )
    bundle.check_generates("plan")
    on_gpus, on_this = target_on(gpu=True), target_on(gpu=False)
    here = [name for name in bundle.programs if name != on_gpus]
    names = [on_this] if on_this in here else here[:1]
    names += [on_gpus] if on_gpus in bundle.programs else []
    if not names:
        there = ", ".join(sorted(bundle.targets)) or "none"
        raise BundleError(
            f"{bundle.path}: none of the bundle's targets ({there}) has a lowered program, which plans are made from",
            hint=f"Export the model with --target {on_this} as well, or plan for the model itself.",
        )
    recipe = str(bundle.manifest.recipe.get("name") or "")
    planned = []
    for name in names:
        program, planning = bundle.programs[name], planning_of(name)
        formats = (planning.formats if planning is not None else stored_formats)(program)
        planned.append(PlannedProgram((recipe,), program, name, formats))
    return PlannedModel(bundle.model, tuple(planned))


def name_of(gpu: Gpu | None) -> str:
    """Returns the name of a device; None is this machine's processor."""
    return PROCESSOR if gpu is None else gpu.name


def processes_waiting() -> float:
    """Returns the load average of the last minute per core, running processes included; 0 if the system has none."""
    try:
        return os.getloadavg()[0] / available_threads()
    except OSError:
        return 0.0


def room_of(gpu: Gpu | None, options: PlanOptions, shares: Shares) -> int:
    """Returns the bytes of a device's memory for weights, caches and the values of a step."""
    if options.memory is not None:
        return options.memory
    return free_memory() if gpu is None else int(gpu.memory * shares.memory)


def _omitted(model: PlannedModel, devices: Sequence[Gpu | None]) -> list[Omitted]:
    """Returns the recipes without a program: once if they have none on any device, otherwise for each device."""
    of_each = [
        (Omitted(p.recipes, None, p.omitted), name_of(gpu))
        for gpu in devices
        for p in model.programs_on(gpu=gpu is not None)
        if p.program is None
    ]
    on = {one: [name for other, name in of_each if other == one] for one, _ in of_each}
    return [
        one if len(names) == len(devices) else replace(one, device=name)
        for one, names in on.items()
        for name in (names if len(names) < len(devices) else names[:1])
    ]


MakeModel = Callable[[PlannedProgram, Gpu | None], StepModel]


def model_maker(options: PlanOptions, shares: Shares, context_length: int, progress: Progress) -> MakeModel:
    """Returns a function that makes the model of a program's steps on a device.

    The costs of a program's steps are counted once for all devices.

    Args:
        options, shares: of the plan.
        context_length: tokens of the model's context.
        progress: called while kernels are timed.
    """
    counted: dict[int, CountedSteps] = {}

    def make(planned: PlannedProgram, gpu: Gpu | None) -> StepModel:
        assert planned.program is not None
        if id(planned.program) not in counted:
            counted[id(planned.program)] = CountedSteps(planned.program)
        steps = counted[id(planned.program)]
        runs_it = target_on(gpu=gpu is not None)
        planning = planning_of(runs_it)
        assert planning is not None, "it was chosen for that"
        own_program = planned.target == runs_it
        engine = partial(engine_seconds, planned.program.cache_groups)
        request = PlannedSteps(steps, own_program, context_length, engine)
        return planning.model(request, Device(gpu, shares, options.threads), progress)

    return make


@dataclass(frozen=True)
class Memory:
    """The memory that a program needs on a device, in bytes.

    Attributes:
        program: the lowered program.
        target: the name of its target.
    """

    program: LoweredProgram
    target: str

    @property
    def weights(self) -> int:
        """The bytes of all weights."""
        return sum(map(stored_bytes, self.program.weights))

    def workspace(self, requests: int, prompt: int, context: int) -> int:
        """Returns the bytes of the largest step: intermediate values with logits, and scratch of attention over long
        contexts.

        Args:
            requests: requests that run at a time.
            prompt: tokens of a prompt.
            context: tokens of each request.
        """
        tokens = requests + min(prompt, CHUNK)
        planning = planning_of(self.target)
        scratch = planning.scratch(self.program, requests, context) if planning is not None else 0
        return self.program.arena_bytes.evaluate(tokens, requests, requests) + scratch

    def cache(self, tokens: int, requests: int = 1) -> int:
        """Returns the bytes of the caches of ``requests`` requests of ``tokens`` tokens each."""
        groups = self.program.cache_groups
        block = pool_unit(groups)
        whole = -(-tokens // block) * block
        return bytes_for(groups, requests * whole, enough_for_windows(groups, requests, CHUNK))

    @property
    def kv_per_token(self) -> int:
        """The bytes of keys and values of a token, without a second cache of the ends of requests."""
        return token_bytes(self.program.cache_groups)

    @property
    def states_per_request(self) -> int:
        """The bytes of a request's recurrent states, and the same again for its snapshots."""
        fixed = [group for group in self.program.cache_groups if kind_of(group).fixed]
        return bytes_for(fixed, 0, enough_for_windows(fixed, 1, CHUNK))

    def needed(self, requests: int, context: int, prompt: int) -> int:
        """Returns all bytes for ``requests`` requests that have ``context`` tokens each; ``prompt`` is the length of a
        prompt.
        """
        return self.weights + self.workspace(requests, prompt, context) + self.cache(context, requests)


def most_that(most: int, holds: Callable[[int], bool]) -> int:
    """Returns the largest number up to ``most`` for which ``holds`` returns True; 0 if there is none.

    If it holds for a number, it must hold for every smaller one.
    """
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low


def _plan(planned: PlannedProgram, gpu: Gpu | None, room: int, options: PlanOptions, make: MakeModel) -> DevicePlan:
    assert planned.program is not None and options.context is not None and options.prompt is not None
    context, prompt = options.context, options.prompt
    memory = Memory(planned.program, planned.target)
    most = min(MOST_REQUESTS, most_requests(planned.program.cache_groups))
    requests = most_that(most, lambda n: memory.needed(n, context, prompt) <= room)
    block = pool_unit(planned.program.cache_groups)
    longest = most_that(1 << 20, lambda n: memory.needed(1, n * block, n * block) <= room) * block
    device_plan = DevicePlan(
        device=name_of(gpu),
        target=planned.target,
        recipes=planned.recipes,
        fits=requests > 0,
        room=room,
        weights=memory.weights,
        kv_per_token=memory.kv_per_token,
        states_per_request=memory.states_per_request,
        workspace=memory.workspace(1, prompt, context),
        needed=memory.needed(1, context, prompt),
        most_requests=requests,
        most_tokens=longest,
    )
    if not device_plan.fits:
        return device_plan
    model = make(planned, gpu)

    def tpot(batch: int) -> float:
        return model.seconds(StepSizes((1,) * batch, (context,) * batch))

    def ttft(batch: int) -> float:
        return first_token_seconds(model, prompt, batch - 1, context)

    def speed(batch: int) -> BatchSpeed:
        step = tpot(batch)
        return BatchSpeed(batch, ttft(batch), step, batch / step)

    def bound(batch: int) -> str:
        return model.bound(StepSizes((1,) * batch, (context,) * batch))

    largest, limit = largest_batch(requests, most, options, tpot, ttft)
    return replace(
        device_plan,
        speeds=tuple(
            replace(speed(batch), bound=bound(batch)) if batch <= requests else BatchSpeed(batch)
            for batch in options.batches
        ),
        largest=speed(largest) if largest else None,
        largest_limit=limit,
        steps=_steps(model, context),
    )


def largest_batch(
    requests: int, most: int, options: PlanOptions, tpot: Callable[[int], float], ttft: Callable[[int], float]
) -> tuple[int, str]:
    """Returns the largest number of requests at a time that meets the goals, and the limit of a larger one.

    Args:
        requests: the largest number that fits into memory, of at most ``most``.
        most: the largest number that is planned.
        options: the options with the goals.
        tpot, ttft: the seconds of each token, and to the first one, by the number of requests at a time.

    Returns:
        the number, 0 if none meets the goals; and "memory", "tpot", "ttft", or "requests" for ``most``.
    """

    def missed(batch: int) -> str:
        for name, goal, seconds in (("tpot", options.tpot, tpot), ("ttft", options.ttft, ttft)):
            if goal is not None and seconds(batch) > goal:
                return name
        return ""

    largest = most_that(requests, lambda n: not missed(n))
    if largest < requests:
        return largest, missed(largest + 1)
    return largest, "memory" if requests < most else "requests"


def _steps(model: StepModel, context: int) -> tuple[StepTime, ...]:
    """Returns the times of steps of some sizes: only decoding, only prompts, and both."""
    times, contexts = [], sorted({min(_STEP_CONTEXT, context), context})
    for rows in (0, *_STEP_ROWS):
        for prompt in (0, *_STEP_PROMPTS):
            for tokens in contexts if rows else (0,):
                if rows or prompt:
                    read = min(prompt, context)
                    sizes = StepSizes((1,) * rows + (read,) * bool(read), (tokens,) * rows + (read,) * bool(read))
                    times.append(StepTime(rows, read, tokens, model.seconds(sizes)))
    return tuple(times)


def first_token_seconds(model: StepModel, prompt: int, others: int, context: int) -> float:
    """Predicts the time to the first token of a prompt that is read in chunks.

    Args:
        model: the model of the program's steps.
        prompt: tokens of the prompt.
        others: requests that get a token in each of these steps.
        context: tokens of each of these requests.
    """
    seconds, done = 0.0, 0
    while done < prompt:
        chunk = min(CHUNK, prompt - done)
        done += chunk
        seconds += model.seconds(StepSizes((*(1,) * others, chunk), (*(context,) * others, done)))
    return seconds


def _advice(
    one: DevicePlan, model: PlannedModel, plans: Sequence[DevicePlan], options: PlanOptions, shares: Shares
) -> str:
    """Returns suggestions for a plan that doesn't fit: recipes, lengths of requests, and devices with which it
    would.
    """
    assert options.context is not None and options.prompt is not None
    suggestions = []
    if smaller := [p for p in plans if p.device == one.device and p.fits]:
        suggestions.append(f"recipe {max(smaller, key=lambda p: p.weights).recipes[0]}")  # nearest to the source
    if one.most_tokens:
        suggestions.append(f"requests of {one.most_tokens:,} tokens (--context {one.most_tokens})")
    (program,) = (p for p in model.programs if (p.recipes, p.target) == (one.recipes, one.target))
    assert program.program is not None
    memory = Memory(program.program, program.target)
    needed = memory.needed(1, options.context, options.prompt)
    if gpus := [gpu.name for gpu in known_gpus() if gpu.memory * shares.memory >= needed]:
        suggestions.append(f"this on {_or(gpus)}")
    return (
        f"What would fit: {'; '.join(suggestions)}." if suggestions else "The model fits on none of the known devices."
    )


def _or(names: Sequence[str]) -> str:
    return " or ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))


def _no_room(model: PlannedModel, plans: Sequence[DevicePlan], options: PlanOptions, shares: Shares) -> CapacityError:
    """Returns the error that no plan fits. It is about the recipe that comes closest to fitting."""
    if not plans:
        why = "; ".join(f"{', '.join(p.recipes)}: {p.omitted}" for p in model.programs)
        return CapacityError(
            f"{model.info.name}: nothing can be planned: {why}", hint="Export it, and plan the bundle."
        )
    best = max(plans, key=lambda p: p.room - p.needed)
    smaller = "" if len(model.programs) > 1 else " A recipe of fewer bits takes less: int8 has 8, int4 4.5."
    return CapacityError(
        f"{model.info.name} doesn't fit on {_or(list(dict.fromkeys(p.device for p in plans)))}: with recipe "
        f"{best.recipes[0]}, weights of {format_bytes(best.weights)} and a request of {options.context:,} tokens need "
        f"{format_bytes(best.needed)}, and {format_bytes(best.room)} may be used",
        hint=_advice(best, model, plans, options, shares) + smaller,
    )
