"""Finds values whose channels can be scaled: the linears that read them, and the weights before them that take the
inverse.

For s > 0, ``linear(x, W)`` equals ``linear(x / s, W * s)``. The factor 1/s is multiplied into a weight before x, in
which x must be linear. That can be (Lin et al. 2023, https://arxiv.org/abs/2306.00978):

- the weight and bias of a norm,
- the rows of a linear,
- in a gated activation, the rows of the half to which the function isn't applied,
- the linear that computes the values of an attention.

In encoders with the norm after the sum, the norm's result is also a term of the next sum. Such a result isn't scaled
itself: its linears read a copy that is multiplied by 1/s.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.fx.node import Node, Target

from ..ir.prequantized import CodeFormat
from ..ir.program import Program
from ..ir.provenance import WHERE
from ..ir.quantized import formats_of_rows
from ..ir.scaled import Factors, Scaled
from ..ir.weights import COMPUTED, Source, WeightExpr
from .choose_formats import FORMAT, LINEARS, WEIGHT_ARGUMENT, weight_node

aten, ew = torch.ops.aten, torch.ops.ew

_SAME_CHANNELS: tuple[Target, ...] = (
    ew.take_rows.default,
    aten.view.default,
    aten.reshape.default,
    aten.clone.default,
)
"""Ops that select tokens, or join the heads of a token, and keep the order of its channels."""

_NORM_WEIGHTS: dict[Target, tuple[int, ...]] = {
    ew.rms_norm.default: (1,),
    ew.layer_norm.default: (1, 2),
    ew.add_rms_norm.default: (2,),
    ew.add_layer_norm.default: (2, 3),
}
"""Norms -> the indices of the arguments that are their weight and bias."""

_SUMS: tuple[Target, ...] = (aten.add.Tensor, ew.add_rms_norm.default, ew.add_layer_norm.default)
"""Ops that add a residual."""

ATTENTIONS: tuple[Target, ...] = (ew.attention.default, ew.paged_attention.default)


@dataclass(frozen=True)
class Fold:
    """A range of a weight that is divided by s.

    Attributes:
        node, argument: the call, and the index of its argument that is the weight.
        axis: the axis of the channels, -2 or -1.
        start, stop: the range along that axis.
    """

    node: Node
    argument: int
    axis: int
    start: int
    stop: int


@dataclass(frozen=True)
class Producer:
    """The calls that compute a value whose channels can be scaled.

    Attributes:
        folds: the ranges of weights that are multiplied by 1/s; () if a multiplication by 1/s is added before the
            readers.
        heads: for the result of an attention (Nkv, Nq / Nkv, Dv). Then s has Nkv * Dv numbers, and the query heads of a
            key/value head share its part. None if s has one number for each channel of the value.
        experts: True if each expert has its own s.
    """

    folds: tuple[Fold, ...]
    heads: tuple[int, int, int] | None = None
    experts: bool = False


@dataclass(frozen=True)
class Channels:
    """A value whose channels can be divided by factors s, with which the weights of its readers are then multiplied.

    Attributes:
        origin: the value.
        readers: the linears that read it.
        producer: the calls that compute the value; None if it can't be scaled.
        reason: the reason why it can't be scaled; "" if it can.
        tables: embeddings whose table is also the weight of a reader. The table is stored multiplied by s, so the
            results of these embeddings have to be divided by s.
    """

    origin: Node
    readers: tuple[Node, ...]
    producer: Producer | None
    reason: str = ""
    tables: tuple[Node, ...] = ()


class _NotScalableError(Exception):
    """An error with the reason why a value can't be scaled."""


def channels_read_by(program: Program, linears: list[Node], *, again: bool = False) -> list[Channels]:
    """Returns the values that ``linears`` read, each once and in order, with all linears that read it.

    Args:
        program: the program.
        linears: the linears.
        again: True if weights with known integers may be rounded again, also those that are tables of embeddings. Then
            calls may be added too: the multiplication of a norm's result that is also a residual.
    """
    channels = []
    for origin in dict.fromkeys(_origin(n.args[0]) for n in linears):
        readers = tuple(n for n, _ in _users(origin) if n.target in LINEARS)
        try:
            residual = again and _is_residual(origin)
            tables = _check_readers(program, origin, again, _SUMS if residual else ())
            producer = Producer(()) if residual else _producer(program, origin, readers, again)
            _check_count(program, origin, producer, readers)
            channels.append(Channels(origin, readers, producer, tables=tables))
        except _NotScalableError as e:
            channels.append(Channels(origin, tuple(n for n in linears if _origin(n.args[0]) is origin), None, str(e)))
    return channels


