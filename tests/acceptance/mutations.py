"""Damages files at random, the same for the same seed: as bytes, and as JSON documents that stay JSON."""

from __future__ import annotations

import copy
import json
import math
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


Documents = dict[str, Any]
"""A bundle's "program", "index" and "manifest", as JSON values."""


def mutate_meaning(rng: random.Random, documents: Documents) -> None:
    """One to three edits that leave documents of the right form, with another meaning."""
    for _ in range(rng.choice((1, 1, 2, 3))):
        rng.choice(_MEANINGS)(rng, documents)


def _operands(documents: Documents) -> list[dict[str, Any]]:
    steps = documents["program"]["steps"]
    operands = list(documents["program"]["outputs"].values())
    return [o for step in steps for o in (*step["inputs"], *step["outputs"])] + operands


def _number(rng: random.Random, value: int) -> int:
    changes = (value + 1, value - 1, value * 2, value // 2, value + 32, -value, 0, 1, *NUMBERS)
    return rng.choice(changes[:8] if rng.random() < 0.8 else changes)


def _size(rng: random.Random, value: Any) -> Any:
    """Another size, stride or offset: a number, or so many times T, B or R."""
    terms = dict(value) if isinstance(value, dict) else {"1": value}
    kind = rng.randrange(4)
    key = rng.choice(sorted(terms) or ["1"])
    if kind == 0:
        terms[rng.choice("TBR1")] = terms.pop(key, 1)
    elif kind == 1:
        terms[rng.choice("TBR1")] = rng.choice((1, -1, 7, 64))
    else:
        terms[key] = _number(rng, terms.get(key, 0))
    return terms


def _swap(rng: random.Random, items: list[Any], key: Any = None) -> None:
    """Two of ``items`` change places, or what they have at ``key``."""
    if len(items) < 2:
        return
    a, b = rng.sample(range(len(items)), 2)
    if key is None:
        items[a], items[b] = items[b], items[a]
    elif key in items[a] and key in items[b]:
        items[a][key], items[b][key] = items[b][key], items[a][key]


def _change_steps(rng: random.Random, documents: Documents) -> None:
    steps = documents["program"]["steps"]
    kind = rng.randrange(5)
    if kind == 0:
        _swap(rng, steps)
    elif kind == 1:
        _swap(rng, steps, rng.choice(("op", "inputs", "outputs", "attrs")))
    elif kind == 2 and len(steps) > 1:
        del steps[rng.randrange(len(steps))]
    elif kind == 3:
        steps.insert(rng.randrange(len(steps)), copy.deepcopy(rng.choice(steps)))
    else:
        field = rng.choice(("op", "inputs", "outputs"))
        rng.choice(steps)[field] = copy.deepcopy(rng.choice(steps)[field])


def _change_operands(rng: random.Random, documents: Documents) -> None:
    operand, kind = rng.choice(_operands(documents)), rng.randrange(8)
    alike = [o for o in _operands(documents) if o["kind"] == operand["kind"]]
    if kind <= 1:
        operand["name"] = rng.choice(alike)["name"]
    elif kind == 2:
        operand["dtype"] = rng.choice(_operands(documents))["dtype"]
    elif kind == 3:
        _swap(rng, operand[rng.choice(("shape", "strides"))])
    elif kind == 4:
        operand["offset"] = _size(rng, operand.get("offset", 0))
    elif kind == 5:
        operand.update(copy.deepcopy(rng.choice(_operands(documents))))
    else:
        sizes = operand[rng.choice(("shape", "shape", "strides"))]
        if sizes:
            at = rng.randrange(len(sizes))
            sizes[at] = _size(rng, sizes[at])


def _change_memory(rng: random.Random, documents: Documents) -> None:
    """Buffers that lie over each other, are too small, or end behind the arena."""
    program = documents["program"]
    buffer, kind = rng.choice(program["buffers"]), rng.randrange(4)
    if kind == 0:
        buffer["size"] = _size(rng, buffer["size"])
    elif kind == 1:
        buffer["offset"] = _size(rng, buffer["offset"])
    elif kind == 2:
        _swap(rng, program["buffers"], rng.choice(("name", "offset", "size")))
    else:
        program["arena_bytes"] = _size(rng, program["arena_bytes"])


def _change_attributes(rng: random.Random, documents: Documents) -> None:
    steps = [step for step in documents["program"]["steps"] if step.get("attrs")]
    if not steps:
        return
    attrs = rng.choice(steps)["attrs"]
    name = rng.choice(sorted(attrs))
    value = attrs[name]
    if isinstance(value, bool):
        attrs[name] = not value
    elif isinstance(value, int):
        attrs[name] = _number(rng, value)
    elif isinstance(value, float):
        attrs[name] = rng.choice((0.0, -value, 1e38, 1e300, float("inf"), float("nan")))
    else:
        attrs[name] = rng.choice([step["attrs"].get(name, value) for step in steps])


def _change_weights(rng: random.Random, documents: Documents) -> None:
    """Changes the program and the index alike, so that they agree."""
    uses, tensors = documents["program"]["weights"], documents["index"]["tensors"]
    use, kind = rng.choice(uses), rng.randrange(5)
    entry = tensors[use["name"]] if use["name"] in tensors else rng.choice(list(tensors.values()))
    if kind == 0:
        _swap(rng, list(tensors.values()), rng.choice(("offset", "blob")))
    elif kind == 1 and use["shape"]:
        shape = list(use["shape"])
        _swap(rng, shape)
        if rng.random() < 0.6:
            at = rng.randrange(len(shape))
            shape[at] = _number(rng, shape[at])
        use["shape"], entry["shape"] = shape, list(shape)
    elif kind == 2:
        field = rng.choice(("dtype", "layout"))
        use[field] = entry[field] = rng.choice(uses)[field]
    elif kind == 3:
        entry["offset"] = max(0, entry["offset"] + rng.choice((64, -64, 4096, 1 << 20)))
    else:
        _swap(rng, uses, "name")
    if rng.random() < 0.7:  # bytes that its shape would have in rows
        width = {"f32": 4, "i32": 4, "bf16": 2, "f16": 2}.get(entry["dtype"], 1)
        entry["bytes"] = width * math.prod(max(0, n) for n in entry["shape"])


def _change_caches(rng: random.Random, documents: Documents) -> None:
    groups = documents["program"]["cache_groups"]
    if not groups:
        return
    group, kind = rng.choice(groups), rng.randrange(5)
    if kind == 0:
        _swap(rng, group["layers"])
    elif kind == 1:
        group["layers"] = [_number(rng, layer) for layer in group["layers"]][: rng.choice((1, 99))]
    elif kind == 2:
        group["dtype"] = rng.choice(("f32", "bf16", "i8", "fp8"))
    elif kind == 3:
        group["name"] = rng.choice(("full", "x", "window"))
    else:
        field = rng.choice(("kv_heads", "key_head_size", "value_head_size", "window", "block_size"))
        group[field] = _number(rng, group.get(field, 32))


def _change_model(rng: random.Random, documents: Documents) -> None:
    """The manifest's sizes and tokens; sometimes with the logits' width, so that they agree."""
    model, kind = documents["manifest"]["model"], rng.randrange(4)
    if kind <= 1:
        field = rng.choice(("vocab_size", "context_length"))
        model[field] = _number(rng, model[field])
        if kind == 1:
            documents["program"]["outputs"]["logits"]["shape"][-1] = model["vocab_size"]
    elif kind == 2:
        model["eos_token_ids"] = [rng.choice((0, -1, model["vocab_size"], model["vocab_size"] - 1, 2**31, 2**70))]
    else:
        documents["manifest"]["targets"] = rng.choice((["cpu", "cpu"], ["onnx"], [], ["cpu", "onnx"]))


_MEANINGS = (_change_steps, _change_operands, _change_operands, _change_memory, _change_attributes)
_MEANINGS += (_change_weights, _change_caches, _change_model)
