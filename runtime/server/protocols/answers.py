"""Response formats of OpenAI's API and llama.cpp's infill: a whole JSON object, or a stream of server-sent events."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ...requests.outputs import Logprobs
from ...tasks.generate import Finished
from ...text.chat_format import Delta
from ...text.tokenizer import Tokenizer
from ..engines.records import Ended, Piece
from ..http.errors import ApiError, encoded
from .bodies import Body, CompletionBody
from .tools import ToolChoice

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"

_LEAST = -9999.0
"""The smallest log-probability that is sent. JSON has no minus infinity."""


def event(value: Any, name: str = "") -> bytes:
    """Returns ``value`` as the JSON of a server-sent event; ``name`` is the type of the event, which may be empty."""
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + encoded(value) + b"\n\n"


@dataclass(frozen=True)
class Given:
    """The prompt of a request: its text and its token ids.

    ``guarded`` is the text of a conversation as `Tokenizer.guarded_chat` renders it; None for a plain prompt.
    """

    text: str
    ids: Sequence[int]
    guarded: str | None = None


@dataclass(frozen=True)
class News:
    """New tokens of an answer, and the deltas that are parsed from them.

    Attributes:
        deltas: reasoning, content and tool calls, in the order in which the model wrote them.
        piece: the new tokens and their plain text; ``deltas`` have the same text, parsed.
        finish_reason: "stop", "length", ..., or "tool_calls"; None while the answer isn't complete.
    """

    deltas: Sequence[Delta]
    piece: Piece
    finish_reason: str | None


class Shape:
    """The response to one request body, in the format of a protocol.

    A whole response is made by ``add`` for each of its choices, then ``response``. A stream is made by ``start``, then
    ``first`` and ``news`` for each choice, then ``end`` or ``failed``.

    Args:
        body: the body of the request.
        model: the name of the model that requests use.
        tokenizer: tokenizer of the model; None if the bundle has none.
        fingerprint: value of ``system_fingerprint``.
        seed: seed of the random numbers that draw tokens.
        tools: the tools that the model may call.
        spliced: number of prompt tokens that were taken from an earlier answer instead of tokenized text; None if the
            conversation isn't spliced.

    Attributes:
        media_type: media type of a stream.
        keep_alive: bytes that are sent while a stream has no event to send.
        usage_always: True if every event of a stream contains the token counts.
        call_prefix: prefix of the ids of tool calls.
    """

    prefix = ""
    media_type = "text/event-stream; charset=utf-8"
    keep_alive = KEEP_ALIVE
    usage_always = False
    call_prefix = "call_"

    def __init__(
        self,
        body: Body,
        model: str,
        tokenizer: Tokenizer | None,
        fingerprint: str | None,
        seed: int,
        tools: ToolChoice,
        spliced: int | None = None,
    ) -> None:
        self._body, self._tokenizer, self._tools, self._model = body, tokenizer, tools, model
        self._fingerprint, self._seed, self._spliced = fingerprint, seed, spliced
        self._strings: dict[int, tuple[str, list[int]]] = {}
        self.id = f"{self.prefix}{secrets.token_hex(16)}"

    def add(self, index: int, news: News, one: Finished, ended: Ended, given: Given) -> None:
        """Adds one choice to a whole response.

        Args:
            index: index of the choice.
            news: the deltas of the choice, and its finish reason.
            one: tokens, text and log-probabilities of the choice, as the engine returned them.
            ended: the end of the request, with its metrics.
            given: the prompt of the request.
        """
        raise NotImplementedError

    def response(self, usage: dict[str, Any]) -> dict[str, Any]:
        """Returns the whole response as a JSON object; ``usage`` has the token counts."""
        raise NotImplementedError

    def start(self, prompt: int) -> bytes:
        """Returns the first events of a stream; ``prompt`` is the number of the prompt's tokens."""
        return b""

    def first(self, index: int, prompt: str) -> bytes:
        """Returns the first events of the choice ``index``; ``prompt`` is the prompt's text."""
        return b""

    def news(self, index: int, news: News, usage: dict[str, Any] | None) -> bytes:
        """Returns the events for new tokens of the choice ``index``; ``usage`` has the token counts so far, or is
        None.
        """
        raise NotImplementedError

    def end(self, usage: dict[str, Any], ended: Sequence[Ended]) -> bytes:
        """Returns the last events of a stream, given the token counts and the ends of its requests."""
        raise NotImplementedError

    def failed(self, error: ApiError) -> bytes:
        """Returns the last events of a stream that fails with ``error``."""
        return event(error.body_for("")) + DONE

    def prompt_logprobs(self, ended: Ended) -> list[dict[str, Any] | None]:
        """Returns the log-probabilities of the prompt's tokens, an entry for each token; None for the first token."""
        raise NotImplementedError

    def entry(self, token: int, logprob: float) -> dict[str, Any]:
        """Returns the JSON object of a token id and its natural log-probability, with the token's text and bytes."""
        text, data = self.token(token)
        return {"token": text, "logprob": max(logprob, _LEAST), "bytes": data}

    def token(self, index: int) -> tuple[str, list[int]]:
        """Returns the text and the bytes of the token ``index``."""
        if index not in self._strings:
            if self._tokenizer is None or self._body.return_tokens_as_token_ids:
                self._strings[index] = f"token_id:{index}", []
            else:
                data = self._tokenizer.token_bytes(index)
                self._strings[index] = data.decode("utf-8", "replace"), list(data)
        return self._strings[index]


