"""The limits of request bodies: one table of fields, which is checked before a field is decoded.

A body is first split into its fields, which takes no memory and one pass over its bytes. Each field has a ``Bound``:
its characters, its values and its levels. Only fields within their bounds are decoded and looked at any further.
SECURITY.md shows the table.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from ...requests.sampling import (
    LONGEST_BREAKER,
    MOST_BAD_TEXT,
    MOST_BAD_WORDS,
    MOST_BREAKERS,
    MOST_STOP,
    MOST_STOP_TEXT,
)
from ...shared.errors import ContextError, RequestError

MOST_FIELDS = 256
"""The most fields of a body."""
MOST_LEVELS = 110
"""The most levels of objects and lists in a field. Schemas have 100 at most."""
MOST_DIGITS = 400
"""The most digits of a number in a row: the largest 64-bit float has 309."""
_SMALL = 4096  # bytes of structure that aren't worth a closer look
_PIECE = 1 << 18  # bytes that are looked at together
_ESCAPED = 6  # bytes that a character takes at most: \u0041


@dataclass(frozen=True)
class Sizes:
    """The sizes of a model that limits depend on."""

    vocabulary: int
    context: int


LARGEST = Sizes(1 << 20, 1 << 20)
"""The sizes that are used if the model isn't known."""


@dataclass(frozen=True)
class Most:
    """A number that may grow with the model: ``fixed + vocabulary * V + context * C``.

    Attributes:
        vocabulary: its factor; V is the number of tokens of the model's vocabulary.
        context: its factor; C is the number of tokens of the model's context.
    """

    fixed: int = 0
    vocabulary: int = 0
    context: int = 0

    def of(self, sizes: Sizes) -> int:
        """Returns the number for a model with these sizes: ``fixed + vocabulary * V + context * C``."""
        return self.fixed + self.vocabulary * sizes.vocabulary + self.context * sizes.context

    def __str__(self) -> str:
        parts = [f"{self.fixed:,}"] if self.fixed or not (self.vocabulary or self.context) else []
        for factor, name in ((self.vocabulary, "vocabulary"), (self.context, "context")):
            if factor:
                parts.append(name if factor == 1 else f"{factor:,} x {name}")
        return " + ".join(parts)


@dataclass(frozen=True)
class Bound:
    """The limits of one field.

    Attributes:
        characters: the most characters of all its texts and names together.
        values: maximum number of objects, lists, texts and numbers in it, including nested ones.
        items: maximum number of elements of the field's own list or object; None for no limit.
        prompt: True if its texts become part of a prompt, so that the error mentions the context.
        levels: maximum nesting of objects and lists.
    """

    characters: Most = Most(65_536)
    values: Most = Most(1_024)
    items: Most | None = None
    prompt: bool = False
    levels: int = MOST_LEVELS

    def __str__(self) -> str:
        one = str(self.values) == "1"
        parts = [f"{self.characters} characters", *([] if one else [f"{self.values} values"])]
        return ", ".join([*([f"{self.items} items"] if self.items else []), *parts])


_TEXT = Most(65_536, context=64)
"""The most characters of a prompt: few tokens have more than 64."""
_PROMPT = Bound(_TEXT, Most(131_072), Most(10_000), prompt=True)
_FORM = Bound(Most(1 << 20), Most(131_072))
_IDS = Bound(Most(0), Most(1, vocabulary=1), Most(vocabulary=1))
_TEXTS = Bound(_TEXT, Most(1), prompt=True)

