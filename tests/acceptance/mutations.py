"""Damages files at random, the same for the same seed: as bytes, and as JSON documents that stay JSON."""

from __future__ import annotations

import copy
import json
import random
from collections import defaultdict
from typing import Any

NUMBERS = (0, 1, -1, 2, 31, 33, 255, 2**15, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**40, 2**62, 2**63 - 1, 2**63)
NUMBERS += (2**64 - 1, 2**64, -(2**31), -(2**63), 10**30)
OTHER_VALUES: tuple[Any, ...] = (None, True, False, 0.5, -0.0, 1e300, float("inf"), float("nan"))
OTHER_VALUES += ("", "x", "../x", "a\0b", "\ud800", [], {}, [[]], {"1": 1}, {"T": 2**40, "1": -1})
OTHER_VALUES += (json.loads("[" * 900 + "]" * 900),)

Path = tuple[Any, ...]


def mutate_bytes(rng: random.Random, data: bytes, header: int) -> bytes:
    """``data`` with one to three changes, mostly in its first ``header`` bytes, where files keep what they are."""
    result = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        _mutate_once(rng, result, header)
    return bytes(result)


def _mutate_once(rng: random.Random, data: bytearray, header: int) -> None:
    def place() -> int:
        end = min(header, len(data)) if rng.random() < 0.85 else len(data)
        return rng.randrange(end) if end else 0

    at, length = place(), rng.choice((1, 2, 4, 8, 16, 64, 500))
    kind = rng.randrange(9)
    if kind <= 1 and data:
        data[at] ^= 1 << rng.randrange(8)
    elif kind == 2 and data:
        data[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
    elif kind == 3:
        width = rng.choice((4, 8))
        number = rng.choice(NUMBERS) % 2 ** (8 * width)
        data[at : at + width] = number.to_bytes(width, "little")
    elif kind == 4:
        del data[rng.choice((place(), rng.randrange(len(data) + 1))) :]
    elif kind == 5:
        data[at:at] = rng.randbytes(length)
    elif kind == 6:
        del data[at : at + length]
    elif kind == 7:
        data[at:at] = data[at : at + length]
    else:
        data[at : at + length] = bytes(len(data[at : at + length]))


def mutate_json(rng: random.Random, data: bytes) -> bytes:
    """``data``, a JSON document, with one to three edits; one in five times its text is damaged instead."""
    if rng.random() < 0.2:
        return mutate_bytes(rng, data, len(data))
    if rng.random() < 0.01:
        return b"[" * 200_000
    document = json.loads(data)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        document = _edit(rng, document)
    return json.dumps(document).encode()


def _edit(rng: random.Random, document: Any) -> Any:
    """The document with one value, key or element changed."""
    by_key: dict[Any, list[Path]] = defaultdict(list)  # so that rare fields are changed as often as frequent ones
    _collect(document, (), by_key)
    if not by_key:
        return rng.choice(OTHER_VALUES)
    key = rng.choice(sorted(by_key, key=str))
    path = rng.choice(by_key[key])
    parent = document
    for part in path[:-1]:
        parent = parent[part]
    value, kind = parent[path[-1]], rng.randrange(10)
    if kind <= 2 and isinstance(value, int) and not isinstance(value, bool):
        changes = (value + 1, value - 1, value * 2, -value, value + 64, value * 33, value // 2, rng.choice(NUMBERS))
        parent[path[-1]] = rng.choice(changes)
    elif kind <= 4:
        # What the field is somewhere else; through text, since an edit before may have nested it a thousand deep.
        parent[path[-1]] = json.loads(json.dumps(_at(document, rng.choice(by_key[key]))))
    elif kind == 5:
        parent[path[-1]] = rng.choice((*NUMBERS, *OTHER_VALUES))
    elif kind == 6:
        del parent[path[-1]]
    elif kind == 7 and isinstance(parent, dict):
        parent[rng.choice(("x", str(path[-1]) + "s", *map(str, parent)))] = parent.pop(path[-1])
    elif kind == 7 and isinstance(parent, list):
        parent.insert(rng.randrange(len(parent) + 1), copy.deepcopy(value))
    elif kind == 8 and isinstance(value, str):
        parent[path[-1]] = value[: len(value) // 2] + rng.choice(("", "0", "/", "é", "\0", "\ud800", "x" * 5000))
    else:
        other = rng.choice(by_key[key])
        holder = _at(document, other[:-1])
        if other[: len(path)] != path and path[: len(other)] != other:
            holder[other[-1]], parent[path[-1]] = value, holder[other[-1]]
    return document


def _collect(value: Any, path: Path, by_key: dict[Any, list[Path]]) -> None:
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in parts:
        # Elements of lists go by the name of the list.
        name = key if isinstance(key, str) else f"{next((p for p in reversed(path) if isinstance(p, str)), '')}[]"
        by_key[name].append((*path, key))
        _collect(part, (*path, key), by_key)


def _at(document: Any, path: Path) -> Any:
    for part in path:
        document = document[part]
    return document
