"""The report calls pruning's passes and figures by their names, without loading them."""

from __future__ import annotations

from enginewright.optimizer.report import pruned_lines
from enginewright.passes.sparsity import fit_removed, prune_channels, prune_heads
from enginewright.passes.sparsity.drop_layers import DropLayers


def test_names_are_those_of_the_passes() -> None:
    assert DropLayers.name == pruned_lines.DROP_LAYERS
    assert prune_heads.PruneHeads.name == pruned_lines.PRUNE_HEADS
    assert prune_channels.PruneChannels.name == pruned_lines.PRUNE_CHANNELS
    assert (pruned_lines.HEADS, pruned_lines.HEADS_KEPT) == (prune_heads.HEADS, prune_heads.KEPT)
    assert (pruned_lines.CHANNELS, pruned_lines.CHANNELS_KEPT) == (prune_channels.CHANNELS, prune_channels.KEPT)
    assert pruned_lines.ERROR == fit_removed.ERROR
