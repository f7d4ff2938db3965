"""Places the tensors of a GGUF file in a model of transformers, undoing what llama.cpp's converter rearranged.

Each change works both on numpy arrays and on torch's meta tensors, with which shapes are computed.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import PretrainedConfig

from enginewright.optimizer.shared.resources import release_pages
from enginewright.passes.ir.prequantized import SourceCodes
from enginewright.passes.ir.weights import Source, WeightExpr
from enginewright.runtime.shared.errors import SourceError

from .blocks import SIZES, GgufTensor, dequantize, format_of, read_codes, rows_of, shape_of
from .file import GgufFile

Change = Callable[[Any, PretrainedConfig], Any]
"""Rearranges a tensor, outermost dimension first, given the model's configuration."""

_LAYER = re.compile(r"blk\.(\d+)\.(.+)\Z")
_SUFFIX = re.compile(r"\.(weight|bias)\Z")
_DAMAGED = (ValueError, IndexError, KeyError, TypeError, ArithmeticError, AttributeError, RuntimeError)


@dataclass(frozen=True)
class Place:
    """The place of a file's tensor in the model.

    Attributes:
        name: the model's name, within the layer for tensors of a layer, without ".weight" or ".bias".
        change: undoes the converter's rearrangement; None if there was none.
        part: the tensor's index among the tensors that are joined to one weight.
        axis: the axis along which they are joined.
        whole: True if ``name`` has its suffix already.
        flat: True if the joined parts are one matrix for each head, and the heads' rows follow each other.
        negated_exp: True if the file has -exp(w) of the weight w.
        split: the names, in the table, of the equal parts along the outermost axis that the tensor consists of; such a
            tensor has no ``name``.
    """

    name: str
    change: Change | None = None
    part: int = 0
    axis: int | None = None
    whole: bool = False
    flat: bool = False
    negated_exp: bool = False
    split: tuple[str, ...] = ()


