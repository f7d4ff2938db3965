from __future__ import annotations

import pytest
from peers.summary import FIGURES, best_peers, figures_of, limits_of, ratio, summarize
from peers.workload import Report

from tests.benchmarks.peers_results import measured

PREFILL, START, PEAK = (next(f for f in FIGURES if f.name == name) for name in ("prefill", "start", "peak"))


def test_medians_are_over_the_rounds_that_have_the_figure() -> None:
    medians = figures_of(measured("llama.cpp", {"prefill": 10, "kl": 0.5}, {"prefill": 30}, {"prefill": 11}, peak=7))
    assert medians == {"prefill": 11, "kl": 0.5, "peak": 7}


def test_ratios_are_of_one_round_and_turned_around_where_less_is_better() -> None:
    ours = measured("enginewright", {"prefill": 20, "start": 1}, {"prefill": 90, "start": 2}, peak=50)
    theirs = measured("llama.cpp", {"prefill": 10, "start": 3}, {"prefill": 30, "start": 8}, {"prefill": 1}, peak=80)
    assert ratio(ours, theirs, PREFILL) == {"median": 2.5, "least": 2, "most": 3}
    assert ratio(ours, theirs, START) == {"median": 3.5, "least": 3, "most": 4}
    assert ratio(ours, theirs, PEAK) == {"median": 1.6, "least": 1.6, "most": 1.6}
    assert ratio(ours, measured("openvino", {"start": 1}), PREFILL) is None


def test_the_best_peer_is_the_one_that_we_are_least_ahead_of() -> None:
    ours = measured("enginewright", {"prefill": 20, "decode_1": 5, "kl": 0.010}, peak=50)
    slow = measured("llama.cpp", {"prefill": 5, "decode_1": 10, "kl": 0.009}, peak=100)
    fast = measured("openvino", {"prefill": 10, "decode_1": 1, "kl": 0.0099}, peak=25)
    best = best_peers(ours, [slow, fast])
    assert best["prefill"] == {"engine": "openvino", "ratio": 2, "kl_no_worse": True}  # as good as equal
    assert best["decode_1"] == {"engine": "llama.cpp", "ratio": 0.5, "kl_no_worse": False}
    assert best["peak"]["engine"] == "openvino" and best["peak"]["ratio"] == 0.5
    assert "start" not in best
    silent = measured("ctranslate2", {"prefill": 10})
    assert best_peers(ours, [silent])["prefill"]["kl_no_worse"] is None


def test_limits_are_shares_of_what_was_measured() -> None:
    ours = measured("enginewright", {"decode_1": 100}, peak=330)
    ours.bytes |= {"weights": 200, "kv": 100}
    figures = {"bandwidth": 30.0, "bandwidth_of_weights": 40.0, "peak": 500.0, "matmul": 250.0}
    roofs = [
        Report("", figures=figures | {"bandwidth_of_weights": b}, bytes={"read": 200_000_000}) for b in (40, 50, 20)
    ]
    limits = limits_of(ours, roofs)
    assert limits["bandwidth_share"] == pytest.approx(0.5)  # 20 GB/s of the median, 40
    assert limits["peak_share"] == pytest.approx(0.5)
    assert limits["memory"] == pytest.approx(1.1)
    assert limits_of(measured("enginewright", {"prefill": 1}), []) == {}


def test_a_summary_has_every_model_format_and_goal_that_was_measured() -> None:
    rounds = ({"prefill": 20.0, "kl": 0.01}, {"prefill": 22.0})
    summary = summarize(
        [measured("enginewright", *rounds), measured("llama.cpp", *rounds)], {}, {"smollm2.int8.prefill": "r"}
    )
    table = summary["models"]["smollm2"]["formats"]["int8"]
    assert set(table["engines"]) == {"enginewright", "llama.cpp"}
    assert "ratio" not in table["engines"]["enginewright"]
    assert table["engines"]["llama.cpp"]["ratio"]["prefill"]["median"] == 1
    assert {(g["model"], g["format"]) for g in summary["goals"]} == {("smollm2", "int8")}
    prefill = next(g for g in summary["goals"] if g["figure"] == "prefill")
    assert (prefill["measured"], prefill["met"], prefill["reason"]) == (1, False, "r")
    assert summarize([measured("llama.cpp", *rounds)], {}, {})["models"]["smollm2"]["formats"]["int8"]["best"] == {}
