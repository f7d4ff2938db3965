"""A tokenizer of 256 tokens, each a byte, for the tiny models, whose vocabulary is as large."""

from __future__ import annotations

import json
from collections.abc import Sequence


def byte_tokens_json(ends: Sequence[int]) -> str:
    """Its tokenizer.json. ``ends`` are special tokens, in place of the bytes of their numbers."""
    # Byte-level tokenizers write a byte as a letter: its own, or one from U+0100 on for those that can't be seen.
    seen = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in seen]
    letters = {byte: chr(byte) for byte in seen} | {byte: chr(0x100 + i) for i, byte in enumerate(hidden)}
    vocabulary = {f"<end_{i}>" if i in ends else letters[i]: i for i in range(256)}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    model = {"type": "BPE", "dropout": None, "unk_token": None, "vocab": vocabulary, "merges": []}
    return json.dumps(
        {
            "version": "1.0",
            "added_tokens": [{"id": i, "content": f"<end_{i}>", **flags} for i in ends],
            "pre_tokenizer": level,
            "decoder": level,
            "model": model,
        }
    )
