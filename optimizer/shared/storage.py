"""The bytes of a bundle: weights by layer, by purpose and by type, and the arena of a step's values."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass

from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.shared.arena import live_bytes
from enginewright.runtime.shared.targets import MEASURED
from enginewright.runtime.shared.weight_formats import FORMATS

_PROMPT = 512
"""The tokens of the prompt whose step's arena is shown."""

_LAYER = re.compile(r"(?:^|(?<=\.))(\d+)\.")
RECORDS = (".input_scale", ".output_scale", ".input_rotation", ".output_rotation")
"""Ends of names of tensors that no step reads: they record how other tensors were scaled and rotated."""

_SUFFIX = re.compile(rf"(\.(weight|bias|rows|{'|'.join(FORMATS)}|scales|offsets|onnx|columns))+$")


@dataclass(frozen=True)
class StoredBytes:
    """The bytes of the weights with the same layer, kind and type.

    Attributes:
        layer: the first number in their names; None if there is none.
        kind: the module's path after that number, such as mlp.down_proj.
        dtype: f32, bf16, f16, fp8, i8, i4, u4, i32, or a format that no kernel reads. Scales and offsets are f16.
        nbytes: the bytes as stored, without the gaps between weights.
    """

    layer: int | None
    kind: str
    dtype: str
    nbytes: int


@dataclass(frozen=True)
class ArenaSize:
    """The size of the cpu target's arena for a step, and the most bytes in it that are live at once: its lower
    bound.
    """

    name: str
    tokens: int
    requests: int
    arena_bytes: int
    live_bytes: int


def arena_sizes(bundle: Bundle) -> list[ArenaSize]:
    """Returns the sizes of the arena for a decode step, a prompt, and each bucket; empty without the cpu target."""
    if MEASURED not in bundle.programs:
        return []
    program, prompt = bundle.program(MEASURED), min(_PROMPT, bundle.model.context_length)
    shapes = [("decode, 1 request", 1, 1, 1), (f"prompt of {prompt}", prompt, 1, 1)]
    if MEASURED in bundle.buckets:
        shapes += [(f"bucket {b.name}", b.tokens, b.requests, b.rows) for b in bundle.buckets[MEASURED].buckets]
    return [
        ArenaSize(name, t, b, program.arena_bytes.evaluate(t, b, r), live_bytes(program, t, b, r))
        for name, t, b, r in shapes
    ]


def stored_weights(bundle: Bundle) -> list[StoredBytes]:
    """Returns all weights of a bundle, those outside of layers first; a weight that two targets share counts once."""
    tables = _shared_tables(bundle)
    sizes: defaultdict[tuple[int, str, str], int] = defaultdict(int)
    for name, entry in bundle.index.stored_once().items():
        if name.endswith(RECORDS):
            continue
        layer, kind = _place(name)
        sizes[layer, tables.get(kind, kind), entry.kind] += entry.bytes
    return [StoredBytes(None if a < 0 else a, b, c, n) for (a, b, c), n in sorted(sizes.items())]


def layer_of(path: str) -> int | None:
    """Returns the layer of a module path: the first number in it."""
    layer = _LAYER.search(f"{path}.")
    return int(layer[1]) if layer else None


def kind_of(path: str) -> str:
    """Returns a module path without the layer's number, which is the same in all layers.

    For fused modules, the differing parts of the paths are joined.
    """
    parts = (_LAYER.split(f"{part}.")[-1].strip(".") for part in path.split(" + "))
    return " + ".join(dict.fromkeys(part for part in parts if part))


def _place(name: str) -> tuple[int, str]:
    """Returns the layer of a weight, -1 if it has none, and its kind."""
    path = _SUFFIX.sub("", name)
    layer = layer_of(path)
    return (-1, path) if layer is None else (layer, f"{path}.".split(f"{layer}.", 1)[1].removesuffix("."))


def _shared_tables(bundle: Bundle) -> dict[str, str]:
    """Returns labels for the weights that are both a table of tokens and a linear's weight."""
    tables: dict[str, str] = {}
    linears: set[str] = set()
    for program in (one for entries in bundle.entries.values() for one in entries.values()):
        for step in program.steps:
            for name in (_place(o.name)[1] for o in step.inputs if o.kind == "weight"):
                if "embedding" in step.op:
                    tables[name] = step.where
                elif step.op.endswith("linear"):
                    linears.add(name)
    return {name: f"{name} and {where}" for name, where in tables.items() if name in linears and name != where}
