"""Lets only the chat template write control tokens, never a caller's message.

A tokenizer reads the spelling of a control token (its ``special`` added tokens, such as ``<|im_end|>``) as that token.
In a conversation, a message could thereby end its own turn and begin another. So a random secret is added after each
spelling in the template before rendering; messages can't contain the secret. A spelling without the secret in the
rendered text then came from a message. It is encoded as text, by a tokenizer that knows the control tokens only with
the secret.

Some templates compose a spelling, for example from a role, so that the secret would change their text. For these, the
secret breaks the spellings in the messages before rendering instead. The messages are also rendered with neutral
texts; if the control tokens differ, the request is refused.
"""

from __future__ import annotations

import re
import secrets
import threading
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

import msgspec
import tokenizers

from ..shared.errors import RequestError

if TYPE_CHECKING:
    from .quick_tokenizer import QuickTokenizer

_SHORTEST = 3
"""The fewest characters of a spelling that is guarded. Shorter ones, such as a line's end, are common in templates."""


class ControlTokens:
    """The control tokens of one tokenizer. It is thread-safe.

    Args:
        tokenizer: the model's tokenizer.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer | QuickTokenizer) -> None:
        added = tokenizer.get_added_tokens_decoder()
        self._ids = {one.content: i for i, one in added.items() if one.special and len(one.content) >= _SHORTEST}
        self._tokenizer = tokenizer
        self._secret = secrets.token_hex(8)
        spellings = _any_of(self._ids)
        self._plain = re.compile(spellings)
        self._own = re.compile(f"(?:{spellings}){self._secret}")
        # A message's end may be the beginning of a spelling that the template continues.
        self._begun = re.compile(f"(?:{_any_of({s[:n] for s in self._ids for n in range(1, len(s))})})\\Z")
        self._first = re.compile(_any_of({spelling[0] for spelling in self._ids}))
        self._normalized = any(one.special and one.normalized for one in added.values())
        self._lock = threading.Lock()
        self._guarded: tuple[tokenizers.Tokenizer, dict[int, int]] | None = None

    def guard(self, text: str) -> str:
        """Returns a text of the model (a template or one of its variables) with the secret after each control token."""
        return self._plain.sub(lambda found: found[0] + self._secret, text)

    def unguard(self, text: str) -> str:
        """Returns the text without the secret, for errors and for callers that want the prompt's text."""
        return text.replace(self._secret, "")

    def break_up(self, value: Any) -> Any:
        """Returns a message's value with the secret within each control token, and within a partial one at a text's
        end.

        So a rendered prompt has no control token from a message.
        """

        def broken(text: str) -> str:
            for pattern in (self._plain, self._begun):
                text = pattern.sub(lambda match: match[0][0] + self._secret + match[0][1:], text)
            return text

        return _with_texts(value, broken)

    def neutral(self, value: Any) -> Any:
        """Returns a message's value without the characters that begin control tokens, so that it contains none."""
        return _with_texts(value, lambda text: self._first.sub("", text))

    def guard_composed(self, text: str, neutral: str) -> str:
        """Guards a prompt that was rendered from messages changed by ``break_up``.

        Returns the prompt with the secret after each control token that the template wrote. The secret is removed from
        the texts of the messages, which are thus as the caller wrote them.

        Args:
            text: the prompt, rendered from the results of ``break_up``.
            neutral: the same prompt, rendered from the results of ``neutral``.

        Raises:
            RequestError: ``text`` and ``neutral`` have different control tokens.
        """
        if self._plain.findall(text) != self._plain.findall(neutral):
            raise RequestError(
                "messages: the model's template makes a control token of a part of them",
                hint="Write it otherwise: control tokens are the template's alone.",
            )
        parts, end, secret = [], 0, self._secret
        for match in self._plain.finditer(text):
            parts += [text[end : match.start()].replace(secret, ""), match[0], secret]
            end = match.end()
        return "".join([*parts, text[end:].replace(secret, "")])

    def encode(self, text: str, encode: Callable[[str], list[int]]) -> list[int]:
        """Returns the token ids of a guarded text.

        Args:
            text: the guarded text.
            encode: the model's own tokenizer; used if the text has no spelling from a message.

        Raises:
            RequestError: the tokenizer can write a text only as a control token.
        """
        if not self.spelled(text):
            return encode(self.unguard(text))
        guarded, ids = self._guarded_tokenizer()
        encoded = guarded.encode(text, add_special_tokens=False).ids
        if any(index not in ids and index in self._ids.values() for index in encoded):
            raise RequestError(
                "messages: the tokenizer can't write a control token's spelling as text",
                hint="Leave it out of the messages.",
            )
        return [ids.get(index, index) for index in encoded]

    def spelled(self, text: str) -> bool:
        """Returns True if a guarded text has the spelling of a control token that the template didn't write."""
        rest = self._own.sub("\0", text)
        if self._plain.search(rest):
            return True
        normalizer = self._tokenizer.normalizer
        return bool(self._normalized and normalizer is not None and self._plain.search(normalizer.normalize_str(rest)))

    def _guarded_tokenizer(self) -> tuple[tokenizers.Tokenizer, dict[int, int]]:
        """Returns a tokenizer that knows the control tokens with the secret, and a map of its ids to the model's ids.

        It is built on the first call, which most models never need.
        """
        with self._lock:
            if self._guarded is None:
                known = msgspec.json.decode(self._tokenizer.to_str())
                names = {spelling: spelling + self._secret for spelling in self._ids}
                for token in known["added_tokens"]:
                    token["content"] = names.get(token["content"], token["content"])
                escaped = re.compile(_any_of({re.escape(spelling) for spelling in self._ids}))
                known["normalizer"] = _in_patterns(
                    known["normalizer"], lambda pattern: escaped.sub(lambda found: found[0] + self._secret, pattern)
                )
                try:
                    tokenizer = _tokenizer_from(known | {"model": _with_names(known["model"], names)})
                except Exception:  # noqa: BLE001  merges lead to one of them: its model keeps it, and has others besides
                    tokenizer = _tokenizer_from(known)
                ids = {tokenizer.token_to_id(name): self._ids[spelling] for spelling, name in names.items()}
                self._guarded = tokenizer, {index: original for index, original in ids.items() if index is not None}
            return self._guarded