class OpenAIShape(Shape):
    """The common part of the responses of ``/v1/chat/completions`` and ``/v1/completions``."""

    whole, chunk = "", ""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        body = self._body
        self._echo = bool(getattr(body, "echo", None))
        self._ids = bool(body.return_token_ids)
        about: dict[str, Any] = {"seed": self._seed}
        if self._spliced is not None:
            about["spliced_tokens"] = self._spliced
        self._head = {
            "id": self.id,
            "created": int(time.time()),
            "model": self._model,
            "system_fingerprint": self._fingerprint,
        }
        self._about = {"enginewright": about}
        options = body.stream_options
        self._usage_at_end = options is not None and bool(options.include_usage)
        self.usage_always = options is not None and bool(options.continuous_usage_stats)
        self._choices: list[dict[str, Any]] = []

    def add(self, index: int, news: News, one: Finished, ended: Ended, given: Given) -> None:
        """Adds one choice to a whole response. The arguments are those of `Shape.add`."""
        self._choices.append(self.choice(index, news, one, ended, given))

    def response(self, usage: dict[str, Any]) -> dict[str, Any]:
        """Returns the whole response as a JSON object."""
        return {**self._head, "object": self.whole, "choices": self._choices, "usage": usage, **self._about}

    def first(self, index: int, prompt: str) -> bytes:
        """Returns the first event of the choice ``index``; no bytes if the format has no such event."""
        choice = self.first_choice(index, prompt)
        return b"" if choice is None else event(self._chunk([choice]))

    def news(self, index: int, news: News, usage: dict[str, Any] | None) -> bytes:
        """Returns the event for new tokens of a choice; b"" if they add no text, such as a part of a character.

        Args:
            index: the number of the choice.
            news: the new tokens.
            usage: the counts of tokens so far; None leaves them out.
        """
        if not (news.deltas or news.finish_reason or news.piece.logprobs or self._ids):
            return b""
        return event(self._chunk([self.piece(index, news)], usage))

    def end(self, usage: dict[str, Any], ended: Sequence[Ended]) -> bytes:
        """Returns the last events of a stream. The arguments are those of `Shape.end`."""
        return (event(self._chunk([], usage)) if self._usage_at_end else b"") + DONE

    def _chunk(self, choices: Sequence[dict[str, Any]], usage: dict[str, Any] | None = None) -> dict[str, Any]:
        """Returns one event of a stream as a JSON object. The first event has the field ``enginewright``, too."""
        about, self._about = self._about, {}
        chunk = {**self._head, "object": self.chunk, "choices": list(choices), **about}
        if usage is not None or self._usage_at_end:
            chunk["usage"] = usage
        return chunk

    def choice(self, index: int, news: News, one: Finished, ended: Ended, given: Given) -> dict[str, Any]:
        """Returns the JSON object of one choice in a whole response. The arguments are those of `add`."""
        raise NotImplementedError

    def first_choice(self, index: int, prompt: str) -> dict[str, Any] | None:
        """Returns the first event of the choice ``index`` in a stream, or None if the format has no such event."""
        raise NotImplementedError

    def piece(self, index: int, news: News) -> dict[str, Any]:
        """Returns the next event of a stream, with the new tokens and text of the choice ``index``."""
        raise NotImplementedError

    def prompt_logprobs(self, ended: Ended) -> list[dict[str, Any] | None]:
        """Returns the log-probabilities in vLLM's format: an object {token id: log-probability, rank, text} for
        each token of the prompt; None for the first token, which has no probability.
        """
        entries: list[dict[str, Any] | None] = []
        for entry in ended.result.prompt_logprobs or ():
            if entry is None:
                entries.append(None)
                continue
            ranks = {token: (logprob, rank) for rank, (token, logprob) in enumerate(entry[2], 1)}
            ranks.setdefault(entry[0], (entry[1], 0))
            entries.append(
                {
                    str(token): {"logprob": max(p, _LEAST), "rank": rank or None, "decoded_token": self.token(token)[0]}
                    for token, (p, rank) in ranks.items()
                }
            )
        return entries