def keeps_integers(program: Program, linear: Node) -> bool:
    """Returns True if a linear's weight already has integers of its format. Scaling its channels would round the weight
    again.
    """
    expr, weight_format = program.weight_of(weight_node(linear)), linear.meta.get(FORMAT)
    code_format = None if weight_format is None else CodeFormat.of(weight_format)
    return expr is not None and code_format is not None and formats_of_rows(expr) == {code_format}


def _origin(value: object) -> Node:
    """Returns the value from which ``value`` is computed by ops in ``_SAME_CHANNELS``; ``value`` itself if there are
    none.
    """
    assert isinstance(value, Node)
    while value.target in _SAME_CHANNELS:
        first = value.args[0]
        assert isinstance(first, Node)
        value = first
    return value


def _users(value: Node) -> Iterator[tuple[Node, Node]]:
    """Yields (reader, value) for the readers of a value, directly or after ops in ``_SAME_CHANNELS``, and the value
    that it reads.
    """
    for user in value.users:
        if user.target in _SAME_CHANNELS:
            yield from _users(user)
        else:
            yield user, value


def _is_residual(origin: Node) -> bool:
    """Returns True if a value is a norm's result that is also an operand of a sum."""
    call = origin.args[0] if origin.target is operator.getitem else origin
    return getattr(call, "target", None) in _NORM_WEIGHTS and any(n.target in _SUMS for n, _ in _users(origin))


def _check_readers(program: Program, origin: Node, again: bool, others: tuple[Target, ...]) -> tuple[Node, ...]:
    """Checks that only linears with weights that may change read a value, apart from calls of the ops ``others``.

    Returns the embeddings that share the weight of one of these linears. Raises _NotScalableError with the reason.
    """
    tables: list[Node] = []
    for user, value in _users(origin):
        if user.target in others:
            continue
        if user.target not in LINEARS or user.args[0] is not value:
            raise _NotScalableError(f"{origin.name} is also read by {user.name} ({user.target})")
        shared = [n for n in weight_node(user).users if n.target is ew.embedding.default] if again else []
        _check_matrix(program, user, shared, again)
        tables += shared
    return tuple(tables)


def _check_count(program: Program, origin: Node, producer: Producer, readers: tuple[Node, ...]) -> None:
    """Raises _NotScalableError if one of the linears ``readers`` reads another number of channels than the scaled value
    has.
    """
    count = producer.folds[0].stop - producer.folds[0].start if producer.folds else program.value(origin).shape[-1]
    if producer.heads is not None:
        count *= producer.heads[1]
    for reader in readers:
        if (size := _weight(program, reader).shape[-1]) != count:
            raise _NotScalableError(f"{count} channels become the {size} that {reader.name} reads")


def _check_matrix(program: Program, linear: Node, tables: Sequence[Node] = (), again: bool = False) -> None:
    """Raises _NotScalableError if a linear's weight may not change, or has readers other than the linear and
    ``tables``.

    ``again``: True if known integers may be rounded again.
    """
    weight = weight_node(linear)
    expr = program.weight_of(weight)
    if any(linear.args[WEIGHT_ARGUMENT[linear.target] + 2 :]) or any(linear.kwargs.values()):
        raise _NotScalableError(f"{linear.name} does more than multiply")
    if expr is None or not expr.dtype.is_floating_point:
        raise _NotScalableError(f"the weight of {linear.name} is computed, or holds integers")
    if set(weight.users) != {linear, *tables}:
        raise _NotScalableError(f"the weight {weight.target} has other uses than {linear.name}")
    if not again and keeps_integers(program, linear):
        raise _NotScalableError(f"the integers of {weight.target} are known already")


