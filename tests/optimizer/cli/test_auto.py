from __future__ import annotations

import io

from rich.console import Console

from enginewright.optimizer.cli.auto import print_auto
from enginewright.optimizer.search.report import AutoReport, FormatOption, ParetoPoint, UnitChoice


def report(points: int, max_kl: float | None, max_bytes: int | None) -> AutoReport:
    options = (FormatOption("int4-g32-a:int8:g32", 600_000, 0.02), FormatOption("bf16-a:bf16", 2_000_000, 0.0001))
    return AutoReport(
        max_kl=max_kl,
        max_bytes=max_bytes,
        tokens=256,
        together="unit by unit",
        chosen=ParetoPoint(1_300_000, 0.01234, 0.0151),
        measured_kl={"calibration tokens": 0.0122, "the package's text": 0.0151},
        curve=tuple(ParetoPoint(2_600_000 - i * 10_000, 0.0002 * (1 + i)) for i in range(points)),
        single={o.format: ParetoPoint(o.bytes * 2, o.predicted_kl * 2) for o in options},
        tried=(ParetoPoint(1_300_000, 0.01234, 0.0151),),
        units=tuple(UnitChoice(f"layers.{i}", options[i % 3 // 2].format, options) for i in range(6)),
        seconds=1.5,
    )


def printed(auto: AutoReport) -> str:
    out = io.StringIO()
    print_auto(Console(file=out, width=120, highlight=False), auto)
    return out.getvalue()


def test_the_curve_is_printed_from_many_bytes_to_few() -> None:
    text = printed(report(100, 0.02, None))
    lines = text.splitlines()
    assert "for at most KL 0.02:" in text
    assert sum(line.startswith("mixed") for line in lines) == 12
    chosen = [line.split() for line in lines if line.startswith("chosen  ")]
    assert [row[-2:] for row in chosen] == [["0.0123", "0.0151"]]
    predicted = [float(line.split()[3]) for line in lines if line.startswith("mixed")]
    assert predicted == sorted(predicted)
    assert "all bf16-a:bf16" in text
    assert "chosen: 4 of int4-g32-a:int8:g32, 2 of bf16-a:bf16" in text
    assert "KL: 0.0122 on calibration tokens, 0.0151 on the package's text" in text


def test_a_short_curve_is_printed_whole() -> None:
    text = printed(report(1, None, 5_000_000))
    assert sum(line.startswith("mixed") for line in text.splitlines()) == 1
    assert "for at most 4.8 MiB:" in text
