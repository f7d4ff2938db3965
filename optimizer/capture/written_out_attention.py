"""Finds attention that a model computes itself instead of calling transformers' interface.

A module's ``softmax(scores(q @ k^T)) @ v`` is recognised by its values, not by its code: the nodes between the product
and the softmax are evaluated for sequences of several lengths, and must equal

    scale * (q @ k^T) + slope * (key - query) + a term that is the same for all keys,

and mask all keys except the causal ones, or the causal ones within a window. In a model of whole texts they may mask no
key, or those outside a window of both sides; the distance is -|key - query| then. The slopes are those of linear biases
(ALiBi, https://arxiv.org/abs/2108.12409), or 0. A bias by distance from a table is found before. One ``ew.attention``
then replaces the nodes; otherwise the model is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx.node import Node, map_arg

from enginewright.passes.framework.match import bound_arguments
from enginewright.passes.ir.program import Program, named_symbol
from enginewright.passes.ir.provenance import WHERE, join_where
from enginewright.passes.ir.weights import COMPUTED, Source
from enginewright.runtime.shared.errors import UnsupportedModelError
from enginewright.runtime.shared.step_schema import Q_START

from .attention_interface import NOT_CAUSAL, AttentionCapture, AttentionMask, seen_keys
from .known_values import Sequence, UnknownError, known_nodes
from .learned_biases import take_learned_biases

aten, ew = torch.ops.aten, torch.ops.ew

_T = named_symbol("T")

_SOFTMAXES = (aten.softmax.int, aten._softmax.default)
_PRODUCTS = (aten.matmul.default, aten.bmm.default, aten.baddbmm.default)
_RESHAPES: tuple[object, ...] = (
    aten.view,
    aten._unsafe_view,
    aten.reshape,
    aten.clone,
    aten.alias,
    aten._to_copy,
    aten.dropout,
    aten.expand,
    aten.unsqueeze,
    aten.squeeze,
    aten.slice,
)
_CHOICES = (aten.where,)
"""Ops that are elementwise in some of their forms, but aren't tagged as pointwise."""

_LENGTHS = (2, 5, 17)
_MOST_SCORES = 1 << 25
"""The most scores that are evaluated at once to recognise a mask: 128 MiB."""

_MASKED = -9e3
"""The score below which a key counts as masked: e to that power is 0, and no bias of positions is so low."""
_LARGE = 1024.0
_TOLERANCE = 1e-5
"""The largest difference of two sums of 32-bit floats that count as equal, relative to their largest number."""
_ROUNDED = 2.0**-7
"""The largest difference of biases from linear ones, as a share of a head's largest bias.

Falcon multiplies slopes by positions in bf16, which rounds positions from 256 on. Two biases that are compared are off
by half a unit in the last place each.
"""


@dataclass(frozen=True)
class _Meaning:
    """The parameters of ``ew.attention`` that give the same scores. ``slopes``: [N], or None if all are 0."""

    scale: float
    mask: AttentionMask
    slopes: torch.Tensor | None


@dataclass(frozen=True)
class _Found:
    """The nodes of written-out attention.

    Attributes:
        product: q @ k^T.
        softmax: the softmax.
        weights: the factor that is multiplied with v.
        result: the product with v.
    """

    product: Node
    softmax: Node
    weights: Node
    result: Node


class _NotAttentionError(Exception):
    """Says why a softmax isn't ``ew.attention``."""


def replace_written_out_attention(program: Program, capture: AttentionCapture, longest: int) -> None:
    """Replaces every softmax over the keys of a step by ``ew.attention``, in place.

    Args:
        program: the traced program; nodes that become unused are removed.
        capture: the layers that have attended through the interface; the replaced ones are added.
        longest: the model's maximum sequence length.

    Raises:
        UnsupportedModelError: a softmax isn't provably ``ew.attention``; names its module.
    """
    known = known_nodes(program)
    meanings: dict[object, _Meaning] = {}
    softmaxes = [n for n in program.nodes_of(*_SOFTMAXES) if _is_square(program, n) and n not in known]
    biases = take_learned_biases(program, softmaxes, longest) if capture.whole_texts else {}
    for softmax in softmaxes:
        where = join_where(w for w in softmax.meta[WHERE] if w) or "the model"
        try:
            attention = _find(program, softmax, known)
            key = _spelling(attention, known)
            if key not in meanings:
                meanings[key] = _meaning(program, attention, known, longest, capture)
            _replace(program, attention, meanings[key], capture, biases.get(softmax))
        except (_NotAttentionError, UnknownError) as e:
            raise UnsupportedModelError(
                f"{where} writes its attention out, and {e}",
                hint="Attention is causal, or of whole texts, maybe within a window, and adds to scores at most a bias "
                "that is linear in the distance.",
            ) from e
    if softmaxes:
        program.remove_dead_code()


