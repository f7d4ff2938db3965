"""Tokenizes many texts, or pairs of texts, at a time, for models that compute a text whole.

The library tokenizes a batch on several threads, without Python's lock. Texts that are too long are refused, or cut if
the caller asks for it, as transformers cuts them: at their ends, and of a pair the longer text first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, NoReturn

import tokenizers

from ..shared.errors import ContextError, RequestError
from .tokenizer import Tokenizer, what_tokenizers_raises

CHARACTERS_A_TOKEN = 10
"""The characters per allowed token that are tokenized first of a long text. Most texts have 2 to 5 per token."""
_MOST_CHARACTERS = 64
"""The most characters per allowed token that are tokenized.

A longer text with few tokens is nearly all blanks, or a word that the tokenizer doesn't know. Tokenizing megabytes of
these would delay other requests for seconds.
"""


def longest_text(most: int) -> int:
    """Returns the most characters that are tokenized of a text with at most ``most`` tokens."""
    return _MOST_CHARACTERS * (most + 128)


Text = str | tuple[str, str]
"""A text, or a pair of texts."""


class TextTokens(NamedTuple):
    """The token ids of a text, and their types (``Request.token_types``)."""

    ids: list[int]
    types: Sequence[int] = ()


def first_characters(text: str, most: int, count_tokens: Callable[[str], int]) -> tuple[str, int]:
    """Returns a beginning with more than twice ``most`` tokens, if the text has that many; otherwise the whole text.

    Tokenizing megabytes takes seconds. So a prefix of a long text is tokenized first, and a longer one while it may
    have too few tokens. The rest of the text could only change how the last word of the prefix is split.

    Args:
        text: the text.
        most: the most tokens that are needed.
        count_tokens: returns the number of a text's tokens.

    Returns:
        The beginning, and the number of its tokens; or the whole text and 0.
    """
    count = CHARACTERS_A_TOKEN * (most + 128)
    while count < len(text):
        tokens = count_tokens(text[:count])
        if tokens > 2 * most:
            return text[:count], tokens
        count *= 2
    return text, 0


def encode_texts(
    tokenizer: Tokenizer, texts: Sequence[Text], names: Sequence[str], most: int, *, truncate: bool = False
) -> list[TextTokens]:
    """Returns the tokens of each text, with the special tokens that the model expects around it.

    Args:
        tokenizer: the model's tokenizer.
        texts: the texts.
        names: their names in errors.
        most: the most tokens of a text.
        truncate: True cuts texts that have more tokens, or more characters than ``longest_text(most)``.

    Raises:
        ContextError: a text has too many tokens or characters.
        RequestError: a text isn't UTF-8, or the tokenizer has no tokens for it. Each names the text.
    """
    results: list[TextTokens | None] = [None] * len(texts)
    for i, (text, name) in enumerate(zip(texts, names, strict=True)):
        longest = 0
        for part in _parts(text):
            _check_utf8(part, name)
            longest = max(longest, len(part))
        if longest > CHARACTERS_A_TOKEN * (most + 128):
            results[i] = _of_long_text(tokenizer, text, name, most, truncate=truncate)
    left = [i for i, result in enumerate(results) if result is None]
    encoded = _encode_all(tokenizer, [texts[i] for i in left], [names[i] for i in left])
    for i, tokens_of in zip(left, encoded, strict=True):
        if len(tokens_of.ids) > most:
            if not truncate:
                _refuse(names[i], f"it has {len(tokens_of.ids):,} tokens", most, len(tokens_of.ids), exact=True)
            tokens_of = _cut(tokenizer, texts[i], most, names[i])
        results[i] = tokens_of
    return [result for result in results if result is not None]


def _of_long_text(tokenizer: Tokenizer, text: Text, name: str, most: int, *, truncate: bool) -> TextTokens | None:
    """Returns the tokens of a text that is certainly too long, after cutting it; None for a text that may be short
    enough.

    Only a beginning of the text is tokenized. Raises ContextError for a text that is too long if not ``truncate``.
    """
    for part in _parts(text):
        longest = longest_text(most)
        beginning, tokens = first_characters(part[:longest], most, lambda some: len(_encode(tokenizer, some, name).ids))
        if truncate and (tokens or len(part) > longest):
            return _cut(tokenizer, text, most, name)
        if not tokens and len(part) > longest:
            _refuse(
                name, f"it has {len(part):,} characters, of which {longest:,} are tokenized at most", most, most + 1
            )
        if tokens:
            _refuse(name, f"its first {len(beginning):,} characters have {tokens:,} tokens", most, tokens)
    return None


def _encode_all(tokenizer: Tokenizer, texts: Sequence[Text], names: Sequence[str]) -> list[TextTokens]:
    """Tokenizes a batch. If the library refuses it, each text is tokenized alone, to name the one that is wrong."""
    if len(texts) == 1 and isinstance(texts[0], str):  # needn't read the whole tokenizer
        try:
            return [TextTokens(tokenizer.encode(texts[0]))]
        except RequestError as e:
            raise e.reworded(f"{names[0]}{e.message.removeprefix('prompt')}", hint=e.hint) from e
    try:
        with what_tokenizers_raises(lambda e: _cannot("texts", e)):
            encodings = tokenizer.library.encode_batch_fast(list(texts))
    except RequestError:
        encodings = [_encode(tokenizer, text, name) for text, name in zip(texts, names, strict=True)]
    return [_tokens(tokenizer, one, text) for one, text in zip(encodings, texts, strict=True)]


def _encode(tokenizer: Tokenizer, text: Text, name: str, *, special: bool = True) -> tokenizers.Encoding:
    with what_tokenizers_raises(lambda e: _cannot(name, e)):
        first, second = (text, None) if isinstance(text, str) else text
        return tokenizer.library.encode(first, second, add_special_tokens=special)


def _cut(tokenizer: Tokenizer, text: Text, most: int, name: str) -> TextTokens:
    """Returns the tokens of a text that is cut to at most ``most`` tokens, special ones included."""
    library, parts = tokenizer.library, [part[: longest_text(most)] for part in _parts(text)]
    room = most - library.num_special_tokens_to_add(len(parts) > 1) - tokenizer.most_added
    if room < 1:
        raise RequestError(f"{name}: {most} tokens have no room for a text", hint="Open the model with more context.")

    def encoded(part: str) -> tokenizers.Encoding:
        return _encode(tokenizer, part, name, special=False)

    encodings = [encoded(first_characters(part, room, lambda some: len(encoded(some).ids))[0]) for part in parts]
    for encoding, length in zip(encodings, _lengths([len(one.ids) for one in encodings], room), strict=True):
        encoding.truncate(length)
    whole = library.post_process(encodings[0], encodings[1] if len(encodings) > 1 else None)
    return _tokens(tokenizer, whole, text)


def _lengths(lengths: Sequence[int], room: int) -> Sequence[int]:
    """Returns the number of tokens to keep of one or two texts, so that together they have at most ``room``.

    The longer of two texts loses tokens first.
    """
    if len(lengths) == 1 or sum(lengths) <= room:
        return [min(one, room) for one in lengths]
    shorter = min(min(lengths), room // 2)
    return [shorter, room - shorter] if lengths[0] <= lengths[1] else [room - shorter, shorter]


def _tokens(tokenizer: Tokenizer, encoding: tokenizers.Encoding, text: Text) -> TextTokens:
    before, after = tokenizer.added_around(encoding.ids)
    ids = [*before, *encoding.ids, *after] if before or after else encoding.ids
    if isinstance(text, str):
        return TextTokens(ids)
    types = [*[0] * len(before), *encoding.type_ids, *encoding.type_ids[-1:] * len(after)]
    return TextTokens(ids, types if any(types) else ())


def _parts(text: Text) -> tuple[str, ...]:
    return (text,) if isinstance(text, str) else text


def _check_utf8(text: str, name: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as e:
        raise RequestError(f"{name}: {text[e.start]!r} isn't a character", hint="Pass text in UTF-8.") from e


def _cannot(name: str, cause: BaseException) -> RequestError:
    return RequestError(f"{name}: the tokenizer can't take it: {cause}", hint="Pass token ids instead.")


def _refuse(name: str, what: str, most: int, tokens: int, *, exact: bool = False) -> NoReturn:
    raise ContextError(
        f"{name}: {what}; a text may have {most:,}",
        hint="Shorten it, or pass truncate=True.",
        context=most,
        tokens=tokens,
        exact=exact,
        room=most,
    )
