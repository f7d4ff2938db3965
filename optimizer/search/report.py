"""What searches looked at and found, for the report of an export: the fields are keys of report/report.json."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from enginewright.runtime.kv_cache.kinds.table import cache_block_bytes
from enginewright.runtime.shared.contracts import CacheGroup
from enginewright.runtime.shared.dtypes import BYTES_PER_ELEMENT

if TYPE_CHECKING:
    from enginewright.passes.framework.base import PassRecord

RECIPE_FILE = "report/recipe.toml"
"""In the bundle: what was chosen, to be exported again without a search."""

RECIPE_COMMENT = """What a search chose. To export the same without searching:
optimize export MODEL --recipe report/recipe.toml"""


@dataclass(frozen=True)
class SearchReport:
    """What all searches report.

    Attributes:
        max_kl: the budget, in nats a token.
        tokens: that each unit was measured with.
        measured_kl: of what was taken, by the kind of tokens of the check.
        seconds: that it all took.
    """

    max_kl: float | None
    tokens: int
    measured_kl: dict[str, float]
    seconds: float


@dataclass(frozen=True)
class ParetoPoint:
    """An assignment of formats to all units.

    Attributes:
        bytes: of all weights.
        ms_per_token: predicted, where the budget has a time; None elsewhere.
        predicted_kl: sum of what each unit's format costs alone, in nats a token.
        measured_kl: of the quantized program on the tokens of the check; None if it was not measured.
    """

    bytes: int
    predicted_kl: float
    measured_kl: float | None = None
    ms_per_token: float | None = None


@dataclass(frozen=True)
class TokenTime:
    """What a token takes, a decode step of one request, in milliseconds.

    Attributes:
        budget: the most.
        device: where.
        predicted: by the formats' times, corrected if the chosen program took another time.
        timed: of the chosen program on made-up weights, or as predicted for a GPU.
        measured: of the bundle; None where it doesn't run here.
    """

    budget: float
    device: str
    predicted: float
    timed: float
    measured: float | None = None


@dataclass(frozen=True)
class FormatOption:
    """A format that a unit can have."""

    format: str
    bytes: int
    predicted_kl: float


@dataclass(frozen=True)
class UnitChoice:
    """A unit by its modules, the format that it got, and all that it could have."""

    where: str
    format: str
    options: tuple[FormatOption, ...]


@dataclass(frozen=True)
class AutoReport(SearchReport):
    """How formats were chosen. KL is of the quantized program.

    Attributes:
        max_bytes: the budget, beside ``max_kl``.
        together: units were measured one by one, or layer by layer.
        chosen: what was taken; measured.
        curve: the Pareto curve, from the least KL to the fewest bytes; of a long one some points.
        single: one format for every unit that can have it, the least exact one that fits for the others.
        tried: what was measured on the way, in order.
        units: in the order of the program.
        shapes_kl: of the measured KL, what the model's shape costs that the recipe changes, on the worst kind.
        time: of a token, where the budget has one.
    """

    max_bytes: int | None
    together: str
    chosen: ParetoPoint
    curve: tuple[ParetoPoint, ...]
    single: dict[str, ParetoPoint]
    tried: tuple[ParetoPoint, ...]
    units: tuple[UnitChoice, ...]
    shapes_kl: float = 0.0
    time: TokenTime | None = None


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
class KvSearchReport(SearchReport):
    """How numbers of heads were chosen. KL is of the converted program.

    Attributes:
        max_cache_bytes_per_token: the budget, beside ``max_kl``.
        chosen: what was taken; measured.
        curve: from the least KL to the fewest bytes.
        tried: what was measured on the way, in order.
        layers: in the order of the program.
    """

    max_cache_bytes_per_token: int | None
    chosen: HeadsPoint
    curve: tuple[HeadsPoint, ...]
    tried: tuple[HeadsPoint, ...]
    layers: tuple[LayerOptions, ...]


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
        return {f.where: int(f.value) for f in record.metrics if f.name == name}

    before, now, sizes = each("key/value heads before"), each("key/value heads"), each("numbers of a key and a value")
    errors = [f.value for f in record.metrics if f.name.startswith("relative error")]
    total = sum(cache_block_bytes(group) // group.block_size for group in groups)
    width = BYTES_PER_ELEMENT[groups[0].dtype]
    saved = sum((before[path] - heads) * sizes[path] * width for path, heads in now.items())
    return KvHeadsReport(
        total + saved,
        total,
        {path: (before[path], heads) for path, heads in now.items()},
        sum(errors) / len(errors) if errors else None,
        search,
    )


@dataclass(frozen=True)
class LayerChoice:
    """What goes of one layer.

    Attributes:
        layer: its path.
        dropped: whether all of it goes.
        channels, heads: shares removed.
        parameters: of the layer's weights that may go, how many went.
        predicted_kl: what that costs alone, in nats a token.
        kl_channels, kl_heads, kl_layer: measured alone: with the largest shares that the recipe allows, and without the
            layer; None where that was not to be chosen.
    """

    layer: str
    dropped: bool
    channels: float
    heads: float
    parameters: int
    predicted_kl: float
    kl_channels: float | None
    kl_heads: float | None
    kl_layer: float | None


@dataclass(frozen=True)
class PruneReport(SearchReport):
    """What goes, and how that was chosen. KL is of the pruned program before weights have their formats.

    ``tried``: parameters removed, predicted and measured KL of each choice that was measured.
    """

    max_kl: float
    parameters_removed: int
    predicted_kl: float
    tried: tuple[tuple[int, float, float], ...]
    layers: tuple[LayerChoice, ...]


@dataclass(frozen=True)
class Candidate:
    """A bundle that was compared with another, where both are within the budget.

    Attributes:
        name: what is done to the model: "formats alone", "less of the model, then formats".
        bytes: of all weights; None if nothing of the kind is within the budget.
        shapes_kl: of the model without what goes, before formats, on the worst kind of tokens.
        measured_kl: with its formats, on the worst kind.
        taken: whether it was exported.
        reason: why there is none, if so.
    """

    name: str
    bytes: int | None
    shapes_kl: float
    measured_kl: float | None
    taken: bool
    reason: str = ""