def _with_texts(value: Any, change: Callable[[str], str]) -> Any:
    """Returns a message, or a part of one, with ``change`` applied to each of its texts."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_with_texts(key, change): _with_texts(one, change) for key, one in value.items()}
    return [_with_texts(one, change) for one in value] if isinstance(value, (list, tuple)) else value


def _in_patterns(part: Any, change: Callable[[str], str]) -> Any:
    """Returns a part of a normalizer with ``change`` applied to its regular expressions, as these may name control
    tokens.
    """
    if isinstance(part, Mapping):
        return {key: change(one) if key == "Regex" else _in_patterns(one, change) for key, one in part.items()}
    return [_in_patterns(one, change) for one in part] if isinstance(part, list) else part


def _any_of(texts: Collection[str]) -> str:
    """Returns a pattern that matches the longest of the texts that fits; without texts, a pattern that never
    matches.
    """
    return "|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or r"(?!)"


def _tokenizer_from(known: Mapping[str, Any]) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer.from_str(msgspec.json.encode({**known, "post_processor": None}).decode())
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _with_names(model: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Returns the tokenizer's model with renamed tokens, which keep their ids. ``names``: old name -> new name."""
    vocab = model["vocab"]
    if isinstance(vocab, dict):
        vocab = {names.get(token, token): index for token, index in vocab.items()}
    else:
        vocab = [[names.get(entry[0], entry[0]), *entry[1:]] for entry in vocab]
    unknown = model.get("unk_token")
    return {**model, "vocab": vocab} | ({"unk_token": names.get(unknown, unknown)} if isinstance(unknown, str) else {})
