"""Adds products, quantized weights and rotations as TensorRT's layers."""

from __future__ import annotations

from collections.abc import Mapping

import tensorrt as trt

from .layers_elementwise import Handler
from .network_builder import NetworkBuilder

_PLAIN, _TURNED = trt.MatrixOperation.NONE, trt.MatrixOperation.TRANSPOSE


def _matmul(b: NetworkBuilder) -> trt.ITensor:
    x, y = b.same_rank(b.input(0), b.input(1))
    return b.out(b.network.add_matrix_multiply(x, _PLAIN, y, _PLAIN))


def _gemm(b: NetworkBuilder) -> trt.ITensor:
    """Adds a matrix product, which is a Gemm without its third operand."""
    kinds = [_TURNED if b.attribute(name) else _PLAIN for name in ("transA", "transB")]
    return b.out(b.network.add_matrix_multiply(b.input(0), kinds[0], b.input(1), kinds[1]))


def _dequantize(b: NetworkBuilder) -> trt.ITensor:
    """Adds the product of integers and their scales: one scale for each index of an axis, or for each block along
    it.
    """
    x, scales = b.input(0), b.input(1)
    layer = b.add(b.network.add_dequantize(x, scales, scales.dtype))
    axis, block = b.attribute("axis") % len(x.shape), b.attribute("block_size")
    if not block:
        layer.axis = axis
    return layer.get_output(0)


def _rotary(b: NetworkBuilder) -> trt.ITensor:
    x, cosines, sines = (b.input(i) for i in range(3))
    interleaved, rotated = bool(b.attribute("interleaved")), b.attribute("rotary_embedding_dim")
    return b.out(b.network.add_rotary_embedding(x, cosines, sines, interleaved, rotated))


HANDLERS: Mapping[str, Handler] = {
    "MatMul": _matmul,
    "Gemm": _gemm,
    "DequantizeLinear": _dequantize,
    "RotaryEmbedding": _rotary,
}
