"""Runs a scenario: an engine and its loop, on an executor, a disk and a clock that are simulated, under its clients.

Everything happens on one thread, in an order that the scenario decides. What must hold:

1. Each request gets what ``reference`` says, whatever else runs; aborted ones a beginning of it. A request ends with an
   error only if it would alone, or if a fault of the scenario allows that.
2. All end, and all blocks are free then.
3. ``invariants`` and the executor's own checks hold at every step.
4. A folder of ``save_prefix`` and ``load_prefix`` holds blocks of these calls alone.
5. Where several steps may be in flight and enough requests decode, most steps begin while another runs.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from enginewright.runtime.bundle.buckets import BucketPlan
from enginewright.runtime.engine.draft_model import DraftModel
from enginewright.runtime.engine.engine import Engine
from enginewright.runtime.engine.engine_loop import EngineLoop
from enginewright.runtime.engine.prefixes import load_prefix, open_host_tier, save_prefix
from enginewright.runtime.executors.base import Executor
from enginewright.runtime.executors.static_shapes import StaticShapes, padding_blocks
from enginewright.runtime.kv_cache.disk_tier import DiskTier
from enginewright.runtime.requests.block_keys import Namespace
from enginewright.runtime.requests.lookup import ForcedTokens, OwnText, PastAnswers
from enginewright.runtime.requests.outputs import StreamPiece
from enginewright.runtime.requests.request import BeamSearch, Generation, PromptRequest, Request
from enginewright.runtime.requests.request_options import RequestOptions
from enginewright.runtime.requests.sampling import SamplingParams
from enginewright.runtime.scheduler.limits import SchedulerConfig
from enginewright.runtime.scheduler.options import Scheduling
from enginewright.runtime.shared.contracts import STATE, STATE_TOKENS, CacheGroup, ExecutorCaps
from enginewright.runtime.shared.errors import CapacityError, EnginewrightError, OverloadError, RequestError
from enginewright.runtime.tasks.base import Rows

from . import invariants
from .disk import Folder, SimulatedStore
from .executor import Clock, SimulatedExecutor, Submitted, ViolationError
from .grammars import form, grammar, simulated_grammars
from .model import END, RECURRENT, VOCAB, Model, mix
from .reference import Answer, answer
from .scenario import SCHEDULING, Ask, Scenario
from .troubles import HELPERS, plant

PLAN = BucketPlan.from_sizes((4, 16, 64), (1, 2, 4), 4)
LEAST_OVERLAP = 0.5
"""The share of steps that begin while another is in flight, where enough requests decode; of 12 steps or more."""
_EVERY = 16
"""Ticks between two looks at all blocks."""


@dataclass
class Outcome:
    """The result of a scenario.

    Attributes:
        failures: violated invariants; empty if there are none.
        digest: a checksum of all steps: two runs of a scenario have the same.
        counts: event -> how often it happened, which shows what scenarios cover.
    """

    failures: list[str] = field(default_factory=list)
    digest: int = 0
    counts: Counter[str] = field(default_factory=Counter)


class _Loop(EngineLoop):
    """The engine's loop without its thread: the world calls what the thread would."""

    idle_seconds = 0.0

    def _post(self, action: Callable[[], None]) -> None:
        self._inbox.append(action)

    def turn(self) -> bool:
        """Does what was asked for between steps, then a step; False if there was none to make."""
        if not self._take_inbox():
            return False
        self._step()
        return True


@dataclass(eq=False)
class _Client:
    """One request of an ``Ask``, and what its listener heard.

    Attributes:
        sample: which of the ask's samples it is.
        error: what the engine told all.
        refused: why it did not begin.
        rows: the outputs of its prompt, if it wants them.
        left: whether its client gave it up, or stopped listening.
        faults: how many faults of steps there were when it came.
    """

    ask: Ask
    request: Request
    sample: int = 0
    tokens: list[int] = field(default_factory=list)
    reason: str | None = None
    error: EnginewrightError | None = None
    refused: EnginewrightError | None = None
    left: bool = False
    pieces: int = 0
    faults: int = 0
    troubles: int = 0
    then: Callable[[], None] | None = None
    rows: Rows | None = None

    def listen(self, event: StreamPiece | EnginewrightError) -> None:
        """Its listener."""
        if self.left or self.ended:
            raise ViolationError("a listener is called after the end")
        if isinstance(event, EnginewrightError):
            self.error = event
            return
        self.pieces += 1
        if 0 <= self.ask.deaf < self.pieces:
            self.left = True
            raise ValueError("this client does not listen")
        self.tokens += event.token_ids
        self.reason = event.finish_reason
        if self.ended and self.then is not None:
            self.then()

    @property
    def ended(self) -> bool:
        return self.reason is not None or self.error is not None or self.refused is not None


