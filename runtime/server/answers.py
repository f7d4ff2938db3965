"""Answers in the shapes of OpenAI's API, whole and as server-sent events."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from ..text.tokenizer import Tokenizer
from .bodies import Body, CompletionBody
from .records import Ended, Finished, Logprobs, Piece

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"

_LEAST = -9999.0
"""Stands for minus infinity, which JSON hasn't."""

_encoder = msgspec.json.Encoder()


def event(value: Any) -> bytes:
    """A server-sent event."""
    return b"data: " + _encoder.encode(value) + b"\n\n"


@dataclass(frozen=True)
class Given:
    """A prompt: its text and token ids. ``guarded``: a conversation's text as ``Tokenizer.guarded_chat`` has it."""

    text: str
    ids: Sequence[int]
    guarded: str | None = None


class Shape:
    """The answer to one body; ``ChatShape`` and ``CompletionShape`` are the two kinds.

    Args:
        body: what was asked.
        model: the name that requests use.
        tokenizer: None where the bundle has none.
        fingerprint: ``system_fingerprint``.
        seed: of the random numbers.
        spliced: tokens that came from a kept turn.
    """

    prefix, whole, chunk = "", "", ""

    def __init__(
        self,
        body: Body,
        model: str,
        tokenizer: Tokenizer | None,
        fingerprint: str | None,
        seed: int,
        spliced: int | None = None,
    ) -> None:
        self._body, self._tokenizer = body, tokenizer
        self._echo = bool(getattr(body, "echo", None))
        self._ids = bool(body.return_token_ids)
        self._strings: dict[int, tuple[str, list[int]]] = {}
        self.id = f"{self.prefix}-{secrets.token_hex(16)}"
        about: dict[str, Any] = {"seed": seed}
        if spliced is not None:
            about["spliced_tokens"] = spliced
        self._head = {"id": self.id, "created": int(time.time()), "model": model, "system_fingerprint": fingerprint}
        self._about = {"enginewright": about}
        options = body.stream_options
        self.usage_at_end = options is not None and bool(options.include_usage)
        self.usage_always = options is not None and bool(options.continuous_usage_stats)

    def response(self, choices: Sequence[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
        """The whole answer."""
        return {**self._head, "object": self.whole, "choices": list(choices), "usage": usage, **self._about}

    def chunks(self, choices: Sequence[dict[str, Any]], usage: dict[str, Any] | None = None) -> dict[str, Any]:
        """One event of a stream. The first says what is special to us, too."""
        about, self._about = self._about, {}
        found = {**self._head, "object": self.chunk, "choices": list(choices), **about}
        if usage is not None or self.usage_at_end:
            found["usage"] = usage
        return found

    def choice(self, index: int, one: Finished, ended: Ended, given: Given) -> dict[str, Any]:
        """One of the whole answer's."""
        raise NotImplementedError

    def first(self, index: int, prompt: str) -> dict[str, Any] | None:
        """The first of a stream's; None: there is nothing to say yet."""
        raise NotImplementedError

    def piece(self, index: int, piece: Piece) -> dict[str, Any]:
        """A further one of a stream's."""
        raise NotImplementedError

    def prompt_logprobs(self, ended: Ended) -> list[dict[str, Any] | None]:
        """vLLM's shape: token id -> its log-probability, for each token of a prompt but the first."""
        found: list[dict[str, Any] | None] = []
        for entry in ended.prompt_logprobs or ():
            if entry is None:
                found.append(None)
                continue
            ranks = {token: (logprob, rank) for rank, (token, logprob) in enumerate(entry[2], 1)}
            ranks.setdefault(entry[0], (entry[1], 0))
            found.append(
                {
                    str(token): {"logprob": max(p, _LEAST), "rank": rank or None, "decoded_token": self.token(token)[0]}
                    for token, (p, rank) in ranks.items()
                }
            )
        return found

    def token(self, index: int) -> tuple[str, list[int]]:
        """A token's text, and its bytes."""
        if index not in self._strings:
            if self._tokenizer is None or self._body.return_tokens_as_token_ids:
                self._strings[index] = f"token_id:{index}", []
            else:
                data = self._tokenizer.token_bytes(index)
                self._strings[index] = data.decode("utf-8", "replace"), list(data)
        return self._strings[index]


def usage(prompt: int, new: int, ended: Iterable[Ended] = ()) -> dict[str, Any]:
    """Counts of tokens."""
    ended = list(ended)
    accepted, drafted = sum(one.accepted for one in ended), sum(one.drafted for one in ended)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": new,
        "total_tokens": prompt + new,
        "prompt_tokens_details": {"cached_tokens": sum(one.cached_tokens for one in ended), "audio_tokens": 0},
        "completion_tokens_details": {
            "reasoning_tokens": 0,
            "audio_tokens": 0,
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": drafted - accepted,
        },
    }


class ChatShape(Shape):
    """The answer of ``/v1/chat/completions``."""

    prefix, whole, chunk = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def choice(self, index: int, one: Finished, ended: Ended, given: Given) -> dict[str, Any]:
        """One of the whole answer's."""
        text = (given.text if self._echo else "") + one.text
        found: dict[str, Any] = {
            "index": index,
            "message": {"role": "assistant", "content": text, "refusal": None},
            "logprobs": None if one.logprobs is None else self._logprobs(one.logprobs),
            "finish_reason": one.finish_reason,
            "stop_reason": one.stop_reason,
        }
        return found | ({"token_ids": one.token_ids} if self._ids else {})

    def first(self, index: int, prompt: str) -> dict[str, Any]:
        """The first of a stream's."""
        delta = {"role": "assistant", "content": prompt if self._echo else ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def piece(self, index: int, piece: Piece) -> dict[str, Any]:
        """A further one."""
        found: dict[str, Any] = {
            "index": index,
            "delta": {"content": piece.text} if piece.text else {},
            "logprobs": None if piece.logprobs is None else self._logprobs(piece.logprobs),
            "finish_reason": piece.finish_reason,
        }
        return found | ({"token_ids": piece.token_ids} if self._ids else {})

    def _logprobs(self, entries: Sequence[Logprobs]) -> dict[str, Any]:
        return {
            "content": [
                self._entry(t, p) | {"top_logprobs": [self._entry(*one) for one in top]} for t, p, top in entries
            ],
            "refusal": None,
        }

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        text, data = self.token(token)
        return {"token": text, "logprob": max(logprob, _LEAST), "bytes": data}


class CompletionShape(Shape):
    """The answer of ``/v1/completions``; log-probabilities have the shape that this protocol began with."""

    prefix, whole, chunk = "cmpl", "text_completion", "text_completion"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._offsets: dict[int, int] = {}

    def choice(self, index: int, one: Finished, ended: Ended, given: Given) -> dict[str, Any]:
        """One of the whole answer's."""
        assert isinstance(self._body, CompletionBody)
        alone = self._body.scores_alone
        entries: list[Logprobs | int] = []
        if one.logprobs is not None:
            scored = ended.prompt_logprobs if self._echo else None
            entries = [given.ids[0] if entry is None else entry for entry in scored or ()]
            entries += () if alone else one.logprobs
        found: dict[str, Any] = {
            "index": index,
            "text": (given.text if self._echo else "") + ("" if alone else one.text),
            "logprobs": None if one.logprobs is None else self._legacy(entries, 0),
            "finish_reason": "length" if alone else one.finish_reason,
            "stop_reason": one.stop_reason,
        }
        return found | ({"token_ids": one.token_ids} if self._ids else {})

    def first(self, index: int, prompt: str) -> dict[str, Any] | None:
        """The first of a stream's; None: there is nothing to say yet."""
        if not self._echo:
            return None
        self._offsets[index] = len(prompt)
        return {"index": index, "text": prompt, "logprobs": None, "finish_reason": None}

    def piece(self, index: int, piece: Piece) -> dict[str, Any]:
        """A further one."""
        offset = self._offsets.get(index, 0)
        self._offsets[index] = offset + len(piece.text)
        found: dict[str, Any] = {
            "index": index,
            "text": piece.text,
            "logprobs": None if piece.logprobs is None else self._legacy(piece.logprobs, offset),
            "finish_reason": piece.finish_reason,
        }
        return found | ({"token_ids": piece.token_ids} if self._ids else {})

    def _legacy(self, entries: Sequence[Logprobs | int], offset: int) -> dict[str, Any]:
        """``entries`` of tokens in their order; a prompt's first token is an id, as it has no probability."""
        tokens, logprobs, tops, offsets = [], [], [], []
        for entry in entries:
            text = self.token(entry if isinstance(entry, int) else entry[0])[0]
            tokens.append(text)
            offsets.append(offset)
            offset += len(text)
            logprobs.append(None if isinstance(entry, int) else max(entry[1], _LEAST))
            tops.append(None if isinstance(entry, int) else {self.token(t)[0]: max(p, _LEAST) for t, p in entry[2]})
        return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets}


def error_body(message: str, kind: str, *, param: str | None = None, code: str | int | None = None) -> dict[str, Any]:
    """An error in OpenAI's shape."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
