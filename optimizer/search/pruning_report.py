"""What the search of [prune] looked at and found, for the report of an export."""

from __future__ import annotations

from dataclasses import dataclass


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
class PruneReport:
    """The search: ``measured_kl`` by kind of tokens, of the pruned program before weights have their formats.

    ``tried``: parameters removed, predicted and measured KL of each choice that was measured.
    """

    max_kl: float
    tokens: int
    parameters_removed: int
    predicted_kl: float
    measured_kl: dict[str, float]
    tried: tuple[tuple[int, float, float], ...]
    layers: tuple[LayerChoice, ...]
    seconds: float
