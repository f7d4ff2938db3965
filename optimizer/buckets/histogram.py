"""Distributions of lengths, read from a file of counts or a trace of requests, or chosen by name."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any

from enginewright.runtime.bundle.regular_file import MOST_TEXT_BYTES, read_regular
from enginewright.runtime.shared.errors import RequestError
from enginewright.runtime.shared.json_document import parse_json

LONGEST = 1 << 20
"""The largest length in tokens: the most tokens of a step."""

MOST = 1 << 53
"""The largest count. Some programs can't represent larger integers in JSON exactly."""

_FORMATS = (
    'A histogram is JSON ({"length": count} or a list of lengths), CSV (length,count) or a length a line; '
    "a trace is JSONL with prompt_tokens in each line."
)
_PROMPT = ("prompt_tokens", "input_tokens")
_COMPLETION = ("completion_tokens", "output_tokens")
_WHOLE = re.compile(r"\s*[+-]?[0-9]{1,19}\s*")
_WRAPPERS = ("usage", "response", "body")
_SAMPLES = 10_000


@dataclass(frozen=True)
class Histogram:
    """Lengths in tokens, and the number of times that each occurs.

    Attributes:
        counts: pairs (length, count) in ascending order of lengths; both are at least 1.
        origin: description of the source, for messages.
    """

    counts: tuple[tuple[int, int], ...]
    origin: str

    @classmethod
    def from_counts(cls, counts: Mapping[int, int], origin: str) -> Histogram:
        """Returns the histogram of length -> count, without the lengths whose count is 0.

        ``origin`` is the source of the lengths, for messages. Raises RequestError if no length is left or a number is
        out of range.
        """
        for length, count in counts.items():
            if not 1 <= length <= LONGEST:
                raise RequestError(f"{origin}: length {length} is not in 1 .. {LONGEST:,}", hint=_FORMATS)
            if not 0 <= count <= MOST:
                raise RequestError(f"{origin}: length {length} has count {count}, not 0 .. 2^53", hint=_FORMATS)
        positive = tuple(sorted((length, count) for length, count in counts.items() if count))
        if not positive:
            raise RequestError(f"{origin}: the histogram is empty", hint=_FORMATS)
        return cls(positive, origin)

    @property
    def entries(self) -> int:
        """Returns the number of lengths, repetitions included."""
        return sum(count for _, count in self.counts)

    @property
    def tokens(self) -> int:
        """Returns the sum of all lengths, repetitions included."""
        return sum(length * count for length, count in self.counts)

    @property
    def longest(self) -> int:
        return self.counts[-1][0]

    def check_context(self, context_length: int) -> None:
        """Raises RequestError if a length is above ``context_length``."""
        if self.longest > context_length:
            beyond = sum(count for length, count in self.counts if length > context_length)
            raise RequestError(
                f"{self.origin}: {beyond:,} of {self.entries:,} lengths are beyond the context of {context_length:,} "
                f"tokens, up to {self.longest:,}",
                hint="Take them out of the file, or export for a longer context (--context).",
            )

    def in_chunks(self, chunk: int) -> Histogram:
        """Returns the histogram in which each length above ``chunk`` is cut into pieces of ``chunk`` tokens and a
        rest.
        """
        pieces: Counter[int] = Counter()
        for length, count in self.counts:
            whole, rest = divmod(length, chunk)
            pieces[chunk] += whole * count
            pieces[rest] += count
        del pieces[0]
        return Histogram.from_counts(pieces, f"{self.origin}, in chunks of {chunk}")


@dataclass(frozen=True)
class Trace:
    """The lengths of a trace's prompts, and the number of tokens that all its requests generated together."""

    prompts: Histogram
    generated: int


def read_histogram(path: str | Path) -> Histogram:
    """Reads a histogram from a file of counts or of lengths.

    The file is JSON (an object of counts by length, or a list of lengths), CSV (length,count in each line, with a
    header or without), or has one length in each line. Empty lines are skipped.

    Raises:
        RequestError: the file can't be read, has none of these forms, is empty, or has a number out of range; names the
            line.
    """
    text = _text(path)
    if text.lstrip()[:1] in ("{", "["):
        return Histogram.from_counts(_from_json(text, str(path)), str(path))
    counts: Counter[int] = Counter()
    for number, line in enumerate(text.splitlines(), 1):
        cells = [cell.strip().strip('"') for cell in line.split(",")]
        if not any(cells) or (number == 1 and len(cells) == 2 and not any(c.isdigit() for c in line)):
            continue  # an empty line, or a header
        if len(cells) > 2:
            raise RequestError(f"{path}:{number}: {len(cells)} columns, not length,count", hint=_FORMATS)
        where = f"{path}:{number}"
        length = _whole(cells[0], where)
        counts[length] += _checked(length, _whole(cells[1], where) if len(cells) == 2 else 1, where)
    return Histogram.from_counts(counts, str(path))


