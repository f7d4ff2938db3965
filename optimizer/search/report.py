"""The records of searches for the report of an export: the fields are keys of report/report.json."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from enginewright.runtime.kv_cache.kinds.table import token_bytes, token_groups
from enginewright.runtime.shared.contracts import CacheGroup

if TYPE_CHECKING:
    from enginewright.passes.framework.base import PassRecord

RECIPE_FILE = "report/recipe.toml"
"""The path in a bundle of the recipe with the search's choice, which exports the same without a search."""

RECIPE_COMMENT = """What a search chose. To export the same without searching:
optimize export MODEL --recipe report/recipe.toml"""


@dataclass(frozen=True)
class SearchReport:
    """The fields that all search reports share.

    Attributes:
        max_kl: the budget, in nats per token.
        tokens: tokens that each unit was measured with.
        measured_kl: KL of the final choice, by the kind of check tokens.
        seconds: duration of the search.
    """

    max_kl: float | None
    tokens: int
    measured_kl: dict[str, float]
    seconds: float


@dataclass(frozen=True)
class ParetoPoint:
    """A choice of formats for all units.

    Attributes:
        bytes: the bytes of all weights.
        predicted_kl: the sum of the KL of each unit's format alone, in nats per token.
        measured_kl: the KL of the quantized program on the check tokens; None if it wasn't measured.
        ms_per_token: the predicted time of a token; None if the budget has no time.
    """

    bytes: int
    predicted_kl: float
    measured_kl: float | None = None
    ms_per_token: float | None = None


@dataclass(frozen=True)
class TokenTime:
    """The time of a token, a decode step of one request, in milliseconds.

    Attributes:
        budget: the longest time allowed.
        device: the device.
        predicted: the sum of the times of the formats, corrected if the timed choice took another time.
        timed: the time of the chosen program on random weights; predicted for a GPU.
        measured: the time of the bundle; None if it doesn't run here.
    """

    budget: float
    device: str
    predicted: float
    timed: float
    measured: float | None = None


@dataclass(frozen=True)
class FormatOption:
    """A format that a unit can have, with the unit's bytes in this format, and the predicted KL in nats per token."""

    format: str
    bytes: int
    predicted_kl: float


@dataclass(frozen=True)
class UnitChoice:
    """The choice for one unit: the paths of its modules, the chosen format, and the formats that it can have."""

    where: str
    format: str
    options: tuple[FormatOption, ...]