class World:
    """The simulation of a scenario, as the module describes it."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario, self.setup = scenario, scenario.setup
        self.clock, self.outcome = Clock(), Outcome()
        self.counts = self.outcome.counts
        self.model = Model(mix(self.setup.seed), self.setup.habit)
        self.tick = 0
        self.clients: list[_Client] = []
        self.folders = [Folder(), Folder()]
        self.prefix_folder = Folder()
        self.faults: list[str] = []
        self.raised: list[str] = []
        self._submitted: Request | None = None
        self._begun = [0, 0]  # steps that began where others could be in flight, and of these those where one was
        self._mask_calls = 0
        self._numbers = 0  # of steps of engines that have died
        simulated_grammars().late = self._masks_are_late
        self._open()

    # The engine

    def _open(self) -> None:
        setup, scenario = self.setup, self.scenario
        groups = [
            CacheGroup(
                f"g{i}",
                (i,),
                kv_heads=1,
                key_head_size=1,
                value_head_size=1,
                block_size=STATE_TOKENS if window == RECURRENT else setup.block_size,
                **{"kind": STATE, "state_size": 1} if window == RECURRENT else {"window": window},
            )
            for i, window in enumerate(setup.all_windows)
        ]
        padding = padding_blocks(PLAN, groups) if setup.buckets else dict.fromkeys((g.name for g in groups), 0)
        blocks = {g.name: count for g, count in zip(groups, setup.all_blocks, strict=True)}
        caps = ExecutorCaps(
            ragged=setup.layout not in ("phases", "slots"),
            shared_blocks=setup.layout == "shared",
            kept_slots=setup.layout == "slots",
            verifies=setup.verifies and setup.layout not in ("phases", "slots"),
            in_flight=setup.in_flight,
            chains=setup.chains,
            most_runs=8 if setup.runs_seconds else 1,
            masks=setup.masks,
            owners=setup.owners,
            outputs=("hidden:0", "hidden:1"),
        )
        faults = {number - self._numbers: fault for number, fault in scenario.faults}
        self.executor = SimulatedExecutor(
            self.model,
            groups,
            {name: count + padding[name] for name, count in blocks.items()},
            caps,
            self.clock,
            self._seconds,
            waits=lambda number: setup.in_flight > 1 and mix(setup.seed * 77 + number) % 16 < setup.late,
            faults=faults,
            padding=blocks,
        )
        self.executor.faulted = self.faults
        self.executor.submitting = self._before_step
        outer: Executor = StaticShapes(self.executor, PLAN) if setup.buckets else self.executor
        config = SchedulerConfig(
            setup.max_requests,
            setup.prefill_tokens,
            setup.prefill_chunk or None,
            setup.prefix_cache,
            Scheduling(**SCHEDULING[setup.scheduling]) if setup.scheduling else None,
            setup.speculate and caps.verifies,
            runs_seconds=setup.runs_seconds,
        )
        self.draft_model = self._draft_model(groups, caps) if setup.draft and config.speculate else None
        models = () if self.draft_model is None else (self.draft_model,)
        proposers = (ForcedTokens(), OwnText(), PastAnswers(), *models)
        self.engine = Engine(outer, config, proposers, self.clock)
        self.cache = self.engine.scheduler.cache
        disk = None
        if setup.disk and self.cache.prefixes.tiered:
            disk = self._disk(self.prefix_folder, setup.seed + 5)
        self.cache.tier = disk
        if setup.host and self.cache.prefixes.tiered:
            least = sum(self.executor.copy_bytes(name) for name in self.executor.blocks)
            pools = sum(self.executor.copy_bytes(name) * blocks for name, blocks in self.executor.blocks.items())
            self.cache.tier = open_host_tier(self.executor, self.cache, least + int(pools * setup.host), disk)
        self.loop = _Loop(self.engine)
        plant(self.engine, scenario.troubles, self.raised)

    def _draft_model(self, groups: Sequence[CacheGroup], caps: ExecutorCaps) -> DraftModel:
        kinds = {
            "right": self.model,
            "mixed": replace(self.model, errs=4),
            "wrong": replace(self.model, salt=self.model.salt ^ 1),
        }
        small = SimulatedExecutor(
            kinds[self.setup.draft],
            groups,
            dict(zip((g.name for g in groups), self.setup.all_blocks, strict=True)),
            ExecutorCaps(shared_blocks=caps.shared_blocks, masks=True),
            self.clock,
            lambda rows, prompts, seen: 1e-5 + self._seconds(rows, prompts, seen) / 20,
        )
        return DraftModel(small, 4096, "draft", prefix_cache=self.setup.prefix_cache, clock=self.clock)

    def _disk(self, folder: Folder, seed: int) -> DiskTier:
        def took(seconds: float, tokens: int) -> None:
            self.clock.now += seconds
            self.counts["parts from disk"] += tokens < self.setup.block_size

        store = SimulatedStore(folder, seed, self.setup.disk_fails, self.setup.disk_seconds, took)
        return DiskTier(store, self.executor, self.cache.kinds.values(), self.setup.block_size)  # type: ignore[arg-type]

    def _seconds(self, rows: int, prompts: int, seen: int) -> float:
        fixed, row, prompt, context = self.setup.seconds
        self._noise = mix(self.setup.seed + int(self.clock.now * 1e6))
        factor = 1 + self.setup.noise * ((self._noise & 0xFFFF) / 0x8000 - 1)
        return max((fixed + row * rows + prompt * prompts + context * seen) * factor, 1e-7)

    def _masks_are_late(self) -> bool:
        self._mask_calls += 1
        return mix(self.setup.seed * 91 + self._mask_calls) % 16 < self.setup.late_masks

    # The run

    def run(self) -> Outcome:
        """Runs it to its end, or to the first failure."""
        asks = sorted(self.scenario.asks, key=lambda ask: ask.at)
        most = 200 + 6 * sum(len(ask.prompt) + ask.n * ask.beams * ask.new_tokens for ask in asks)
        aborts: list[tuple[int, _Client]] = []
        ticks = 0
        try:
            while True:
                while asks and asks[0].at <= self.tick:
                    for client in self._come(ask := asks.pop(0)):
                        if ask.abort >= 0:
                            aborts.append((self.tick + ask.abort, client))
                for at, client in [one for one in aborts if one[0] <= self.tick]:
                    aborts.remove((at, client))
                    self._leave(client)
                worked = self._turn()
                if not worked and not asks and not self.loop._inbox:
                    break
                if not worked and asks:
                    self.tick = max(self.tick, asks[0].at - 1)
                self.tick += 1
                ticks += 1
                if ticks > most:
                    self._fail(f"no end after {ticks} ticks: {self._state()}")
                    break
                if self.outcome.failures:
                    break
            if not self.outcome.failures:
                self._end()
        except ViolationError as e:
            self._fail(f"invariant: {e}")
        self._count()
        return self.outcome

    def _turn(self) -> bool:
        scheduler, executor = self.engine.scheduler, self.executor
        flows = self._flows()
        before, overlapped = executor.steps, executor.overlapped
        worked = self.loop.turn()
        if flows and executor.steps > before:
            self._begun[0] += 1
            self._begun[1] += executor.overlapped - overlapped
        if executor.dead:
            self._restart()
            return True
        self._take_failures()
        if scheduler.caps.chains:
            self.counts["ended in flight"] += any(r.finish_reason == "stop" for r in scheduler.queues.leaving)
        if worked:
            invariants.pending_copies(self.cache)
            if not self.tick % _EVERY:
                invariants.blocks(scheduler)
        return worked

    def _flows(self) -> bool:
        """Returns True if steps in flight could follow each other: as many requests decode as there may be steps, or
        some that can go on without the host.
        """
        scheduler = self.engine.scheduler
        caps = scheduler.caps
        if caps.in_flight == 1 or scheduler.waiting or self.setup.scheduling in ("classes", "strict"):
            return False
        running = [r for r in scheduler.running if not r.finished]
        if not all(r.remaining == 1 and r.search is None for r in running):
            return False
        if not caps.chains:
            return len(running) >= caps.in_flight
        return any(
            isinstance(r, Generation) and r.rules is None and r.max_tokens > r.output_length + 2 for r in running
        )

    def _restart(self) -> None:
        """Restarts as a supervisor does: the memory is gone, the folders remain, and the next requests are served."""
        self.counts["restarts"] += 1
        self._numbers += self.executor.steps
        self._take_failures()
        for client in self.clients:
            client.faults -= not client.ended
        self.loop.close()
        self._count_engine()
        self._open()

    def _take_failures(self) -> None:
        """An engine that has failed without a fault of the scenario is a failure."""
        for client in self.clients:
            if client.error is not None and len(self.faults) == client.faults:
                cause = client.error.__cause__
                shown = f"{type(cause).__name__}: {cause}" if cause is not None else str(client.error)
                self._fail(f"the engine failed: {shown}")
                return

    # Clients

    def _come(self, ask: Ask) -> list[_Client]:
        handler = {"load": self._load, "save": self._save, "delete": self._delete}.get(ask.kind, self._request)(ask)
        for client in handler:
            client.faults, client.troubles = len(self.faults), len(self.raised)
            self.clients.append(client)
            try:
                self.loop.submit(client.listen, client.request)
            except (CapacityError, RequestError) as e:
                client.refused = e
                self.counts["never fit"] += 1
        return handler

    def _leave(self, client: _Client) -> None:
        if not client.ended and not client.left:
            self.counts["aborts"] += 1
            client.left = True
            self.loop.abort(client.request)

    def _params(self, ask: Ask) -> SamplingParams:
        return SamplingParams(
            max_tokens=ask.new_tokens,
            temperature=ask.temperature,
            seed=ask.seed,
            num_beams=ask.beams,
            early_stopping=ask.early_stopping,  # type: ignore[arg-type]
            length_penalty=ask.length_penalty if ask.beams > 1 else 1.0,
            logprobs=None if ask.logprobs < 0 else ask.logprobs,
            prompt_logprobs=1 if ask.prompt_logprobs else None,
            min_tokens=ask.min_tokens,
            allowed_token_ids=ask.allowed,
            repetition_penalty=1.5 if ask.repetition else 1.0,
            frequency_penalty=0.5 if ask.frequency else 0.0,
            ignore_eos=ask.ignore_eos,
            speculate=ask.speculate,
            n=1,
        )

    def _request(self, ask: Ask) -> list[_Client]:
        priority = (ask.priority or None) if self.setup.scheduling else None
        common: dict[str, Any] = {"options": RequestOptions(ask.tenant, priority), "clock": self.clock}
        if self.setup.scheduling and ask.request_class:
            scheduling = Scheduling(**SCHEDULING[self.setup.scheduling])
            common["request_class"] = scheduling.class_named(ask.request_class)
        if ask.kind in ("score", "hidden"):
            rows = Rows(len(ask.prompt))
            output = "logits" if ask.kind == "score" else "hidden:1"
            return [_Client(ask, PromptRequest(ask.prompt, (output,), rows.take, **common), rows=rows)]
        params, generations = self._params(ask), []
        for sample in range(ask.n):
            request = Generation(
                ask.prompt,
                params,
                end_token_ids=(END,),
                bad_words=ask.bad_words,
                grammar=grammar(ask.form) if ask.form else None,
                sample=sample,
                **common,
            )
            if ask.beams > 1:
                BeamSearch.begin(request, VOCAB)
            generations.append(_Client(ask, request, sample))
        return generations

    def _of_prefix(self, ask: Ask) -> Generation:
        return Generation(
            ask.prompt, SamplingParams(max_tokens=1), options=RequestOptions(ask.tenant), clock=self.clock
        )

    def _load(self, ask: Ask) -> list[_Client]:
        def load() -> None:
            folder = self.folders[ask.folder]
            before = set(folder.records)
            disk = self._disk(folder, self.setup.seed + self.tick)
            count = load_prefix(self.cache, self._of_prefix(ask), disk)
            disk.close()
            self.counts["loads"] += count > 0
            if not set(folder.records) <= before:
                self._fail("load_prefix wrote to its folder")

        if self.cache.prefixes.tiered:
            self.loop._post(load)
        return []

    def _save(self, ask: Ask) -> list[_Client]:
        if not self.cache.prefixes.tiered:
            return []
        client = _Client(ask, self._of_prefix(ask))
        client.then = lambda: self.loop._post(partial(self._write, ask))
        return [client]

    def _write(self, ask: Ask) -> None:
        folder, size = self.folders[ask.folder], self.setup.block_size
        before = set(folder.records)
        disk = self._disk(folder, self.setup.seed + self.tick)
        self.counts["saves"] += save_prefix(self.cache, self._of_prefix(ask), disk) > 0
        disk.close()
        blocks = {ask.prompt[at : at + size] for at in range(0, len(ask.prompt), size)}
        for name, (namespace, tokens, _) in folder.records.items():
            begins = any(block[: len(tokens)] == tokens for block in blocks)
            if name not in before and (namespace != Namespace(ask.tenant) or not begins):
                self._fail("save_prefix wrote other blocks than its own")

    def _delete(self, ask: Ask) -> list[_Client]:
        self.loop._post(lambda: self._forget(ask))
        return []

    def _forget(self, ask: Ask) -> None:
        self.engine.scheduler.forget(ask.tenant or None)
        left = [of for of, _, _ in self.prefix_folder.records.values() if not ask.tenant or of.tenant == ask.tenant]
        if self.cache.tier is not None and left:
            self._fail("delete_prefixes left a record")

    # What must hold

    def _before_step(self, pending: Submitted) -> None:
        step, scheduler = pending.step, self.engine.scheduler
        pending.requests = [chunk.request for chunk in scheduler.chunks]
        digest = zlib.crc32(step.ids, zlib.crc32(step.kv_len, self.outcome.digest))
        for slots in step.slots.values():
            digest = zlib.crc32(slots, digest)
        self.outcome.digest = digest
        invariants.step(pending, scheduler)

    def _fail(self, message: str) -> None:
        self.outcome.failures.append(f"tick {self.tick}: {message}")

    def _state(self) -> str:
        scheduler = self.engine.scheduler
        return f"{len(scheduler.running)} run, {len(scheduler.waiting)} wait, {self.engine.steps_in_flight} in flight"

    def _end(self) -> None:
        """All requests have ended."""
        for client in self.clients:
            self._judge(client)
        scheduler = self.engine.scheduler
        if scheduler.running or scheduler.waiting or self.engine.steps_in_flight:
            self._fail(f"requests are left: {self._state()}")
        errors = {name: n for name, n in scheduler.counters.helper_errors.items() if name != "listener"}
        if errors and not self.scenario.troubles:
            self._fail(f"helpers failed: {errors}")
        invariants.all_free(scheduler)
        if self.draft_model is not None:
            invariants.nothing_held(self.draft_model.cache)
        submitted, overlapped = self._begun
        if submitted >= 12 and overlapped < LEAST_OVERLAP * submitted and not self.faults:
            self._fail(f"steps do not overlap: {overlapped} of {submitted} began while another was in flight")

    def _judge(self, client: _Client) -> None:
        ask, request = client.ask, client.request
        if client.refused is not None or ask.kind in ("load", "save", "delete"):
            return
        expected = answer(self.model, self.setup.all_windows, ask, client.sample, form)
        name = f"{ask.kind} of tick {ask.at}"
        if client.error is not None:
            self._judge_beginning(client, expected, name)
            return
        if client.left:
            self._judge_beginning(client, expected, name)
            return
        if client.reason is None:
            self._fail(f"{name} has no end")
            return
        if client.reason == "error" and (self._may_fail(client) or expected.reason != "error"):
            if not self._may_fail(client):
                cause = request.error.__cause__ if request.error is not None else None
                self._fail(f"{name} ended with {request.error}; {type(cause).__name__}: {cause}")
            self._judge_beginning(client, expected, name)
            return
        self._judge_whole(client, expected, name)

    def _may_fail(self, client: _Client) -> bool:
        error = client.request.error
        if isinstance(error, (OverloadError, RequestError)) and self.setup.scheduling == "strict":
            return not client.tokens
        if isinstance(error, CapacityError) and "full" in self.faults[client.faults :]:
            return True
        return any(HELPERS[one].ends for one in self.raised[client.troubles :])

    def _judge_beginning(self, client: _Client, expected: Answer, name: str) -> None:
        if client.ask.beams == 1 and tuple(client.tokens) != expected.tokens[: len(client.tokens)]:
            self._fail(f"{name} began {client.tokens}, alone {list(expected.tokens)}")

    def _judge_whole(self, client: _Client, expected: Answer, name: str) -> None:
        request = client.request
        if client.reason != expected.reason or tuple(client.tokens) != expected.tokens:
            self._fail(f"{name}: {client.tokens} ({client.reason}), alone {list(expected.tokens)} ({expected.reason})")
            return
        if expected.reason == "error":
            self.counts["not finite"] += 1
            return
        self.counts["finished"] += 1
        if client.rows is not None:
            ((output, values),) = client.rows.values.items()
            if values[:, 0].tolist() != [float(np.float32(one)) for one in expected.prompt]:
                self._fail(f"{name}: another output {output} than alone")
        elif isinstance(request, Generation):
            self._judge_logprobs(request, client.ask, expected, name)

    def _judge_logprobs(self, request: Generation, ask: Ask, expected: Answer, name: str) -> None:
        output = request.to_output()
        if output.logprobs is not None:
            logprobs = [one.logprob for one in output.logprobs]
            if logprobs != list(expected.logprobs):
                self._fail(f"{name}: log-probabilities {logprobs}, alone {list(expected.logprobs)}")
        if ask.beams > 1 and output.score != expected.score:
            self._fail(f"{name}: a score of {output.score}, alone {expected.score}")
        if ask.prompt_logprobs and output.prompt_logprobs is not None:
            scored = [None if one is None else one.logprob for one in output.prompt_logprobs[1:]]
            if scored != list(expected.prompt):
                self._fail(f"{name}: other log-probabilities of its prompt than alone")

    # What was covered

    def _count_engine(self) -> None:
        counts, scheduler = self.counts, self.engine.scheduler
        counts["steps"] += self.executor.steps
        counts["states that go on"] += self.executor.states_that_go_on
        counts["snapshots"] += self.executor.snapshots
        counts["overlapped"] += self.executor.overlapped
        counts["placed"] += self.executor.placed
        counts["runs again"] += self.executor.runs_again
        counts["preemptions"] += scheduler.preemptions
        counts["evictions"] += sum(pool.evictions for pool in scheduler.pools.values())
        use = scheduler.cache.use
        counts["prefix tokens"] += use.reused
        if scheduler.caps.chains:
            counts["preemptions of chains"] += scheduler.preemptions
            counts["prefix tokens of chains"] += use.reused
        counts["copied blocks"] += use.copied_blocks
        counts["tokens from disk"] += use.from_disk
        counts["tokens from main memory"] += use.from_host

    def _count(self) -> None:
        self._count_engine()
        counts = self.counts
        counts[f"profile {self.scenario.profile}"] += 1
        for fault in self.faults:
            counts[f"fault {fault}"] += 1
        for helper in self.raised:
            counts[f"raised {helper}"] += 1
        for client in self.clients:
            ask, request = client.ask, client.request
            counts["requests"] += 1
            if isinstance(request, Generation):
                counts["drafted"] += request.drafted
                counts["accepted"] += request.accepted
            counts["refused"] += isinstance(request.error, OverloadError)
            counts["beams"] += ask.beams > 1
            counts["guided"] += bool(ask.form)
            counts["guided beams"] += ask.beams > 1 and bool(ask.form)
            counts["samples"] += ask.n > 1
            counts[f"kind {ask.kind}"] += 1
            counts[f"scheduling {self.setup.scheduling or 'fcfs'}"] += 1


def run(scenario: Scenario) -> Outcome:
    """Runs a scenario."""
    return World(scenario).run()
