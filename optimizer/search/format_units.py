"""The units to which ``auto`` assigns one format each: products after fusion, a layer's experts, embedding tables."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.fx.node import Node

from enginewright.passes.formats.weight_format import WeightFormat
from enginewright.passes.framework.base import PassContext
from enginewright.passes.framework.pass_options import PassOptions
from enginewright.passes.framework.weight_formats import WeightFormats
from enginewright.passes.ir.program import Program
from enginewright.passes.ir.provenance import WHERE, join_where, where_of
from enginewright.passes.ir.two_of_four import QUAD
from enginewright.passes.ops.quantization import groups_of
from enginewright.passes.quantization.choose_formats import (
    FORMAT,
    LINEARS,
    ChooseFormats,
    heads_of,
    weight_node,
    why_dense,
)
from enginewright.runtime.bundle.weights import stored_bytes
from enginewright.runtime.shared.panel_layouts import Layout

ew = torch.ops.ew

_ANY = WeightFormat(storage="bf16", activation="bf16")
"""A format that every weight can have, except weights that must stay floats."""


@dataclass(frozen=True)
class FormatUnit:
    """Weights that have the same format, and the calls that read them: one weight, or the experts of one module.

    Attributes:
        paths: the paths of the modules, as overrides name them; no other unit has them.
        nodes: the calls in the program; several for experts, and if the head's weight is the table too.
        formats: the formats that the weights can have, each once.
        sizes: the bytes of the weights in each format.
    """

    paths: tuple[str, ...]
    nodes: tuple[Node, ...]
    formats: tuple[WeightFormat, ...]
    sizes: tuple[int, ...]

    @property
    def where(self) -> str:
        return join_where(self.paths)

    @property
    def layer(self) -> str:
        """The path of the first module up to the layer's number; all paths if it isn't in a layer."""
        match = re.match(r".*?\.\d+(?=\.|$)", self.paths[0])
        return match[0] if match else self.where

    @property
    def smallest(self) -> int:
        """The index of the first format with the fewest bytes."""
        return self.sizes.index(min(self.sizes))


def find_units(program: Program, candidates: Sequence[WeightFormat]) -> list[FormatUnit]:
    """Returns the units of a program with the formats that each can have, in the order in which they are read.

    Weights that don't get the default of a recipe (see ``ChooseFormats``) are in no unit. A unit has the candidates
    whose groups, and fours of sparse formats, divide the input dimensions of its weights. It has no sparse candidate if
    a weight always stays dense. A unit without any candidate stays 32-bit floats.
    """
    order = {node: i for i, node in enumerate(program.graph.nodes)}
    heads = heads_of(program)
    together = sorted(_together(program), key=lambda nodes: min(order[n] for n in nodes))
    return [_unit(program, nodes, candidates, heads) for nodes in together]


def _together(program: Program) -> list[list[Node]]:
    """Returns the calls whose weights may have a format other than floats, grouped by weights that must have the
    same one.
    """
    marked = program.copy()
    ChooseFormats().run(marked, PassContext(recipe=PassOptions(weights=WeightFormats(default=_ANY))))
    kinds = (*LINEARS, ew.embedding.default)
    together: list[list[Node]] = []
    for node, mark in zip(program.nodes_of(*kinds), marked.nodes_of(*kinds), strict=True):
        if mark.meta[FORMAT] != _ANY:
            continue
        same = [some for some in together if any(_belong_together(node, other) for other in some)]
        together = [some for some in together if some not in same]
        together.append([*(n for some in same for n in some), node])
    return together


def _unit(program: Program, nodes: Sequence[Node], candidates: Sequence[WeightFormat], heads: set[Node]) -> FormatUnit:
    """Returns the unit of calls, with the candidates that all their weights can have; with only floats if there are
    none.

    Args:
        program: the program.
        nodes: the calls.
        candidates: the formats to choose from.
        heads: the calls that compute logits.
    """
    shapes = [tuple(int(n) for n in program.value(w).shape) for w in dict.fromkeys(map(weight_node, nodes))]
    dense = any(why_dense(n, heads) is not None for n in nodes)
    fitting = [c for c in candidates if all(_fits(s, c) for s in shapes) and not (dense and c.sparsity != "dense")]
    formats = tuple(dict.fromkeys(fitting)) or (WeightFormat(),)
    sizes = tuple(sum(bytes_of(s, f) for s in shapes) for f in formats)
    return FormatUnit(where_of(nodes), tuple(nodes), formats, sizes)


def _belong_together(a: Node, b: Node) -> bool:
    return weight_node(a) is weight_node(b) or not set(a.meta[WHERE]).isdisjoint(b.meta[WHERE])


def bytes_of_others(program: Program, units: Sequence[FormatUnit]) -> int:
    """Returns the bytes of weights outside of all units, such as those of norms, which stay 32-bit floats."""
    names = {str(weight_node(n).target) for unit in units for n in unit.nodes}
    others = [program.weights[name] for name in program.weights if name not in names]
    return sum(4 * torch.Size(e.shape).numel() for e in others)


def bytes_of(shape: tuple[int, ...], weight_format: WeightFormat) -> int:
    """Returns the bytes of a weight of shape [.., N, K] stored in a format, with its scales and offsets."""
    stored, sparse = weight_format.stored, weight_format.sparsity != "dense"
    if stored.layout is None:
        return stored_bytes(shape, "rows", "f32", weight_format.storage)
    dtype = stored.shifted if weight_format.zero_point and stored.shifted else stored.dtype
    values = stored_bytes(shape, "sparse32" if sparse else stored.layout, dtype)
    if not stored.group_sizes:
        return values
    groups, block = groups_of(shape[-1], weight_format.group_size), weight_format.scale_block
    if block:
        layout: Layout = "blocks16" if block == 16 else "blocks8"
        of_scales = stored_bytes((*shape[:-1], groups // block * (2 + block)), layout, "i8")
    else:
        of_scales = stored_bytes((*shape[:-1], groups), "panel32", "f16")
    return values + (2 if weight_format.zero_point else 1) * of_scales


def _fits(shape: tuple[int, ...], weight_format: WeightFormat) -> bool:
    if weight_format.sparsity != "dense" and shape[-1] % QUAD:
        return False
    fits = weight_format.stored.fits(shape[-1], weight_format.group_size or shape[-1])
    return fits and weight_format.fits_blocks(shape[-1])