def _producer(program: Program, origin: Node, readers: tuple[Node, ...], again: bool) -> Producer:
    call = origin
    if origin.target is operator.getitem:
        call, index = origin.args  # type: ignore[assignment]
        if index != 0 or call.target not in _NORM_WEIGHTS:
            raise _NotScalableError(f"nothing before {origin.name} ({call.target}) takes a scale")
    if call.target in _NORM_WEIGHTS:
        return _norm(program, call)
    if call.target is aten.relu.default:  # relu(x / s) is relu(x) / s
        call = _only_linear(call.args[0], call)
    if call.target in LINEARS:
        return _rows(program, call, 0, _outputs(program, call), readers, again)
    if call.target is ew.gated_activation.default:
        linear = _only_linear(call.args[0], call)
        size = _outputs(program, linear)
        return _rows(program, linear, size // 2, size, readers, again)
    if call.target in ATTENTIONS:
        return _values(program, call, readers, again)
    raise _NotScalableError(f"nothing before {origin.name} ({call.target}) takes a scale")


def _norm(program: Program, call: Node) -> Producer:
    folds = []
    for i, argument in enumerate(_NORM_WEIGHTS[call.target]):
        weight = call.args[argument]
        expr = program.weight_of(weight)
        if expr is not None:
            folds.append(Fold(call, argument, -1, 0, expr.shape[-1]))
        elif weight is not None or i == 0:
            raise _NotScalableError(f"{call.name} ({call.target}) has no weight of its own")
    return Producer(tuple(folds))


def _only_linear(value: object, reader: Node) -> Node:
    """Returns ``value`` as a node. Raises _NotScalableError unless it is a linear's result that only ``reader``
    reads.
    """
    if not isinstance(value, Node) or value.target not in LINEARS:
        raise _NotScalableError(f"what {reader.name} ({reader.target}) reads isn't a linear's result")
    if set(value.users) != {reader}:
        raise _NotScalableError(f"{value.name} is read by others than {reader.name}")
    return value


def _outputs(program: Program, linear: Node) -> int:
    return _weight(program, linear).shape[-2]


def _weight(program: Program, linear: Node) -> WeightExpr:
    weight = program.weight_of(weight_node(linear))
    if weight is None:
        raise _NotScalableError(f"the weight of {linear.name} is computed from the inputs")
    return weight


def _rows(program: Program, linear: Node, start: int, stop: int, readers: tuple[Node, ...], again: bool) -> Producer:
    _check_matrix(program, linear, again=again)
    argument = WEIGHT_ARGUMENT[linear.target]
    experts = linear.target is ew.grouped_linear.default
    if experts != all(r.target is ew.grouped_linear.default for r in readers):
        raise _NotScalableError(f"{linear.name} and what reads it are not both experts")
    folds = [Fold(linear, argument, -2, start, stop)]
    if linear.args[argument + 1] is not None:
        if program.weight_of(linear.args[argument + 1]) is None:
            raise _NotScalableError(f"the bias of {linear.name} is computed from the inputs")
        folds.append(Fold(linear, argument + 1, -1, start, stop))
    return Producer(tuple(folds), experts=experts)


def _values(program: Program, attention: Node, readers: tuple[Node, ...], again: bool) -> Producer:
    """Returns the linear that computes an attention's values, as the producer of the attention's result.

    The result is linear in the values, and the query heads of a value head share its s. Raises _NotScalableError if the
    values aren't a linear's result alone.
    """
    q, _, v = attention.args[:3]
    if isinstance(v, Node) and v.target is operator.getitem:  # of a cache that this step's values were written to
        write, index = v.args
        if not isinstance(write, Node) or write.target is not ew.kv_write.default or index != 1:
            raise _NotScalableError(f"the values of {attention.name} come from {v.name}")
        if set(v.users) != {attention}:
            raise _NotScalableError(f"the values of {attention.name} have other readers")
        v, reader = write.args[3], write
    else:
        reader = attention
    assert isinstance(q, Node)
    assert isinstance(v, Node)
    heads, size = (int(n) for n in program.value(v).shape[-2:])
    node, start = v, 0
    while True:
        if set(node.users) != {reader}:
            raise _NotScalableError(f"{node.name}, of the values of {attention.name}, has other readers")
        if node.target in LINEARS:
            break
        if node.target is aten.slice.Tensor and node.args[1] in (-1, program.value(node).dim() - 1):
            linear, start = node.args[0], int(node.args[2])  # type: ignore[arg-type]
            if not isinstance(linear, Node) or linear.target not in LINEARS:
                raise _NotScalableError(f"the values of {attention.name} aren't a linear's result")
            node = linear
            break
        if node.target not in _SAME_CHANNELS or node.target is ew.take_rows.default:
            raise _NotScalableError(f"nothing before the values of {attention.name} ({node.target}) takes a scale")
        reader, node = node, node.args[0]  # type: ignore[assignment]
    rows_producer = _rows(program, node, start, start + heads * size, readers, again)
    return Producer(rows_producer.folds, heads=(heads, int(program.value(q).shape[-2]) // heads, size))


class Scaling(NamedTuple):
    """The scales s of a value's channels.

    Attributes:
        channels: the value.
        factors: s for its readers, [1 or E, K].
        folded: s for its producer, whose channels may be fewer.
    """

    channels: Channels
    factors: torch.Tensor
    folded: torch.Tensor


def scaled_weights(program: Program, scalings: Iterable[Scaling]) -> dict[tuple[Node, int], WeightExpr]:
    """Returns the scaled weights, by (call, index of the argument), as ``put_weights`` needs them.

    A weight can be multiplied by the scales of one value and divided by those of another.
    """
    exprs: dict[tuple[Node, int], WeightExpr] = {}

    def put(node: Node, argument: int, factors: torch.Tensor, divide: bool) -> None:
        base = exprs.get((node, argument)) or program.weight_of(node.args[argument])
        assert base is not None
        exprs[node, argument] = Scaled(base, Factors("s", factors), divide)

    for channels, factors, folded in scalings:
        assert channels.producer is not None
        for reader in channels.readers:
            rank = len(program.value(weight_node(reader)).shape)
            columns = factors if rank == 2 else factors[:, None]  # [1, K], or [1 or E, 1, K]
            put(reader, WEIGHT_ARGUMENT[reader.target], columns, divide=False)
        for table in channels.tables:
            put(table, WEIGHT_ARGUMENT[table.target], factors, divide=False)
        for fold in channels.producer.folds:
            weight = fold.node.args[fold.argument]
            assert isinstance(weight, Node)
            shape = program.value(weight).shape
            axis = len(shape) + fold.axis
            rows = torch.ones(len(folded), int(shape[axis]))  # [1 or E, N]
            rows[:, fold.start : fold.stop] = folded
            lead, after = (-1,) if axis else (), (1,) * (-1 - fold.axis)
            put(fold.node, fold.argument, rows.reshape(*lead, rows.shape[1], *after), divide=True)
    return exprs


def put_weights(program: Program, exprs: dict[tuple[Node, int], WeightExpr], suffix: str = "") -> None:
    """Sets weights of calls, by (call, index of the argument), under their old names with ``suffix``.

    Without a suffix a weight keeps its name, unless another call reads the old weight.
    """
    for (node, argument), expr in exprs.items():
        old = node.args[argument]
        assert isinstance(old, Node)
        alike = [exprs.get((user, i)) for user in old.users for i, arg in enumerate(user.args) if arg is old]
        if not suffix and all(one == expr for one in alike):
            program.weights.change(str(old.target), expr)
        else:
            name = f"{old.target}.{suffix or 'smooth'}"
            node.update_arg(argument, program.weight(name, expr, where=old.meta[WHERE]))


def divide_result(program: Program, table: Node, factors: torch.Tensor) -> None:
    """Divides the result of an embedding, [.., H], by ``factors`` [H]."""
    where = table.meta[WHERE]
    result = _quotient(program, table, factors, where, where[0])
    table.replace_all_uses_with(result, delete_user_cb=lambda user: user is not result)


def divide_inputs(program: Program, readers: Sequence[Node], factors: torch.Tensor) -> None:
    """Divides the input [.., K] of linears by ``factors`` [K]. Linears that read the same value share the division.

    The division belongs to the module that contains the first linear. So a comparison of values by module sees it
    before the linear's input.
    """
    for value in dict.fromkeys(reader.args[0] for reader in readers):
        assert isinstance(value, Node)
        those = [reader for reader in readers if reader.args[0] is value]
        path = those[0].meta[WHERE][0]
        result = _quotient(program, value, factors, (path.rpartition(".")[0],), path)
        for reader in those:
            reader.update_arg(0, result)


def _quotient(program: Program, value: Node, factors: torch.Tensor, where: tuple[str, ...], name: str) -> Node:
    """Adds a call that divides a value [.., H] by ``factors``, and returns it.

    Args:
        program: the program.
        value: the value.
        factors: [H].
        where: the module paths of the call.
        name: the path that begins the name of the weight with the factors.
    """
    inverse = Factors("1/s", 1 / factors)
    source = Source(
        f"{COMPUTED}1/s of {inverse.digest[:16]}", tuple(factors.shape), torch.float32, lambda: inverse.values
    )
    with program.inserting_before(value.next):
        weight = program.weight(f"{name}.inverse_scales", source, where=where)
        return program.call(aten.mul.Tensor, value, weight, where=where)
