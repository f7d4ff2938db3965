"""What a verification found, and where it ends an export."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Comparison:
    """How far the exported program is from the source, over the logits after some tokens.

    Attributes:
        tokens: how many logits' rows were compared.
        max_logit_error: largest absolute difference of two logits.
        largest_logit: of the source's, by absolute value.
        kl_mean, kl_max: KL(source || exported) per token in nats.
        top1_agreement: share of the tokens after which both find the same token the likeliest.
    """

    tokens: int
    max_logit_error: float
    largest_logit: float
    kl_mean: float
    kl_max: float
    top1_agreement: float


@dataclass(frozen=True)
class TextComparison(Comparison):
    """The same over a text.

    Attributes:
        text: BUILT_IN, the text that comes with the package.
        window, windows, windows_in_text: tokens of a window, how many were compared, and how many the text has.
        perplexity, source_perplexity: of the compared tokens.
    """

    text: str
    window: int
    windows: int
    windows_in_text: int
    perplexity: float
    source_perplexity: float


@dataclass(frozen=True)
class VerificationReport:
    """One target compared with its source.

    Attributes:
        target: its name.
        exact: nothing in the recipe loses precision, so that only rounding may differ.
        seed: of the random tokens.
        random_tokens: what they showed.
        tolerance: most that a logit may be off on random tokens; None if the recipe is not exact.
        max_kl: most that a mean KL may be; None if the recipe is exact.
        text: what the text showed; None if it was not compared.
        text_omitted: why not; None if it was.
        seconds: that it took.
        peak_rss_bytes: the process's largest resident size by its end.
    """

    target: str
    exact: bool
    seed: int
    random_tokens: Comparison
    tolerance: float | None
    max_kl: float | None
    text: TextComparison | None
    text_omitted: str | None
    seconds: float
    peak_rss_bytes: int


@dataclass(frozen=True)
class Measurement(Comparison):
    """How far the program is from the source after a pass, over calibration tokens.

    Attributes:
        perplexity, source_perplexity: of the same tokens, those that begin a sequence left out; None if all do.
        seconds: that measuring took.
        unchanged: the pass changed nothing, and the figures are those from before it.
    """

    perplexity: float | None
    source_perplexity: float | None
    seconds: float
    unchanged: bool = False


@dataclass(frozen=True)
class PassVerification:
    """How the program was compared with its source from pass to pass.

    Attributes:
        origin: where the tokens are from.
        sequences, tokens: how many.
        exact_tokens: how many of them are looked at while nothing but rounding may differ.
        relative_tolerance: most that a logit may then be off, as a share of the largest one.
        max_kl: most that the mean KL may be after a pass that loses precision; None if the recipe is exact.
        captured: the program as it was captured.
        measured: how often it was compared.
        seconds: that all this took, the source's part included.
    """

    origin: str
    sequences: int
    tokens: int
    exact_tokens: int
    relative_tolerance: float
    max_kl: float | None
    captured: Measurement
    measured: int
    seconds: float
