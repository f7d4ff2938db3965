"""Measures a bundle: prompts and decode steps through the engine, in rounds, with the machine's limits between them."""

from __future__ import annotations

import os
import platform
import time
from collections import defaultdict
from dataclasses import asdict, dataclass, field

from enginewright.optimizer.shared.resources import peak_rss_bytes, rss_bytes
from enginewright.optimizer.shared.storage import kind_of
from enginewright.plugins.native.processor import processor_name
from enginewright.plugins.native.step_profile import StepProfile, StepTotal
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.executors.open import choose_target, context_of
from enginewright.runtime.shared.errors import CapacityError, counted
from enginewright.runtime.shared.lowered_program import Step
from enginewright.runtime.shared.progress import Progress, ProgressEvent, silent
from enginewright.runtime.shared.step_costs import StepSizes, stored_bytes
from enginewright.runtime.shared.targets import MEASURED
from enginewright.runtime.shared.threads import available_threads

from .limits import LimitMeter, share_of
from .options import WARM_UP, BenchOptions, BenchPlan, plan
from .result import BenchResult, DecodeSpeed, Memory, Profile, ProfileLine, PromptSpeed, Spread
from .server import Server
from .speculation import check_speculation, measure_speculation

STAGE = "bench"
_WARM_PROMPT, _WARM_STEPS = 16, 4
_ROUNDS, _ROUNDS_OF_READERS = 3, 1


@dataclass
class _Times:
    """The times measured so far, in seconds: lists by prompt length, or by (batch, context) for decode steps.

    Attributes:
        omitted: prompt length, or (batch, context) -> the reason why it isn't measured.
    """

    first: defaultdict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    after: defaultdict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    steps: defaultdict[tuple[int, int], list[float]] = field(default_factory=lambda: defaultdict(list))
    omitted: dict[int | tuple[int, int], str] = field(default_factory=dict)


def bench(bundle: Bundle, options: BenchOptions = BenchOptions(), progress: Progress = silent) -> BenchResult:
    """Measures prompts and decode steps of one target, its memory, and the limits of the machine.

    Every round goes through all sizes once, so that a slower machine affects all of them.

    Args:
        bundle: the bundle.
        options: the sizes to measure.
        progress: called before each measurement.

    Raises:
        RequestError: a size is out of range, or longer than the bundle's context; or the model is an encoder, which has
            no decode steps.
        BundleError, CapacityError, MissingDependencyError: the bundle can't be opened.
    """
    began = time.perf_counter()
    before = rss_bytes()
    bundle.check_generates("bench")
    target = choose_target(bundle, options.target)
    if options.speculate is not None:
        check_speculation(bundle, target, options.speculate)
    sizes = plan(options, context_of(bundle, None, target))
    server = Server(bundle, target, sizes, threads=options.threads, partition=options.partition, memory=options.memory)
    try:
        rounds = options.rounds or (_ROUNDS_OF_READERS if server.reads_prompts else _ROUNDS)
        meter = None
        if server.cpu is not None:
            program = server.cpu.program
            meter = LimitMeter(program.lowered, program.isa, program.threads)
        cases = len(sizes.prompts) + len(sizes.batches) * len(sizes.contexts)
        teller = _Teller(progress, _parts(options, rounds, cases, profiled=meter is not None))
        server.prompt(min(_WARM_PROMPT, sizes.context - _WARM_STEPS - 1), _WARM_STEPS)
        times = _Times()
        peak = 0
        for _ in range(rounds):
            _round(server, sizes, times, teller)
            peak = peak or peak_rss_bytes()  # what is measured of the machine takes memory too
            teller("limits of the machine")
            if meter is not None:
                _measure(meter)
        profiles = _profiles(server, sizes, times, meter, teller) if options.profile and meter is not None else ()
        speculation = None
        if options.speculate is not None:
            teller("texts")
            speculation = measure_speculation(bundle, options.speculate, rounds, options.threads)
        teller.end()
        weights = bundle.program(MEASURED).weights if meter is not None else ()
        return BenchResult(
            model=bundle.model.name,
            recipe=str(bundle.manifest.recipe.get("name", "")),
            target=target,
            engine=server.executor.describe(),
            machine=machine_facts(),
            options=asdict(sizes) | {"rounds": rounds},
            seconds=time.perf_counter() - began,
            memory=Memory(before, peak, sum(stored_bytes(use) for use in weights), server.cache_bytes),
            limits=meter.limits() if meter is not None else None,
            prompts=tuple(_prompt_speed(n, times, meter) for n in sizes.prompts),
            decodes=tuple(_decode_speed(b, c, sizes, times, meter) for c in sizes.contexts for b in sizes.batches),
            profiles=profiles,
            speculation=speculation,
        )
    finally:
        server.close()


def _parts(options: BenchOptions, rounds: int, cases: int, *, profiled: bool) -> int:
    """Returns the number of measurements, for the progress bar; each round measures the machine's limits too."""
    more = (cases if options.profile and profiled else 0) + (options.speculate is not None)
    return rounds * (cases + 1) + more


class _Teller:
    """Reports progress: each call announces the begin of one of ``total`` measurements."""

    def __init__(self, progress: Progress, total: int) -> None:
        self._progress, self._total, self._done = progress, total, 0

    def __call__(self, detail: str) -> None:
        self._progress(ProgressEvent(STAGE, self._done, self._total, detail))
        self._done += 1

    def end(self) -> None:
        self._progress(ProgressEvent(STAGE, self._total, self._total))


