"""The page for Prometheus: its series, the process's own, and usage by tenant where that is asked for."""

from __future__ import annotations

import os
import re
import resource
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from enginewright.runtime.requests.outputs import RequestMetrics
from enginewright.runtime.server.http.metrics import OTHER_TENANTS, Metrics
from enginewright.runtime.server.http.options import ServerOptions
from enginewright.runtime.shared.errors import RequestError

TIMES = RequestMetrics(0.0)


def series(metrics: Metrics) -> dict[str, dict[tuple[str, ...], float]]:
    """Name of a sample -> values of its labels -> its value."""
    values: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(metrics.text().decode()):
        for sample in family.samples:
            values.setdefault(sample.name, {})[
                tuple(sample.labels[name] for name in sorted(sample.labels, reverse=True))
            ] = sample.value
    return values


def test_no_series_says_when_another_one_began() -> None:
    metrics = Metrics({}, ServerOptions(models={}))
    metrics.ended("m", 3, 2, TIMES, "stop")
    metrics.responded(200)
    names = series(metrics)
    assert not [name for name in names if name.endswith("_created")]
    assert names["enginewright_prompt_tokens_total"] == {("m",): 3} == names["vllm:prompt_tokens_total"]


def test_the_process_has_the_series_that_clients_of_prometheus_have() -> None:
    metrics_of = series(Metrics({}, ServerOptions(models={})))
    assert metrics_of["process_open_fds"][()] > 2
    assert metrics_of["process_max_fds"][()] == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    memory = metrics_of["process_resident_memory_bytes"][()]
    assert 0.5 < memory / (pages * os.sysconf("SC_PAGE_SIZE")) < 2
    assert metrics_of["process_cpu_seconds_total"][()] > 0 and metrics_of["process_start_time_seconds"][()] > 1e9


def test_usage_by_tenant_is_there_only_where_it_is_asked_for() -> None:
    metrics = Metrics({}, ServerOptions(models={}))
    metrics.ended("m", 3, 2, TIMES, "stop", "web")
    assert b"tenant" not in metrics.text() and b"web" not in metrics.text()


def test_usage_by_tenant_has_no_more_series_than_tenants_are_allowed() -> None:
    metrics = Metrics({}, ServerOptions(models={}, tenant_metrics=2))
    for i in range(100):
        metrics.ended("m", 10, 2, TIMES, "stop", f"t{i}")
    metrics.ended("m", 5, 1, TIMES, "stop", "t0")
    metrics.aborted("m", 7, 3, "t1")
    metrics_of = series(metrics)
    assert metrics_of["enginewright_tenant_prompt_tokens_total"] == {
        ("t0", "m"): 15,
        ("t1", "m"): 17,
        (OTHER_TENANTS, "m"): 980,
    }
    assert metrics_of["enginewright_tenant_generation_tokens_total"][("t1", "m")] == 5
    assert metrics_of["enginewright_tenant_requests_total"] == {
        ("t0", "m"): 2,
        ("t1", "m"): 2,
        (OTHER_TENANTS, "m"): 98,
    }
    assert not re.search(r'tenant="t[2-9]', metrics.text().decode())


def test_a_number_of_tenants_below_0_is_refused() -> None:
    with pytest.raises(RequestError, match=r"^tenant_metrics: expected `int` >= 0\n.*It is -1\."):
        ServerOptions(models={"m": "m"}, tenant_metrics=-1).check()