def read_trace(path: str | Path) -> Trace:
    """Reads a trace of requests from a JSONL file.

    Each line has ``prompt_tokens`` and ``completion_tokens``, or ``input_tokens`` and ``output_tokens``, at the top or
    in OpenAI's ``usage``, also of a batch's ``response``. A line without the second number generated no tokens.

    Raises:
        RequestError: the file can't be read, or a line isn't such an object; names the line.
    """
    counts: Counter[int] = Counter()
    generated = 0
    for number, line in enumerate(_text(path).splitlines(), 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        usage = _usage(line, where)
        length = _whole(next(usage[key] for key in _PROMPT if key in usage), where)
        completion = _whole(next((usage[key] for key in _COMPLETION if key in usage), 0), where)
        generated += _checked(length, completion, where)
        counts[length] += 1
    return Trace(Histogram.from_counts(counts, str(path)), generated)


def default_histogram(name: str, longest: int) -> Histogram:
    """Returns the distribution ``name`` of `DEFAULTS`, with lengths up to ``longest``.

    Raises RequestError for another name.
    """
    if name not in DEFAULTS:
        raise RequestError(f"default: there is no {name!r}", hint=f"Defaults: {', '.join(DEFAULTS)}.")
    quantile = DEFAULTS[name]
    lengths = (quantile((i + 0.5) / _SAMPLES) for i in range(_SAMPLES))
    counts = Counter(min(max(1, round(length)), longest) for length in lengths)
    return Histogram.from_counts(counts, f"default {name!r}")


def uniform(longest: int) -> Histogram:
    """Returns the histogram in which every length from 1 to ``longest`` occurs once."""
    return Histogram.from_counts(dict.fromkeys(range(1, longest + 1), 1), f"uniform from 1 to {longest}")


def _log_normal(median: float, sigma: float) -> Callable[[float], float]:
    normal = NormalDist(math.log(median), sigma)
    return lambda p: math.exp(normal.inv_cdf(p))


def _pareto(least: float, alpha: float) -> Callable[[float], float]:
    return lambda p: min(least * (1 - p) ** (-1 / alpha), LONGEST)


def _mixture(share: float, low: Callable[[float], float], high: Callable[[float], float]) -> Callable[[float], float]:
    """Returns the quantile function of a mixture: a share of the lengths from ``low``, the others from ``high``.

    It is exact if the two distributions hardly overlap.
    """
    return lambda p: low(p / share) if p < share else high((p - share) / (1 - share))


DEFAULTS: Mapping[str, Callable[[float], float]] = {
    "chat": _log_normal(120, 1.0),
    "documents": _pareto(300, 1.1),
    "code": _mixture(0.6, _log_normal(60, 0.6), _log_normal(1400, 0.35)),
}
"""Name of a distribution -> the quantile function of its prompt lengths.

They are: log-normal with median 120 and sigma 1; Pareto from 300 with exponent 1.1; and two log-normals, 60 % with
median 60 (sigma 0.6) and 40 % with median 1,400 (sigma 0.35).
"""


def _text(path: str | Path) -> str:
    try:
        text = read_regular(path, most=MOST_TEXT_BYTES, piped=True).decode("utf-8-sig")
    except OSError as e:
        raise RequestError(f"{path}: can't be read: {e.strerror}", hint="Pass a file of lengths.") from e
    except UnicodeDecodeError as e:
        raise RequestError(f"{path}: not text: byte {e.start} isn't UTF-8", hint=_FORMATS) from e
    if "\0" in text:
        raise RequestError(f"{path}: not text: it has zero bytes", hint=_FORMATS)
    return text


def _from_json(text: str, origin: str) -> Mapping[int, int]:
    try:
        data = parse_json(text)
    except ValueError as e:
        raise RequestError(f"{origin}: not JSON: {e}", hint=_FORMATS) from e
    pairs: Iterable[tuple[Any, Any]] = data.items() if isinstance(data, dict) else ((value, 1) for value in data)
    counts: Counter[int] = Counter()
    for length, count in pairs:
        counts[_whole(length, origin)] += _checked(_whole(length, origin), _whole(count, origin), origin)
    return counts


def _usage(line: str, where: str) -> Mapping[str, Any]:
    """Returns the object in a line that has the number of prompt tokens. Raises RequestError naming ``where``."""
    try:
        data = parse_json(line)
    except ValueError as e:
        raise RequestError(f"{where}: not JSON: {e}", hint=_FORMATS) from e
    for candidate in _nested(data):
        if any(key in candidate for key in _PROMPT):
            return candidate
    raise RequestError(f"{where}: it has no prompt_tokens", hint=_FORMATS)


def _nested(data: Any) -> Iterator[Mapping[str, Any]]:
    while isinstance(data, dict):
        yield data
        data = next((data[key] for key in _WRAPPERS if key in data), None)


def _whole(value: Any, where: str) -> int:
    """Returns a whole number that is an int or, as in JSON's keys and CSV's cells, its digits. Raises RequestError."""
    if isinstance(value, str) and _WHOLE.fullmatch(value):
        return int(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    raise RequestError(f"{where}: {str(value)[:40]!r} isn't a whole number", hint=_FORMATS)


def _checked(length: int, count: int, where: str) -> int:
    """Returns ``count`` if it and the length are in range. Raises RequestError naming ``where`` otherwise."""
    if not 1 <= length <= LONGEST:
        raise RequestError(f"{where}: length {length} is not in 1 .. {LONGEST:,}", hint=_FORMATS)
    if not 0 <= count <= MOST:
        raise RequestError(f"{where}: {count} is not in 0 .. 2^53", hint=_FORMATS)
    return count
