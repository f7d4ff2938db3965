"""Calibration from a file: plain text, or JSONL with a document a line."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from enginewright.optimizer.measure.texts import read_text
from enginewright.optimizer.measure.windows import split_prefix
from enginewright.passes.framework.token_sequences import spread
from enginewright.runtime.shared.errors import RequestError
from enginewright.runtime.text.tokenizer import Tokenizer

JSONL_SUFFIXES = (".jsonl", ".ndjson")

LEAST_TOKENS = 128
"""The fewest tokens of a calibration text. A shorter one is refused, because it says nothing about a layer."""

_HINT = 'Each line is an object with "text", or with "messages" of a conversation.'


def read_sequences(
    path: Path,
    tokenizer: Tokenizer | None,
    vocab_size: int,
    tokens: int,
    sequence_length: int,
    option: str = "calibration",
) -> tuple[torch.Tensor, ...]:
    """Returns the token ids of a file, int32 [S] each, S at most ``sequence_length``.

    A text is divided into pieces, each with the tokens that the model expects before any text (a BOS). If there are
    more than ``tokens``, evenly spaced pieces are used. The documents of a JSONL file are divided separately, so that
    no sequence has parts of two. ``option`` is the name of the caller's option, for messages.

    Raises:
        RequestError: the file can't be read, is binary, empty or too short, a line of it has no text, the model has no
            tokenizer, or the tokenizer has tokens that the model hasn't; names the file and the line.
    """
    if tokenizer is None:
        raise RequestError(
            f"{option}: {path} is text, and the model has no tokenizer to read it with",
            hint="Leave the file out, and tokens are sampled from the model; or pass a tokenizer.",
        )
    text = read_text(path, option, "")
    if path.suffix.lower() in JSONL_SUFFIXES:
        documents = [_document(path, n, line, tokenizer, option) for n, line in _lines(text)]
    else:
        documents = [split_prefix(tokenizer, text)]
    pieces = [piece for prefix, ids in documents for piece in _pieces(prefix, ids, sequence_length)]
    available = sum(len(p) for p in pieces)
    if available < LEAST_TOKENS:
        raise RequestError(
            f"{option}: {path} is too short: it has {available} tokens, and {LEAST_TOKENS} are the least",
            hint="Pass a longer text, such as a few pages of what the model is used for.",
        )
    largest = max(max(p) for p in pieces)
    if largest >= vocab_size:
        raise RequestError(
            f"{option}: {path}: the tokenizer makes token {largest} of it, the model has a vocabulary of {vocab_size}",
            hint="Pass the model's own tokenizer.",
        )
    return tuple(torch.tensor(p, dtype=torch.int32) for p in _spread(pieces, tokens))


def _lines(text: str) -> list[tuple[int, str]]:
    return [(n, line) for n, line in enumerate(text.split("\n"), 1) if line.strip()]


def _document(
    path: Path, number: int, line: str, tokenizer: Tokenizer, option: str
) -> tuple[tuple[int, ...], list[int]]:
    """Returns the prefix and the tokens of one line."""
    where = f"{option}: {path}: line {number}"
    try:
        value: Any = json.loads(line)
    except (ValueError, RecursionError) as e:
        raise RequestError(f"{where} isn't JSON: {e}", hint=_HINT) from e
    if not isinstance(value, dict) or not ({"text", "messages"} & value.keys()):
        raise RequestError(f'{where} has neither "text" nor "messages"', hint=_HINT)
    if "text" in value:
        if not isinstance(value["text"], str):
            raise RequestError(f'{where}: "text" is not a string', hint=_HINT)
        return split_prefix(tokenizer, value["text"])
    messages = value["messages"]
    if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
        raise RequestError(f'{where}: "messages" is not a list of objects', hint=_HINT)
    try:
        # The template writes what comes before a conversation itself.
        return (), tokenizer.encode_chat(messages, add_generation_prompt=False)
    except RequestError as e:
        raise RequestError(f"{where}: {e.message}", hint=e.hint) from e


def _pieces(prefix: tuple[int, ...], ids: Sequence[int], length: int) -> list[list[int]]:
    """Cuts ``ids`` into pieces of ``length`` tokens, each with ``prefix`` before it and counted with it.

    The last piece may be shorter.
    """
    step = max(length - len(prefix), 1)
    return [[*prefix, *ids[i : i + step]] for i in range(0, len(ids), step)]


def _spread(pieces: Sequence[list[int]], tokens: int) -> list[list[int]]:
    """Picks evenly spread pieces with about ``tokens`` tokens in total; all pieces if they have fewer."""
    available = sum(len(p) for p in pieces)
    if available <= tokens:
        return list(pieces)
    count = max(1, round(len(pieces) * tokens / available))
    return spread(pieces, count)