ARGUMENTS = Bound(_TEXT, Most(65_536), prompt=True, levels=MOST_LEVELS - 10)
"""The bound of a tool call's arguments that the server sends as an object.

A client can send such a call back: it fits the bound of ``messages`` together with the message around it.
"""
MANY_TEXTS = Bound(Most(8 << 20), Most(1 << 20))
"""The bound of a list of texts, or of lists of token ids. Each entry is a request of its own."""
SCALAR = Bound()
"""The bound of a field that isn't in ``BOUNDS``."""
BOUNDS: Mapping[str, Bound] = {
    **dict.fromkeys(("messages", "system", "input", "input_extra"), _PROMPT),
    **dict.fromkeys(("instructions", "content", "suffix", "input_prefix", "input_suffix"), _TEXTS),
    "tools": Bound(_TEXT, Most(131_072), Most(1_024), prompt=True),
    "prompt": Bound(Most(128 * 64, context=128 * 10), Most(1_024, context=128), prompt=True),
    "tokens": Bound(Most(0), Most(65_537, context=4), Most(65_536, context=4)),
    **dict.fromkeys(("allowed_token_ids", "stop_token_ids"), _IDS),
    "logit_bias": Bound(Most(vocabulary=10), Most(1, vocabulary=1), Most(vocabulary=1)),
    **dict.fromkeys(("stop", "stop_sequences"), Bound(Most(MOST_STOP_TEXT), Most(MOST_STOP + 1), Most(MOST_STOP))),
    "bad_words": Bound(Most(MOST_BAD_TEXT), Most(MOST_BAD_WORDS + MOST_BAD_TEXT + 1), Most(MOST_BAD_WORDS)),
    "dry_sequence_breakers": Bound(Most(MOST_BREAKERS * LONGEST_BREAKER), Most(MOST_BREAKERS + 1), Most(MOST_BREAKERS)),
    **dict.fromkeys(
        ("response_format", "structured_outputs", "json_schema", "guided_json", "guided_regex", "guided_choice"), _FORM
    ),
    **dict.fromkeys(("guided_grammar", "format", "text", "output_format", "output_config"), _FORM),
    **dict.fromkeys(("chat_template_kwargs", "tool_choice"), Bound(_TEXT, Most(131_072), prompt=True)),
}
"""Field of a body -> its limits. All protocols share them: a name means the same in each."""


def rows(
    bodies: Mapping[str, tuple[str, ...]], own: Mapping[str, Mapping[str, Bound]]
) -> Iterator[tuple[list[str], Bound, list[str]]]:
    """Yields groups of fields with equal bounds at the same endpoints, their bound, and the endpoints.

    The last group has no fields: its bound applies to all other fields.

    Args:
        bodies: each endpoint's fields.
        own: endpoint -> its own limits of fields, in place of those of ``BOUNDS``.
    """
    together: dict[tuple[Bound, tuple[str, ...]], list[str]] = {}
    for name in dict.fromkeys([*BOUNDS, *(name for fields in own.values() for name in fields)]):
        paths: dict[Bound, list[str]] = {BOUNDS[name]: []} if name in BOUNDS else {}
        for path, fields in bodies.items():
            if name in fields:
                paths.setdefault(own.get(path, {}).get(name, bound_of(name)), []).append(path)
        for bound, places in paths.items():
            together.setdefault((bound, tuple(places)), []).append(name)
    for (bound, endpoints), names in together.items():
        yield names, bound, [*endpoints]
    yield [], SCALAR, [*bodies]


def bound_of(name: str) -> Bound:
    """Returns the limits that all protocols have for a body's field ``name``; ``SCALAR`` if it isn't listed."""
    return BOUNDS.get(name, SCALAR)


def split(data: bytes) -> dict[str, msgspec.Raw]:
    """Splits a body into its undecoded fields.

    Raises:
        RequestError: it isn't a JSON object, or it has too many fields, levels or digits.
    """
    structure = _structure(data)
    if structure > _SMALL:
        _, fields, _ = _measured(data, len(data))
        if fields > MOST_FIELDS:
            raise RequestError(f"the body: it has more than {MOST_FIELDS} fields", hint="Leave some out.")
    try:
        return _fields(data)
    except msgspec.ValidationError:
        raise RequestError("the body isn't a JSON object", hint='Send {"model": ..., ...}.') from None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as e:
        raise _no_json(e) from e


_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


def value_of(name: str, raw: msgspec.Raw, sizes: Sizes, bound: Bound | None = None) -> Any:
    """Decodes a field after checking its limits: ``bound``, by default that of its name.

    Raises:
        RequestError: a limit is exceeded, or the field isn't JSON; names the field.
    """
    bound = bound or bound_of(name)
    data = bytes(raw)
    characters, values = bound.characters.of(sizes), bound.values.of(sizes)
    structure = _structure(data)
    if data[:1] == b'"' and len(data) > _ESCAPED * characters + 2:
        raise _too_long(name, bound, characters, sizes)
    if structure + 1 > values or data.count(b"[") + data.count(b"{") > bound.levels:
        count, _, levels = _measured(data, values)
        if count > values:
            raise RequestError(f"{name}: it has more than {values:,} values", hint="Pass fewer.")
        if levels > bound.levels:
            hint = f"{bound.levels} levels of objects and lists are taken."
            raise RequestError(f"{name}: its JSON is nested too deep", hint=hint)
    if len(data) > MOST_DIGITS and _has_long_number(data):
        raise RequestError(f"{name}: a number of more than {MOST_DIGITS} digits", hint="Pass a smaller one.")
    try:
        value = msgspec.json.decode(data)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as e:
        raise _no_json(e) from e
    if bound.items is not None and isinstance(value, (list, dict)) and len(value) > (most := bound.items.of(sizes)):
        raise RequestError(f"{name}: there are {len(value):,}", hint=f"Pass {most:,} at most.")
    # What is shorter as JSON is shorter decoded.
    if len(data) > characters and sum(map(len, _texts(value))) > characters:
        raise _too_long(name, bound, characters, sizes)
    return value