def _round(server: Server, sizes: BenchPlan, times: _Times, teller: _Teller) -> None:
    for tokens in sizes.prompts:
        teller(_prompt_name(tokens))
        if tokens in times.omitted:
            continue
        try:
            first, after = server.prompt(tokens, sizes.steps)
        except CapacityError as e:
            times.omitted[tokens] = e.message
            continue
        times.first[tokens].append(first)
        times.after[tokens] += after
    for context in sizes.contexts:
        for batch in sizes.batches:
            teller(_decode_name(batch, context))
            if (batch, context) in times.omitted:
                continue
            try:
                times.steps[batch, context] += server.decode(batch, context, sizes.steps)
            except CapacityError as e:
                times.omitted[batch, context] = e.message


def _prompt_name(tokens: int) -> str:
    return f"prompt of {tokens:,}"


def _decode_name(batch: int, context: int) -> str:
    return f"decode, {counted(batch, 'request')} at {context:,} tokens"


def _measure(meter: LimitMeter) -> None:
    try:
        meter.measure()
    except MemoryError as e:
        raise CapacityError(
            f"no {meter.working_set:,} bytes of memory to measure the bandwidth with", hint="Measure shorter contexts."
        ) from e


def _prompt_speed(tokens: int, times: _Times, meter: LimitMeter | None) -> PromptSpeed:
    if (why := times.omitted.get(tokens)) is not None:
        return PromptSpeed(tokens, omitted=why)
    first, after = Spread.from_values(times.first[tokens]), Spread.from_values(times.after[tokens])
    limit = None if meter is None else meter.seconds(StepSizes((tokens,), (tokens,)))
    return PromptSpeed(tokens, first, after, tokens / first.median, limit, share_of(limit, first.median))


def _decode_speed(batch: int, context: int, sizes: BenchPlan, times: _Times, meter: LimitMeter | None) -> DecodeSpeed:
    if (why := times.omitted.get((batch, context))) is not None:
        return DecodeSpeed(batch, context, omitted=why)
    step = Spread.from_values(times.steps[batch, context])
    speed = DecodeSpeed(batch, context, step, batch / step.median)
    if meter is None:
        return speed
    middle = _decode_sizes(batch, context, sizes)
    limit = meter.seconds(middle)
    moved = meter.cost(middle).memory / step.median
    return DecodeSpeed(batch, context, step, batch / step.median, moved, limit, share_of(limit, step.median))


def _decode_sizes(batch: int, context: int, sizes: BenchPlan) -> StepSizes:
    """Returns the sizes of the middle one of the timed decode steps of ``batch`` requests with ``context`` tokens
    each.
    """
    return StepSizes((1,) * batch, (context + 1 + WARM_UP + sizes.steps // 2,) * batch)


def _profiles(
    server: Server, sizes: BenchPlan, times: _Times, meter: LimitMeter, teller: _Teller
) -> tuple[Profile, ...]:
    """Returns a profile of each size.

    They run apart from the timed steps, as a profile reads the clock twice for each op.
    """
    profiles: list[Profile] = []
    for tokens in sizes.prompts:
        teller(f"profile: {_prompt_name(tokens)}")
        if tokens in times.omitted:
            continue
        server.profile_into(profile := StepProfile())
        server.prompt(tokens, 0)
        server.profile_into(None)
        profiles.append(profile_of(_prompt_name(tokens), profile, 1, meter))
    for context in sizes.contexts:
        for batch in sizes.batches:
            teller(f"profile: {_decode_name(batch, context)}")
            if (batch, context) in times.omitted:
                continue
            server.profile_into(profile := StepProfile())
            server.decode(batch, context, sizes.steps)
            server.profile_into(None)
            profiles.append(profile_of(_decode_name(batch, context), profile, profile.runs, meter))
    return tuple(profiles)


def profile_of(name: str, profile: StepProfile, times: int, meter: LimitMeter) -> Profile:
    """Returns the profile of one size, by op, and by kind of module over all layers.

    Args:
        name: the name of the size, for the profile.
        profile: the summed times of ``times`` runs, of which the mean is taken.
        times: the number of runs.
        meter: the machine's limits.
    """

    def lines(totals: list[StepTotal]) -> tuple[ProfileLine, ...]:
        return tuple(_profile_line(total, profile, times, meter) for total in totals)

    def module(step: Step) -> str:
        return f"{step.op} {kind_of(step.where)}".strip()

    around = (profile.seconds - profile.kernels) / times
    seconds = profile.seconds / times
    return Profile(name, profile.runs, seconds, around, lines(profile.by_op()), lines(profile.totals(module)))


def _profile_line(total: StepTotal, profile: StepProfile, times: int, meter: LimitMeter) -> ProfileLine:
    cost, seconds = total.cost, total.seconds / times
    limit = meter.limit_of(cost) / times or None
    return ProfileLine(
        name=total.key,
        calls=total.calls // times,
        seconds=seconds,
        part=total.seconds / profile.kernels if profile.kernels else 0.0,
        weights=cost.weights // times,
        kv=(cost.kv_read + cost.kv_written) // times,
        activations=(cost.activations_read + cost.activations_written) // times,
        products=cost.multiply_adds // times,
        limit_seconds=limit,
        share=share_of(limit, seconds),
    )


def machine_facts() -> dict[str, str | int]:
    """Returns the processor, the number of usable cores, memory, system and Python version; not the machine's name."""
    return {
        "processor": processor_name(),
        "cores": available_threads(),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }
