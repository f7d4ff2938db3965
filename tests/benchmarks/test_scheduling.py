"""Deadlines and shares in the simulator: a sample in CI, the whole load in the soak; and what the page says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import scheduling
from loads import bursts, by_tenant, greedy, summary
from scheduling import BEGIN, END, FAIR_RATE, TARGETS, deadlines, shares, table

from enginewright.runtime.scheduler.options import Scheduling
from enginewright.runtime.scheduler.step_times import StepSize
from tests.simulator.loads import Arrival, Served, seconds, simulate

REPOSITORY = Path(__file__).resolve().parents[2]
(RESULT,) = (REPOSITORY / "benchmarks" / "results").glob("scheduling-*.json")


@pytest.mark.parametrize("requests", [800, pytest.param(100_000, marks=pytest.mark.soak)])
def test_deadlines_are_kept_at_a_load_where_first_come_first_served_is_late(requests: int) -> None:
    load = bursts(requests, 4.0, seed=1)
    figures = {name: summary(simulate(load, how), TARGETS) for name, how in deadlines().items()}
    before, after = (figures[name]["chat"] for name in ("fcfs", "deadlines"))
    assert before["within"] < 0.75 and after["within"] > 0.98
    assert after["goodput"] > 1.3 * before["goodput"]
    assert after["ttft_p99"] < TARGETS["chat"][0] and after["tpot_p99"] < TARGETS["chat"][1] < before["tpot_p99"]
    assert after["refused"] < 0.02
    assert figures["deadlines"]["tokens_per_second"] > 0.97 * figures["fcfs"]["tokens_per_second"]
    assert figures["deadlines"]["batch"]["refused"] == 0


@pytest.mark.parametrize("requests", [600, pytest.param(20_000, marks=pytest.mark.soak)])
def test_too_many_requests_are_refused_and_the_others_served_in_time(requests: int) -> None:
    outcomes = {name: simulate(bursts(requests, 10.0, seed=2), how) for name, how in deadlines().items()}
    chat = {name: summary(served, TARGETS)["chat"] for name, served in outcomes.items()}
    assert chat["deadlines"]["refused"] > 0.05 and chat["deadlines"]["within_of_served"] > 0.8
    assert chat["deadlines"]["within"] > 1.5 * chat["fcfs"]["within"]
    refused = [s for s in outcomes["deadlines"] if s.first is None]
    assert all(s.retry_after is not None and s.retry_after > 0 for s in refused)
    longest = 1.25 * seconds(StepSize(64, 512, 64 * 1456, 512 * 1200))
    assert all(s.ended - s.arrival.at < longest < 0.6 for s in refused), "when the step is over in which they came"


@pytest.mark.parametrize("requests", [600, pytest.param(20_000, marks=pytest.mark.soak)])
def test_a_greedy_tenant_delays_itself_alone(requests: int) -> None:
    load = greedy(requests, FAIR_RATE, seed=2)
    figures = {name: by_tenant(simulate(load, how)) for name, how in shares().items()}
    for name in ("t1", "t2", "t3"):
        assert figures["fair"][name]["p99"] < 1.5 and figures["fair"][name]["p50"] < 0.3 * figures["fcfs"][name]["p50"]
    assert figures["fair"]["greedy"]["p50"] > figures["fcfs"]["greedy"]["p50"]
    assert sum(of["requests"] for of in figures["fair"].values()) == requests, "nobody is refused"


def test_weights_are_shares_of_what_is_served() -> None:
    load = [Arrival(0.0, 100, 50, "chat", tenant) for _ in range(150) for tenant in ("one", "three")]
    served = simulate(load, Scheduling(shares={"three": 3.0}), most=8)
    first = sorted(served, key=lambda s: s.ended)[: len(load) // 2]
    assert sum(s.arrival.tenant == "three" for s in first) == pytest.approx(0.75 * len(first), rel=0.06)


def test_the_load_is_what_was_asked_for() -> None:
    load = bursts(20_000, 4.0, seed=0)
    assert len(load) / load[-1].at == pytest.approx(4.0, rel=0.1)
    assert sum(a.of_class == "batch" for a in load) / len(load) == pytest.approx(0.15, abs=0.02)
    at = [int(a.at) for a in load]
    most = sorted((at.count(s) for s in set(at[:4000])), reverse=True)
    assert most[len(most) // 20] >= 10, "bursts"


def test_the_arithmetic() -> None:
    chat, batch = Arrival(0.0, 1, 10, "chat"), Arrival(1.0, 1, 30, "batch")
    served = [
        Served(chat, 0.5, 0.03, 1.0),
        Served(chat, 1.5, 0.03, 2.0),
        Served(chat, 0.5, 0.05, 5.0),
        Served(chat, None, None, 0.0, 0.2),
        Served(batch, 2.0, None, 10.0),
    ]
    figures = summary(served, TARGETS)
    row = figures["chat"]
    assert (row["within"], row["within_of_served"], row["goodput"], row["refused"]) == (0.25, 1 / 3, 0.1, 0.25)
    assert (row["ttft_p50"], row["end_to_end_p50"], figures["batch"]["end_to_end_p50"]) == (0.5, 2.0, 9.0)
    assert figures["tokens_per_second"] == 6


def test_the_page_has_what_was_committed() -> None:
    page = (REPOSITORY / "benchmarks" / "notes" / "cpu.md").read_text(encoding="utf-8")
    assert page.partition(BEGIN)[2].partition(END)[0].strip() == table(json.loads(RESULT.read_text())).strip()
    assert scheduling.__doc__ is not None and "simulate" in scheduling.__doc__
