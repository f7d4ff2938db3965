"""Files of lengths: what is read, and what is refused with its line."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from enginewright.optimizer.buckets.histogram import (
    DEFAULTS,
    Histogram,
    default_histogram,
    read_histogram,
    read_trace,
    uniform,
)
from enginewright.runtime.shared.errors import RequestError

EXPECTED = ((3, 5), (10, 2), (400, 1))


def write(folder: Path, content: str | bytes) -> Path:
    path = folder / "lengths"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


@pytest.mark.parametrize(
    "content",
    [
        '{"3": 5, "400": 1, "10": 2}',
        ' \n{"3": 4, "003": 1, "10": 2, "400": 1, "7": 0}',
        "[3, 10, 3, 3, 400, 3, 3, 10]",
        "length,count\n3,5\n10,2\n\n400,1\n",
        "3,5\r\n10 , 2\r\n400,1",
        "\ufeffprompt,n\n3,2\n10,2\n400,1\n3,3\n",
        '"length","count"\n"3","5"\n"10","2"\n"400","1"',
        "3\n3\n3\n10\n\n400\n3\n3\n 10 \n",
    ],
)
def test_all_spellings_say_the_same(content: str, tmp_path: Path) -> None:
    histogram = read_histogram(write(tmp_path, content))
    assert histogram.counts == EXPECTED
    assert (histogram.entries, histogram.tokens, histogram.longest) == (8, 15 + 20 + 400, 400)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "the histogram is empty"),
        ("\n \n", "the histogram is empty"),
        ("{}", "the histogram is empty"),
        ('{"5": 0}', "the histogram is empty"),
        ("length,count\n", "the histogram is empty"),
        ('{"5": -1}', "-1 is not in 0 .. 2"),
        ("3,5\n7,-2", "lengths:2: -2 is not in 0"),
        ("3\n0\n", "lengths:2: length 0 is not in 1"),
        ('{"-3": 1}', "length -3 is not in 1"),
        ('{"2000000": 1}', "length 2000000 is not in 1"),
        ('{"3": 99999999999999999}', "is not in 0 .. 2"),
        ('{"3": 1.5}', "'1.5' isn't a whole number"),
        ('{"3": true}', "'True' isn't a whole number"),
        ('{"3": null}', "'None' isn't a whole number"),
        ('{"three": 1}', "'three' isn't a whole number"),
        ('{"3": [1]}', "isn't a whole number"),
        ('{"3": NaN}', "lengths"),
        ("[[3]]", "isn't a whole number"),
        ("three\nfour", "lengths:1: 'three' isn't a whole number"),
        ("3,5\nlength,count", "lengths:2: 'length' isn't a whole number"),
        ("3;5", "lengths:1: '3;5' isn't a whole number"),
        ("3,4,5", "lengths:1: 3 columns"),
        ("9" * 200_000, "isn't a whole number"),
        ('{"' + "9" * 200_000 + '": 1}', "isn't a whole number"),
        ("+-5", "lengths:1: '\\+-5' isn't a whole number"),
        ("5,", "lengths:1: '' isn't a whole number"),
        ("[" * 100_000, "not JSON"),
        ('{"3": 1', "not JSON"),
        ('{"3": 1} x', "not JSON"),
        (b"\x00\x01\x02", "zero bytes"),
        (b"3\n\xff\xfe4", "byte 2 isn't UTF-8"),
    ],
)
def test_what_is_no_histogram(content: str | bytes, message: str, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        read_histogram(write(tmp_path, content))
    assert "lengths" in caught.value.message and caught.value.hint


@given(
    text=st.text(st.sampled_from('{}[]":,.+-019eElength usagepromt_kns\n\r\t\x85é'), max_size=60), trace=st.booleans()
)
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_text_is_read_or_refused(text: str, trace: bool, tmp_path: Path) -> None:
    path = write(tmp_path, text)
    try:
        histogram = read_trace(path).prompts if trace else read_histogram(path)
    except RequestError:
        return
    assert histogram.counts and all(length >= 1 and count >= 1 for length, count in histogram.counts)


def test_files_that_cant_be_read(tmp_path: Path) -> None:
    for read in (read_histogram, read_trace):
        with pytest.raises(RequestError, match="can't be read: No such file"):
            read(tmp_path / "none")
        with pytest.raises(RequestError, match="can't be read: it is a folder"):
            read(tmp_path)


def test_requests_of_a_trace(tmp_path: Path) -> None:
    lines = [
        '{"prompt_tokens": 10, "completion_tokens": 7, "total_tokens": 17}',
        '{"id": "a", "usage": {"prompt_tokens": 3, "completion_tokens": 1, "prompt_tokens_details": {}}}',
        "",
        '{"response": {"status_code": 200, "body": {"usage": {"prompt_tokens": 10, "completion_tokens": 0}}}}',
        '{"usage": {"input_tokens": 400, "output_tokens": 2}}',
        '{"prompt_tokens": 3}',
    ]
    trace = read_trace(write(tmp_path, "\n".join(lines)))
    assert trace.prompts.counts == ((3, 2), (10, 2), (400, 1)) and trace.generated == 10


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "the histogram is empty"),
        ('{"prompt_tokens": 5}\n{"tokens": 5}', "lengths:2: it has no prompt_tokens"),
        ('{"prompt_tokens": 5}\nnothing', "lengths:2: not JSON"),
        ("[5]", "lengths:1: it has no prompt_tokens"),
        ('{"usage": null}', "lengths:1: it has no prompt_tokens"),
        ('{"prompt_tokens": 0}', "lengths:1: length 0"),
        ('{"prompt_tokens": "many"}', "'many' isn't a whole number"),
        ('{"prompt_tokens": 5, "completion_tokens": -1}', "lengths:1: -1 is not in 0"),
        (b"\x1f\x8b\x08\x00", "lengths: not text"),
    ],
)
def test_what_is_no_trace(content: str | bytes, message: str, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=message):
        read_trace(write(tmp_path, content))


def test_lengths_beyond_the_context() -> None:
    histogram = Histogram.from_counts({3: 5, 10: 2, 400: 1}, "mine.csv")
    histogram.check_context(400)
    with pytest.raises(RequestError, match=r"mine\.csv: 3 of 8 lengths are beyond the context of 9 tokens, up to 400"):
        histogram.check_context(9)


def test_chunks() -> None:
    histogram = Histogram.from_counts({3: 5, 10: 2, 400: 1, 100: 1}, "mine")
    assert histogram.in_chunks(50).counts == ((3, 5), (10, 2), (50, 10))
    assert histogram.in_chunks(30).counts == ((3, 5), (10, 4), (30, 16))
    assert histogram.in_chunks(30).tokens == histogram.tokens
    assert histogram.in_chunks(400).counts == histogram.counts


@pytest.mark.parametrize("name", DEFAULTS)
def test_defaults_are_what_they_say(name: str) -> None:
    histogram = default_histogram(name, 1 << 20)
    lengths = [length for length, count in histogram.counts for _ in range(count)]
    assert len(lengths) == 10_000 and histogram == default_histogram(name, 1 << 20)
    median = {"chat": 120, "documents": 300 * 2 ** (1 / 1.1), "code": 60 * 1.79}[name]  # of code: 5/6 of the lower part
    assert lengths[5000] == pytest.approx(median, rel=0.02)
    assert default_histogram(name, 50).longest == 50


def test_the_other_histograms() -> None:
    assert uniform(3).counts == ((1, 1), (2, 1), (3, 1))
    with pytest.raises(RequestError, match="default: there is no 'books'"):
        default_histogram("books", 100)
