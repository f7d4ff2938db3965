"""Every method of every helper fails: the engine goes on, and the requests' tokens are those without the error."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from enginewright.runtime.engine.engine import Engine
from enginewright.runtime.engine.prefixes import open_tier
from enginewright.runtime.kv_cache.block_store import BlockStore
from enginewright.runtime.kv_cache.disk_tier import DiskTier
from enginewright.runtime.requests.lookup import ForcedTokens, OwnText, PastAnswers
from enginewright.runtime.requests.proposers import Proposal, ProposalKind, TimedProposer
from enginewright.runtime.requests.request import Generation
from enginewright.runtime.requests.request_options import RequestOptions
from enginewright.runtime.requests.sampling import SamplingParams
from enginewright.runtime.scheduler.drafts import Drafts
from enginewright.runtime.scheduler.helpers import HELPERS
from enginewright.runtime.scheduler.limits import SchedulerConfig
from enginewright.runtime.scheduler.options import Scheduling
from enginewright.runtime.scheduler.policy import Policy, RankedPolicy
from enginewright.runtime.scheduler.step_times import StepTimes
from enginewright.runtime.scheduler.waiting import Shares
from enginewright.runtime.server.http.metrics import Metrics
from enginewright.runtime.shared.contracts import ExecutorCaps
from enginewright.runtime.shared.errors import OverloadError


class Guesses(TimedProposer):
    """A draft model that proposes token 7 again and again."""

    name = "guesses"
    kind = ProposalKind(name, 0, 0.7)

    def propose(self, wanted: Sequence[tuple[Generation, int]]) -> list[Proposal]:
        return [Proposal([7] * most, self.kind) for _, most in wanted]

    def seconds(self, rows: int) -> float:
        return 1e-6


CLASSES: dict[str, tuple[type, ...]] = {
    "policy": (RankedPolicy,),
    "shares": (Shares,),
    "step times": (StepTimes,),
    "drafts": (Drafts,),
    "proposer": (ForcedTokens, OwnText, PastAnswers),
    "timed proposer": (Guesses,),
    "prefix tier": (DiskTier,),
}
CASES = [(kind, method) for kind in CLASSES for method in HELPERS[kind] if method not in ("known", "paused")]
"""All but two plain attributes, which can't raise."""


@pytest.fixture(autouse=True)
def _key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


@pytest.fixture
def engine(toy: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """One with every kind of helper, and a pool that is too small for its requests."""
    caps = ExecutorCaps(shared_blocks=True, verifies=True, most_runs=8)
    scheduling = Scheduling(classes={"chat": {"ttft": 5.0, "tpot": 1.0}, "batch": {"priority": 3}}, fair=True)
    config = SchedulerConfig(3, 16, None, True, scheduling, speculate=True, runs_seconds=1e9)
    # Nothing depends on what this machine takes: each look at the clock is a millisecond, and no read is slow.
    never = property(lambda store: None, lambda store, seconds: None)
    monkeypatch.setattr(BlockStore, "seconds_per_block", never, raising=False)
    ticks = itertools.count()
    proposers = (ForcedTokens(), OwnText(), PastAnswers(), Guesses())
    built = Engine(toy(9, 8, caps=caps), config, proposers, lambda: next(ticks) * 1e-3)
    cache = built.scheduler.cache
    cache.tier = open_tier(built.executor, cache, tmp_path / "kept")
    yield built
    cache.tier.close()
    built.executor.close()


def answers(engine: Engine) -> list[list[int]]:
    """Two rounds of requests of two tenants, which share beginnings, with what ``LLM.info`` asks for."""
    scheduling = engine.scheduler.config.scheduling
    assert scheduling is not None
    texts = []
    for round_ in range(2):
        if round_:  # what the first round left in memory is evicted, and read from the disk
            engine.add_request(Generation([99] * 64, SamplingParams(max_tokens=8), options=RequestOptions("f")))
            while engine.has_work():
                engine.step()
            assert engine.scheduler.cache.tier is not None
            engine.scheduler.cache.tier.flush()
        for i in range(8):
            prompt = [*range(20 if i % 2 else 3), i, i, i]
            params = SamplingParams(max_tokens=12, allowed_token_ids=(7,) if i == 6 else ())
            of = scheduling.class_named("chat" if i % 3 else "batch")
            clock = engine.scheduler._clock
            texts.append(Generation(prompt, params, options=RequestOptions(f"t{i % 2}"), request_class=of, clock=clock))
            engine.add_request(texts[-1])
        for _ in range(2000):
            if not engine.has_work():
                break
            engine.step()
        scheduler = engine.scheduler
        scheduler.policy.describe(), scheduler.drafts.describe(), scheduler.expected_seconds()
        scheduler.cache.statistics(scheduler.running)
    assert all(request.finish_reason == "length" for request in texts)
    assert all(pool.total_blocks == pool.free_blocks for pool in engine.pools.values())
    return [request.tokens for request in texts]


@pytest.mark.parametrize(("kind", "method"), CASES)
def test_an_error_costs_its_result_alone(
    engine: Engine, toy: Any, monkeypatch: pytest.MonkeyPatch, kind: str, method: str
) -> None:
    calls = []

    def fails(*_: object, **__: object) -> None:
        calls.append(1)
        raise ZeroDivisionError(method)

    for of in CLASSES[kind]:
        monkeypatch.setattr(of, method, fails if callable(HELPERS[kind][method]) else property(fails))
    results = answers(engine)
    assert engine.scheduler.counters.helper_errors.get(kind, 0) == len(calls)
    never = {
        *(("policy", "comes_first"), ("step times", "row_tokens"), ("step times", "prompt_within")),
        *(
            ("step times", "rows_within"),
            ("prefix tier", "holds"),
            ("prefix tier", "part"),
            ("prefix tier", "read_states"),
        ),
        ("prefix tier", "spill"),
    }
    assert calls or (kind, method) in never
    plain = toy(64, 8)
    expected = []
    for tokens in results[:8]:
        alone = Engine(plain, SchedulerConfig())
        params = SamplingParams(max_tokens=12)
        alone.add_request(request := Generation(tokens[:-12], params))
        while alone.has_work():
            alone.step()
        expected.append(request.tokens)
    plain.close()
    for i, (tokens, other) in enumerate(zip(results, expected * 2, strict=True)):
        assert i % 8 == 6 or tokens == other


def test_every_method_of_a_policy_and_of_shares_is_in_the_table() -> None:
    """Each of them is called between two steps; and the table names none that isn't there."""
    for kind, of in (("policy", Policy), ("shares", Shares)):
        assert {name for name in vars(of) if not name.startswith("_")} == set(HELPERS[kind])
    methods = [(of, name) for kind, classes in CLASSES.items() for of in classes for name in HELPERS[kind]]
    methods += [(Metrics, name) for name in HELPERS["metrics"]]
    assert [(of, name) for of, name in methods if not hasattr(of, name)] == [(StepTimes, "known")]


def test_a_refusal_is_an_answer(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: object) -> None:
        raise OverloadError("full", retry_after=1.0)

    monkeypatch.setattr(RankedPolicy, "arrives", refuses)
    with pytest.raises(OverloadError):
        engine.add_request(Generation([1], SamplingParams(max_tokens=1)))
    assert not engine.has_work() and not engine.scheduler.counters.helper_errors