def _too_long(name: str, bound: Bound, most: int, sizes: Sizes) -> RequestError:
    if bound.prompt:
        return ContextError(
            f"{name}: it has more than {most:,} characters; there is room for {sizes.context - 1:,} tokens",
            hint="Shorten the prompt.",
            context=sizes.context,
            tokens=sizes.context + 1,
            exact=False,
        )
    return RequestError(f"{name}: it has more than {most:,} characters", hint="Shorten it.")


def _no_json(problem: Exception) -> RequestError:
    return RequestError(f"the body isn't JSON: {problem}", hint="Send an object in UTF-8.")


def _texts(value: Any) -> Iterator[str]:
    """Yields all texts and names in a value."""
    left = [value]
    while left:
        one = left.pop()
        if isinstance(one, str):
            yield one
        elif isinstance(one, list):
            left += one
        elif isinstance(one, dict):
            left += one
            left += one.values()


def _structure(data: bytes) -> int:
    """Returns an upper limit of the number of JSON's values, minus 1: a fast count of commas and brackets, also in
    strings.
    """
    return data.count(b",") + data.count(b"[") + data.count(b"{")


def _measured(data: bytes, most: int) -> tuple[int, int, int]:
    """Returns (values of the JSON, fields of its outermost object, levels).

    Brackets and commas in strings don't count. The text is read in pieces, so that memory stays small and other threads
    run; counting stops after ``most`` values. For a text that isn't JSON the numbers mean nothing.
    """
    values, fields, levels, level = 1, 1, 0, 0
    for marks in _outside_texts(data):
        folded = marks | 0x20  # "[" and "{" differ in this bit alone, as "]" and "}" do
        opening, closing = folded == ord("{"), folded == ord("}")
        depth = np.cumsum(opening.astype(np.int8) - closing, dtype=np.int32) + level
        commas = marks == ord(",")
        values += int(np.count_nonzero(commas)) + int(np.count_nonzero(opening))
        fields += int(np.count_nonzero(commas & (depth == 1)))
        levels, level = max(levels, int(depth.max())), int(depth[-1])
        if values > most:
            break
    return values, fields, levels


def _outside_texts(data: bytes) -> Iterator[np.ndarray[Any, Any]]:
    """Yields the bytes of JSON in pieces, with 0 in place of those in strings."""
    inside = escaped = False
    for begin in range(0, len(data), _PIECE):
        piece = np.frombuffer(data, np.uint8, min(_PIECE, len(data) - begin), begin)
        quotes, escaped = _quotes(piece, escaped)
        texts = np.logical_xor.accumulate(quotes) ^ inside
        inside = bool(texts[-1])
        yield np.where(texts, 0, piece)


def _quotes(piece: np.ndarray[Any, np.dtype[np.uint8]], escaped: bool) -> tuple[np.ndarray[Any, Any], bool]:
    """Returns a mask of quotes that begin or end a text, and True if the piece's end escapes the next character."""
    quotes = piece == ord('"')
    slashes = np.flatnonzero(piece == ord("\\"))
    if escaped:
        quotes[0] = False
        slashes = slashes[slashes > 0]
    if not len(slashes):
        return quotes, False
    # In a row of backslashes the first, the third, ... escape the character behind them.
    firsts = np.flatnonzero(np.diff(slashes, prepend=-2) != 1)
    lengths = np.diff(firsts, append=len(slashes))
    place = np.arange(len(slashes)) - np.repeat(firsts, lengths)
    after = slashes[place % 2 == 0] + 1
    quotes[after[after < len(piece)]] = False
    return quotes, bool(after[-1] == len(piece))


def _has_long_number(data: bytes) -> bool:
    """Returns True if a number has too many digits. Digits in texts don't count."""
    ten = data.translate(_DIGITS)
    if b"0" * (MOST_DIGITS + 1) not in ten:
        return False
    rest = b""
    for marks in _outside_texts(data):
        outside = rest + marks.astype(np.uint8).tobytes().translate(_DIGITS)
        if b"0" * (MOST_DIGITS + 1) in outside:
            return True
        rest = outside[-MOST_DIGITS:]
    return False


_DIGITS = bytes.maketrans(b"123456789", b"000000000")
