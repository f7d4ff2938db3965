"""The padding that buckets cause, compared with a single size and with powers of two."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any

from enginewright.runtime.shared.errors import counted

from .histogram import Histogram
from .solve import Sizes, padding, powers_of_two


@dataclass(frozen=True)
class Waste:
    """A set of sizes, and the padding that it causes on a histogram.

    Attributes:
        sizes: the sizes in ascending order.
        padded: padding tokens over all entries of the histogram.
        share: share of padding in all computed tokens: padded / (padded + real).
    """

    sizes: tuple[int, ...]
    padded: int
    share: float

    @classmethod
    def from_sizes(cls, histogram: Histogram, sizes: tuple[int, ...], padded: int | None = None) -> Waste:
        padded = padding(histogram, sizes) if padded is None else padded
        return cls(sizes, padded, padded / (padded + histogram.tokens))


@dataclass(frozen=True)
class KindReport:
    """The sizes of one kind of steps.

    Attributes:
        kind: "tokens" for the prompt tokens of a step, or "batch" for the requests of a decode step.
        origin: description of the histogram's source.
        entries, tokens: number of lengths in the histogram, and their sum.
        chosen: the best set with the chosen number of sizes.
        one_size: the set of the largest size alone.
        powers_of_two: the largest powers of two, as many as the chosen sizes; ``all_powers_of_two`` has all of them.
        curve: share of padding with 1, 2, ... sizes, up to the allowed number.
    """

    kind: str
    origin: str
    entries: int
    tokens: int
    chosen: Waste
    one_size: Waste
    powers_of_two: Waste
    all_powers_of_two: Waste
    curve: tuple[float, ...]

    @classmethod
    def from_curve(cls, kind: str, histogram: Histogram, curve: list[Sizes], count: int, multiple: int) -> KindReport:
        """Returns the report of the set with ``count`` sizes.

        Args:
            kind: "tokens" or "batch".
            histogram: the lengths.
            curve: the best sets of 1, 2, ... sizes, as `solve` returns them.
            count: number of sizes in the chosen set.
            multiple: sizes are multiples of it.
        """
        chosen = curve[count - 1]
        largest = chosen.sizes[-1]
        powers = powers_of_two(largest, len(chosen.sizes), multiple)
        return cls(
            kind=kind,
            origin=histogram.origin,
            entries=histogram.entries,
            tokens=histogram.tokens,
            chosen=Waste.from_sizes(histogram, chosen.sizes, chosen.padded),
            one_size=Waste.from_sizes(histogram, (largest,)),
            powers_of_two=Waste.from_sizes(histogram, powers),
            all_powers_of_two=Waste.from_sizes(histogram, powers_of_two(largest, None, multiple)),
            curve=tuple(s.padded / (s.padded + histogram.tokens) for s in curve),
        )


@dataclass(frozen=True)
class SizesReport:
    """The chosen sizes for prompts and for decode steps.

    ``generated`` is the number of tokens decoded for all prompts.
    """

    most: int
    multiple: int
    context_length: int | None
    generated: int
    kinds: tuple[KindReport, ...]

    def to_json(self) -> dict[str, Any]:
        """Returns the report as plain values for ``--json``."""
        return asdict(self)


def share_out(prompts: list[Sizes], decodes: list[Sizes], most: int, weight: Fraction) -> tuple[int, int]:
    """Divides ``most`` buckets into those for prompts and those for decode steps.

    Minimizes the padding of prompts + ``weight`` * the padding of decode steps over every split; the split with the
    most prompt buckets wins a tie. A single bucket is for prompts, and decode steps run in it too.
    """
    if most == 1:
        return 1, 0
    candidates = ((p, min(most - p, len(decodes))) for p in range(min(most - 1, len(prompts)), 0, -1))
    return min(candidates, key=lambda shares: prompts[shares[0] - 1].padded + weight * decodes[shares[1] - 1].padded)


def text_lines(report: SizesReport) -> list[str]:
    """Returns the report as lines for a terminal."""
    lines = []
    for kind in report.kinds:
        what = "prompts" if kind.kind == "tokens" else "decode steps"
        lines.append(f"{kind.kind}: {', '.join(str(s) for s in kind.chosen.sizes)}")
        lines.append(f"  for {kind.entries:,} {what} with {kind.tokens:,} tokens together ({kind.origin})")
        rows = [
            ("these", kind.chosen),
            ("one size", kind.one_size),
            ("powers of two, as many", kind.powers_of_two),
            ("powers of two, all", kind.all_powers_of_two),
        ]
        for name, waste in rows:
            number = counted(len(waste.sizes), "size")
            lines.append(f"  {name:<24}{number:>9}  {waste.share:>6.1%} of what is computed is padding")
    return lines


def recipe_lines(tokens: Sequence[int], batch: Sequence[int]) -> list[str]:
    """Returns the lines of a recipe's section [buckets] with these sizes."""
    lines = ["[buckets]", f"tokens = {list(tokens)}"]
    return lines + ([f"batch = {list(batch)}"] if batch else [])
