"""The results of requests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from ..shared.errors import EnginewrightError

if TYPE_CHECKING:
    from ..shared.contracts import FloatArray
    from ..text.formats.answers import Message

FinishReason = Literal["stop", "length", "abort", "error"]
"""The reason for a request's end.

stop: an end token or a stop string; length: ``max_tokens`` or the context is reached; abort: the caller aborted it;
error: the request failed, for example because its logits weren't finite.
"""


@dataclass(frozen=True)
class TokenLogprobs:
    """The log-probability of a token (natural logarithm).

    ``top`` has pairs (token, log-probability) of the most probable tokens, best first. The numbers are from the model's
    own distribution, before penalties, temperature, and filters such as top_k.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


Logprobs = tuple[int, float, tuple[tuple[int, float], ...]]
"""``TokenLogprobs`` as plain values, which cross a socket."""


def plain_logprobs(entries: tuple[TokenLogprobs, ...] | None) -> tuple[Logprobs, ...] | None:
    """Converts ``TokenLogprobs`` to plain tuples; None stays None."""
    return None if entries is None else tuple((one.token_id, one.logprob, one.top) for one in entries)


@dataclass(frozen=True)
class Logprob:
    """The log-probability of one token, as in vLLM.

    Attributes:
        logprob: its natural logarithm.
        rank: 1 for the likeliest token; None if the token isn't among the reported ones.
    """

    logprob: float
    rank: int | None = None


@dataclass(frozen=True)
class RequestMetrics:
    """Times and counts of a request.

    A time is in seconds of ``time.monotonic()``, and None if its event hasn't happened yet.

    Attributes:
        queued: the time at which the request was made.
        first_token, last_token: the times at which the first and the last new token were available.
        started: the time at which the first chunk of the prompt was scheduled.
        intervals: the number of intervals between new tokens.
        longest_interval: the longest of these intervals, in seconds.
        drafted, accepted: the number of proposed tokens, and of those that were right (``LLM(speculate=...)``).
        cached_tokens: the number of prompt tokens from the prefix cache.
    """

    queued: float
    first_token: float | None = None
    last_token: float | None = None
    started: float | None = None
    intervals: int = 0
    longest_interval: float = 0.0
    drafted: int = 0
    accepted: int = 0
    cached_tokens: int = 0

    @property
    def times(self) -> tuple[float, float, float]:
        """Three durations in seconds: waiting, from the first chunk of the prompt to the first token, and
        generating.
        """
        started = self.queued if self.started is None else self.started
        first = started if self.first_token is None else self.first_token
        return started - self.queued, first - started, (self.last_token or first) - first

    @property
    def interval_seconds(self) -> float:
        """The seconds from the first new token to the last."""
        return 0.0 if self.first_token is None or self.last_token is None else self.last_token - self.first_token

    @property
    def ttft(self) -> float | None:
        """The seconds until the first new token; None before it."""
        return None if self.first_token is None else self.first_token - self.queued

    @property
    def tpot(self) -> float | None:
        """The mean seconds per new token after the first; None with fewer than two."""
        return self.interval_seconds / self.intervals if self.intervals else None


@dataclass(frozen=True, eq=False)
class Classification:
    """The classes of a text, or of each of its tokens.

    Attributes:
        labels: the names of the C classes; their numbers if the model has no names.
        scores: float32 numbers, one for each class: [C]. A model that classifies each of S tokens has [S, C].
        token_ids: the tokens of the text, with the special tokens around it.
        error: the error if this text failed (all scores are NaN then); otherwise None.
    """

    labels: tuple[str, ...]
    scores: FloatArray
    token_ids: tuple[int, ...] = ()
    error: EnginewrightError | None = None

    @property
    def label(self) -> str | tuple[str, ...]:
        """The label with the greatest score. For a model that classifies tokens: such a label of each token."""
        best = self.scores.argmax(-1)
        return self.labels[int(best)] if best.ndim == 0 else tuple(self.labels[int(one)] for one in best)

    @property
    def score(self) -> float | FloatArray:
        """The greatest score. For a model that classifies tokens: the greatest score of each token, [S]."""
        greatest = self.scores.max(-1)
        return float(greatest) if greatest.ndim == 0 else greatest


@dataclass(frozen=True)
class CompletionOutput:
    """One answer of a request, with vLLM's names; ``RequestOutput`` describes the fields."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    cumulative_logprob: float | None
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: FinishReason
    stop_reason: int | str | None
    reader: Callable[[tuple[int, ...]], Message] | None = field(default=None, compare=False, repr=False)

    @cached_property
    def message(self) -> Message | None:
        """The answer's content, reasoning and calls; see ``RequestOutput.message``."""
        return None if self.reader is None else self.reader(self.token_ids)


