"""From files to sizes: how buckets are shared between prompts and decode steps, and what is compared."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path

import pytest

from enginewright.optimizer.buckets.choose import BucketSource, choose
from enginewright.optimizer.buckets.histogram import Histogram, uniform
from enginewright.optimizer.buckets.report import SizesReport, recipe_lines, share_out, text_lines
from enginewright.optimizer.buckets.solve import padding, solve
from enginewright.runtime.shared.errors import RequestError

LENGTHS = {10: 50, 33: 20, 90: 9, 200: 1}


@pytest.fixture
def file(tmp_path: Path) -> str:
    (tmp_path / "h.json").write_text(json.dumps(LENGTHS))
    return str(tmp_path / "h.json")


def padded(report: SizesReport) -> Fraction:
    """The sum that is minimised: padding of all prompts and of all decode steps."""
    prompts, decodes = report.kinds
    return prompts.chosen.padded + Fraction(report.generated, decodes.tokens) * decodes.chosen.padded


@pytest.mark.parametrize("most", [2, 3, 5, 9])
def test_no_other_split_pads_less(file: str, most: int) -> None:
    chosen = choose(BucketSource(histogram=file, most=most, multiple=1, max_batch=12))
    assert len(chosen.tokens) + len(chosen.batch) <= most
    prompts, decodes = Histogram.from_counts(LENGTHS, "h"), uniform(12)
    weight = Fraction(prompts.tokens, decodes.tokens)
    splits = [
        padding(prompts, p.sizes) + weight * padding(decodes, d.sizes)
        for p in solve(prompts, most)
        for d in solve(decodes, most)
        if len(p.sizes) + len(d.sizes) <= most
    ]
    assert padded(chosen.report) == min(splits)


def test_a_trace_weighs_decode_steps_by_what_was_generated(tmp_path: Path) -> None:
    def sizes(completion: int) -> tuple[int, int]:
        path = tmp_path / "trace.jsonl"
        line = '{{"prompt_tokens": {}, "completion_tokens": {}}}'
        path.write_text("\n".join(line.format(n, completion) for n in LENGTHS))
        chosen = choose(BucketSource(trace=str(path), most=6, multiple=1, max_batch=12))
        return len(chosen.tokens), len(chosen.batch)

    assert sizes(0) == (4, 2)  # nothing is generated: what prompts leave over
    assert sizes(100_000) == (1, 5)
    assert sizes(100)[0] in (2, 3, 4)


def test_one_bucket_is_for_everything(file: str) -> None:
    chosen = choose(BucketSource(histogram=file, most=1))
    assert (chosen.tokens, chosen.batch) == ((200,), ())
    assert recipe_lines(chosen.tokens, chosen.batch) == ["[buckets]", "tokens = [200]"]


def test_equal_splits_have_more_for_prompts() -> None:
    prompts, decodes = solve(Histogram.from_counts(LENGTHS, "h"), 4), solve(uniform(12), 4)
    assert share_out(prompts, decodes, 4, Fraction(0)) == (3, 1)
    assert share_out(prompts, decodes, 20, Fraction(1)) == (4, 4)


def test_chunks_batches_and_the_context(file: str, tmp_path: Path) -> None:
    (tmp_path / "b.csv").write_text("1,90\n4,10\n")
    chosen = choose(BucketSource(histogram=file, chunk=64, batches=str(tmp_path / "b.csv"), most=9, multiple=48), 200)
    assert chosen.tokens == (48, 96) and chosen.batch == (1, 4)
    assert choose(BucketSource(histogram=file, most=9, multiple=48), 200).tokens[-1] == 200
    assert choose(BucketSource(histogram=file, most=9, multiple=48)).tokens[-1] == 240
    # Decodes share steps with prompts: no batch is larger than the largest of those.
    assert choose(BucketSource(histogram=file, chunk=8, multiple=1, max_batch=64)).batch[-1] == 8


def test_the_report_says_what_others_leave(file: str) -> None:
    chosen = choose(BucketSource(histogram=file, most=6, multiple=8, max_batch=8))
    for kind in chosen.report.kinds:
        assert kind.chosen.padded <= kind.powers_of_two.padded <= kind.one_size.padded
        assert len(kind.powers_of_two.sizes) == len(kind.chosen.sizes)
        assert kind.curve[len(kind.chosen.sizes) - 1] == kind.chosen.share
        assert kind.chosen.share == kind.chosen.padded / (kind.chosen.padded + kind.tokens)
        assert list(kind.curve) == sorted(kind.curve, reverse=True)
    assert chosen.report.kinds[0].one_size.sizes == (200,)
    lines = "\n".join(text_lines(chosen.report))
    assert "80 prompts with 2,170 tokens together" in lines and "8 decode steps" in lines and "one size" in lines
    assert json.loads(json.dumps(chosen.report.to_json()))["kinds"][1]["kind"] == "batch"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"histogram": None}, "buckets: nothing given"),
        ({"default": "chat"}, "buckets: histogram and default given"),
        ({"most": 0}, "most: 0"),
        ({"multiple": 0}, "multiple: 0"),
        ({"max_batch": 0}, "max_batch: 0"),
        ({"chunk": 0}, "chunk: 0"),
        ({"histogram": None, "default": "books"}, "default: there is no 'books'"),
    ],
)
def test_what_is_refused(change: dict[str, object], message: str, file: str) -> None:
    source = BucketSource(**({"histogram": file} | change))  # type: ignore[arg-type]
    with pytest.raises(RequestError, match=message):
        choose(source)


def test_what_the_context_cant_hold(file: str, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="beyond the context of 199 tokens"):
        choose(BucketSource(histogram=file), 199)
    (tmp_path / "b.csv").write_text("1,90\n201,10\n")
    with pytest.raises(RequestError, match="a batch of 201 requests is beyond the largest size of prompts, 200"):
        choose(BucketSource(histogram=file, batches=str(tmp_path / "b.csv")))
