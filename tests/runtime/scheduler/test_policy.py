"""The order, pauses and refusals of requests that aren't served in the order of arrival."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from enginewright.runtime.requests.request import Generation, Request
from enginewright.runtime.requests.request_options import RequestOptions
from enginewright.runtime.requests.sampling import SamplingParams
from enginewright.runtime.scheduler.base import Batch
from enginewright.runtime.scheduler.continuous import ContinuousScheduler
from enginewright.runtime.scheduler.limits import SchedulerConfig
from enginewright.runtime.scheduler.options import Scheduling
from enginewright.runtime.scheduler.step_times import StepSize
from enginewright.runtime.scheduler.waiting import LEAST_TENANTS, Shares
from enginewright.runtime.shared.contracts import CacheGroup, ExecutorCaps, StepOutput
from enginewright.runtime.shared.errors import OverloadError, RequestError

GROUP = CacheGroup("g0", (0,), 1, 1, 1, block_size=4)
CLASSES = {"chat": {"ttft": 1.0, "tpot": "20ms"}, "slow": {"ttft": 10}, "batch": {"priority": 3}}


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Run:
    """A scheduler whose steps take what ``seconds`` says."""

    def __init__(
        self,
        scheduling: Scheduling | None,
        blocks: int = 4096,
        caps: ExecutorCaps = ExecutorCaps(),
        seconds: Callable[[StepSize], float] = lambda size: 1e-3 + 1e-3 * size.rows + 1e-4 * size.prompt,
        groups: int = 1,
        **config: Any,
    ) -> None:
        self.clock, self.seconds, self.scheduling = Clock(), seconds, scheduling
        cache_groups = [
            GROUP.model_copy(update={"name": f"g{i}", "layers": (i,), "block_size": 4 << i}) for i in range(groups)
        ]
        config = {"prefill_tokens": 64, **config}
        self.scheduler = ContinuousScheduler(
            SchedulerConfig(scheduling=scheduling, **config),
            caps,
            cache_groups,
            {g.name: blocks for g in cache_groups},
            self.clock,
        )
        self.ended: list[Request] = []

    def add(self, prompt: int = 4, new: int = 4, name: str | None = None, **fields: Any) -> Request:
        """A request, queued."""
        of = {} if self.scheduling is None else {"request_class": self.scheduling.class_named(name)}
        generation = Generation(
            range(prompt), SamplingParams(max_tokens=new), clock=self.clock, options=RequestOptions(**fields), **of
        )
        self.scheduler.add(generation)
        return generation

    def step(self) -> Batch:
        """One step."""
        batch = self.scheduler.schedule()
        self.clock.now += self.seconds(StepSize.from_chunks(batch.chunks))
        self.scheduler.prepare_next(batch)
        output = StepOutput(tokens=np.zeros(len(batch.step.rows), np.int32))
        self.ended += [r for r in self.scheduler.commit(batch, output) if r.finished]
        return batch

    def finish(self) -> list[Request]:
        """All steps; the requests as they ended."""
        while self.scheduler.has_work():
            self.step()
        return self.ended

    def warm(self) -> Run:
        """Until the costs of steps are known."""
        for rows in (1, 3, 9):
            for _ in range(rows):
                self.add(30 * rows, 8, priority=0)
            self.finish()
        assert self.scheduler.times.known
        self.ended.clear()
        return self


def test_lower_priorities_go_first_and_equal_ones_as_they_come() -> None:
    run = Run(Scheduling(), max_requests=1)
    requests = [run.add(priority=p) for p in (2, 0, 1, 0)]
    assert run.finish() == [requests[1], requests[3], requests[2], requests[0]]


def test_who_is_more_urgent_takes_the_place_of_one_that_runs() -> None:
    run = Run(Scheduling(), max_requests=2)
    running = [run.add(new=20, priority=p) for p in (1, 2)]
    run.step()
    same = run.add(priority=2)
    run.step()
    assert run.scheduler.running == running and run.scheduler.preemptions == 0  # the same priority has no right to it
    urgent = run.add(priority=0)
    run.step()
    assert run.scheduler.running == [urgent, running[0]] and run.scheduler.preemptions == 1
    assert [r.started is None for r in (*running, same, urgent)] == [False, False, True, False]
    assert run.finish()[0] is urgent
    assert len(run.ended) == 4 and all(r.output_length == r.max_tokens for r in run.ended)


def test_who_is_more_urgent_takes_the_blocks_of_one_that_runs() -> None:
    run = Run(Scheduling(), blocks=8)  # 32 tokens
    late = run.add(24, 4, priority=1)
    run.step()
    urgent = run.add(12, 4, priority=0)
    run.finish()
    assert run.ended == [urgent, late] and run.scheduler.preemptions == 1


def test_the_earliest_deadline_goes_first_and_a_missed_one_is_replaced() -> None:
    run = Run(Scheduling(classes=CLASSES, refuse=False), max_requests=1)
    slow, chat = run.add(name="slow"), run.add(name="chat")
    nothing = run.add()  # within a minute
    run.clock.now += 1.5
    new = run.add(name="chat")
    assert run.finish() == [chat, new, slow, nothing]
    assert chat.rank[1] == pytest.approx(102)  # twice its time from when it came


def test_a_prompt_of_an_earlier_deadline_goes_before_one_that_is_read_already() -> None:
    run = Run(Scheduling(classes=CLASSES))
    run.add(400, name="slow")
    run.step()
    chat = run.add(40, name="chat")
    batch = run.step()
    assert [(c.request is chat, c.count) for c in batch.chunks] == [(True, 40), (False, 24)]


def test_prompts_get_what_the_time_per_token_leaves() -> None:
    """20 ms for each token; a step of 10 requests takes 11 ms, and each prompt token 0.1 ms."""
    run = Run(Scheduling(classes=CLASSES), prefill_tokens=512).warm()
    chats = [run.add(4, 60, name="chat") for _ in range(10)]
    for _ in range(3):
        run.step()
    run.add(2000, 1)
    counts = [sum(c.count for c in run.step().chunks if c.count > 1) for _ in range(12)]
    assert 60 < counts[-1] < 120 < counts[0], "the first takes what they were ahead; then 9 ms, less a margin"
    run.finish()
    for chat in chats:
        assert chat.token_times is not None
        assert (chat.token_times[1] - chat.token_times[0]) / 59 <= 0.02


def test_first_come_first_served_lets_a_prompt_delay_them() -> None:
    run = Run(None, prefill_tokens=512)
    chats = [run.add(4, 10) for _ in range(10)]
    run.add(2000, 1)
    run.finish()
    assert chats[0].token_times is not None
    assert (chats[0].token_times[1] - chats[0].token_times[0]) / 9 > 0.02


def test_who_has_no_time_per_token_pauses_for_those_that_have() -> None:
    run = Run(Scheduling(classes=CLASSES), max_requests=40).warm()
    others = [run.add(4, 100, name="batch") for _ in range(30)]
    for _ in range(4):
        run.step()
    assert len(run.step().chunks) == 30
    chat = run.add(4, 50, name="chat")
    run.step()
    rows = [len(run.step().chunks) for _ in range(20)]
    assert 13 <= rows[-1] <= 16, "80 % of 20 ms"
    assert all(other.tables for other in others), "they keep their blocks"
    run.finish()
    assert chat.token_times is not None and (chat.token_times[1] - chat.token_times[0]) / 49 <= 0.02
    assert all(other.output_length == 100 for other in others)


def test_no_more_run_than_their_time_per_token_allows() -> None:
    run = Run(Scheduling(classes=CLASSES, refuse=False), max_requests=40).warm()
    chats = [run.add(4, 50, name="chat") for _ in range(30)]
    seen = []
    while run.scheduler.has_work():
        seen.append(len(run.step().chunks))
    assert 13 <= max(seen) <= 16
    times = [c.token_times for c in chats if c.token_times is not None]
    assert len(times) == 30 and all((last - first) / 49 <= 0.02 for first, last in times)


def test_a_deadline_that_can_not_be_met_is_refused_at_once() -> None:
    run = Run(Scheduling(classes=CLASSES), max_requests=4, prefill_tokens=64).warm()
    with pytest.raises(RequestError, match=r"request_class: 'chat' has a ttft of 1000 ms, .* about 1[0-9]{3} ms even"):
        run.add(12_000, name="chat")
    accepted, refused = [], []
    for _ in range(60):  # 0.1 s each
        try:
            accepted.append(run.add(800, 2, name="chat"))
        except OverloadError as e:
            refused.append(e)
    assert refused and 3 <= len(accepted) < 12
    assert all(0 < e.retry_after < 2 and "Come back in" in str(e) for e in refused)
    assert (run.scheduler.policy.describe() or {})["refused"] == len(refused) + 1
    run.clock.now += refused[-1].retry_after / 100
    while run.scheduler.has_work():
        run.step()
    for request in accepted:
        assert request.token_times is not None and request.token_times[0] - request.queued <= 1.0
    run.add(800, 2, name="chat")  # there is room again


def test_who_was_promised_a_time_is_not_made_late() -> None:
    """A class with a shorter time would go before those that wait, and isn't let in where that makes one late."""
    classes = {"long": {"ttft": 0.7}, "short": {"ttft": 0.5}}
    run = Run(Scheduling(classes=classes), max_requests=8).warm()
    first = [run.add(1000, 2, name="long") for _ in range(5)]
    with pytest.raises(OverloadError, match=r"that of a request which waits would come 0\.0[0-9]+ s late"):
        run.add(1500, 2, name="short")
    run.add(100, 2, name="short")
    run.finish()
    assert all(r.token_times is not None and r.token_times[0] - r.queued <= 0.7 for r in first)


