"""The parts of a report as lines of text: quality, pruning, key/value heads, candidates and engines."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence

from enginewright.optimizer.measure.text_metrics import shown_metrics
from enginewright.optimizer.shared.export_records import PassSummary, VerificationReport
from enginewright.runtime.shared.errors import counted
from enginewright.runtime.shared.memory import format_bytes

from . import numbers
from .document import ReportDocument


def engine_lines(document: ReportDocument) -> list[str]:
    """Returns a line for each engine, and one for the sizes of its steps; none if no engine was built."""
    lines = []
    for engine in document.engines:
        gpus = ", ".join(engine.compute_capabilities)
        lines.append(
            f"{engine.target}: {engine.file}: {format_bytes(engine.file_bytes)} for compute capability {gpus}, built "
            f"in {engine.seconds:.1f} s with {format_bytes(engine.peak_rss_bytes)} of memory"
        )
        lines.append(f"{engine.target}: steps of {'; '.join(engine.profiles)}")
    return lines


def already_quantized_lines(document: ReportDocument) -> list[str]:
    """Returns lines with the kinds of packed weights in the source, and the number that kept their values; none for
    floats.
    """
    kinds: dict[str, list[bool]] = {}
    for weight in document.already_quantized:
        kinds.setdefault(weight.stored, []).append(weight.kept)
    return [f"{len(flags)} of {kind}: {_what_became(flags)}" for kind, flags in kinds.items()]


def _what_became(kept: Sequence[bool]) -> str:
    if all(kept):
        return "values kept"
    return f"values kept in {sum(kept)}, the others stored anew" if any(kept) else "read as floats and stored anew"


def candidate_lines(document: ReportDocument) -> list[str]:
    """Returns a line for each candidate, the exported one first; none if there is nothing to compare."""
    lines = []
    for candidate in sorted(document.ways, key=lambda c: not c.taken):
        if candidate.bytes is None or candidate.measured_kl is None:
            lines.append(f"{candidate.name}: {candidate.reason}")
            continue
        shapes = f", of which {numbers.significant(candidate.shapes_kl)} for its shape" if candidate.shapes_kl else ""
        kl = f"KL {numbers.significant(candidate.measured_kl)}{shapes}"
        lines.append(
            f"{candidate.name}: {numbers.format_bytes(candidate.bytes)}, {kl}" + (" (taken)" if candidate.taken else "")
        )
    return lines


def kv_heads_lines(document: ReportDocument) -> list[str]:
    """Returns lines with the cache before and after heads were grouped, and the cost; none if no heads were grouped."""
    lines = []
    for heads in document.kv_heads:
        before, now = heads.bytes_per_token_before, heads.bytes_per_token
        layers = Counter(heads.heads.values())
        changed = ", ".join(f"{a} heads to {b} in {counted(n, 'layer')}" for (a, b), n in sorted(layers.items()))
        lines.append(f"{now:,} bytes a token, {before:,} before ({now / before:.0%}): {changed}")
        measured = [p.measurement for p in document.passes if p.name == "group_kv_heads" and p.measurement is not None]
        lines += [
            f"that costs a KL of {m.kl_mean:.3g} nats a token, and {1 - m.top1_agreement:.1%} of the likeliest tokens"
            for m in measured[:1]
        ]
        if heads.search is not None:
            kinds = ", ".join(f"{kl:.3g} on {kind}" for kind, kl in heads.search.measured_kl.items())
            tried = len(heads.search.tried)
            lines.append(f"heads searched for: {tried} choices measured; KL {kinds}")
    return lines


def kv_formats_lines(document: ReportDocument) -> list[str]:
    """Returns lines with the formats that were chosen for keys and values, and the cost; none without a choice."""
    if (choice := document.kv_formats) is None:
        return []
    formats = Counter(layer.format for layer in choice.layers)
    chosen = ", ".join(f"{name} in {counted(n, 'layer')}" for name, n in formats.most_common())
    kinds = ", ".join(f"{kl:.3g} on {kind}" for kind, kl in choice.measured_kl.items())
    spent = f"{choice.chosen.bytes_per_token:,} of {choice.max_bytes_per_token:,} bytes a token"
    return [f"{chosen}: {spent}", f"formats chosen with {choice.tokens:,} tokens; KL {kinds}"]


# As the passes of passes/sparsity/ call themselves and their figures; importing them would load torch.
DROP_LAYERS, PRUNE_HEADS, PRUNE_CHANNELS = "drop_layers", "prune_heads", "prune_channels"
HEADS, HEADS_KEPT = "query heads", "query heads kept"
CHANNELS, CHANNELS_KEPT = "channels", "channels kept"
ERROR = "relative error"


def pruned_lines(document: ReportDocument) -> list[str]:
    """Returns a line for each pruning pass with the number of removed layers, heads or channels and the measured KL.

    If the amounts were searched for, further lines have the result of the search. Empty if nothing was removed.
    """
    lines: list[str] = []
    for entry in document.passes:
        if entry.name == DROP_LAYERS and entry.matched:
            lines.append(f"{counted(entry.matched, 'layer')} less")
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


def _kept(entry: PassSummary, total: str, kept: str) -> str:
    """Returns a line such as "channels: 1,024 of 1,536 in 30 places, relative error 0.1"."""
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


def quality_sentence(document: ReportDocument) -> str | None:
    """Returns a sentence about the target with the largest distance from the source; None if no target was compared."""
    if not document.verification:
        return None
    worst = max(document.verification, key=lambda v: (not v.exact, (v.text or v.random_tokens).kl_mean))
    of_several = f" (target {worst.target}, the farthest of {len(document.verification)})"
    return _sentence(worst) + (of_several if len(document.verification) > 1 else "") + "."


def _sentence(v: VerificationReport) -> str:
    compared = v.text or v.random_tokens
    kind = "of a text" if v.text else "of random tokens"
    positions = f"{compared.tokens:,} positions {kind}"
    if v.exact:
        allowed = f", where rounding explains {numbers.significant(v.tolerance)}" if v.tolerance is not None else ""
        off = numbers.significant(compared.max_logit_error)
        return f"The bundle computes what the source does: logits differ by {off} at most in {positions}{allowed}"
    if compared.of_vectors:
        limit = f" of {numbers.significant(v.max_kl)} allowed" if v.max_kl is not None else ""
        least = (
            "" if v.text is None else "".join(f"; {label} {value}" for label, value in shown_metrics(v.text.metrics))
        )
        return f"The bundle's vectors are the source's but for a {compared.distance}{limit}, in {positions}{least}"
    # KL(source || bundle) is the mean of log(p_source / p_bundle) over tokens that the source draws: exp(-KL) is how
    # likely the bundle makes such a token, beside the source, in the geometric mean.
    less = numbers.significant(100 * (1 - math.exp(-max(compared.kl_mean, 0.0))), 2)
    allowed = f" of {numbers.significant(v.max_kl)} allowed" if v.max_kl is not None else ""
    same = numbers.percent(compared.top1_agreement)
    return (
        f"The bundle picks the same token as the source in {same} of {positions}; "
        f"KL {numbers.significant(compared.kl_mean)}{allowed}: what the source would say is {less} % less likely here"
    )
