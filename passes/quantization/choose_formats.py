"""Chooses the format of the weight of every linear, grouped linear and embedding. Later passes convert the weights."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.fx.node import Node, Target

from enginewright.passes.framework.base import (
    Condition,
    Pass,
    PassContext,
    PassResult,
    Rejection,
    describe_node,
    free_of,
)
from enginewright.passes.framework.weight_formats import FormatOverride, WeightFormats
from enginewright.runtime.shared.errors import PassError, RecipeError
from enginewright.runtime.shared.weight_formats import FORMATS

from ..formats.weight_format import WeightFormat
from ..ir.prequantized import CodeFormat
from ..ir.program import Program
from ..ir.provenance import WHERE, join_where
from ..ir.quantized import formats_of_rows
from ..ir.stacked_weights import is_of_heads
from ..ir.two_of_four import QUAD
from ..ir.weights import COMPUTED

aten, ew = torch.ops.aten, torch.ops.ew

FORMAT = "format"
"""The key in ``node.meta`` of products and embeddings that has the ``WeightFormat`` of their weight."""

LINEARS: tuple[Target, ...] = (ew.linear.default, ew.grouped_linear.default)
"""Ops whose weight [.., N, K] is multiplied."""
WEIGHT_ARGUMENT: dict[Target, int] = {ew.linear.default: 1, ew.grouped_linear.default: 2, ew.embedding.default: 1}

FEWEST_OUTPUTS = 32
"""The rows of a panel. A product with fewer outputs is stored as a whole panel, so a narrower format would save
little.
"""

LARGE_TABLE = 16
"""A table isn't rounded to integers if the largest table has more than this many times its rows. An example is a table
of positions.
"""

LONGEST_SUM = 1 << 16
"""The number of products of 8-bit integers whose sum always fits into an int32, with weights shifted to 0 .. 255."""

_CHOOSERS: dict[Target, tuple[int, ...]] = {
    aten.topk.default: (0,),
    aten.sort.default: (0,),
    aten.argmax.default: (0,),
    aten.max.dim: (0,),
    ew.route_experts.default: (0,),
    ew.combine_experts.default: (2,),
}
"""Ops that choose values, or weigh chosen ones -> the indices of the arguments that decide the choice."""


def weight_node(node: Node) -> Node:
    """Returns the weight that a product or an embedding reads."""
    weight = node.args[WEIGHT_ARGUMENT[node.target]]
    assert isinstance(weight, Node)
    return weight


class ChooseFormats(Pass):
    """Sets ``meta["format"]`` of calls with weights: the format of an override, or otherwise the default.

    The default is ``formats.embeddings``, if it is set, for tables and for the product that computes the logits, and
    ``formats.default`` for all others. With ``keep_blocks``, the default of a weight that is stored as integers is the
    format in which it is stored. A fused product whose parts are stored in different formats can't keep them.

    Some weights stay floats, against the default:

    - The weight of a product that decides which experts a token takes (a router). Rounding it would change which
      experts' weights are used.
    - The weight of a product with fewer than 32 outputs.
    - A table that the model computes, such as sines of positions, which are exact.
    - A table with less than a 16th of the rows of the largest one (learned positions, token types), if the default is
      integers: each of its rows is used in many texts.

    An override applies to these too. Weights that are computed from the inputs, and weights of integers, never get
    another format.

    A table that is also the weight of a product has the product's format, so that it is stored once. If the groups of a
    weight don't fill whole blocks of scales, each group has its own float16. If the default is sparse, tables, experts
    and products that compute the logits are dense; an override that makes one of them sparse is an error.
    """

    name = "choose_formats"
    requires = (free_of(ew.moe.default, name="experts are linears already, so that their weights get formats too"),)
    ensures = (
        Condition("every linear and embedding has a format", lambda p: [describe_node(n) for n in _without_format(p)]),
    )

    def call(self, program: Program, context: PassContext) -> PassResult:
        result = PassResult()
        formats = context.recipe.weights
        used: set[FormatOverride] = set()
        by_weight: dict[object, WeightFormat] = {}
        heads = heads_of(program)
        stored = _stored(program, context) if formats.keep_blocks else {}
        for node in [*program.nodes_of(*LINEARS), *program.nodes_of(ew.embedding.default)]:  # tables follow heads
            is_table = node.target is ew.embedding.default
            default = formats.default
            if formats.embeddings is not None and (is_table or node in heads):
                default = formats.embeddings
            source_formats = stored.get(node, frozenset())
            stored_format = _as_stored(source_formats)
            default_format = stored_format or default
            chosen = _overriding(node, formats, default_format, used)
            if chosen is None:
                if is_table:
                    reason = _why_not_table(program, node, rounded=stored_format is None and default.stored.integers)
                else:
                    reason = _why_not_product(program, node)
                if reason is None and len(source_formats) > 1:
                    result.rejected.append(_blocks_that_differ(node, source_formats))
                weight = node.args[WEIGHT_ARGUMENT[node.target]]
                chosen = _unless(
                    reason, by_weight.get(weight, default_format) if is_table else default_format, node, result
                )
                chosen = _in_smaller_groups(program, node, chosen, result)
                chosen = _without_partial_blocks(program, node, chosen, result)
                if chosen.sparsity != "dense" and (reason := why_dense(node, heads)) is not None:
                    result.rejected.append(
                        Rejection(node.name, join_where(node.meta[WHERE]), f"it stays dense: {reason}")
                    )
                    chosen = chosen.model_copy(update={"sparsity": "dense"})
            chosen = _check_weight(program, node, chosen, heads)
            node.meta[FORMAT] = chosen
            if not is_table:
                by_weight.setdefault(node.args[WEIGHT_ARGUMENT[node.target]], chosen)
        _check_overrides(program, formats, used)
        result.matched = sum(n.meta[FORMAT] != WeightFormat() for n in _of_weights(program))
        return result


def _of_weights(program: Program) -> list[Node]:
    return program.nodes_of(*LINEARS, ew.embedding.default)


def _without_format(program: Program) -> list[Node]:
    return [n for n in _of_weights(program) if FORMAT not in n.meta]


HAS_FORMATS = Condition(
    "formats have been chosen", lambda program: [describe_node(n) for n in _without_format(program)]
)
"""The condition that formats have been chosen, which the later passes require."""


def heads_of(program: Program) -> set[Node]:
    """Returns the products that compute the logits: only elementwise ops and selections of rows follow them."""
    vocabulary = program.value(program.logits).shape[-1]
    seen, open_ = {program.logits}, [program.logits]
    heads = set()
    while open_:
        node = open_.pop()
        if node.target in LINEARS:
            if program.value(node).shape[-1] == vocabulary:
                heads.add(node)
            continue
        for value in node.all_input_nodes:
            if value not in seen:
                seen.add(value)
                open_.append(value)
    return heads


def _stored(program: Program, context: PassContext) -> dict[Node, frozenset[CodeFormat | None]]:
    """Returns for each call whose weight is stored as integers the formats of its rows, as targets can read them.

    None among the formats is for floats, or for a format that a target doesn't read. Raises RecipeError if no weight is
    stored as integers.
    """
    formats = {}
    for node in _of_weights(program):
        weight = program.weight_of(node.args[WEIGHT_ARGUMENT[node.target]])
        if weight is not None and (kinds := formats_of_rows(weight)) != {None}:
            formats[node] = frozenset(_kept(k, context) for k in kinds)
    if not formats:
        raise RecipeError(
            "weights.keep_blocks is true, but no weight of this model is stored in blocks that can be kept",
            hint="Take another recipe, such as int8, or leave keep_blocks out of the recipe. Or export from a GGUF "
            "file whose tensors are quantized.",
        )
    return formats


def _kept(kind: CodeFormat | None, context: PassContext) -> CodeFormat | None:
    """Returns the format in which targets can read integers that are stored in the format ``kind``; None if they
    can't.
    """
    for known in () if kind is None else (kind, kind.in_4_bits):
        stored = _as_stored(frozenset({known}))
        if stored is None or stored.everywhere or not context.common_formats:
            return known
    return None


def _as_stored(kinds: frozenset[CodeFormat | None]) -> WeightFormat | None:
    """Returns the weight format for the formats of a weight's rows; None if these are several, or floats."""
    kind = next(iter(kinds)) if len(kinds) == 1 else None
    if kind is None:
        return None
    return WeightFormat(
        storage=kind.storage,
        group_size=kind.group_size,
        zero_point=kind.offsets,
        activation=FORMATS[kind.storage].activation,
        activation_group_size=kind.group_size if FORMATS[kind.storage].integers else 0,
        scale_block=kind.scale_block,
    )