def usage(prompt: int, new: int, ended: Iterable[Ended] = (), reasoning: int = 0) -> dict[str, Any]:
    """Returns the token counts in the format of chat completions.

    Args:
        prompt: number of prompt tokens.
        new: number of generated tokens.
        ended: the ends of the requests, with the numbers of cached and of drafted tokens.
        reasoning: number of the generated tokens that are reasoning.
    """
    ended = list(ended)
    accepted, drafted = sum(one.metrics.accepted for one in ended), sum(one.metrics.drafted for one in ended)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": new,
        "total_tokens": prompt + new,
        "prompt_tokens_details": {"cached_tokens": sum(one.metrics.cached_tokens for one in ended), "audio_tokens": 0},
        "completion_tokens_details": {
            "reasoning_tokens": reasoning,
            "audio_tokens": 0,
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": drafted - accepted,
        },
    }


class ChatShape(OpenAIShape):
    """The response of ``/v1/chat/completions``."""

    prefix, whole, chunk = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def choice(self, index: int, news: News, one: Finished, ended: Ended, given: Given) -> dict[str, Any]:
        """Returns the JSON object of one choice in a whole response. The arguments are those of `Shape.add`."""
        parts = self._said(news)
        content = (given.text if self._echo else "") + parts.pop("content", "")
        calls = parts.get("tool_calls", ())
        for call in calls:
            del call["index"]
        message = {"role": "assistant", "content": content if content or not calls else None, "refusal": None, **parts}
        choice: dict[str, Any] = {
            "index": index,
            "message": message,
            "logprobs": None if one.logprobs is None else self._logprobs(one.logprobs),
            "finish_reason": news.finish_reason,
            "stop_reason": one.stop_reason,
        }
        return choice | ({"token_ids": one.token_ids} if self._ids else {})

    def first_choice(self, index: int, prompt: str) -> dict[str, Any]:
        """Returns the first event of a choice: the role, and the prompt's text if the body asks for its echo."""
        delta = {"role": "assistant", "content": prompt if self._echo else ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def piece(self, index: int, news: News) -> dict[str, Any]:
        """Returns the next event of a choice, with its new content, reasoning and tool calls."""
        piece = news.piece
        choice: dict[str, Any] = {
            "index": index,
            "delta": self._said(news),
            "logprobs": None if piece.logprobs is None else self._logprobs(piece.logprobs),
            "finish_reason": news.finish_reason,
        }
        return choice | ({"token_ids": piece.token_ids} if self._ids else {})

    def _said(self, news: News) -> dict[str, Any]:
        """Returns the fields that an event's ``delta`` and a whole response's ``message`` share.

        They are content, tool calls, and the reasoning under the two names that clients read.
        """
        content = "".join(delta.content for delta in news.deltas)
        reasoning = "".join(delta.reasoning for delta in news.deltas)
        calls: dict[int, dict[str, Any]] = {}
        for delta in news.deltas:
            if delta.call is None:
                continue
            call = calls.setdefault(delta.call, {"index": delta.call})
            if delta.name:
                custom = delta.name in self._tools.custom
                call |= {"id": delta.id, "type": "custom" if custom else "function"}
                call[call["type"]] = {"name": delta.name, "input" if custom else "arguments": delta.arguments}
            elif "custom" in call:
                call["custom"]["input"] += delta.arguments
            else:
                call.setdefault("function", {"arguments": ""})["arguments"] += delta.arguments
        parts: dict[str, Any] = {"content": content} if content else {}
        if reasoning and getattr(self._body, "shows_reasoning", True):
            parts |= {"reasoning": reasoning, "reasoning_content": reasoning}
        return parts | ({"tool_calls": [*calls.values()]} if calls else {})

    def _logprobs(self, entries: Sequence[Logprobs]) -> dict[str, Any]:
        return {
            "content": [
                self.entry(t, p) | {"top_logprobs": [self.entry(*one) for one in top]} for t, p, top in entries
            ],
            "refusal": None,
        }


class CompletionShape(OpenAIShape):
    """The response of ``/v1/completions``, with log-probabilities in the older format of that endpoint."""

    prefix, whole, chunk = "cmpl-", "text_completion", "text_completion"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._offsets: dict[int, int] = {}

    def choice(self, index: int, news: News, one: Finished, ended: Ended, given: Given) -> dict[str, Any]:
        """Returns the JSON object of one choice in a whole response. The arguments are those of `Shape.add`."""
        assert isinstance(self._body, CompletionBody)
        alone = self._body.scores_alone
        entries: list[Logprobs | int] = []
        if one.logprobs is not None:
            scored = ended.result.prompt_logprobs if self._echo else None
            entries = [given.ids[0] if entry is None else entry for entry in scored or ()]
            entries += () if alone else one.logprobs
        choice: dict[str, Any] = {
            "index": index,
            "text": (given.text if self._echo else "") + ("" if alone else one.text),
            "logprobs": None if one.logprobs is None else self._legacy(entries, 0),
            "finish_reason": "length" if alone else one.finish_reason,
            "stop_reason": one.stop_reason,
        }
        return choice | ({"token_ids": one.token_ids} if self._ids else {})

    def first_choice(self, index: int, prompt: str) -> dict[str, Any] | None:
        """Returns the first event of a choice: the prompt's text; None unless the body asks for its echo."""
        if not self._echo:
            return None
        self._offsets[index] = len(prompt)
        return {"index": index, "text": prompt, "logprobs": None, "finish_reason": None}

    def piece(self, index: int, news: News) -> dict[str, Any]:
        """Returns the next event of a choice, with its new text."""
        piece = news.piece
        offset = self._offsets.get(index, 0)
        self._offsets[index] = offset + len(piece.text)
        choice: dict[str, Any] = {
            "index": index,
            "text": piece.text,
            "logprobs": None if piece.logprobs is None else self._legacy(piece.logprobs, offset),
            "finish_reason": piece.finish_reason,
        }
        return choice | ({"token_ids": piece.token_ids} if self._ids else {})

    def _legacy(self, entries: Sequence[Logprobs | int], offset: int) -> dict[str, Any]:
        """Returns log-probabilities in the older format: parallel lists of tokens, log-probabilities, alternatives
        and offsets.

        Args:
            entries: the tokens in order, with their log-probabilities; an id alone for the first token of a prompt,
                which has no probability.
            offset: offset of the first token in the text, in characters.
        """
        tokens, logprobs, tops, offsets = [], [], [], []
        for entry in entries:
            text = self.token(entry if isinstance(entry, int) else entry[0])[0]
            tokens.append(text)
            offsets.append(offset)
            offset += len(text)
            logprobs.append(None if isinstance(entry, int) else max(entry[1], _LEAST))
            tops.append(None if isinstance(entry, int) else {self.token(t)[0]: max(p, _LEAST) for t, p in entry[2]})
        return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets}


