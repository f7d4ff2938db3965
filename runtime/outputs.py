"""What a request gives back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from enginewright.plugins.errors import EnginewrightError

FinishReason = Literal["stop", "length", "abort", "error"]
"""stop: an end token or a stop string; length: max_tokens or the context is reached; abort: the caller gave it up;
error: the model's logits for it were not finite."""


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural-log probabilities at one new token: of the token itself, and of the most probable ones, best first.

    They are of the model's own distribution, before temperature and before any token is left out.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class RequestOutput:
    """A finished request.

    Attributes:
        prompt_token_ids: the prompt as the model saw it.
        token_ids: every new token, with the end token if there was one.
        text: their text, without the end token, and cut before a stop string.
        finish_reason: see ``FinishReason``.
        logprobs: one entry a new token if the request asked for them, else None.
        error: what went wrong where finish_reason is "error"; tokens and text are those before.
    """

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprobs, ...] | None = None
    error: EnginewrightError | None = field(default=None, compare=False)


@dataclass(frozen=True)
class StreamPiece:
    """What came since the last piece. ``text`` may be empty: a character or a possible stop string is incomplete.

    The texts of all pieces together are the ``text`` of the ``RequestOutput``; ``finish_reason`` is set on the last.
    """

    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