def test_most_waiting() -> None:
    run = Run(Scheduling(max_waiting=2), max_requests=3)
    for _ in range(5):
        run.add()
    with pytest.raises(OverloadError, match="max_waiting: 5 requests wait"):
        run.add()
    assert len(run.finish()) == 5


@pytest.mark.parametrize(("shares", "expected"), [({}, 1.0), ({"b": 3.0}, 3.0)])
def test_tenants_get_their_shares(shares: dict[str, float], expected: float) -> None:
    """One has a hundred requests there before the other has any."""
    run = Run(Scheduling(shares=shares, fair=True), max_requests=4)
    greedy = [run.add(20, 10, tenant="a") for _ in range(200)]
    for _ in range(10):
        run.step()
    other = [run.add(20, 10, tenant="b") for _ in range(200)]
    before = sum(r.output_length for r in greedy)
    while sum(r.finished for r in other) < 60:
        run.step()
    had = sum(r.output_length for r in other) / (sum(r.output_length for r in greedy) - before)
    assert had == pytest.approx(expected, rel=0.15)
    run.scheduler.abort_all()
    assert not run.scheduler.has_work()


def test_who_was_away_gets_no_credit_for_it() -> None:
    run = Run(Scheduling(fair=True), max_requests=2)
    for _ in range(100):
        run.add(20, 5, tenant="a")
    while len(run.ended) < 50:
        run.step()
    back = [run.add(20, 5, tenant="b") for _ in range(40)]
    while len(run.ended) < 80:
        run.step()
    assert 10 <= sum(r.finished for r in back) <= 18


