"""GGUF files of vocabularies alone, written key by key."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from enginewright.runtime.text.tokenizer import BYTES_OF_LETTERS
from tests.optimizer.capture.random_texts import TRICKY_TEXTS

GOLDEN_TOKENS = Path(__file__).parents[3] / "golden" / "gguf_tokens.json"
"""``digest`` of llama.cpp's tokens of ``TRICKY_TEXTS`` by the name of a pre-tokenizer, with ``tricky_vocabulary``."""
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
    tokens = dict.fromkeys(LETTERS[byte] for byte in range(256))
    merges: dict[str, None] = {}
    for word in words:
        letters = "".join(LETTERS[byte] for byte in word.encode())
        for end in range(2, len(letters) + 1):
            if letters[:end] not in tokens:
                tokens[letters[:end]] = None
                merges[f"{letters[: end - 1]} {letters[end - 1]}"] = None
    kinds = [NORMAL] * len(tokens) + list(special.values())
    keys = {"model": "gpt2", "pre": pre, "tokens": [*tokens, *special], "token_type": kinds, "merges": list(merges)}
    return {**keys, "bos_token_id": len(kinds) - 1, "eos_token_id": len(kinds) - 1, **more}


def tricky_vocabulary() -> dict[str, Any]:
    """Keys of a byte-level vocabulary whose words are parts of ``TRICKY_TEXTS``, over any boundary."""
    text = "".join(TRICKY_TEXTS)
    words = [text[3 * i : 3 * i + 2 + i % 5] for i in range(len(text) // 3)]
    return byte_level(words, {"<s>": CONTROL}, None)


def digest(ids: Sequence[Sequence[int]]) -> str:
    """The beginning of the SHA-256 of lists of tokens."""
    return hashlib.sha256(json.dumps([list(one) for one in ids]).encode()).hexdigest()[:12]


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


def charsmap(entries: Mapping[str, str]) -> list[int]:
    """SentencePiece's table of normalisations: a double array of 256 units for each node, then the texts.

    A unit has its byte, 256 if an entry ends there, and 1024 times its place XOR that of its node's units. The first of
    these is the place of the entry's text.
    """
    nodes: dict[bytes, int] = {b"": 0}
    for key in entries:
        raw = key.encode()
        for end in range(1, len(raw) + 1):
            nodes.setdefault(raw[:end], len(nodes))
    units = [0] * 256 * (len(nodes) + 1)
    units[0] = 256 << 10
    for raw, number in nodes.items():
        if raw:
            place = 256 * (nodes[raw[:-1]] + 1) + raw[-1]
            units[place] = (place ^ (256 * (number + 1))) << 10 | raw[-1]
    texts = b""
    for key, text in entries.items():
        raw = key.encode()
        units[256 * (nodes[raw[:-1]] + 1) + raw[-1]] |= 256
        units[256 * (nodes[raw] + 1)] = len(texts)
        texts += text.encode() + b"\0"
    return list(struct.pack("<I", 4 * len(units)) + struct.pack(f"<{len(units)}I", *units) + texts)
