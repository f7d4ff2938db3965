from __future__ import annotations

import pytest

from enginewright.optimizer.export.memory_limit import MemoryLimit
from enginewright.optimizer.measure.source_runner import KEEP_BYTES
from enginewright.optimizer.shared.resources import rss_bytes
from enginewright.runtime.shared.errors import CapacityError, RequestError


def test_without_a_limit_all_is_as_it_was() -> None:
    limit = MemoryLimit.parse(None)
    assert (limit.memory_budget(), limit.keep_bytes(), limit.cache_bytes(), limit.report()) == (
        None,
        KEEP_BYTES,
        None,
        None,
    )


@pytest.mark.parametrize("extra", [1 << 30, 64 << 30])
def test_room_is_what_is_left_of_the_limit(extra: int) -> None:
    limit = MemoryLimit.parse(rss_bytes() + extra)
    memory_budget = limit.memory_budget()
    assert memory_budget is not None
    assert 0.9 * extra < memory_budget <= extra + (16 << 20)
    assert (
        limit.keep_bytes() == min(KEEP_BYTES, memory_budget // 4)
        or abs(limit.keep_bytes() - memory_budget // 4) < 8 << 20
    )
    report = limit.report()
    assert report is not None
    assert report.kept == (report.peak <= report.limit)


def test_a_peak_beyond_the_limit_is_said() -> None:
    report = MemoryLimit(1).report()
    assert report is not None
    assert not report.kept
    assert MemoryLimit(1).memory_budget() == 0


def test_too_little_says_how_much_is_needed() -> None:
    with pytest.raises(
        CapacityError, match=r"max_memory: 100MB is too little: the process itself takes [\d,]+"
    ) as error:
        MemoryLimit.parse("100MB")
    assert "Allow" in str(error.value.hint)


def test_no_size_at_all() -> None:
    with pytest.raises(RequestError, match="max_memory: 'lots' isn't a size"):
        MemoryLimit.parse("lots")