def _blocks_that_differ(node: Node, kinds: frozenset[CodeFormat | None]) -> Rejection:
    named = sorted("floats" if k is None else str(_as_stored(frozenset({k}))) for k in kinds)
    reason = f"its blocks are not kept: its parts are stored as {' and '.join(named)}"
    return Rejection(node.name, join_where(node.meta[WHERE]), reason)


def _overriding(
    node: Node, formats: WeightFormats, own: WeightFormat, used: set[FormatOverride]
) -> WeightFormat | None:
    """Returns the format that overrides give to the weight of a call; None without an override.

    Args:
        node: the call.
        formats: the recipe's formats.
        own: the format of the call without overrides.
        used: the overrides that apply to any call; those that apply to this call are added.

    Raises:
        PassError: the call stands for several modules, and these don't all have the same format.
    """
    paths = node.meta[WHERE]
    overrides = [formats.override_of(path) for path in paths]
    chosen = [own if o is None else o.format for o in overrides]
    if len(set(chosen)) > 1:
        shown = ", ".join(f"{path}: {one}" for path, one in zip(paths, chosen, strict=True))
        raise PassError(
            f"{join_where(paths)} became one product, and the recipe gives its parts different formats ({shown})",
            hint="Give them the same format, or turn off the fusion under [passes] in the recipe.",
        )
    matching = [o for o in overrides if o is not None]
    used.update(matching)
    return chosen[0] if matching else None