class InfillShape(Shape):
    """The response of llama.cpp's ``/infill``. In the last event of its stream, ``stop`` is true."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._text, self._finish, self._word, self._prompt = "", "", "", 0
        self._ended: Ended | None = None

    def add(self, index: int, news: News, one: Finished, ended: Ended, given: Given) -> None:
        """Sets the text and the end of the only answer. The arguments are those of `Shape.add`."""
        self._take(one.text, one.finish_reason)
        self._ended = ended
        if isinstance(one.stop_reason, str):
            self._word = one.stop_reason

    def response(self, usage: dict[str, Any]) -> dict[str, Any]:
        """Returns the whole response as a JSON object."""
        return self._end(self._text, usage)

    def start(self, prompt: int) -> bytes:
        """Records the number of the prompt's tokens. Returns no bytes, because a stream begins with its first text."""
        self._prompt = prompt
        return b""

    def news(self, index: int, news: News, usage: dict[str, Any] | None) -> bytes:
        """Returns the event for new text; no bytes if there is none."""
        self._take(news.piece.text, news.piece.finish_reason)
        if not news.piece.text:
            return b""
        head = {"index": 0, "content": news.piece.text, "tokens": news.piece.token_ids, "stop": False, "id_slot": -1}
        return event({**head, "tokens_evaluated": self._prompt})

    def end(self, usage: dict[str, Any], ended: Sequence[Ended]) -> bytes:
        """Returns the last event of a stream."""
        self._ended = next(iter(ended), None)
        reason = None if self._ended is None else self._ended.result.answers[0].stop_reason
        if isinstance(reason, str):
            self._word = reason
        return event(self._end("", usage))

    def failed(self, error: ApiError) -> bytes:
        """Returns the last event of a stream that fails with ``error``."""
        return event(error.body_for(""))

    def _take(self, text: str, finish: str | None) -> None:
        self._text += text
        self._finish = finish or self._finish

    def _end(self, content: str, usage: dict[str, Any]) -> dict[str, Any]:
        ended = self._ended
        _, read, wrote = (0.0, 0.0, 0.0) if ended is None else ended.metrics.times
        new, prompt = usage["completion_tokens"], usage["prompt_tokens"]
        known = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "index": 0,
            "content": content,
            "tokens": [],
            "id_slot": -1,
            "stop": True,
            "model": self._model,
            "tokens_predicted": new,
            "tokens_evaluated": prompt,
            "has_new_line": "\n" in self._text,
            "truncated": False,
            "stop_type": "limit" if self._finish == "length" else "word" if self._word else "eos",
            "stopping_word": self._word,
            "tokens_cached": known,
            "timings": {
                "prompt_n": prompt - known,
                "prompt_ms": 1000 * read,
                "prompt_per_second": (prompt - known) / read if read else 0.0,
                "predicted_n": new,
                "predicted_ms": 1000 * wrote,
                "predicted_per_second": new / wrote if wrote else 0.0,
            },
        }
