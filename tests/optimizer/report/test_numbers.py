from __future__ import annotations

import pytest

from enginewright.optimizer.report import numbers


@pytest.mark.parametrize(
    ("value", "text"), [(0.004632, "0.00463"), (20.55, "20.6"), (0.0, "0"), (1.2e-7, "1.2e-07"), (12345.6, "12,346")]
)
def test_significant(value: float, text: str) -> None:
    assert numbers.significant(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(134_515_008, "135 M"), (1.15e9, "1.15 G"), (999, "999"), (1000, "1 k"), (2e12, "2 T"), (999_700, "1 M")],
)
def test_count(value: float, text: str) -> None:
    assert numbers.count(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(3.7e-5, "37 µs"), (0.0041, "4.1 ms"), (0.0, "0 µs"), (12.34, "12.3 s"), (227.0, "3 min 47 s"), (99.9, "99.9 s")],
)
def test_duration(seconds: float, text: str) -> None:
    assert numbers.duration(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(1.0, "1 s"), (0.9997, "1 s"), (0.9994, "999 ms"), (1e-3, "1 ms"), (0.9997e-3, "1 ms"), (100.0, "1 min 40 s")],
)
def test_where_units_change(seconds: float, text: str) -> None:
    assert numbers.duration(seconds) == text


def test_percent_and_rate() -> None:
    assert numbers.percent(0.96) == "96.0 %"
    assert numbers.percent(1.0) == "100.0 %"
    assert numbers.rate(61.24) == "61.2"
    assert numbers.rate(1240.4) == "1,240"


@pytest.mark.parametrize(
    ("share", "text"), [(0.031, "+3.1 %"), (-0.0063, "−0.6 %"), (-0.0002, "0.0 %"), (0.0, "0.0 %"), (0.0004, "0.0 %")]
)
def test_gain(share: float, text: str) -> None:
    assert numbers.gain(share) == text


@pytest.mark.parametrize(
    ("share", "text", "phrase"),
    [
        (0.384, "38 %", "38 % of this machine's limit"),
        (1.004, "100 %", "100 % of this machine's limit"),
        (1.09, "in cache", "in cache: faster than memory"),
        (2.35, "in cache", "in cache: faster than memory"),
    ],
)
def test_a_share_of_a_limit(share: float, text: str, phrase: str) -> None:
    assert (numbers.of_limit(share), numbers.of_machine(share)) == (text, phrase)