def _unless(reason: str | None, wanted: WeightFormat, node: Node, result: PassResult) -> WeightFormat:
    """Returns ``wanted`` if ``reason`` is None. Otherwise it records the reason and returns the format of 32-bit
    floats.
    """
    if reason is None or wanted == WeightFormat():
        return wanted
    result.rejected.append(Rejection(node.name, join_where(node.meta[WHERE]), reason))
    return WeightFormat()


def _why_only_float(program: Program, node: Node) -> str | None:
    """Returns the reason why a call's weight can't be rounded to integers; None if it can."""
    weight = program.weight_of(node.args[WEIGHT_ARGUMENT[node.target]])
    if weight is None:
        return "its weight is computed from the inputs"
    return None if weight.dtype.is_floating_point else "its weight holds integers"


def _why_not_table(program: Program, node: Node, *, rounded: bool) -> str | None:
    """Returns the reason why a table stays floats; None if there is none.

    ``rounded``: True if the format is integers, and the table isn't stored in that format already.
    """
    if (reason := _why_only_float(program, node)) is not None:
        return reason
    weight = program.weight_of(node.args[1])
    assert weight is not None
    computed = all(part.source.startswith(COMPUTED) for part in weight.parts())
    if computed:
        return "its table is in no checkpoint, the model computes it"
    tables = [program.weight_of(one.args[1]) for one in program.nodes_of(ew.embedding.default)]
    largest = max(table.shape[0] for table in tables if table is not None)
    if rounded and LARGE_TABLE * weight.shape[0] < largest:
        return f"it has {weight.shape[0]:,} rows, where the largest table has {largest:,}"
    return None


def _why_not_product(program: Program, node: Node) -> str | None:
    if (reason := _why_only_float(program, node)) is not None:
        return reason
    weight = program.weight_of(node.args[WEIGHT_ARGUMENT[node.target]])
    assert weight is not None
    if weight.shape[-2] < FEWEST_OUTPUTS:
        return f"it has {weight.shape[-2]} outputs, fewer than a panel of {FEWEST_OUTPUTS}"
    if (chooser := _decides(node)) is not None:
        return f"its result decides what {chooser.name} chooses"
    return None


def _decides(node: Node) -> Node | None:
    """Returns the op that makes a choice by a node's result, directly or after other ATen ops; None if there is
    none.
    """
    seen, open_ = {node}, [node]
    while open_:
        value = open_.pop()
        for user in value.users:
            if user.target in _CHOOSERS:
                if any(user.args[i] is value for i in _CHOOSERS[user.target] if i < len(user.args)):
                    return user
            elif user not in seen and getattr(user.target, "namespace", "aten") == "aten" and user.op != "output":
                seen.add(user)
                open_.append(user)
    return None


def why_dense(node: Node, heads: set[Node]) -> str | None:
    """Returns the reason why the weight of a call can't be sparse; None if it can. ``heads`` are the products that
    compute the logits.
    """
    if node.target is ew.embedding.default:
        return "a row of a table is looked up, not multiplied"
    if node.target is ew.grouped_linear.default:
        return "there is no kernel for sparse experts"
    return "its product gives the logits, which rounding hurts most" if node in heads else None


def _in_smaller_groups(program: Program, node: Node, wanted: WeightFormat, result: PassResult) -> WeightFormat:
    """Returns ``wanted`` with smaller groups, for products of single heads whose inputs aren't whole groups.

    It takes the largest groups that fit, or 32-bit floats if none do, and records the change. A recipe is written for a
    model's own linears, which have more inputs than a head. Other formats are returned unchanged.
    """
    weight = program.weight_of(node.args[WEIGHT_ARGUMENT[node.target]])
    stored, group = wanted.stored, wanted.group_size
    if weight is None or not is_of_heads(weight) or stored.fits(weight.shape[-1], group or weight.shape[-1]):
        return wanted
    size = weight.shape[-1]
    smaller = [g for g in stored.group_sizes if 0 < g < group and stored.fits(size, g)]
    reason = f"its {size} inputs aren't groups of {group}"
    if not smaller:
        return _unless(reason, wanted, node, result)
    result.rejected.append(Rejection(node.name, join_where(node.meta[WHERE]), f"groups of {max(smaller)}: {reason}"))
    update = {"group_size": max(smaller), "activation_group_size": min(wanted.activation_group_size, max(smaller))}
    return wanted.model_copy(update=update)


