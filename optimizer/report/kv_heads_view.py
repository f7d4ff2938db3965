"""What is said of key/value heads that were grouped: the cache before and after, and the quality lost."""

from __future__ import annotations

from collections import Counter

from .document import ReportDocument


def kv_heads_lines(document: ReportDocument) -> list[str]:
    """The cache before and after heads were grouped, and what that cost; none if none were."""
    lines = []
    for found in document.kv_heads:
        before, now = found.bytes_per_token_before, found.bytes_per_token
        layers = Counter(found.heads.values())
        changed = ", ".join(f"{a} heads to {b} in {n} layer{'s' * (n > 1)}" for (a, b), n in sorted(layers.items()))
        lines.append(f"{now:,} bytes a token, {before:,} before ({now / before:.0%}): {changed}")
        measured = [p.measurement for p in document.passes if p.name == "group_kv_heads" and p.measurement is not None]
        lines += [
            f"that costs a KL of {m.kl_mean:.3g} nats a token, and {1 - m.top1_agreement:.1%} of the likeliest tokens"
            for m in measured[:1]
        ]
        if found.search is not None:
            kinds = ", ".join(f"{kl:.3g} on {kind}" for kind, kl in found.search.measured_kl.items())
            tried = len(found.search.tried)
            lines.append(f"heads searched for: {tried} choices measured; KL {kinds}")
    return lines
