"""How far a bundle is from its source, as `optimize export` and `optimize inspect` print it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def figures(report: Mapping[str, Any]) -> str:
    """One target's comparison with the source, in a line or two.

    ``report`` is a ``VerificationReport`` as plain values: a bundle's report is read without what exporting needs.
    Raises KeyError, TypeError or ValueError if it is not one.
    """
    random, text = report["random_tokens"], report["text"]
    line = f"target {report['target']}, compared with the source on {random['tokens']} random tokens: logits at most "
    line += f"{random['max_logit_error']:.2g} apart"
    if report["tolerance"] is not None:
        return f"{line} (allowed: {report['tolerance']:.2g}, as they reach {random['largest_logit']:.3g})"
    line += f" (they reach {random['largest_logit']:.3g}), KL {random['kl_mean']:.2g}, "
    line += f"top-1 {random['top1_agreement']:.1%}"
    if text is None:
        return f"{line}\n  no text was compared: {report['text_omitted']}"
    part = (
        ""
        if text["windows"] == text["windows_in_text"]
        else f", {text['windows']} of {text['windows_in_text']} windows"
    )
    return (
        f"{line}\n  on a text of {text['tokens']:,} tokens{part}: KL {text['kl_mean']:.2g}, "
        f"top-1 {text['top1_agreement']:.1%}, perplexity {text['perplexity']:.3f}, "
        f"the source's {text['source_perplexity']:.3f}"
    )
