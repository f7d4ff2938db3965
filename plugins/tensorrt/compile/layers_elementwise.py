"""Adds element-wise operators, reductions and norms as TensorRT's layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import reduce

import tensorrt as trt

from .network_builder import TYPES, NetworkBuilder

Result = trt.ITensor | tuple[trt.ITensor, ...]
Handler = Callable[[NetworkBuilder], Result]
"""A function that adds the layers for the builder's current call, and returns its results."""

_Op = trt.ElementWiseOperation
_Unary = trt.UnaryOperation


def _binary(kind: trt.ElementWiseOperation) -> Handler:
    return lambda b: b.binary(b.input(0), b.input(1), kind)


def _unary(kind: trt.UnaryOperation) -> Handler:
    return lambda b: b.unary(b.input(0), kind)


def _several(kind: trt.ElementWiseOperation) -> Handler:
    """Returns a handler that adds Max or Min with any number of operands."""

    def add(b: NetworkBuilder) -> trt.ITensor:
        assert b.call is not None
        tensors = [b.input(i) for i in range(len(b.call.inputs))]
        return reduce(lambda x, y: b.binary(x, y, kind), tensors)

    return add


def _inverted(kind: trt.ElementWiseOperation) -> Handler:
    """Returns a handler that adds the negation of a comparison, such as LessOrEqual as not Greater."""
    return lambda b: b.unary(b.binary(b.input(0), b.input(1), kind), _Unary.NOT)


def _equal(b: NetworkBuilder) -> trt.ITensor:
    """Adds an equality. TensorRT compares only numbers; for booleans, it is the negated exclusive or."""
    x, y = b.input(0), b.input(1)
    if x.dtype == trt.DataType.BOOL:
        return b.unary(b.binary(x, y, _Op.XOR), _Unary.NOT)
    return b.binary(x, y, _Op.EQUAL)


def _activation(kind: trt.ActivationType) -> Handler:
    return lambda b: b.out(b.network.add_activation(b.input(0), kind))


def _gelu(b: NetworkBuilder) -> trt.ITensor:
    exact = b.text("approximate") != "tanh"
    kind = trt.ActivationType.GELU_ERF if exact else trt.ActivationType.GELU_TANH
    return b.out(b.network.add_activation(b.input(0), kind))


def _cast(b: NetworkBuilder) -> trt.ITensor:
    to = b.text("to")
    return b.cast(b.input(0), next(of for name, of in TYPES.items() if name == to))


def _where(b: NetworkBuilder) -> trt.ITensor:
    condition, x, y = b.same_rank(b.input(0), b.input(1), b.input(2))
    return b.out(b.network.add_select(condition, x, y))


def _softmax(b: NetworkBuilder) -> trt.ITensor:
    x = b.input(0)
    layer = b.add(b.network.add_softmax(x))
    layer.axes = 1 << (b.attribute("axis", -1) % len(x.shape))
    return layer.get_output(0)


def _reduction(kind: trt.ReduceOperation) -> Handler:
    def add(b: NetworkBuilder) -> trt.ITensor:
        x, axes = b.input(0), b.integers(1)
        rank = len(x.shape)
        chosen = range(rank) if axes is None else [axis % rank for axis in axes]
        mask = sum(1 << axis for axis in chosen)
        return b.out(b.network.add_reduce(x, kind, mask, bool(b.attribute("keepdims", 1))))

    return add


def _norm(centered: bool) -> Handler:
    """Returns a handler that adds RMSNormalization, or LayerNormalization if ``centered``, computed in 32 bits."""

    def add(b: NetworkBuilder) -> trt.ITensor:
        operand, single = b.input(0), trt.DataType.FLOAT
        last = 1 << (len(operand.shape) - 1)

        def mean(x: trt.ITensor) -> trt.ITensor:
            return b.out(b.network.add_reduce(x, trt.ReduceOperation.AVG, last, True))

        x = b.cast(operand, single)
        if centered:
            x = b.binary(x, mean(x), _Op.SUB)
        variance = b.binary(mean(b.binary(x, x, _Op.PROD)), b.like(b.number("epsilon", 1e-5), x), _Op.SUM)
        y = b.binary(x, b.unary(b.unary(variance, _Unary.SQRT), _Unary.RECIP), _Op.PROD)
        y = b.binary(y, b.cast(b.input(1), single), _Op.PROD)
        if b.operand(2):
            y = b.binary(y, b.cast(b.input(2), single), _Op.SUM)
        return b.cast(y, operand.dtype)

    return add


HANDLERS: Mapping[str, Handler] = {
    "Add": _binary(_Op.SUM),
    "Sub": _binary(_Op.SUB),
    "Mul": _binary(_Op.PROD),
    "Div": _binary(_Op.DIV),
    "Pow": _binary(_Op.POW),
    "And": _binary(_Op.AND),
    "Or": _binary(_Op.OR),
    "Less": _binary(_Op.LESS),
    "Greater": _binary(_Op.GREATER),
    "LessOrEqual": _inverted(_Op.GREATER),
    "GreaterOrEqual": _inverted(_Op.LESS),
    "Equal": _equal,
    "Max": _several(_Op.MAX),
    "Min": _several(_Op.MIN),
    "Not": _unary(_Unary.NOT),
    "Neg": _unary(_Unary.NEG),
    "Abs": _unary(_Unary.ABS),
    "Exp": _unary(_Unary.EXP),
    "Log": _unary(_Unary.LOG),
    "Sqrt": _unary(_Unary.SQRT),
    "Sin": _unary(_Unary.SIN),
    "Cos": _unary(_Unary.COS),
    "Erf": _unary(_Unary.ERF),
    "Floor": _unary(_Unary.FLOOR),
    "Round": _unary(_Unary.ROUND),
    "Reciprocal": _unary(_Unary.RECIP),
    "Relu": _activation(trt.ActivationType.RELU),
    "Sigmoid": _activation(trt.ActivationType.SIGMOID),
    "Tanh": _activation(trt.ActivationType.TANH),
    "Gelu": _gelu,
    "Cast": _cast,
    "Where": _where,
    "Softmax": _softmax,
    "ReduceSum": _reduction(trt.ReduceOperation.SUM),
    "ReduceMean": _reduction(trt.ReduceOperation.AVG),
    "ReduceMax": _reduction(trt.ReduceOperation.MAX),
    "RMSNormalization": _norm(centered=False),
    "LayerNormalization": _norm(centered=True),
}