def test_counters_of_tenants_that_are_gone_are_dropped() -> None:
    """Without a change for anybody who comes back: one that is dropped would begin where it is put then."""
    shares, counted = Shares({}), Shares({})
    counted._next_look = 10**9  # one that drops nothing
    for each in (shares, counted):
        for i in range(5 * LEAST_TENANTS):
            request = Generation([1] * (1 + i % 7), SamplingParams(), options=RequestOptions(f"t{i}"))
            each.joins(request.tenant, [f"t{i - 1}"] if i else [])
            each.begins(request)
            each.ends(request, 1.0)
    assert len(counted._had) == 5 * LEAST_TENANTS and len(shares._had) <= LEAST_TENANTS
    last = f"t{5 * LEAST_TENANTS - 1}"
    for name in ("t0", "t5000", last, "new"):
        for each in (shares, counted):
            each.joins(name, [last])
        assert shares.had(name) == counted.had(name)


COURSES: list[dict[str, Any]] = [
    {},
    {"fair": True},
    {"classes": CLASSES},
    {"classes": CLASSES, "refuse": False},
    {"classes": CLASSES, "shares": {"a": 2.5}, "max_waiting": 6},
    {"offline": True},
]


@pytest.mark.parametrize("options", COURSES, ids=lambda options: "-".join(options) or "priority")
def test_any_course_of_events_ends_well(options: dict[str, Any]) -> None:
    """Requests come and are aborted at random, until all have ended; none is lost, and no block."""
    preemptions = refused = 0
    for seed in range(8):
        rng = np.random.default_rng(seed)
        caps = ExecutorCaps(ragged=bool(seed % 3), max_tokens=24, shared_blocks=seed % 2 == 0)
        config = {"max_requests": int(rng.integers(1, 12)), "prefill_tokens": int(rng.integers(1, 20))}
        run = Run(
            Scheduling(**options),
            int(rng.integers(6, 40)),
            caps,
            groups=1 + seed % 2,
            prefix_cache=seed % 4 == 0,
            **config,
        )
        most = min(p.total_blocks * run.scheduler.groups[n].block_size for n, p in run.scheduler.pools.items())
        requests: list[Request] = []
        tried = aborted = 0
        while tried < 80 or run.scheduler.has_work():
            if tried < 80 and (rng.random() < 0.3 or not run.scheduler.has_work()):
                tried += 1
                prompt = int(rng.integers(1, most))
                fields = {"priority": int(rng.integers(3)), "tenant": "abc"[int(rng.integers(3))]}
                names = [None, *options.get("classes", ())]
                name = names[int(rng.integers(len(names)))]
                try:
                    requests.append(run.add(prompt, int(rng.integers(1, most - prompt + 2)), name, **fields))
                except (OverloadError, RequestError):
                    refused += 1
            elif requests and rng.random() < 0.01:
                running = [r for r in requests if not r.finished]
                if running:
                    run.scheduler.abort(running[int(rng.integers(len(running)))])
                    aborted += 1
            else:
                run.step()
                ranks = [r.rank for r in run.scheduler.running]
                assert ranks == sorted(ranks)
                assert all(not r.tables and not r.computed for r in run.scheduler.waiting)
        assert all(r.finished for r in requests) and len(run.ended) == len(requests) - aborted
        assert all(r.output_length == r.max_tokens for r in run.ended)
        assert all(pool.free_blocks == pool.total_blocks for pool in run.scheduler.pools.values())
        preemptions += run.scheduler.preemptions
    assert preemptions > 15
    assert bool(refused) == ("classes" in options and options.get("refuse", True))


def test_answers_after_prompts_alone() -> None:
    """The first fit of the steps' times knows no decoding step: what it says of one is a time all the same."""
    run = Run(Scheduling(), seconds=lambda size: 1e-5 * size.prompt + 2e-3 * size.rows, prefill_tokens=4096)
    for prompt in range(100, 1400, 100):
        run.add(prompt, 1)
        run.finish()
    assert run.scheduler.times.known
    requests = [run.add(5, 100), run.add(700, 30)]
    assert {*run.finish()[-2:]} == {*requests} and [one.output_length for one in requests] == [100, 30]
    assert 1e-3 < run.scheduler.times.seconds(StepSize(1, 0, 50)) < 4e-3  # from one sample of two rows