def _is_square(program: Program, node: Node) -> bool:
    value = node.meta["val"]
    if not isinstance(value, torch.Tensor) or value.dim() < 2:
        return False
    return program.shape(node)[-2:] == (_T, _T)


# ---- finding


def _find(program: Program, softmax: Node, known: set[Node]) -> _Found:
    rank = program.value(softmax).dim()
    if bound_arguments(softmax)["dim"] % rank != rank - 1:
        raise _NotAttentionError("its softmax isn't over keys")
    product = _product(program, softmax, known)
    weights, result = _result(softmax, known)
    return _Found(product, softmax, weights, result)


def _product(program: Program, softmax: Node, known: set[Node]) -> Node:
    """Returns the product of queries and keys from which a softmax's scores are computed."""
    node = softmax.args[0]
    assert isinstance(node, Node)
    while node.target not in _PRODUCTS:
        unknown = [a for a in node.all_input_nodes if a not in known]
        if len(unknown) != 1 or not _keeps_places(node):
            raise _NotAttentionError(f"{node.target} makes scores of more than one product, as of positions")
        node = unknown[0]
    if not _is_square(program, node):
        raise _NotAttentionError("its scores aren't a product of queries and keys")
    if node.target is aten.baddbmm.default and node.args[0] not in known:
        raise _NotAttentionError("something that depends on tokens is added to its scores")
    return node


def _result(softmax: Node, known: set[Node]) -> tuple[Node, Node]:
    """Returns the attention weights that follow from a softmax, and the product of these weights with the values.

    Args:
        softmax: the call of the softmax.
        known: the calls that depend on neither tokens nor parameters: see ``known_nodes``.

    Raises _NotAttentionError if the weights are used elsewhere, or changed by anything that isn't known.
    """
    weights = softmax
    while True:
        users = [u for u in weights.users if u.users]
        if len(users) != 1:
            raise _NotAttentionError("its weights are used in several places")
        user = users[0]
        if user.target in (aten.matmul.default, aten.bmm.default) and user.args[0] is weights:
            return weights, user
        if not _keeps_places(user) or any(a is not weights and a not in known for a in user.all_input_nodes):
            raise _NotAttentionError(f"{user.target} changes its weights")
        weights = user


def _keeps_places(node: Node) -> bool:
    """Returns True if ``_meaning`` can evaluate an op: it is pointwise, a reshape or a choice."""
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and (
        torch.Tag.pointwise in target.tags or target.overloadpacket in (*_RESHAPES, *_CHOICES)
    )


def _spelling(found: _Found, known: set[Node]) -> object:
    """Returns a key that is equal for attentions with the same computation, so that repeated layers are analysed
    once.
    """
    number: dict[Node, object] = {found.product: "product", found.softmax: "softmax"}
    calls: list[object] = []

    def name(node: Node) -> Any:
        return node if node in known else number[node]

    chain = [*_between(found.softmax, found.product, known), *_between(found.weights, found.softmax, known)]
    for node in chain:
        number.setdefault(node, len(number))
        calls.append((node.target, str(map_arg((node.args, node.kwargs), name))))
    product = found.product
    if product.target is aten.baddbmm.default:
        calls.append(str((product.args[0], product.kwargs)))
    return (tuple(calls), str(product.meta["val"].shape))


