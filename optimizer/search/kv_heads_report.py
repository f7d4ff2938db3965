"""What grouping key/value heads saved and cost, for the report of an export."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from enginewright.plugins.shared.contracts import BYTES_PER_ELEMENT, CacheGroup

if TYPE_CHECKING:
    from enginewright.passes.framework.base import PassRecord


@dataclass(frozen=True)
class HeadsPoint:
    """Numbers of heads for all layers.

    Attributes:
        bytes_per_token: of the cache, over all layers.
        predicted_kl: sum of what each layer's number costs alone, in nats a token.
        measured_kl: of the converted program on the tokens of the check; None if it was not measured.
    """

    bytes_per_token: int
    predicted_kl: float
    measured_kl: float | None = None


@dataclass(frozen=True)
class HeadsOption:
    """A number of heads that a layer can have."""

    kv_heads: int
    predicted_kl: float


@dataclass(frozen=True)
class LayerOptions:
    """A layer by its attention's path, what it got, and all that it could have."""

    where: str
    kv_heads: int
    options: tuple[HeadsOption, ...]


@dataclass(frozen=True)
class KvSearchReport:
    """How numbers of heads were chosen.

    Attributes:
        max_kl, max_cache_bytes_per_token: the budget.
        tokens: that each layer was measured with.
        chosen: what was taken; measured.
        measured_kl: of that, by the kind of tokens of the check.
        curve: from the least KL to the fewest bytes.
        tried: what was measured on the way, in order.
        layers: in the order of the program.
        seconds: that it all took.
    """

    max_kl: float | None
    max_cache_bytes_per_token: int | None
    tokens: int
    chosen: HeadsPoint
    measured_kl: dict[str, float]
    curve: tuple[HeadsPoint, ...]
    tried: tuple[HeadsPoint, ...]
    layers: tuple[LayerOptions, ...]
    seconds: float


@dataclass(frozen=True)
class KvHeadsReport:
    """What became of the cache.

    Attributes:
        bytes_per_token_before, bytes_per_token: over all layers.
        heads: of each layer that was changed, by its attention's path: before and now.
        error: mean relative error of what the attentions add that were changed, squared, on calibration tokens; None if
            none were looked at.
        search: how the numbers were found, if they were.
    """

    bytes_per_token_before: int
    bytes_per_token: int
    heads: dict[str, tuple[int, int]]
    error: float | None
    search: KvSearchReport | None = None


def heads_report(record: PassRecord, groups: Sequence[CacheGroup], search: KvSearchReport | None) -> KvHeadsReport:
    """What the pass group_kv_heads did.

    Args:
        record: of the pass.
        groups: of the finished program.
        search: how numbers were found.
    """

    def each(name: str) -> dict[str, int]:
        return {f.where: int(f.value) for f in record.figures if f.name == name}

    before, now, sizes = each("key/value heads before"), each("key/value heads"), each("numbers of a key and a value")
    errors = [f.value for f in record.figures if f.name.startswith("relative error")]
    total = sum(group.bytes_per_block // group.block_size for group in groups)
    width = BYTES_PER_ELEMENT[groups[0].dtype]
    saved = sum((before[path] - heads) * sizes[path] * width for path, heads in now.items())
    return KvHeadsReport(
        total + saved,
        total,
        {path: (before[path], heads) for path, heads in now.items()},
        sum(errors) / len(errors) if errors else None,
        search,
    )