@dataclass(frozen=True)
class AutoReport(SearchReport):
    """The result of a search for formats. KL is the quantized program's.

    Attributes:
        max_bytes: the budget in bytes, in addition to ``max_kl``.
        together: the units of measurement: one by one, or layer by layer.
        chosen: the final choice, measured.
        curve: the Pareto curve, from the least KL to the fewest bytes; some points of a long one.
        single: for each format, the choice of it for all units that can have it; the others have the least exact one
            that they can have.
        tried: measured choices, in order.
        units: the choice for each unit, in the order of the program.
        shapes_kl: the part of the measured KL that the recipe's changes of shapes cost, for the worst kind of tokens.
        time: the time of a token, if the budget limits it.
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
class CachePoint:
    """A choice of each layer's number of key/value heads, or format of keys and values.

    Attributes:
        bytes_per_token: the bytes of the cache, over all layers.
        predicted_kl: the sum, over layers, of the KL that is predicted if that layer alone has its choice; in nats per
            token.
        measured_kl: the KL of the changed program on the check tokens; None if it wasn't measured.
    """

    bytes_per_token: int
    predicted_kl: float
    measured_kl: float | None = None


@dataclass(frozen=True)
class HeadsOption:
    """A number of key/value heads that a layer can have, with the predicted KL in nats per token."""

    kv_heads: int
    predicted_kl: float


@dataclass(frozen=True)
class LayerOptions:
    """The path of an attention, its chosen number of heads, and the numbers that it can have."""

    where: str
    kv_heads: int
    options: tuple[HeadsOption, ...]


@dataclass(frozen=True)
class KvSearchReport(SearchReport):
    """The choice of the numbers of key/value heads. KL is the converted program's.

    Attributes:
        max_cache_bytes_per_token: the budget in bytes, next to ``max_kl``.
        chosen: the final choice, measured.
        curve: the Pareto curve, from the least KL to the fewest bytes.
        tried: measured choices, in order.
        layers: the choice for each layer, in the order of the program.
    """

    max_cache_bytes_per_token: int | None
    chosen: CachePoint
    curve: tuple[CachePoint, ...]
    tried: tuple[CachePoint, ...]
    layers: tuple[LayerOptions, ...]


@dataclass(frozen=True)
class KvFormatsReport(SearchReport):
    """The choice of each layer's format of keys and values. KL is from 32-bit floats.

    Attributes:
        max_bytes_per_token: the budget in bytes.
        chosen: the final choice, measured.
        curve: the Pareto curve, from the least KL to the fewest bytes.
        layers: the choice for each layer, in the order of the program; ``bytes`` are a token's.
    """

    max_bytes_per_token: int
    chosen: CachePoint
    curve: tuple[CachePoint, ...]
    layers: tuple[UnitChoice, ...]


@dataclass(frozen=True)
class KvHeadsReport:
    """The change of the KV cache by grouping heads.

    Attributes:
        bytes_per_token_before, bytes_per_token: bytes over all layers, before and after.
        heads: path of each changed attention -> its numbers of heads before and after.
        error: mean squared relative error of the changed attentions' outputs on calibration tokens, or None.
        search: the search for the numbers; None if the recipe names them.
    """

    bytes_per_token_before: int
    bytes_per_token: int
    heads: dict[str, tuple[int, int]]
    error: float | None
    search: KvSearchReport | None = None


def heads_report(record: PassRecord, groups: Sequence[CacheGroup], search: KvSearchReport | None) -> KvHeadsReport:
    """Returns the report on the pass group_kv_heads: the bytes of the KV cache before and after it, and the errors.

    Args:
        record: the pass's record.
        groups: cache groups of the finished program.
        search: the search for the numbers of heads; None if the recipe names them.
    """

    def each(name: str) -> dict[str, int]:
        return {f.where: int(f.value) for f in record.metrics if f.name == name}

    before, now, sizes = each("key/value heads before"), each("key/value heads"), each("numbers of a key and a value")
    errors = [f.value for f in record.metrics if f.name.startswith("relative error")]
    total = token_bytes(groups)
    width = total / sum(
        len(g.layers) * g.kv_heads * (g.key_head_size + g.value_head_size) for g in token_groups(groups)
    )
    saved = round(sum((before[path] - heads) * sizes[path] * width for path, heads in now.items()))
    return KvHeadsReport(
        total + saved,
        total,
        {path: (before[path], heads) for path, heads in now.items()},
        sum(errors) / len(errors) if errors else None,
        search,
    )


@dataclass(frozen=True)
class LayerChoice:
    """The parts of one layer to remove.

    Attributes:
        layer: the path of the layer.
        dropped: True if the whole layer is removed.
        channels, heads: the shares to remove.
        parameters: the number of parameters removed.
        predicted_kl: the predicted cost of this layer alone, in nats per token.
        kl_channels, kl_heads, kl_layer: the measured cost with the largest shares that the recipe allows, and without
            the layer; None if that can't be chosen.
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
    """The choice of parts to remove. KL is that of the pruned program, before its weights have their formats.

    Attributes:
        parameters_removed: the number of parameters removed.
        predicted_kl: the sum of the costs of all layers, in nats per token.
        tried: the parameters removed, the predicted KL and the measured KL of each choice that was measured.
        layers: the choice for each layer.
    """

    max_kl: float
    parameters_removed: int
    predicted_kl: float
    tried: tuple[tuple[int, float, float], ...]
    layers: tuple[LayerChoice, ...]


@dataclass(frozen=True)
class Candidate:
    """One of two exports within the budget that were compared.

    Attributes:
        name: the changes to the model: "formats alone" or "less of the model, then formats".
        bytes: the bytes of all weights; None if no such export is within the budget.
        shapes_kl: the KL of the model with its changed shape, before formats, on the worst kind of tokens.
        measured_kl: the KL with formats, on the worst kind of tokens.
        taken: True if it was exported.
        reason: the reason why there is no such export; "" otherwise.
    """

    name: str
    bytes: int | None
    shapes_kl: float
    measured_kl: float | None
    taken: bool
    reason: str = ""
