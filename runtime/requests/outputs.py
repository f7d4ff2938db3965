"""The results of requests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from ..shared.errors import EnginewrightError

if TYPE_CHECKING:
    from ..text.formats.answers import Message

FinishReason = Literal["stop", "length", "abort", "error"]
"""stop: an end token or a stop string; length: max_tokens or the context is reached; abort: the caller gave it up;
error: the model's logits for it were not finite."""


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural-log probabilities at one new token: of the token itself, and of the most probable ones, best first.

    They are of the model's own distribution, before penalties and temperature and before any token is left out.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


Logprobs = tuple[int, float, tuple[tuple[int, float], ...]]
"""``TokenLogprobs`` as plain values, which cross a socket."""


def plain_logprobs(entries: tuple[TokenLogprobs, ...] | None) -> tuple[Logprobs, ...] | None:
    """Returns ``TokenLogprobs`` as plain values."""
    return None if entries is None else tuple((one.token_id, one.logprob, one.top) for one in entries)


@dataclass(frozen=True)
class Logprob:
    """One token's log-probability, as in vLLM. ``rank``: 1 is the likeliest; None if it isn't among the top ones."""

    logprob: float
    rank: int | None = None


@dataclass(frozen=True)
class RequestMetrics:
    """When it happened, in seconds of ``time.monotonic()``; None for what didn't.

    Attributes:
        queued: the request was made.
        first_token, last_token: that new token was there.
        started: the first chunk of its prompt was scheduled.
        intervals: how many there are between its new tokens.
        longest_interval: of these, in seconds.
        drafted, accepted: tokens that were computed ahead, and of these those that were right (``LLM(speculate=...)``).
        cached_tokens: tokens of the prompt that were found in the prefix cache.
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
        """Seconds that it waited, read its prompt, and wrote."""
        started = self.queued if self.started is None else self.started
        first = started if self.first_token is None else self.first_token
        return started - self.queued, first - started, (self.last_token or first) - first

    @property
    def interval_seconds(self) -> float:
        """All intervals between its new tokens together."""
        return 0.0 if self.first_token is None or self.last_token is None else self.last_token - self.first_token

    @property
    def ttft(self) -> float | None:
        """Seconds to the first new token."""
        return None if self.first_token is None else self.first_token - self.queued

    @property
    def tpot(self) -> float | None:
        """Seconds for each further token, on average."""
        return self.interval_seconds / self.intervals if self.intervals else None


@dataclass(frozen=True)
class CompletionOutput:
    """A result under vLLM's names; see ``RequestOutput``."""

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
        """The answer in its parts, as ``RequestOutput.message``."""
        return None if self.reader is None else self.reader(self.token_ids)


@dataclass(frozen=True)
class RequestOutput:
    """A finished request. Two are equal if they have the same prompt tokens and the same result.

    Attributes:
        prompt_token_ids: the prompt as the model saw it.
        token_ids: every new token, with the end token if there was one.
        text: their text, without the end token, and cut before a stop string.
        finish_reason: "stop" for an end token or a stop string, "length" for ``max_tokens`` or the context. "abort":
            the caller gave it up; "error": the model's logits for it were not finite.
        logprobs: one entry a new token if the request asked for them, else None.
        stop_reason: the stop string or the token of ``stop_token_ids`` that ended it; None if something else did.
        prompt: the text of the prompt, for a conversation what its template made; None for a prompt of token ids.
        request_id: of this process.
        error: what went wrong where finish_reason is "error"; tokens and text are those before.
        metrics: when it happened.
        num_cached_tokens: of the prompt, that were found in the prefix cache; None without one. (vLLM's name.)
        prompt_logprobs: one entry a token of the prompt if the request asked for them, the first None; else None.
        score: of a beam search's answer: see ``SamplingParams.num_beams``.
        others: the results of the other answers where ``n`` is more than 1; the tokens and the text above are those of
            the first.
        reader: makes ``message`` of the tokens.
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
        """A conversation's answer in its parts: ``content``, ``reasoning`` and ``calls``; None of a plain prompt.

        It is read from ``token_ids`` when it is first asked for. What stands behind a stop string isn't cut there.
        """
        return None if self.reader is None else self.reader(self.token_ids)

    @property
    def cumulative_logprob(self) -> float | None:
        """The sum of the new tokens' log-probabilities; None without ``logprobs``."""
        return None if self.logprobs is None else sum(entry.logprob for entry in self.logprobs)

    @property
    def outputs(self) -> list[CompletionOutput]:
        """One entry an answer, as vLLM has it: ``logprobs`` maps the top tokens, and the new one, to theirs."""
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
        """Always True; vLLM's results have it."""
        return True


@dataclass(frozen=True)
class StreamPiece:
    """The output since the last piece. ``text`` may be empty: a character or a possible stop string is incomplete.

    The texts of all pieces together are the ``text`` of the ``RequestOutput``; ``finish_reason`` is set on the last.
    Where ``n`` is more than 1, each piece is of the answer ``index``.
    """

    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    index: int = 0


@dataclass(frozen=True)
class BeamSearchSequence:
    """One sequence that ``LLM.beam_search`` found, as vLLM has it.

    Attributes:
        tokens: the prompt's and the new ones, with the end token if there was one.
        logprobs: of each new token: the most probable ones there.
        cum_logprob: the sum of the new tokens' log-probabilities.
        text: of all tokens, special ones included; None without a tokenizer.
        finish_reason, stop_reason: see ``RequestOutput``.
        score: what the sequences are sorted by; see ``SamplingParams.num_beams``. (vLLM counts the prompt's tokens as
            part of the length; here only new tokens count, as in transformers.)
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
    """The result of ``LLM.beam_search`` for a prompt: ``sequences``, best first."""

    sequences: list[BeamSearchSequence]

    @classmethod
    def from_result(cls, result: RequestOutput, decode: Callable[[list[int]], str] | None) -> BeamSearchOutput:
        """A request's result in this form; ``decode`` makes text of tokens."""
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
