"""The records of report/report.json on passes, calibration, verification and fusions.

One schema each: exports make these, and ``report/document.py`` reads them again. Without torch, as reports are read.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from enginewright.passes.framework.records import Metric, Rejection


@dataclass(frozen=True)
class Comparison:
    """The difference of the exported program from the source, over the logits after some tokens.

    Attributes:
        tokens: rows of logits compared.
        max_logit_error: largest absolute difference of two logits.
        largest_logit: largest absolute value of the source's logits.
        kl_mean, kl_max: KL(source || exported) per token in nats; for vectors 1 - cosine.
        top1_agreement: share of the tokens after which both predict the same token as the likeliest; of vectors whose
            largest number is at the same place.
        of_vectors: True if vectors of texts were compared, instead of logits or of the scores of classes.
    """

    tokens: int
    max_logit_error: float
    largest_logit: float
    kl_mean: float
    kl_max: float
    top1_agreement: float
    of_vectors: bool = field(default=False, kw_only=True)

    @property
    def distance(self) -> str:
        """The mean distance from the source as text, such as "KL 0.01 nats a token"."""
        if self.of_vectors:
            return f"cosine distance {self.kl_mean:.3g} a text"
        return f"KL {self.kl_mean:.3g} nats a token"


@dataclass(frozen=True)
class TextComparison(Comparison):
    """The difference of the exported program from the source, over a text.

    Attributes:
        text: BUILT_IN, the text that comes with the package.
        window, windows, windows_in_text: tokens of a window, windows compared, and windows of the whole text.
        perplexity, source_perplexity: of the compared tokens; None for a model that doesn't predict tokens.
        metrics: the metrics of a model that computes whole texts, by name, as in measure/text_metrics.py; None for a
            metric that needs more texts. Empty for other models.
    """

    text: str
    window: int
    windows: int
    windows_in_text: int
    perplexity: float | None
    source_perplexity: float | None
    metrics: dict[str, float | None] = field(default_factory=dict, kw_only=True)


@dataclass(frozen=True)
class SourceSpeed:
    """The source's decode speed in transformers: 32-bit floats, eager attention, one request, during the export.

    Attributes:
        threads: torch's threads: all of them or one, whichever was faster.
        context: tokens in the request's cache.
        decode: tokens per second, of the fastest step.
    """

    threads: int
    context: int
    decode: float


@dataclass(frozen=True)
class ExportedOn:
    """The time and the machine of an export.

    Attributes:
        date: the time of its end, in UTC, in ISO 8601's form.
        processor: the processor's name.
        cores: the number of cores that the process could use.
    """

    date: str
    processor: str
    cores: int


@dataclass(frozen=True)
class VerificationReport:
    """The comparison of one target with its source.

    Attributes:
        target: the target's name.
        exact: True if nothing in the recipe loses precision, so that only rounding may differ.
        seed: the seed of the random tokens.
        random_tokens: the comparison on random tokens.
        tolerance: the largest allowed difference of a logit on random tokens; None if the recipe isn't exact.
        max_kl: the largest allowed mean KL; None if the recipe is exact.
        text: the comparison on the text; None if there was none.
        text_omitted: the reason why there was none; None if there was one.
        seconds: the time that the comparison took.
        peak_rss_bytes: the process's largest resident size by its end.
        source_speed: the speed of the source; None if it wasn't timed.
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
    source_speed: SourceSpeed | None = None


@dataclass(frozen=True)
class Measurement(Comparison):
    """The difference of the program from the source after a pass, over calibration tokens.

    Attributes:
        perplexity, source_perplexity: the perplexity of the same tokens without those that begin a sequence; None if
            all tokens do.
        seconds: duration of the measurement.
        unchanged: True if the pass changed nothing, so that the figures are those from before it.
    """

    perplexity: float | None
    source_perplexity: float | None
    seconds: float
    unchanged: bool = False


@dataclass(frozen=True)
class PassVerification:
    """The comparisons of the program with its source after passes.

    Attributes:
        origin: the origin of the tokens.
        sequences, tokens: the numbers of sequences and tokens.
        exact_tokens: tokens compared while only rounding may differ.
        relative_tolerance: largest error of a logit in that case, as a share of the largest logit.
        max_kl: largest mean KL after a lossy pass, in nats per token; None if the recipe is exact.
        captured: the captured program's measurement.
        measured: number of comparisons.
        seconds: duration of all comparisons, the source's run included.
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


@dataclass(frozen=True)
class PassSummary:
    """The effect of one run of a pass.

    Attributes:
        seconds: its duration; None if only the manifest describes the pass.
        target: the target whose pass it is; empty for those of the common pipeline.
        measurement: the program's difference from the source after it; None if it was measured together with a later
            pass, the next one that has a measurement.
        figures: the pass's own measurements, place by place.
    """

    name: str
    matched: int
    rejected: tuple[Rejection, ...] = ()
    seconds: float | None = None
    target: str = ""
    measurement: Measurement | None = None
    figures: tuple[Metric, ...] = ()


@dataclass(frozen=True)
class InputRange:
    """The largest magnitude of the inputs of the linear at ``where``."""

    where: str
    largest: float


@dataclass(frozen=True)
class Coverage:
    """The part of a model that calibration tokens exercise.

    Attributes:
        sequences, tokens: the numbers of sequences and tokens.
        distinct_tokens, vocabulary_share: the number of different ids among them, and its share of the vocabulary.
        ranges: input ranges of the linears that the tokens went through; empty if nothing was calibrated.
        warnings: gaps in the coverage, as sentences.
    """

    sequences: int
    tokens: int
    distinct_tokens: int
    vocabulary_share: float
    warnings: tuple[str, ...]
    ranges: tuple[InputRange, ...] = ()


@dataclass(frozen=True)
class CalibrationReport:
    """The origin of the calibration tokens, and the part of the model that they exercise."""

    origin: str
    coverage: Coverage


Interval = tuple[float, float]
"""An interval: (lower end, upper end)."""


@dataclass(frozen=True)
class FusionEffect:
    """The effect of one fusion on the times of a step of one token and of a prefill of one request.

    Times are medians in microseconds; None: not measured.

    Attributes:
        fusion: the pass's name.
        matched: the number of places that it changed.
        decode_without, decode_with: the time of a step without this fusion but with all others, and with all.
        prefill_without, prefill_with: the same for a prefill.
        decode_saves, prefill_saves: the share of the time that the fusion saves, as an interval of confidence (95 %) of
            the median over rounds; below 0 it costs time. None if it can't be distinguished from noise.
    """

    fusion: str
    matched: int
    decode_without: float | None = None
    decode_with: float | None = None
    prefill_without: float | None = None
    prefill_with: float | None = None
    decode_saves: Interval | None = None
    prefill_saves: Interval | None = None


@dataclass(frozen=True)
class FusionEffects:
    """The effects of a target's fusions.

    Attributes:
        skipped: the reason why nothing was measured; "" if something was.
        decode_noise, prefill_noise: the relative difference between two timings of the same program; None if not
            measured.
    """

    target: str
    context: int
    prefill_tokens: int
    effects: tuple[FusionEffect, ...]
    skipped: str = ""
    decode_noise: float | None = None
    prefill_noise: float | None = None
