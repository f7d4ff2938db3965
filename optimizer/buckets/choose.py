"""Chooses the sizes of buckets from lengths of requests, and divides the buckets between prompts and decode steps."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from enginewright.runtime.shared.errors import RequestError

from .histogram import Histogram, Trace, default_histogram, read_histogram, read_trace, uniform
from .report import KindReport, SizesReport, share_out
from .solve import solve

MULTIPLE = 8
MOST_REQUESTS = 64
"""The default maximum of requests in a decode step: the number that ``LLM`` runs at a time by default."""


@dataclass(frozen=True)
class BucketSource:
    """The source of the lengths that buckets are chosen for, and the limits of the choice.

    Attributes:
        histogram, trace, default: exactly one of them: a file of lengths, a file of requests, a name of ``DEFAULTS``.
        batches: a file of decode batches with their counts; None: batches from 1 to ``max_batch`` are equally likely.
        max_batch: maximum requests of a step.
        most: maximum number of buckets, of prompts and decode steps together.
        multiple: prompt sizes are rounded up to multiples of it.
        chunk: longer prompts are divided into chunks of this many tokens; None: prompts aren't divided.
    """

    histogram: str | None = None
    trace: str | None = None
    default: str | None = None
    batches: str | None = None
    max_batch: int = MOST_REQUESTS
    most: int = 8
    multiple: int = MULTIPLE
    chunk: int | None = None


@dataclass(frozen=True)
class Chosen:
    """The chosen sizes of prompt steps and of decode steps, in tokens and in requests, with the report of the
    choice.
    """

    tokens: tuple[int, ...]
    batch: tuple[int, ...]
    report: SizesReport


def choose(source: BucketSource, context_length: int | None = None) -> Chosen:
    """Chooses the buckets with the least padding.

    ``most`` buckets are divided between prompts and decode steps so that the padding tokens of all steps are fewest.
    The number of decode steps follows from the trace's completion tokens and the distribution of batches; if only the
    prompts' lengths are known, as many tokens are generated as are read.

    Args:
        source: the lengths, and the limits of the choice.
        context_length: the most tokens of a request; None for no limit.

    Raises:
        RequestError: a file is invalid, a length or batch is beyond the context, or a number is out of range.
    """
    trace = _prompts(source, context_length)
    prompts = trace.prompts
    if context_length is not None:
        prompts.check_context(context_length)
    if source.chunk is not None:
        if source.chunk < 1:
            raise RequestError(f"chunk: {source.chunk} is below 1", hint="Leave it out for prompts in one piece.")
        prompts = prompts.in_chunks(source.chunk)
    curve = solve(prompts, source.most, source.multiple, context_length)
    batches = _batches(source, curve[0].sizes[-1])
    decodes = solve(batches, max(source.most - 1, 1))
    weight = Fraction(trace.generated, batches.tokens)
    if trace.generated == 0:
        weight = Fraction(0)
    for_prompts, for_decodes = share_out(curve, decodes, source.most, weight)
    kinds = [KindReport.from_curve("tokens", prompts, curve, for_prompts, source.multiple)]
    if for_decodes:
        kinds.append(KindReport.from_curve("batch", batches, decodes, for_decodes, 1))
    report = SizesReport(source.most, source.multiple, context_length, trace.generated, tuple(kinds))
    return Chosen(kinds[0].chosen.sizes, kinds[1].chosen.sizes if for_decodes else (), report)


def _prompts(source: BucketSource, context_length: int | None) -> Trace:
    sources = [name for name in ("histogram", "trace", "default") if getattr(source, name) is not None]
    if len(sources) != 1:
        listed = " and ".join(sources) or "nothing"
        raise RequestError(f"buckets: {listed} given", hint="Give one of a histogram, a trace and a default.")
    if source.trace is not None:
        return read_trace(source.trace)
    if source.histogram is not None:
        prompts = read_histogram(source.histogram)
    else:
        assert source.default is not None
        prompts = default_histogram(source.default, context_length or _DEFAULT_LONGEST)
    return Trace(prompts, prompts.tokens)


_DEFAULT_LONGEST = 8192
"""The longest length of a default distribution, in tokens, if the context isn't given."""


def _batches(source: BucketSource, largest: int) -> Histogram:
    """Returns the distribution of decode batch sizes: that of a file, or a uniform one.

    Decode steps run in the buckets of prompts too, so no batch may exceed ``largest``, the largest prompt size.
    """
    if source.max_batch < 1:
        raise RequestError(f"max_batch: {source.max_batch} is below 1", hint="A step has at least one request.")
    if source.batches is None:
        return uniform(min(source.max_batch, largest))
    batches = read_histogram(source.batches)
    if batches.longest > largest:
        raise RequestError(
            f"{source.batches}: a batch of {batches.longest:,} requests is beyond the largest size of prompts, "
            f"{largest:,}",
            hint="Decodes share steps with prompts: the largest size must hold them. Take larger batches out.",
        )
    return batches
