"""GGUF files of vocabularies alone, written key by key."""

from __future__ import annotations

import random
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from enginewright.runtime.text.tokenizer import BYTES_OF_LETTERS

LETTERS = {byte: letter for letter, byte in BYTES_OF_LETTERS.items()}
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
_HEADER = {  # llama.cpp reads these of a vocabulary too
    "general.architecture": "llama",
    "llama.block_count": 1,
    "llama.context_length": 128,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 64,
    "llama.attention.head_count": 4,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.dimension_count": 16,
}


def write_keys(path: Path, keys: Mapping[str, Any]) -> Path:
    """Writes a file without tensors. Keys without a dot are the tokenizer's; None leaves one out."""
    named = {key if "." in key else f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    items = [(key, value) for key, value in {**_HEADER, **named}.items() if value is not None]
    data = [b"GGUF", struct.pack("<IQQ", 3, 0, len(items))]
    for key, value in items:
        data += [_text(key), _value(value)]
    path.write_bytes(b"".join(data))
    return path


def _text(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def _value(value: Any) -> bytes:
    kind, raw = _scalar(value) if not isinstance(value, list) else (9, b"")
    if kind != 9:
        return struct.pack("<I", kind) + raw
    items = [_scalar(item) for item in value] or [(8, b"")]
    kind = 5 if items[0][0] == 4 else items[0][0]  # whole numbers of arrays have a sign, as llama.cpp wants
    return struct.pack("<IIQ", 9, kind, len(value)) + b"".join(raw for _, raw in items[: len(value)])


def _scalar(value: Any) -> tuple[int, bytes]:
    if isinstance(value, bool):
        return 7, struct.pack("<?", value)
    if isinstance(value, int):
        return 4, struct.pack("<I", value)
    if isinstance(value, float):
        return 6, struct.pack("<f", value)
    return 8, _text(value)


def byte_level(words: Sequence[str], special: Mapping[str, int], pre: str | None, **more: Any) -> dict[str, Any]:
    """Keys of a vocabulary of bytes, words built from left to right, and special tokens with their kinds."""
    tokens = [LETTERS[byte] for byte in range(256)]
    merges: dict[str, None] = {}
    for word in words:
        letters = "".join(LETTERS[byte] for byte in word.encode())
        for end in range(2, len(letters) + 1):
            if letters[:end] not in tokens:
                tokens.append(letters[:end])
                merges[f"{letters[: end - 1]} {letters[end - 1]}"] = None
    kinds = [NORMAL] * len(tokens) + list(special.values())
    tokens += special
    keys = {"model": "gpt2", "pre": pre, "tokens": tokens, "token_type": kinds, "merges": list(merges)}
    return {**keys, "bos_token_id": len(tokens) - 1, "eos_token_id": len(tokens) - 1, **more}


def sentencepiece(words: Sequence[str], special: Mapping[str, int] | None = None, **more: Any) -> dict[str, Any]:
    """Keys of a SentencePiece vocabulary: <unk>, <s>, </s>, bytes, characters and the beginnings of words."""
    pieces: dict[str, None] = dict.fromkeys("▁" + "".join(words).replace("▁", ""))
    for word in words:
        pieces |= dict.fromkeys(word[:end] for end in range(2, len(word) + 1))
    head = {"<unk>": UNKNOWN, "<s>": CONTROL, "</s>": CONTROL} | {f"<0x{byte:02X}>": BYTE for byte in range(256)}
    tokens = [*head, *pieces, *(special or {})]
    kinds = [*head.values(), *([NORMAL] * len(pieces)), *(special or {}).values()]
    scores = [0.0] * len(head) + [-float(i) for i in range(len(tokens) - len(head))]
    return {"model": "llama", "tokens": tokens, "token_type": kinds, "scores": scores, **more}


_WORDS = [
    "the",
    "The",
    "HELLO",
    "world's",
    "don't",
    "I'LL",
    "we've",
    "THEY'RE",
    "foo_bar",
    "camelCase",
    "HTTPServer",
    "naïve",
    "café",
    "Ünïcödé",
    "straße",
    "ΑΒΓ",
    "αβγ",
    "Привет",
    "мир",
    "שלום",
    "مرحبا",
    "नमस्ते",
    "สวัสดี",
    "東京",
    "日本語",
    "你好世界",
    "한국어",
    "ひらがな",
    "カタカナ",
    "Ǆ",
    "ǅ",
    "ſ",
    "ﬁ",
    "Ⅷ",
    "½",
    "²",
    "٣٤",
    "५६",
    "𝐀𝐁",
    "𝟙𝟚",
    "ª",
    "º",
    "İ",
    "ı",
    "'ſ",
    "'S",
    "'LL",
    "d's",
]
_SPACES = [
    *(" ", "  ", "   ", "\t", "\n", "\r\n", "\n\n", " \n", "\n ", "    ", "\u00a0", "\u3000", "\u2003", "\u2028"),
    *("\u0085", "\u200b", "\ufeff", "\x0b", "\x0c", "\x1c", "\x1f", " " * 7, " " * 17, "\t\t"),
]
_SIGNS = [
    *"!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~",
    *(
        "...",
        "->",
        "==",
        "://",
        "<<",
        "/*",
        "--",
        "''",
        "“”",
        "‘’",
        "…",
        "—",
        "、。",
        "！？",
        "（）",
        "；",
        "·",
        "€",
        "£",
    ),
    *("©", "→", "∑", "≠", "､", "।", "۔", "،"),
]
_EMOJI = ["😀", "👍🏽", "🧑‍🚀", "👨‍👩‍👧‍👦", "🇫🇷", "❤️", "🦙", "1️⃣"]
_MARKS = [
    "e\u0301",
    "a\u0308\u0301",
    "\u0301",
    "क्षि",
    "가\u1100\u1161",
    "\u0300a",
    "Z\u0351\u036b",
    "\u20dd",
    "\u0651ا",
]
_NUMBERS = ["0", "12", "123", "1234", "12345", "1234567", "3.14", "1,000,000", "²³", "１２３", "٣٤٥٦", "12³45", "1234³"]
_CODE = ["def f(x):\n    return x**2\n", "for(int i=0;i<10;++i){}", '<div class="a">b</div>', "https://a.b/c?d=e&f=%20"]
_ODD = ["\x00", "\x07", "\x7f", "\x80", "\ufffd", "\u200d", "\u00ad", "\ue000", "\U0010ffff", "\u0378", "\u1c89"]
_ODD += ["\U000105c0", "\U0001fae9", "\ua7cb", "\U00013460", "\u2427"]


def random_texts(count: int, seed: int, special: Sequence[str] = ()) -> list[str]:
    """Texts of words, numbers, white space, signs, emoji, accents, code, unassigned characters and special tokens."""
    rng = random.Random(seed)
    kinds = [_WORDS, _SPACES, _SIGNS, _NUMBERS, _CODE, _EMOJI, _MARKS, _ODD, list(special) or _WORDS]
    weights = [30, 20, 12, 12, 6, 6, 6, 4, 4]
    texts = ["", " ", "  ", "\n", "a", " a", "a ", " " * 40, "\t" * 9, "▁" * 5]
    while len(texts) < count:
        parts = [rng.choice(rng.choices(kinds, weights)[0]) for _ in range(rng.choice([1, 2, 3, 4, 6, 9, 14]))]
        if rng.random() < 0.2:
            parts.append(chr(rng.choice([rng.randrange(0x80, 0xD800), rng.randrange(0xE000, 0x30000)])))
        texts.append(rng.choice(["", " ", ""]).join(parts))
    return texts[:count]