def _without_partial_blocks(program: Program, node: Node, wanted: WeightFormat, result: PassResult) -> WeightFormat:
    """Returns ``wanted``, without blocks of scales if the weight's groups don't fill whole blocks, which is
    recorded.
    """
    weight = program.weight_of(node.args[WEIGHT_ARGUMENT[node.target]])
    if weight is None or wanted.fits_blocks(weight.shape[-1]):
        return wanted
    together = wanted.group_size * wanted.scale_block
    reason = f"a scale for each group: its {weight.shape[-1]} inputs aren't blocks of {together}"
    result.rejected.append(Rejection(node.name, join_where(node.meta[WHERE]), reason))
    return wanted.model_copy(update={"scale_block": 0})


def _check_weight(program: Program, node: Node, chosen: WeightFormat, heads: set[Node]) -> WeightFormat:
    """Returns a format adjusted to a weight's size. Raises PassError if the weight can't have the format.

    Args:
        program: the program.
        node: the call that reads the weight.
        chosen: the format.
        heads: the products that compute the logits.
    """
    if chosen.sparsity != "dense" and (reason := why_dense(node, heads)) is not None:
        raise PassError(
            f"{describe_node(node)}: an override gives it the sparsity {chosen.sparsity}, but {reason}",
            hint='Give it sparsity = "dense", or leave the module out of the overrides of the recipe.',
        )
    if chosen != WeightFormat() and (reason := _why_only_float(program, node)) is not None:
        raise PassError(
            f"{describe_node(node)}: an override gives it the storage {chosen.storage}, but {reason}",
            hint="Leave the module out of the overrides of the recipe.",
        )
    weight = program.weight_of(node.args[WEIGHT_ARGUMENT[node.target]])
    if weight is None:
        return chosen
    size, stored = weight.shape[-1], chosen.stored
    _check_size(node, chosen, size)
    if stored.codebook is not None and formats_of_rows(weight) != {CodeFormat.of(chosen)}:
        raise PassError(
            f"{describe_node(node)}: the recipe gives it the storage {chosen.storage}, which its source doesn't have",
            hint="A format with a codebook is kept from a GGUF file. Give the module another one, such as int3.",
        )
    rounded = node.target in LINEARS and stored.integers
    if rounded and not (chosen.group_size or chosen.activation_group_size) and size > LONGEST_SUM:
        raise PassError(
            f"{describe_node(node)}: a sum of {size:,} products of 8-bit integers may not fit into 32 bits",
            hint="Give it groups of 32, by an override in the recipe.",
        )
    return chosen.for_inputs(size)


def _check_size(node: Node, chosen: WeightFormat, size: int) -> None:
    """Raises PassError if the format needs a multiple of some number of inputs, and ``size`` isn't one."""
    group, stored = chosen.group_size, chosen.stored
    if not stored.fits(size, group or size):
        others = [f"groups of {g}" for g in stored.group_sizes if g and size % g == 0]
        others += ["group_size = 0"] if size % stored.multiple == 0 else []
        others.append("storage int8")
        number = (
            f"{chosen.storage}'s groups of {group}" if group else f"{stored.multiple}, which {chosen.storage} needs"
        )
        hint = f"Give it {' or '.join(others)}, by an override in the recipe."
    elif not chosen.fits_blocks(size):
        number = f"{chosen.scale_block} groups of {group}, which share their scales"
        hint = "Give it scale_block = 0, by an override in the recipe."
    elif chosen.sparsity != "dense" and size % QUAD:
        number = f"{QUAD}, of which 2:4 keeps two"
        hint = 'Give it sparsity = "dense", by an override in the recipe.'
    else:
        return
    raise PassError(f"{describe_node(node)}: its input dimension of {size} isn't a multiple of {number}", hint=hint)


def _check_overrides(program: Program, formats: WeightFormats, used: set[FormatOverride]) -> None:
    for index, override in enumerate(formats.overrides):
        if override not in used:
            known = list(_paths(program))
            more = max(len(known) - 6, 0)
            matched = [p for p in known if formats.override_of(p) is not override and _matches(override, p)]
            reason = (
                f"an earlier one is there for all that it matches, such as {matched[0]}"
                if matched
                else "it matches no linear, no embedding and no experts"
            )
            raise RecipeError(
                f"weights.overrides.{index}: layers {override.layers!r}: {reason}",
                hint=f"Modules with a weight format: {', '.join(known[:6])}{f' and {more} more' if more else ''}.",
            )


def _matches(override: FormatOverride, path: str) -> bool:
    return WeightFormats(overrides=(override,)).override_of(path) is not None


def _paths(program: Program) -> Iterator[str]:
    yield from dict.fromkeys(path for node in _of_weights(program) for path in node.meta[WHERE])
