"""The pulse of an engine: what it measures, how it crosses a socket, and how several are one."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from enginewright import LLM, SamplingParams
from enginewright.runtime.engine.pulse import METRICS, Pulse
from enginewright.runtime.server.http import metrics as metrics_module
from enginewright.runtime.server.http.metrics import Metrics
from enginewright.runtime.server.http.options import ServerOptions
from enginewright.runtime.shared import counters

BUSY = Pulse((4.0, 0.5), 3, 1, 0.75, 100, (("num_preemptions", 2),), (("lookup", 1), ("grammar", 2)))
IDLE = Pulse((0.0, 2.0), 0, 0, 0.25, 11, (("num_preemptions", 1),), (("lookup", 5),))


def test_an_engine_is_measured(tiny_bundle: Path) -> None:
    with LLM(tiny_bundle) as llm:
        assert llm.pulse().steps == 0
        llm.generate([[5, 6, 7]], SamplingParams(max_tokens=3, ignore_eos=True))
        pulse = llm.pulse()
    assert pulse.steps >= 3 and (pulse.running, pulse.waiting, pulse.counters, pulse.helper_errors) == (0, 0, (), ())


def test_several_engines_are_one_by_each_gauges_rule() -> None:
    assert Pulse.merged([]) == Pulse() and Pulse.merged([BUSY]) == BUSY
    both = Pulse.merged([IDLE, BUSY])
    assert (both.step_seconds, both.expected_seconds) == (4.0, 0.5)  # those of the longest step
    assert (both.running, both.waiting, both.blocks_used, both.steps) == (3, 1, 0.5, 111)
    assert (both.count("num_preemptions"), both.count("another")) == (3, 0)
    assert dict(both.helper_errors) == {"lookup": 6, "grammar": 2}


def test_every_gauge_crosses_a_socket() -> None:
    assert all(getattr(BUSY, one.name) != getattr(Pulse(), one.name) for one in fields(Pulse))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(BUSY), type=Pulse) == BUSY


def test_a_counter_is_one_row_and_where_it_counts(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_module, "COUNTERS", counters.COUNTERS | {"grammar_evictions": "Dropped grammars."})
    monkeypatch.setattr(counters, "COUNTERS", metrics_module.COUNTERS)
    with LLM(tiny_bundle) as llm:
        llm.engine.scheduler.counters.count("grammar_evictions", 2)
        pulse = Pulse.merged([llm.pulse(), llm.pulse()])
    model = SimpleNamespace(name="m", beat=pulse, info={}, deaths=0, state="ready", replicas=1, retried=0)
    text = Metrics(cast(Any, {"m": model}), ServerOptions(models={})).text().decode()
    for prefix in ("enginewright_", "vllm:"):
        assert f"# HELP {prefix}grammar_evictions_total Dropped grammars." in text
        assert f'{prefix}grammar_evictions_total{{model_name="m"}} 4.0' in text


def test_gauges_with_a_metric_are_shown_under_both_prefixes() -> None:
    model = SimpleNamespace(name="m", beat=BUSY, info={}, deaths=0, state="ready", replicas=1, retried=0)
    families = text_string_to_metric_families(
        Metrics(cast(Any, {"m": model}), ServerOptions(models={})).text().decode()
    )
    shown = {family.name: family for family in families}
    for field, metric in METRICS.items():
        for prefix in ("enginewright_", "vllm:"):
            family = shown[prefix + metric.name]
            assert family.documentation == metric.text and family.samples[0].value == getattr(BUSY, field)
