"""Compares a bundle's tokenizer with its source's, and both with the model's table of tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import tokenizers
from transformers import PreTrainedTokenizerBase

from enginewright.runtime.bundle.tokenizer_files import TokenizerFiles
from enginewright.runtime.shared.errors import EnginewrightError, SourceError, shown
from enginewright.runtime.text.tokenizer import Tokenizer, what_tokenizers_raises

TEXTS = (
    "The quick brown fox jumps over the lazy dog.",
    " leading space, and two  spaces, and   three; trailing ",
    "It's 12,345.67 km, or 3 1/2 hours: we'll see what they've DONE, won't we?",
    "1234567890 007 3.14159 1e-9 0x7f",
    "def f(x):\n    return [x**2 for x in range(10)]  # squares\n\n\n\tif x != y:\r\n\t\tpass\n",
    '{"name": "value", "list": [1, 2, 3], "path": "C:\\\\temp"}',
    "naïve café Ünïcödé e\u0301 ﬁ Ⅷ ½ ﷺ",
    "東京で会いましょう。 你好，世界！ 안녕하세요",
    "Привет, мир! שלום עולם مرحبا बहुत धन्यवाद ไทย",
    "🧑‍🚀👍🏽 🇩🇪 ❤️ \u00a0\u200b\ufeff\u2028",
    "\x00\x07\x1b[0m <|user|> [INST] <s> </s> <0x0A> ▁ Ġ ##",
    "a" * 40 + " " * 40 + "\n" * 8 + "é" * 20,
)
"""A dozen texts: words, numbers, code, spaces, many scripts, and a text that looks like a special token."""
_SHOWN = 5

Encode = Callable[[str], list[int]]


@dataclass(frozen=True)
class SourceTokenizer:
    """A source's own tokenizer.

    Attributes:
        encode: returns the tokens of a text.
        token_id: returns the id of the token with a text; None if there is none.
    """

    encode: Encode
    token_id: Callable[[str], int | None]

    @classmethod
    def of_json(cls, tokenizer_json: str) -> SourceTokenizer:
        """Opens a checked tokenizer.json with the `tokenizers` library, without truncation."""
        library = tokenizers.Tokenizer.from_str(tokenizer_json)
        library.no_truncation()
        library.no_padding()
        return cls(lambda text: list(library.encode(text).ids), library.token_to_id)

    @classmethod
    def of_transformers(cls, tokenizer: PreTrainedTokenizerBase) -> SourceTokenizer:
        """Wraps a tokenizer of transformers."""
        return cls(lambda text: list(tokenizer(text)["input_ids"]), tokenizer.get_vocab().get)


def check_tokenizer(
    files: TokenizerFiles, original: SourceTokenizer, vocab_size: int, *, end_tokens: Sequence[int] = (), source: str
) -> list[str]:
    """Compares a bundle's tokenizer with the source's own. Returns warnings, one per line.

    Args:
        files: the bundle's tokenizer files.
        original: the source's tokenizer. A start token that the runtime adds may be missing from its results.
        vocab_size: rows of the model's table of tokens.
        end_tokens: tokens that end a text according to the model's configuration.
        source: folder or file, for messages.

    Raises:
        SourceError: a text has other tokens, or a token, start token or end token isn't in the model's table.
    """
    if files.tokenizer_json is None:
        return []
    bundled = Tokenizer(files)
    start = bundled.bos_token_id if files.special_tokens.get("add_bos") else None
    for text in TEXTS:
        ids = _encoded(bundled.encode, text)
        expected = _encoded(original.encode, text)
        if expected is not None and start is not None and expected[:1] != [start]:
            expected = [start, *expected]
        if ids != expected:
            raise SourceError(
                f"{source}: the tokenizer doesn't survive the export: {shown(text)} has the tokens "
                f"{_few(expected)}, and the bundle's tokenizer gives {_few(ids)}",
                hint="Pass a tokenizer of your own, or a directory with another tokenizer.json.",
            )
        if ids and max(ids) >= vocab_size:
            token = max(ids)
            raise SourceError(
                f"{source}: the tokenizer gives token {token} ({shown(bundled.spelled(token))}) for {shown(text)}, and "
                f"the model has tokens 0 to {vocab_size - 1}",
                hint="Pass the tokenizer that belongs to the model.",
            )
    return [*_beyond(bundled, vocab_size, source), *_special(bundled, files, original, vocab_size, end_tokens, source)]


def _encoded(encode: Encode, text: str) -> list[int] | None:
    """Returns the tokens of a text; None if the tokenizer can't encode it."""
    with suppress(EnginewrightError), what_tokenizers_raises(lambda e: SourceError(str(e))):
        return encode(text)
    return None


def _few(ids: Sequence[int] | None) -> str:
    if ids is None:
        return "none"
    return f"{', '.join(map(str, ids[:12]))}{', ...' if len(ids) > 12 else ''}"


def _beyond(bundled: Tokenizer, vocab_size: int, source: str) -> list[str]:
    """Returns a warning if a text may have tokens that aren't in the model's table; otherwise an empty list."""
    beyond = sorted(index for index in bundled.vocabulary if index >= vocab_size)
    if not beyond:
        return []
    names = ", ".join(shown(bundled.spelled(index)) for index in beyond[:_SHOWN])
    return [
        f"{source}: the tokenizer has {len(beyond):,} tokens that the model, with {vocab_size:,}, hasn't ({names}"
        f"{', ...' if len(beyond) > _SHOWN else ''}): a request that has one is refused"
    ]


def _special(
    bundled: Tokenizer,
    files: TokenizerFiles,
    original: SourceTokenizer,
    vocab_size: int,
    end_tokens: Sequence[int],
    source: str,
) -> list[str]:
    """Returns warnings about special tokens whose text isn't a single token.

    Raises SourceError if a token's id differs from the source's, or a start or end token is outside the model's table.
    """
    warnings = []
    for name, text in files.special_tokens.items():
        if not name.endswith("_token") or not isinstance(text, str):
            continue
        index, expected = bundled.token_id(text), original.token_id(text)
        if expected is not None and index != expected:
            raise SourceError(
                f"{source}: the tokenizer doesn't survive the export: {name} is token {expected}, and the bundle's "
                f"tokenizer has {index}",
                hint="Pass a tokenizer of your own, or a directory with another tokenizer.json.",
            )
        if index is None:
            warnings.append(f"{source}: {name} is {shown(text)}, which isn't a token of the tokenizer")
        elif index >= vocab_size and name in ("bos_token", "eos_token"):
            raise SourceError(
                f"{source}: {name} is {shown(text)}, token {index}, and the model has tokens 0 to {vocab_size - 1}",
                hint="Pass the tokenizer that belongs to the model.",
            )
    end_token = bundled.eos_token_id
    if end_token is not None and end_tokens and end_token not in end_tokens:
        listed = ", ".join(map(str, end_tokens[:_SHOWN]))
        warnings.append(
            f"{source}: the tokenizer's eos_token is token {end_token}, and the configuration ends texts at {listed}: "
            "that decides"
        )
    return warnings
