"""The report on the cache, from the pass's measurements and the groups of the finished program."""

from __future__ import annotations

import pytest

from enginewright.optimizer.search.report import heads_report
from enginewright.passes.framework.base import Metric, PassRecord
from enginewright.runtime.shared.contracts import STATE, CacheGroup


def record(heads: dict[str, tuple[int, int]], error: float | None) -> PassRecord:
    metrics = []
    for path, (before, now) in heads.items():
        metrics += [
            Metric(path, "key/value heads before", before),
            Metric(path, "key/value heads", now),
            Metric(path, "numbers of a key and a value", 16 + 16),
        ]
        if error is not None:
            metrics.append(Metric(path, "relative error of what attention adds", error))
    return PassRecord("group_kv_heads", len(heads), (), 0, 0, 0.0, tuple(metrics))


def group(name: str, layers: tuple[int, ...], heads: int) -> CacheGroup:
    return CacheGroup(name, layers, heads, 16, 16)


@pytest.mark.parametrize("error", [None, 0.25])
def test_what_was_saved_is_added_to_what_is_left(error: float | None) -> None:
    groups = [group("a", (0, 2), 1), group("b", (1,), 4)]
    report = heads_report(record({"layers.0": (4, 1), "layers.2": (4, 1)}, error), groups, None)
    assert (report.bytes_per_token_before, report.bytes_per_token) == (12 * 32 * 4, 6 * 32 * 4)
    assert report.heads == {"layers.0": (4, 1), "layers.2": (4, 1)}
    assert report.error == error and report.search is None


def test_states_and_second_caches_are_none_of_it() -> None:
    keys = group("a", (0,), 1)
    ends = keys.model_copy(update={"name": "a-ends", "window": 128, "first": 128})
    states = CacheGroup("s", (1,), 1, 16, 16, kind=STATE, state_size=4096)
    report = heads_report(record({"layers.0": (4, 1)}, None), [keys, ends, states], None)
    assert (report.bytes_per_token_before, report.bytes_per_token) == (4 * 32 * 4, 32 * 4)


def test_layers_that_were_left_alone_are_none_of_it() -> None:
    report = heads_report(record({}, None), [group("a", (0, 1), 2)], None)
    assert report.bytes_per_token_before == report.bytes_per_token == 4 * 32 * 4
    assert report.heads == {}