def _between(last: Node, first: Node, known: set[Node]) -> list[Node]:
    """Returns the calls after ``first`` up to and including ``last``, in order."""
    chain = []
    node = last
    while node is not first:
        chain.append(node)
        (node,) = [a for a in node.all_input_nodes if a not in known]
    return chain[::-1]


# ---- what it means


def _meaning(program: Program, found: _Found, known: set[Node], longest: int, capture: AttentionCapture) -> _Meaning:
    heads = math.prod(int(s) for s in program.shape(found.softmax)[:-2])
    most = min(longest, math.isqrt(_MOST_SCORES // heads))
    if capture.windows and max(capture.windows) + 2 > most:
        raise _NotAttentionError(f"a window of {max(capture.windows)} tokens is too long to be found in {most}")
    meanings = []
    for length in sorted({n for n in _LENGTHS if n < most} | {most}):
        sequence = Sequence(program, known, length)
        scores = _scores(sequence, found, heads)
        meanings.append((length, *_seen(scores, heads, length)))
        _check_weights(sequence, found)
    # Numbers are read from short sequences, where biases are small, and must hold for all.
    _, scale, _, slopes = meanings[-2] if len(meanings) > 1 else meanings[-1]
    mask = meanings[-1][2]
    for length, other, seen, others in meanings:
        same = torch.allclose(others, slopes, rtol=_ROUNDED, atol=_TOLERANCE) or length == _LENGTHS[0]
        if not math.isclose(other, scale, rel_tol=1e-4) or not same:
            raise _NotAttentionError("its scores depend on how long the sequence is")
        if seen != (mask if mask.window < length else AttentionMask(0, mask.causal)):
            raise _NotAttentionError("its mask depends on how long the sequence is")
    if not mask.causal and not capture.whole_texts:
        raise _NotAttentionError(f"its mask is {NOT_CAUSAL}")
    return _Meaning(scale, mask, slopes if bool(slopes.any()) else None)


def _scores(sequence: Sequence, found: _Found, heads: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns a function that computes the scores [N, S, S] from products [N, S, S]."""
    shape = sequence.shape(found.product)
    calls = _between(found.softmax, found.product, sequence.known)[:-1]
    start = found.product

    def scores(products: torch.Tensor) -> torch.Tensor:
        value = products.view(shape)
        if start.target is aten.baddbmm.default:
            arguments = bound_arguments(start)
            value = arguments["beta"] * sequence.value(arguments["self"]) + arguments["alpha"] * value
        values = {start: value}
        for node in calls:
            values = {node: sequence.call(node, values)}
        (value,) = values.values()
        if value.numel() != products.numel():
            raise _NotAttentionError("its softmax is over other scores than it makes")
        return value.reshape(heads, sequence.length, sequence.length)

    return scores


def _seen(
    scores: Callable[[torch.Tensor], torch.Tensor], heads: int, length: int
) -> tuple[float, AttentionMask, torch.Tensor]:
    """Returns (scale, mask, slopes [N]) of scores over a sequence.

    Raises _NotAttentionError for scores of another form.
    """
    shape = (heads, length, length)
    none = scores(torch.zeros(shape))
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(length))
    some = scores(noise)
    query, key = torch.arange(length)[:, None], torch.arange(length)[None, :]
    visible = none[0] >= _MASKED
    causal = int(visible[0].sum()) == 1
    count = int(visible[-1].sum())
    mask = AttentionMask(0 if count == length else count, causal)
    expected = seen_keys(query, key, mask.window, causal=causal)
    if not all(torch.equal(x >= _MASKED, expected.expand(shape)) for x in (none, some)):
        raise _NotAttentionError(f"its mask is {NOT_CAUSAL}, nor bidirectional")
    scale = float((scores(torch.full(shape, _LARGE))[0, -1, -1] - none[0, -1, -1]) / _LARGE)
    biases = torch.where(expected, none, torch.zeros(()))
    largest = float(biases.abs().max()) + abs(scale) * 5
    if not torch.allclose(
        torch.where(expected, some - none, 0.0),
        torch.where(expected, scale * noise, 0.0),
        rtol=0,
        atol=_TOLERANCE * largest,
    ):
        raise _NotAttentionError("its scores aren't products times a number")
    first = 0 if not mask.window else length - mask.window
    distance = (key - query if causal else -(key - query).abs()).float()
    diagonal = biases.diagonal(dim1=1, dim2=2)  # [N, S]: of each token with itself
    far = float(length - 1 - first)
    slopes = (diagonal[:, -1] - biases[:, -1, first]) / far if far else torch.zeros(heads)
    linear = diagonal[:, :, None] + slopes[:, None, None] * distance
    most = _TOLERANCE * largest + _ROUNDED * biases.abs().amax(dim=(1, 2), keepdim=True)
    if bool(((torch.where(expected, linear, 0.0) - biases).abs() > most).any()):
        raise _NotAttentionError("what it adds to scores isn't linear in the distance")
    return scale, mask, slopes


def _check_weights(sequence: Sequence, found: _Found) -> None:
    """Raises _NotAttentionError unless the softmax's result reaches the product with v unchanged."""
    weights = torch.rand(sequence.shape(found.softmax), generator=torch.Generator().manual_seed(0))
    values = {found.softmax: weights}
    for node in _between(found.weights, found.softmax, sequence.known):
        values = {node: sequence.call(node, values)}
    (value,) = values.values()
    if value.numel() != weights.numel() or not torch.equal(value.flatten().float(), weights.flatten()):
        raise _NotAttentionError("its weights aren't those that the softmax gives")


# ---- replacing


def _replace(
    program: Program, found: _Found, meaning: _Meaning, capture: AttentionCapture, biases: Node | None
) -> None:
    query, key = found.product.args[-2:]
    value = found.result.args[1]
    assert isinstance(query, Node) and isinstance(key, Node) and isinstance(value, Node)
    where = found.result.meta[WHERE]
    layer = next(n for n in range(len(capture.layers) + 1) if n not in capture.layers)
    with program.inserting_before(found.result):
        q, k, v = (_heads(program, x, where) for x in (query, key, value))  # [Nq, T, D], [Nkv, D, T], [Nkv, T, Dv]
        heads, key_heads, value_heads = (program.shape(x)[0] for x in (q, k, v))
        if key_heads != value_heads or key_heads not in (1, heads):
            raise _NotAttentionError("its queries, keys and values have numbers of heads that don't fit")
        arguments = [
            program.call(aten.permute.default, x, order, where=where)
            for x, order in ((q, [1, 0, 2]), (k, [2, 0, 1]), (v, [1, 0, 2]))
        ]
        slopes = None
        if meaning.slopes is not None:
            name, values = f"{where[0]}.slopes".lstrip("."), meaning.slopes
            source = Source(f"{COMPUTED}{name}", tuple(values.shape), values.dtype, values.clone)
            slopes = program.weight(name, source, where=where)
        out = program.call(
            ew.attention.default,
            *arguments,
            program.inputs[Q_START],
            layer,
            meaning.scale,
            meaning.mask.window,
            0.0,
            None,
            slopes,
            *(() if meaning.mask.causal and biases is None else (meaning.mask.causal,)),
            *(() if biases is None else (biases,)),
            where=where,
        )
        new = program.call(aten.permute.default, out, [1, 0, 2], where=where)  # [Nq, T, Dv]
        for _ in range(program.value(found.result).dim() - 3):
            new = program.call(aten.unsqueeze.default, new, 0, where=where)
        new = program.call(aten.clone.default, new, where=where, memory_format=torch.contiguous_format)
    if program.shape(new) != program.shape(found.result):
        raise _NotAttentionError("its heads aren't one axis")
    capture.layers.append(layer)
    program.replace(found.result, new)


def _heads(program: Program, node: Node, where: tuple[str, ...]) -> Node:
    """Reshapes a node [..., a, b] to [N, a, b].

    Before its last two axes, it may have one axis of heads and axes of size 1.
    """
    while program.value(node).dim() > 3:
        if program.shape(node)[0] != 1:
            raise _NotAttentionError("its heads aren't one axis")
        node = program.call(aten.squeeze.dim, node, 0, where=where)
    if program.value(node).dim() != 3:
        raise _NotAttentionError("it has no heads")
    return node
