"""Divides, joins and pads steps, array by array, by the axes of their ports. See ``step_schema``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from .contracts import Int32Array, StepInput
from .step_schema import Array, Port, port_of


def part_of(step: StepInput, members: Sequence[int]) -> tuple[StepInput, npt.NDArray[np.int64]]:
    """Returns a step with some of the requests, and the indices of its rows in the whole step.

    The step has none of the copies and clears of blocks. ``members``: the indices of the requests.
    """
    requests, counts = list(members), step.counts
    ends = np.cumsum(counts)
    tokens = np.concatenate([np.arange(ends[b] - counts[b], ends[b]) for b in requests])
    place = np.full(len(step.ids), -1, np.int32)
    place[tokens] = np.arange(len(tokens), dtype=np.int32)
    order = np.flatnonzero(place[step.rows] >= 0)
    before = np.concatenate([[0], np.cumsum(place >= 0)]).astype(np.int32)  # tokens of the part before each token

    def cut(port: Port, array: Array) -> Array:
        if port.check == "starts":
            return np.concatenate([[0], np.cumsum(counts[requests])]).astype(np.int32)
        if port.check == "segments":
            return before[array]
        if port.check == "row":
            return place[array[order]]
        axis = port.shape[0]
        return array[tokens] if axis == "T" else array[requests] if axis == "B" else array

    arrays = {name: cut(port_of(name), array) for name, array in step.arrays.items()}
    part = StepInput(arrays, sampling=step.sampling, outputs=step.outputs)
    return part, order


def with_padding(step: StepInput, padding: Mapping[str, Array], rows: int) -> dict[str, Array]:
    """Returns the arrays of a step with additional requests, which pad it to a fixed size.

    Args:
        step: the step.
        padding: the arrays of the additional requests. Ports that it lacks are filled with their padding value.
        rows: the least number of rows; additional ones repeat the first row.
    """
    tokens, requests = len(padding["ids"]), len(padding["kv_len"])
    more_rows = max(0, rows - len(step.rows))

    def longer(port: Port, array: Array, own: Array | None) -> Array:
        if port.check == "row":
            first = array[0] if len(array) else 0
            return np.concatenate([array, np.full(more_rows, first, array.dtype)])
        if port.check == "starts":
            assert own is not None
            return np.concatenate([array, array[-1] + own[1:]])
        if own is not None and array.ndim > 1 and port.shape[1] == "M":
            return _stacked(array, own)
        if own is None:
            sizes = port.sizes(len(array) + tokens, len(array) + requests, len(array), 0)
            return filled(port, array, sizes)
        return np.concatenate([array, own])

    return {name: longer(port_of(name), array, padding.get(name)) for name, array in step.arrays.items()}


def filled(port: Port, array: Array, shape: Sequence[int]) -> Array:
    """Returns the array enlarged to ``shape``. New entries have the padding value of ``port``."""
    if array.shape == tuple(shape):
        return array
    value: Any = port.padding if port.padding is not None else array[-1]
    result: Array = np.full(shape, value, array.dtype)  # type: ignore[assignment]
    result[tuple(slice(0, n) for n in array.shape)] = array
    return result


def packed_words(step: StepInput, names: Sequence[str]) -> list[Int32Array]:
    """Returns the arrays named ``names`` of a step as 32-bit words: for each, the number of axes, their sizes, the
    values.
    """
    words: list[Int32Array] = []
    for name in names:
        array = step.arrays[name]
        words.append(np.array([array.ndim, *array.shape], np.int32))
        words.append(np.ascontiguousarray(array).reshape(-1).view(np.int32))
    return words


def unpacked_words(words: Int32Array, names: Sequence[str]) -> tuple[dict[str, Array], int]:
    """Reverses ``packed_words``: returns the arrays by name, and the number of words that they took."""
    arrays: dict[str, Array] = {}
    at = 0
    for name in names:
        axes = int(words[at])
        shape = tuple(words[at + 1 : at + 1 + axes].tolist())
        at += 1 + axes
        end = at + int(np.prod(shape, dtype=np.int64))
        dtype = np.float32 if port_of(name).dtype == "f32" else np.int32
        arrays[name] = words[at:end].view(dtype).reshape(shape)
        at = end
    return arrays, at


def _stacked(table: Array, more: Array) -> Array:
    """Concatenates two block tables along requests. The narrower one is padded with -1."""
    width = max(table.shape[1], more.shape[1])
    result = np.full((len(table) + len(more), width), -1, np.int32)
    result[: len(table), : table.shape[1]] = table
    result[len(table) :, : more.shape[1]] = more
    return result
