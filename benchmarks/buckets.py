"""The padding of buckets: ours, one size, powers of two and geometric sizes, on requests that none was chosen by.

    python benchmarks/buckets.py [--requests 10000] [--context-length 8192] [--update-docs]

Three distributions of prompt lengths (chat, documents, code: ``DEFAULTS`` of optimizer/buckets/histogram.py), cut to
the context. Of each, seed 1 draws the requests that sizes are chosen by and seed 2 others that padding is counted on; a
prompt beyond the largest size comes in chunks of that. Geometric sizes grow by one factor from the smallest of our 16
to the largest. Nothing is timed. --update-docs puts the table into benchmarks/notes/cpu.md.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from peers.marked_table import MarkedTable, line

from enginewright.optimizer.buckets.histogram import DEFAULTS, Histogram
from enginewright.optimizer.buckets.report import Waste
from enginewright.optimizer.buckets.solve import geometric, powers_of_two, solve

PAGE = Path(__file__).resolve().parent.parent / "benchmarks" / "notes" / "cpu.md"
TABLE = MarkedTable("buckets.py")
COUNTS = (4, 8, 16)
CHOSEN_BY, COUNTED_ON = 1, 2  # seeds
MULTIPLE = 8


@dataclass(frozen=True)
class Row:
    """Shares of padding of so many sizes; ``sample``: of ours on the requests that they were chosen by."""

    name: str
    count: int
    ours: float
    sample: float
    one_size: float
    powers_of_two: float
    geometric: float
    all_powers_of_two: float
    powers: int


def drawn(name: str, seed: int, requests: int, context: int) -> Histogram:
    """Draws ``requests`` lengths from a distribution, cut to the context."""
    quantile = DEFAULTS[name]
    shares = np.random.default_rng(seed).uniform(1e-9, 1 - 1e-9, requests).tolist()
    return Histogram.from_counts(
        Counter(min(max(1, round(quantile(p))), context) for p in shares), f"{name}, seed {seed}"
    )


def compare(name: str, requests: int, context: int) -> list[Row]:
    """A row for each count of sizes."""
    sample = drawn(name, CHOSEN_BY, requests, context)
    curve = solve(sample, COUNTS[-1], MULTIPLE, context)
    largest = curve[0].sizes[-1]
    smallest = curve[-1].sizes[0]
    others = drawn(name, COUNTED_ON, requests, context).in_chunks(largest)

    def share(sizes: tuple[int, ...]) -> float:
        return Waste.from_sizes(others, sizes).share

    powers = powers_of_two(largest, None, MULTIPLE)
    return [
        Row(
            name=name,
            count=count,
            ours=share(curve[count - 1].sizes),
            sample=Waste.from_sizes(sample, curve[count - 1].sizes).share,
            one_size=share((largest,)),
            powers_of_two=share(powers_of_two(largest, count, MULTIPLE)),
            geometric=share(geometric(smallest, largest, count, MULTIPLE)),
            all_powers_of_two=share(powers),
            powers=len(powers),
        )
        for count in COUNTS
    ]


def table(rows: list[Row], requests: int, context: int) -> str:
    """The rows as Markdown, and a line that says what was counted."""
    headings = ("lengths", "sizes", "these", "one size", "powers of two, as many", "geometric", "all powers of two")
    lines = [line(headings), line(["---", *["---:"] * (len(headings) - 1)])]
    for row in rows:
        every = f"{_percent(row.all_powers_of_two)} ({row.powers})"
        shares = (row.ours, row.one_size, row.powers_of_two, row.geometric)
        lines.append(line([row.name, str(row.count), *map(_percent, shares), every]))
    gap = max(abs(row.ours - row.sample) for row in rows)
    lines += ["", f"{requests:,} requests, up to {context:,} tokens. On the requests that they were chosen by,"]
    lines += [f"our sizes' shares differ from these by {_percent(gap)} at most."]
    return "\n".join(lines)


def _percent(share: float) -> str:
    return f"{share:.1%}".replace("%", " %")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--context-length", type=int, default=8192)
    parser.add_argument("--page", type=Path, default=PAGE, help="the page whose table --update-docs writes")
    parser.add_argument("--update-docs", action="store_true", help="write the table into the docs")
    options = parser.parse_args(arguments)
    rows = [row for name in DEFAULTS for row in compare(name, options.requests, options.context_length)]
    text = table(rows, options.requests, options.context_length)
    print(text)
    if options.update_docs:
        TABLE.put(options.page, text)
    return 0 if all(row.ours <= min(row.powers_of_two, row.one_size) for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
