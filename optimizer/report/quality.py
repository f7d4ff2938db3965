"""How good a bundle is, in one plain sentence: the first line of the page, and of what commands print of an export."""

from __future__ import annotations

import math

from . import numbers
from .document import ReportDocument, VerificationEntry


def quality_sentence(document: ReportDocument) -> str | None:
    """Of the target that is farthest from the source; None if the report is of a version that compared nothing."""
    if not document.verification:
        return None
    worst = max(document.verification, key=lambda v: (not v.exact, (v.text or v.random_tokens).kl_mean))
    of_several = f" (target {worst.target}, the farthest of {len(document.verification)})"
    return _sentence(worst) + (of_several if len(document.verification) > 1 else "") + "."


def _sentence(v: VerificationEntry) -> str:
    compared = v.text or v.random_tokens
    kind = "of a text" if v.text else "of random tokens"
    positions = f"{compared.tokens:,} positions {kind}"
    if v.exact:
        allowed = f", where rounding explains {numbers.significant(v.tolerance)}" if v.tolerance is not None else ""
        off = numbers.significant(compared.max_logit_error)
        return f"The bundle computes what the source does: logits differ by {off} at most in {positions}{allowed}"
    # KL(source || bundle) is the mean of log(p_source / p_bundle) over tokens that the source draws: exp(-KL) is how
    # likely the bundle makes such a token, beside the source, in the geometric mean.
    less = numbers.significant(100 * (1 - math.exp(-max(compared.kl_mean, 0.0))), 2)
    allowed = f" of {numbers.significant(v.max_kl)} allowed" if v.max_kl is not None else ""
    same = numbers.percent(compared.top1_agreement)
    return (
        f"The bundle picks the same token as the source in {same} of {positions}; "
        f"KL {numbers.significant(compared.kl_mean)}{allowed}: what the source would say is {less} % less likely here"
    )