@dataclass(frozen=True)
class RequestOutput:
    """The result of a finished request. Two results are equal if their prompt tokens and their answers are equal.

    Attributes:
        prompt_token_ids: the tokens of the prompt.
        token_ids: all new tokens, with the end token if there was one.
        text: the text of the new tokens, without the end token, and cut before a stop string.
        finish_reason: "stop" for an end token or a stop string, "length" for ``max_tokens`` or the context, "abort" if
            the caller aborted the request, "error" if the request failed.
        logprobs: a ``TokenLogprobs`` for each new token; None if ``SamplingParams.logprobs`` is None.
        stop_reason: the stop string, or the token of ``stop_token_ids``, that ended the answer; otherwise None.
        prompt: the text of the prompt; for a conversation, the rendered template. None for a prompt of token ids.
        request_id: a number, as text, that is unique in this process.
        error: the error if finish_reason is "error"; ``token_ids`` and ``text`` have the output before the error.
        metrics: times and counts of the request.
        num_cached_tokens: the number of prompt tokens from the prefix cache, as in vLLM; None without a prefix cache.
        prompt_logprobs: a ``TokenLogprobs`` for each prompt token, but None for the first one. It is None if
            ``SamplingParams.prompt_logprobs`` is None.
        score: the score of a beam search's answer; see ``SamplingParams.num_beams``.
        others: the other answers if ``SamplingParams.n`` is more than 1; this object is the first answer.
        reader: the function that converts the tokens to ``message``; None if the prompt wasn't a conversation.
    """

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprobs, ...] | None = None
    stop_reason: int | str | None = None
    prompt: str | None = field(default=None, compare=False)
    request_id: str = field(default="", compare=False)
    error: EnginewrightError | None = field(default=None, compare=False)
    metrics: RequestMetrics = field(default=RequestMetrics(0.0), compare=False)
    num_cached_tokens: int | None = field(default=None, compare=False)
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    score: float | None = None
    others: tuple[RequestOutput, ...] = ()
    reader: Callable[[tuple[int, ...]], Message] | None = field(default=None, compare=False, repr=False)

    @cached_property
    def message(self) -> Message | None:
        """The ``content``, ``reasoning`` and ``calls`` of an answer in a conversation; None for a plain prompt.

        It is parsed from ``token_ids`` at the first access. Text after a stop string isn't removed from it.
        """
        return None if self.reader is None else self.reader(self.token_ids)

    @property
    def cumulative_logprob(self) -> float | None:
        """The sum of the new tokens' log-probabilities; None without ``logprobs``."""
        return None if self.logprobs is None else sum(entry.logprob for entry in self.logprobs)

    @property
    def outputs(self) -> list[CompletionOutput]:
        """One entry per answer, as in vLLM.

        Its ``logprobs`` has, for each new token, a dict of that token and the top tokens.
        """
        return [answer._completion(index) for index, answer in enumerate((self, *self.others))]

    def _completion(self, index: int) -> CompletionOutput:
        entries = None
        if self.logprobs is not None:
            entries = [_logprob_dict(entry) for entry in self.logprobs]
        return CompletionOutput(
            index=index,
            text=self.text,
            token_ids=self.token_ids,
            cumulative_logprob=self.cumulative_logprob,
            logprobs=entries,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            reader=self.reader,
        )

    @property
    def finished(self) -> bool:
        """Always True, as in vLLM's results."""
        return True


@dataclass(frozen=True)
class StreamPiece:
    """The output since the last piece.

    The texts of all pieces together are the ``text`` of the ``RequestOutput``. A piece's text may be empty while a
    character or a possible stop string is incomplete. Only the last piece of an answer has a ``finish_reason``.
    ``index`` is the number of the answer if ``SamplingParams.n`` is more than 1.
    """

    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    index: int = 0


@dataclass(frozen=True)
class BeamSearchSequence:
    """One sequence of ``LLM.beam_search``, as in vLLM.

    Attributes:
        tokens: the tokens of the prompt and of the answer, with the end token if there was one.
        logprobs: for each new token, the log-probabilities of the most probable tokens.
        cum_logprob: the sum of the new tokens' log-probabilities.
        text: the text of all tokens, including special tokens; None if the bundle has no tokenizer.
        finish_reason, stop_reason: as in ``RequestOutput``.
        score: the number that sequences are sorted by; see ``SamplingParams.num_beams``. A sequence's length counts
            only new tokens, as in transformers; vLLM also counts the prompt's tokens.
    """

    tokens: list[int]
    logprobs: list[dict[int, Logprob]]
    cum_logprob: float
    text: str | None
    finish_reason: FinishReason
    stop_reason: int | str | None
    score: float | None


@dataclass(frozen=True)
class BeamSearchOutput:
    """The result of ``LLM.beam_search`` for a prompt: the list ``sequences``, with the best sequence first."""

    sequences: list[BeamSearchSequence]

    @classmethod
    def from_result(cls, result: RequestOutput, decode: Callable[[list[int]], str] | None) -> BeamSearchOutput:
        """Converts a request's result. ``decode`` converts tokens to text; None if there is no tokenizer."""
        sequences = []
        for answer, output in zip((result, *result.others), result.outputs, strict=True):
            tokens = [*result.prompt_token_ids, *answer.token_ids]
            sequences.append(
                BeamSearchSequence(
                    tokens=tokens,
                    logprobs=output.logprobs or [],
                    cum_logprob=answer.cumulative_logprob or 0.0,
                    text=None if decode is None else decode(tokens),
                    finish_reason=answer.finish_reason,
                    stop_reason=answer.stop_reason,
                    score=answer.score,
                )
            )
        return cls(sequences)


def _logprob_dict(entry: TokenLogprobs) -> dict[int, Logprob]:
    logprobs = {entry.token_id: Logprob(entry.logprob)}
    return logprobs | {token: Logprob(logprob, rank) for rank, (token, logprob) in enumerate(entry.top, 1)}
