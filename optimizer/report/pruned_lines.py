"""What pruning took out of a model, in lines."""

from __future__ import annotations

from collections.abc import Iterator

from .document import PassEntry, ReportDocument

# As the passes of passes/sparsity/ call themselves and their figures; importing them would load torch.
DROP_LAYERS, PRUNE_HEADS, PRUNE_CHANNELS = "drop_layers", "prune_heads", "prune_channels"
HEADS, HEADS_KEPT = "query heads", "query heads kept"
CHANNELS, CHANNELS_KEPT = "channels", "channels kept"
ERROR = "relative error"


def pruned_lines(document: ReportDocument) -> list[str]:
    """What went of layers, heads and channels, what that costs, and how it was chosen; none if nothing did."""
    lines: list[str] = []
    for entry in document.passes:
        if entry.name == DROP_LAYERS and entry.matched:
            lines.append(f"{entry.matched} layer{'s' if entry.matched > 1 else ''} less")
        elif entry.name == PRUNE_HEADS and entry.matched:
            lines.append(_kept(entry, HEADS, HEADS_KEPT))
        elif entry.name == PRUNE_CHANNELS and entry.matched:
            lines.append(_kept(entry, CHANNELS, CHANNELS_KEPT))
        else:
            continue
        if (measured := entry.measurement) is not None and not measured.unchanged:
            lines[-1] += f": KL {measured.kl_mean:.3g} nats a token from the source"
    if (search := document.pruning) is not None:
        kinds = ", ".join(f"{kl:.3g} on {kind}" for kind, kl in search.measured_kl.items())
        removed = f"{search.parameters_removed:,} parameters less, for at most KL {search.max_kl:g}"
        lines.append(f"searched for: {removed}; {len(search.tried)} choices measured; KL {kinds}")
        lines += [f"  {line}" for line in _layers(document)]
    return lines


def _kept(entry: PassEntry, total: str, kept: str) -> str:
    """ "channels: 1,024 of 1,536 in 30 places, relative error 0.1"."""
    values = {name: [f.value for f in entry.figures if f.name == name] for name in (total, kept, ERROR)}
    error = sum(values[ERROR]) / max(len(values[ERROR]), 1)
    counts = f"{sum(values[kept]):,.0f} of {sum(values[total]):,.0f}"
    return f"{total}: {counts} kept in {len(values[kept])} of the layers (squared error {error:.2g} of the output)"


def _layers(document: ReportDocument) -> Iterator[str]:
    assert document.pruning is not None
    for layer in document.pruning.layers:
        if layer.dropped:
            yield f"{layer.layer}: dropped, predicted KL {layer.predicted_kl:.3g}"
        elif layer.parameters:
            shares = [
                f"{share:.0%} of its {name}"
                for name, share in (("heads", layer.heads), ("channels", layer.channels))
                if share
            ]
            yield f"{layer.layer}: {' and '.join(shares)}, predicted KL {layer.predicted_kl:.3g}"
