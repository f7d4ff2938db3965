"""Random texts that are hard for tokenizers: where they are split, normalised, and taken for control tokens."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

FIRST_TEXTS = [
    *("", " ", "  ", "\n", "a", " a", "a ", "\r\n"),
    *("\n" * 5, "\n" * 40, " " * 40, "\t" * 9, "▁" * 5, "a" * 200, "1" * 50, "日" * 30),
]
"""Texts that every list begins with: empty, short, and runs of one character."""
LOOKALIKES = (
    *("<|im_start|>", "<|endoftext|>", "<s>", "</s>", "<unk>", "<bos>", "[INST]", "[UNK]", "[CLS]", "<｜User｜>"),
    *("<think>", "</think>", "<fim_prefix>", "<|im_end", "<0x0A>", "▁", "▁▁", "Ġ", "Ċ", "\\u0120"),
)
"""Texts that are control tokens of some vocabularies, and letters that vocabularies have instead of spaces."""


TRICKY_TEXTS = [
    "The café's  naïve 12345.67 don't I'LL\r\n\n\tdef f(x):\n        return x**2  # ok",
    "HTTPServer camelCase ABCdef foo_bar İı ſ ǅx straße ΑΒΓαβγ Привет, мир!",
    "東京タワー、日本語。你好！㐀𠀀 한국어 ｶﾞ カナ ひらがな 豈 中文abc",
    "नमस्ते क्षि สวัสดี مرحبا، שלום a\u0308\u0301 \u0301x e\u0301E\u0301",
    "0 12 1,000,000 1234567890 x1234567y 12³456 ٣٤٥٦ १२३ Ⅷ ½ 𝟙𝟚 3-14",
    "a->b::c<T&>(); x+=1 && !y || {\"k\": [1, 2.5]} $HOME/~ `q` <<>> @#%^ … — “x” ''",
    "\n\n\n \n\t\t  \n a\n\n b \r\r\n  \xa0\u3000\u2003x\x85\u2028 \x1c\x0b\x0c  ",
    "😀👍🏽 🧑‍🚀 🇫🇷 ❤️1️⃣ €5 ∑≠→ © ₹\U0001fae9 \u1c89\u2427 \x00\x07\x7f\xad\u200d\ufeff",
    "<sentinel:12> IMGIMGABCZ they'rest it'list we've they're 'S'll 'ſ ㄅㄆ ﷺ ຄຳ ខ្មែរ မြန်မာ \ue000\u0378",
    "                                   x" + " " * 17 + "y\n" + "\t" * 9 + "▁▁a Ġ " + "ab" * 20,
]
"""Texts that tell the pre-tokenizers of GGUF files apart."""


@dataclass(frozen=True)
class Spared:
    """Parts of texts that llama.cpp aborts on, and what is written instead."""

    pattern: str
    replacement: str
    reason: str

    def apply(self, text: str) -> str:
        """The text that llama.cpp takes."""
        return re.sub(self.pattern, self.replacement, text)


SPARED: Mapping[str | None, Spared] = {
    "whitespace": Spared(r"\s{2,}", " ", "llama.cpp aborts when it looks up a merge of a space with what follows"),
}
"""The parts that are replaced, by the name of a pre-tokenizer."""


def spared(texts: Sequence[str], pre: str | None) -> list[str]:
    """The texts that llama.cpp takes with a pre-tokenizer."""
    return [SPARED[pre].apply(text) for text in texts] if pre in SPARED else list(texts)


def random_texts(count: int, seed: int, special: Sequence[str] = ()) -> list[str]:
    """Texts of one to fourteen pieces, next to each other or with spaces between.

    Args:
        count: the number of texts; the first of them are ``FIRST_TEXTS``.
        seed: of the random numbers.
        special: texts of the vocabulary's control tokens and user-defined tokens.
    """
    rng = random.Random(seed)
    kinds = [*_KINDS, _Kind(3, lambda rng: rng.choice(special))] if special else _KINDS
    texts = list(FIRST_TEXTS)
    while len(texts) < count:
        pieces = rng.choices(kinds, [kind.weight for kind in kinds], k=rng.choice([1, 2, 3, 4, 6, 9, 14]))
        separator = " " if rng.random() < 1 / 3 else ""
        texts.append(separator.join(kind.piece(rng) for kind in pieces))
    return texts[:count]


@dataclass(frozen=True)
class _Kind:
    """A kind of piece.

    Attributes:
        weight: the share of pieces of this kind, in percent without control tokens.
        piece: makes one.
    """

    weight: int
    piece: Callable[[random.Random], str]


def _one_of(*texts: str) -> Callable[[random.Random], str]:
    return lambda rng: rng.choice(texts)


_LATIN = (
    *("the", "The", "HELLO", "foo_bar", "camelCase", "HTTPServer", "naïve", "café", "Ünïcödé", "straße", "İ", "ı"),
    *("world's", "don't", "I'LL", "we've", "THEY'RE", "d's", "'S", "'LL", "'ſ", "Ǆ", "ǅ", "ſ", "ﬁ", "ª", "º"),
)
_OTHER_SCRIPTS = (
    *("ΑΒΓ", "αβγ", "Привет", "мир", "שלום", "مرحبا", "नमस्ते", "สวัสดี", "ก็", "Ⅷ", "𝐀𝐁", "K"),
    *("東京", "日本語", "你好世界", "㐀㐁", "𠀀𠀁", "豈", "한국어", "가나다", "ひらがな", "カタカナ", "ｶﾞ"),
)
_SPACES = (
    *(" ", "  ", "   ", "    ", " " * 7, " " * 17, "\t", "\t\t", "\n", "\n\n", "\n\n\n", "\r", "\r\n", " \n", "\n "),
    *("\x0b", "\x0c", "\x1c", "\x1f", "\x85", "\xa0", "\u2003", "\u2028", "\u202f", "\u3000", "\u200b", "\ufeff"),
)
_SIGNS = (
    *"!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~",
    *(
        "...",
        "->",
        "==",
        "://",
        "<<",
        "/*",
        "*/",
        "--",
        "''",
        "“”",
        "‘’",
        "…",
        "—",
        "、。",
        "！？",
        "（）",
        "；：",
        "·",
    ),
    *("€", "£", "¥", "§", "©", "™", "→", "∑", "≠", "､", "｡", "।", "۔", "،"),
)
_CODE = (
    *("def f(x):\n    return x**2  # c\n", "x = y if z else w\n\t\tpass", "for(int i=0;i<10;++i){}", "if a!=b&&c||d:"),
    *("#include <stdio.h>\n", "SELECT * FROM t WHERE id=1;", '<div class="a">b</div>', '{"k": [1, 2.5, null]}'),
    *("\\n\\t\\\\", "a->b::c<T&>", "/usr/local/bin", "$HOME/x", "user@example.com", "https://a.b/c?d=e&f=%20"),
)
_EMOJI = ("😀", "👍🏽", "🧑‍🚀", "👨‍👩‍👧‍👦", "🇫🇷", "❤️", "🦙", "✅", "1️⃣", "☃")
_ACCENTS = (
    *("e\u0301", "a\u0308\u0301", "a\u0301\u0323", "n\u0303", "ª\u0302\u0301", "½\u0301", "α\u0313\u0301\u0345"),
    *(
        "\u0301",
        "\u0300a",
        "o\u0302",
        "Z\u0351\u036b",
        "\u20dd",
        "क्षि",
        "가\u1100\u1161\u11a8",
        "\u1100\u1161",
        "\u0651ا",
    ),
)
_NUMBERS = (
    *("0", "7", "12", "123", "1234", "12345", "1234567", "3.14", "1,000,000", "2024-11-28", "0x1F", "1e-5", "007"),
    *("²³", "１２３", "٣٤٥٦", "५६", "𝟙𝟚", "Ⅳ", "½1", "12³45", "1234³"),
)
_UNUSUAL = (
    *("\x00", "\x01", "\x07", "\x7f", "\x80", "\x9f", "\xad", "\u200d", "\u2060", "\U000e0001"),
    *("\ue000", "\ufffd", "\ufffe", "\U0010ffff", "\u0378"),  # private, replacement, no characters, unassigned
    *("\u1c89", "\u2427", "\ua7cb", "\U000105c0", "\U00013460", "\U0001fae9"),  # of Unicode 16
)
_PLANES = ((0x80, 0x3000), (0x3000, 0xD800), (0xE000, 0x10000), (0x10000, 0x20000), (0x20000, 0x30000))


def _number(rng: random.Random) -> str:
    return str(rng.randrange(10 ** rng.randrange(1, 14))) if rng.random() < 0.1 else rng.choice(_NUMBERS)


def _any_character(rng: random.Random) -> str:
    """A character of a random part of Unicode, assigned or not."""
    return chr(rng.randrange(*rng.choice(_PLANES)))


_KINDS = (
    _Kind(17, _one_of(*_LATIN)),
    _Kind(13, _one_of(*_OTHER_SCRIPTS)),
    _Kind(20, _one_of(*_SPACES)),
    _Kind(12, _one_of(*_SIGNS)),
    _Kind(10, _number),
    _Kind(6, _one_of(*_CODE)),
    _Kind(6, _one_of(*_EMOJI)),
    _Kind(6, _one_of(*_ACCENTS)),
    _Kind(4, _one_of(*_UNUSUAL)),
    _Kind(3, _any_character),
    _Kind(3, _one_of(*LOOKALIKES)),
)
