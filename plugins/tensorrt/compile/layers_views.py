"""Adds operators that move values: shapes, views, slices and gathers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import tensorrt as trt

from .layers_elementwise import Handler
from .network_builder import NetworkBuilder, sizes_of

_Op = trt.ElementWiseOperation


def _identity(b: NetworkBuilder) -> trt.ITensor:
    return b.out(b.network.add_identity(b.input(0)))


def _shape(b: NetworkBuilder) -> trt.ITensor:
    x = b.input(0)
    whole, rank = b.shape(x), len(x.shape)
    start, end = b.attribute("start"), b.attribute("end", rank)
    if (start, end) == (0, rank):
        return whole
    return _slice_static(b, whole, [start], [end - start], [1])


def _reshape(b: NetworkBuilder) -> trt.ITensor:
    sizes = b.integers(1)
    if sizes is not None:
        return b.reshape(b.input(0), sizes)
    layer = b.add(b.network.add_shuffle(b.input(0)))
    layer.set_input(1, b.input(1))
    return layer.get_output(0)


def _transpose(b: NetworkBuilder) -> trt.ITensor:
    assert b.call is not None
    order = b.call.attributes["perm"]
    assert isinstance(order, tuple)
    layer = b.add(b.network.add_shuffle(b.input(0)))
    layer.first_transpose = trt.Permutation(order)
    return layer.get_output(0)


def _unsqueeze(b: NetworkBuilder) -> trt.ITensor:
    return b.out(b.network.add_unsqueeze(b.input(0), b.input(1)))


def _squeeze(b: NetworkBuilder) -> trt.ITensor:
    return b.out(b.network.add_squeeze(b.input(0), b.input(1)))


def _concat(b: NetworkBuilder) -> trt.ITensor:
    assert b.call is not None
    tensors = [b.input(i) for i in range(len(b.call.inputs))]
    layer = b.add(b.network.add_concatenation(tensors))
    layer.axis = b.attribute("axis") % len(tensors[0].shape)
    return layer.get_output(0)


def _slice_static(
    b: NetworkBuilder, x: trt.ITensor, start: Sequence[int], sizes: Sequence[int], strides: Sequence[int]
) -> trt.ITensor:
    dims = (trt.Dims(list(values)) for values in (start, sizes, strides))
    return b.out(b.network.add_slice(x, *dims))


def _along(b: NetworkBuilder, x: trt.ITensor, axis: int, start: int, size: int, stride: int = 1) -> trt.ITensor:
    """Adds a slice of ``size`` elements along an axis of fixed size, and returns it. Other axes may have dynamic
    sizes.
    """
    rank, fixed = len(x.shape), sizes_of(x)
    starts = [start if i == axis else 0 for i in range(rank)]
    strides = [stride if i == axis else 1 for i in range(rank)]
    sizes = [size if i == axis else fixed[i] for i in range(rank)]
    if all(n >= 0 for n in sizes):
        return _slice_static(b, x, starts, sizes, strides)
    limits = b.shape_constant([size if i == axis else 1 << 62 for i in range(rank)])
    whole = b.binary(b.shape(x), limits, _Op.MIN)
    layer = b.add(b.network.add_slice(x, trt.Dims(starts), trt.Dims([0] * rank), trt.Dims(strides)))
    layer.set_input(2, whole)
    return layer.get_output(0)


def _slice(b: NetworkBuilder) -> trt.ITensor:
    """Adds a slice along one axis, with constant bounds."""
    x = b.input(0)
    starts, ends, axes, steps = (b.integers(i) for i in range(1, 5))
    if starts is None or ends is None or axes is None or len(axes) != 1:
        raise b.refused("the tensorrt target slices along one axis, at fixed places")
    axis, step = axes[0] % len(x.shape), 1 if steps is None else steps[0]
    whole = x.shape[axis]
    if whole < 0 or step < 1:
        raise b.refused("the tensorrt target doesn't slice tokens")
    start, end = (max(0, min(n + whole if n < 0 else n, whole)) for n in (starts[0], ends[0]))
    return _along(b, x, axis, start, max(0, -(-(end - start) // step)), step)


def _split(b: NetworkBuilder) -> tuple[trt.ITensor, ...]:
    x, sizes = b.input(0), b.integers(1)
    if sizes is None:
        raise b.refused("the tensorrt target doesn't split tokens")
    axis, pieces, start = b.attribute("axis") % len(x.shape), [], 0
    for size in sizes:
        pieces.append(_along(b, x, axis, start, size))
        start += size
    return tuple(pieces)


def _expand(b: NetworkBuilder) -> trt.ITensor:
    """Adds a broadcast: a slice with stride 0 along axes of size 1."""
    sizes = b.integers(1)
    x = b.of_rank(b.input(0), b.input(1).shape[0])
    rank, before = len(x.shape), sizes_of(x)
    start, strides = [0] * rank, [0 if size == 1 else 1 for size in before]
    padded = None if sizes is None else (1,) * (rank - len(sizes)) + sizes
    if padded is not None and all(n >= 0 for n in before):
        return _slice_static(b, x, start, [max(n, m) for n, m in zip(padded, before, strict=True)], strides)
    shape = b.input(1) if padded is None else b.shape_constant(padded)
    layer = b.add(b.network.add_slice(x, trt.Dims(start), trt.Dims(start), trt.Dims(strides)))
    layer.set_input(2, b.binary(b.shape(x), shape, _Op.MAX))
    return layer.get_output(0)


def _gather(b: NetworkBuilder) -> trt.ITensor:
    x = b.input(0)
    return b.out(b.network.add_gather(x, b.input(1), b.attribute("axis") % len(x.shape)))


def _gather_elements(b: NetworkBuilder) -> trt.ITensor:
    x = b.input(0)
    layer = b.add(b.network.add_gather_v2(x, b.input(1), trt.GatherMode.ELEMENT))
    layer.axis = b.attribute("axis") % len(x.shape)
    return layer.get_output(0)


def _scatter_elements(b: NetworkBuilder) -> trt.ITensor:
    x = b.input(0)
    layer = b.add(b.network.add_scatter(x, b.input(1), b.input(2), trt.ScatterMode.ELEMENT))
    layer.axis = b.attribute("axis") % len(x.shape)
    return layer.get_output(0)


def _one_hot(b: NetworkBuilder) -> trt.ITensor:
    rank = len(b.input(0).shape) + 1
    return b.out(b.network.add_one_hot(b.input(0), b.input(2), b.input(1), b.attribute("axis", -1) % rank))


def _top_k(b: NetworkBuilder) -> tuple[trt.ITensor, ...]:
    x, count = b.input(0), b.integers(1)
    if count is None:
        raise b.refused("how many are the greatest must be fixed")
    kind = trt.TopKOperation.MAX if b.attribute("largest", 1) else trt.TopKOperation.MIN
    axes = 1 << (b.attribute("axis", -1) % len(x.shape))
    layer = b.add(b.network.add_topk(x, kind, count[0], axes))
    return layer.get_output(0), b.cast(layer.get_output(1), trt.DataType.INT64)


HANDLERS: Mapping[str, Handler] = {
    "Identity": _identity,
    "Shape": _shape,
    "Reshape": _reshape,
    "Transpose": _transpose,
    "Unsqueeze": _unsqueeze,
    "Squeeze": _squeeze,
    "Concat": _concat,
    "Slice": _slice,
    "Split": _split,
    "Expand": _expand,
    "Gather": _gather,
    "GatherElements": _gather_elements,
    "ScatterElements": _scatter_elements,
    "OneHot": _one_hot,
    "TopK": _top_k,
}