def heads_apart(heads: str) -> Change:
    """Returns a change that restores the order of rows which llama.cpp's converter changed for its interleaved
    rotation.

    ``heads``: the configuration's field with the number of heads.
    """

    def change(weight: Any, config: PretrainedConfig) -> Any:
        count = int(getattr(config, heads))
        return weight.reshape(count, weight.shape[0] // count // 2, 2, -1).swapaxes(1, 2).reshape(weight.shape)

    return change


def less_one(weight: Any, config: PretrainedConfig) -> Any:
    """Subtracts 1 from the weights of a norm, to which the converter has added it."""
    return weight - 1


def flat(weight: Any, config: PretrainedConfig) -> Any:
    """Converts a matrix [G, N] or [N, 1] to a vector."""
    return weight.reshape(-1)


def heads_together(weight: Any, config: PretrainedConfig) -> Any:
    """Groups rows by key head: [key heads, rows of a head, K].

    ``weight`` has the rows of all queries, then of all keys and of all values; or the rows of all gates.
    """
    heads, keys = int(config.linear_num_key_heads), int(config.linear_key_head_dim)
    values = int(config.linear_num_value_heads) // heads * int(config.linear_value_head_dim)
    ends = [0, heads * keys, 2 * heads * keys] if weight.shape[0] != heads * values else [0]
    widths = [keys, keys, values] if len(ends) > 1 else [values]
    parts = [
        weight[end : end + heads * width].reshape(heads, width, -1) for end, width in zip(ends, widths, strict=True)
    ]
    return join(parts, 1)


def value_heads_together(width: str = "", *, tail: bool = False, axis: int = 0) -> Change:
    """Returns a change that makes the value heads of one key head neighbours again.

    Args:
        width: the field with the number of rows of a value head; "" for 1.
        tail: True if queries and keys come before the values; these stay.
        axis: the axis of the heads.
    """

    def change(weight: Any, config: PretrainedConfig) -> Any:
        keys, values = int(config.linear_num_key_heads), int(config.linear_num_value_heads)
        size = int(getattr(config, width)) if width else 1
        if keys == values:
            return weight
        begin = weight.shape[axis] - values * size if tail else 0
        moved = weight[begin:] if tail else weight
        shape = moved.shape
        split = (*shape[:axis], values // keys, keys, size, *shape[axis + 1 :])
        moved = moved.reshape(split).swapaxes(axis, axis + 1).reshape(shape)
        return join([weight[:begin], moved], 0) if begin else moved

    return change


def transposed(weight: Any, config: PretrainedConfig) -> Any:
    """Transposes a weight [N, K] to the [K, N] of the class Conv1D; biases are returned unchanged."""
    return weight.swapaxes(0, 1) if len(weight.shape) > 1 else weight


def experts_transposed(weight: Any, config: PretrainedConfig) -> Any:
    """Transposes experts [E, N, K] to [E, K, N]; biases [E, N] are returned unchanged."""
    return weight.swapaxes(1, 2) if len(weight.shape) > 2 else weight


def grouped_heads(groups: str, heads: str) -> Change:
    """Returns a change from the order (all queries, all keys, all values) to groups of queries with their key and
    value.

    ``groups``, ``heads``: the fields with the numbers of key/value heads and of query heads.
    """

    def change(weight: Any, config: PretrainedConfig) -> Any:
        kv, queries = int(getattr(config, groups)), int(getattr(config, heads))
        size = weight.shape[0] // (queries + 2 * kv)
        parts = [
            weight[: queries * size].reshape(kv, queries // kv, size, -1),
            weight[queries * size : (queries + kv) * size].reshape(kv, 1, size, -1),
            weight[(queries + kv) * size :].reshape(kv, 1, size, -1),
        ]
        return join(parts, 1).reshape(weight.shape)

    return change


def row_matrix(weight: Any, config: PretrainedConfig) -> Any:
    """Converts a vector [K] to a matrix [1, K]."""
    return weight.reshape(1, -1)


def middle_axis(weight: Any, config: PretrainedConfig) -> Any:
    """Reshapes the weight of a convolution by channel, [N, K], [N, 1, K] or [1, N, 1, K], to [N, 1, K]."""
    return weight.reshape(-1, 1, weight.shape[-1])


def head_axis(weight: Any, config: PretrainedConfig) -> Any:
    """Reshapes a vector with a number for each head to [1, 1, heads, 1]."""
    return weight.reshape(1, 1, -1, 1)


def join(parts: Sequence[Any], axis: int) -> Any:
    """Concatenates arrays or tensors along an axis; with axis -1 their elements alternate along the last axis."""
    if len(parts) == 1 and axis >= 0:
        return parts[0]
    if not isinstance(parts[0], torch.Tensor):
        return np.concatenate(parts, axis) if axis >= 0 else np.stack(parts, -1).reshape(*parts[0].shape[:-1], -1)
    return torch.cat(list(parts), axis) if axis >= 0 else torch.stack(list(parts), -1).flatten(-2)


def place_tensors(
    file: GgufFile,
    config: PretrainedConfig,
    table: Mapping[str, Place],
    *,
    layer_prefix: str,
    layers: int,
    skipped: Sequence[str] = (),
) -> dict[str, WeightExpr]:
    """Returns the file's tensors by the model's names, float32, dequantized when evaluated.

    Args:
        file: an open file.
        config: the model's configuration.
        table: the place of each tensor, by its name in the file without block number and suffix.
        layer_prefix: prefix of the model's names of layers.
        layers: the number of layers; tensors of blocks after them (for drafts) are omitted.
        skipped: tensors that are read elsewhere.

    Raises SourceError for a tensor that isn't in the model, or doesn't fit the configuration.
    """
    parts: dict[str, list[tuple[GgufTensor, Place]]] = defaultdict(list)
    for name, tensor in file.tensors.items():
        if name in skipped:
            continue
        match = _LAYER.match(name)
        if match is not None and int(match[1]) >= layers:
            continue
        base = name if match is None else match[2]
        suffix = _SUFFIX.search(base)
        place = table.get(base) or (table.get(base[: suffix.start()]) if suffix else None)
        if place is None or (match is None) != (place.name.startswith("=")):
            raise SourceError(
                f"{file.path}: tensor {name} has no place in the model that the metadata describes",
                hint="Export from the model's Hugging Face directory.",
            )
        pieces = _split(file, tensor, len(place.split)) if place.split else (tensor,)
        places = [table[part] for part in place.split] or [place]
        for piece, of_piece in zip(pieces, places, strict=True):
            target = of_piece.name[1:] if match is None else f"{layer_prefix}.{int(match[1])}.{of_piece.name}"
            if not of_piece.whole and suffix is not None:
                target += suffix[0]
            parts[target].append((piece, of_piece))
    weights = {}
    for target, pairs in parts.items():
        pairs.sort(key=lambda pair: pair[1].part)
        try:
            weights[target] = _expression(pairs, config)
        except _DAMAGED as e:
            names = ", ".join(tensor.name for tensor, _ in pairs)
            raise SourceError(
                f"{file.path}: tensor {names}: its shape doesn't fit the metadata: {e}",
                hint="Download or convert the file again.",
            ) from e
    return weights


def _split(file: GgufFile, tensor: GgufTensor, count: int) -> list[GgufTensor]:
    """Cuts a tensor into ``count`` equal parts along its outermost axis. Raises SourceError if that isn't possible."""
    rows, size = shape_of(tensor)[0], len(tensor.data) // count
    values = SIZES[tensor.tensor_type][0] if len(tensor.shape) == 1 else 1
    if rows % (count * values):
        raise SourceError(
            f"{file.path}: tensor {tensor.name} has {rows} rows, which aren't {count} equal parts",
            hint="Download or convert the file again.",
        )
    shape = (*tensor.shape[:-1], rows // count)
    return [
        tensor._replace(
            name=f"{tensor.name}[{i}]",
            shape=shape,
            data=tensor.data[i * size : (i + 1) * size],
            data_offset=tensor.data_offset + i * size,
        )
        for i in range(count)
    ]


def _expression(pairs: Sequence[tuple[GgufTensor, Place]], config: PretrainedConfig) -> WeightExpr:
    tensors = [tensor for tensor, _ in pairs]
    axis = pairs[0][1].axis

    def changed(place: Place, value: Any) -> Any:
        return value if place.change is None else place.change(value, config)

    def joined(values: Sequence[Any]) -> Any:
        if axis is None and len(values) > 1:
            raise ValueError("two tensors have one place in the model")
        whole = values[0] if axis is None else join(values, axis)
        return whole.reshape(-1, *whole.shape[2:]) if pairs[0][1].flat else whole

    def read() -> torch.Tensor:
        value = joined([changed(place, _values(tensor, place)) for tensor, place in pairs])
        value = np.ascontiguousarray(value, dtype=np.float32)
        result = torch.from_numpy(value if value.flags.writeable else value.copy())
        for tensor in tensors:
            release_pages(tensor.data)
        return result

    # Tensors without memory, to see which shape the changes make of them.
    shapes = [changed(place, torch.empty(shape_of(tensor), device="meta")) for tensor, place in pairs]
    shape = tuple(int(n) for n in joined(shapes).shape)
    label = "+".join(tensor.name for tensor in tensors)
    code_format = None if pairs[0][1].negated_exp else format_of(tensors)
    rows = None
    if code_format is not None and (axis is None or pairs[0][1].flat or 0 <= axis < len(shape) - 1):
        changes = [partial(changed, place) for _, place in pairs]
        rows = rows_of(tensors, changes, joined)
    origin = tensors[0].origin
    if code_format is None or rows is None:
        return Source(label, shape, torch.float32, read, origin)
    codes = partial(read_codes, tensors, rows)
    return SourceCodes(label, shape, torch.float32, read, origin, format=code_format, read_codes=codes)


def _values(tensor: GgufTensor, place: Place) -> npt.NDArray[np.float32]:
    """Reads the values of a tensor. Raises SourceError for one that can't be -exp(w), if ``place`` says so."""
    values = dequantize(tensor)
    if not place.negated_exp:
        return values
    if not (values < 0).all():
        raise SourceError(
            f"{tensor.origin}: tensor {tensor.name} has values of at least 0, or that aren't numbers: "
            "a state that decays has values below 0",
            hint="Download or convert the file again.",
        )
    return np.log(-values)


def values_of(file: GgufFile, name: str) -> npt.NDArray[np.float32] | None:
    """Returns a tensor's values as floats; None if the file doesn't have it."""
    tensor = file.tensors.get(name)
    return None if tensor is None else dequantize(tensor)


def size_of(file: GgufFile, name: str) -> int:
    """Returns the outermost dimension of a tensor. Raises SourceError if the file doesn't have the tensor."""
    tensor = file.tensors.get(name)
    if tensor is None or not len(tensor.shape) or not math.prod(tensor.shape):
        raise SourceError(f"{file.path}: tensor {name} is missing", hint="Download or convert the file again.")
    return shape_of(tensor)[0]


def shape_of_tensor(file: GgufFile, name: str) -> tuple[int, ...] | None:
    """Returns the shape of a tensor, outermost dimension first; None if the file doesn't have it, or it is a scalar."""
    tensor = file.tensors.get(name)
    return None if tensor is None or not tensor.shape else shape_of(tensor)
