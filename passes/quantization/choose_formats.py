"""Every linear, grouped linear and embedding learns the format of its weight; the passes behind this one obey."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.fx.node import Node, Target

from enginewright.plugins.contracts import WeightFormat
from enginewright.plugins.errors import PassError, RecipeError

from ..base import Condition, Pass, PassContext, PassResult, Rejection, describe_node, free_of
from ..ir.program import Program
from ..ir.provenance import WHERE, join_where
from ..ir.weights import COMPUTED
from ..weight_formats import FormatOverride, WeightFormats

aten, ew = torch.ops.aten, torch.ops.ew

FORMAT = "format"
"""Key in ``node.meta`` of every product and embedding: the ``WeightFormat`` of its weight."""

LINEARS: tuple[Target, ...] = (ew.linear.default, ew.grouped_linear.default)
"""Ops whose weight [.., N, K] is multiplied."""
WEIGHT_ARGUMENT: dict[Target, int] = {ew.linear.default: 1, ew.grouped_linear.default: 2, ew.embedding.default: 1}

FEWEST_OUTPUTS = 32
"""A panel's rows. A product with fewer outputs is stored as a whole panel, so that a narrower format saves little."""

LONGEST_SUM = 1 << 16
"""Products of 8-bit integers that an int32 holds whatever they are, with weights taken as 0 .. 255 as kernels do."""

_CHOOSERS: dict[Target, tuple[int, ...]] = {
    aten.topk.default: (0,),
    aten.sort.default: (0,),
    aten.argmax.default: (0,),
    aten.max.dim: (0,),
    ew.route_experts.default: (0,),
    ew.combine_experts.default: (2,),
}
"""Ops that choose, or weigh what was chosen, by their arguments at these places."""


class ChooseFormats(Pass):
    """Writes ``meta["format"]``: an override's format, or the default where nothing speaks against it.

    The default is not given to a product that decides which experts a token takes (a router: rounding there changes
    which weights are read, not just by how much a sum is off), nor to one with fewer than 32 outputs, nor to a table
    that the model computes (the sines of positions, which are exact). A table that is also some product's weight has
    that one's format, so that it is stored once. An override that names a module is taken at its word in all of these
    cases. What is computed from the inputs, or holds integers, has no other format at all.
    """

    name = "choose_formats"
    requires = (free_of(ew.moe.default, name="experts are linears already, so that their weights get formats too"),)
    ensures = (
        Condition("every linear and embedding has a format", lambda p: [describe_node(n) for n in _without_format(p)]),
    )

    def call(self, program: Program, context: PassContext) -> PassResult:
        result = PassResult()
        used: set[FormatOverride] = set()
        by_weight: dict[object, WeightFormat] = {}
        for node in program.nodes_of(*LINEARS):
            chosen = _overriding(node, context.formats, used)
            if chosen is None:
                chosen = _unless(_why_not_product(program, node), context.formats.default, node, result)
            _check_weight(program, node, chosen)
            _check_sums(program, node, chosen)
            node.meta[FORMAT] = chosen
            by_weight.setdefault(node.args[WEIGHT_ARGUMENT[node.target]], chosen)
        for node in program.nodes_of(ew.embedding.default):
            chosen = _overriding(node, context.formats, used)
            if chosen is None:
                wanted = by_weight.get(node.args[1], context.formats.default)
                chosen = _unless(_why_not_table(program, node), wanted, node, result)
            _check_weight(program, node, chosen)
            node.meta[FORMAT] = chosen
        _check_overrides(program, context.formats, used)
        result.matched = sum(n.meta[FORMAT] != WeightFormat() for n in _of_weights(program))
        return result


def _of_weights(program: Program) -> list[Node]:
    return program.nodes_of(*LINEARS, ew.embedding.default)


def _without_format(program: Program) -> list[Node]:
    return [n for n in _of_weights(program) if FORMAT not in n.meta]


HAS_FORMATS = Condition(
    "formats have been chosen", lambda program: [describe_node(n) for n in _without_format(program)]
)
"""What the passes behind this one require."""


def _overriding(node: Node, formats: WeightFormats, used: set[FormatOverride]) -> WeightFormat | None:
    """The format that overrides give a call, None without any; those that speak for it join ``used``.

    Raises PassError if the call stands for several modules that don't all have the same format.
    """
    paths = node.meta[WHERE]
    found = [formats.override_of(path) for path in paths]
    wanted = [formats.default if o is None else o.format for o in found]
    if len(set(wanted)) > 1:
        shown = ", ".join(f"{path}: {one}" for path, one in zip(paths, wanted, strict=True))
        raise PassError(
            f"{join_where(paths)} became one product, and the recipe gives its parts different formats ({shown})",
            hint="Give them the same format, or turn off the fusion under [passes] in the recipe.",
        )
    given = [o for o in found if o is not None]
    used.update(given)
    return wanted[0] if given else None


def _unless(reason: str | None, wanted: WeightFormat, node: Node, result: PassResult) -> WeightFormat:
    """The format that is wanted, or floats and a rejection if there is a reason against it."""
    if reason is None or wanted == WeightFormat():
        return wanted
    result.rejected.append(Rejection(node.name, join_where(node.meta[WHERE]), reason))
    return WeightFormat()


def _why_only_float(program: Program, node: Node) -> str | None:
    """Why a weight has no other format, whatever is asked for."""
    weight = program.weight_of(node.args[WEIGHT_ARGUMENT[node.target]])
    if weight is None:
        return "its weight is computed from the inputs"
    return None if weight.dtype.is_floating_point else "its weight holds integers"


def _why_not_table(program: Program, node: Node) -> str | None:
    if (reason := _why_only_float(program, node)) is not None:
        return reason
    weight = program.weight_of(node.args[1])
    assert weight is not None
    computed = all(part.source.startswith(COMPUTED) for part in weight.parts())
    return "its table is in no checkpoint, the model computes it" if computed else None


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
    """The op that chooses by this node's result, as a router's; ATen ops in between are followed."""
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


def _check_weight(program: Program, node: Node, chosen: WeightFormat) -> None:
    if chosen != WeightFormat() and (reason := _why_only_float(program, node)) is not None:
        raise PassError(
            f"{describe_node(node)}: an override gives it the storage {chosen.storage}, but {reason}",
            hint="Leave the module out of the overrides of the recipe.",
        )


def _check_sums(program: Program, node: Node, chosen: WeightFormat) -> None:
    weight = program.weight_of(node.args[WEIGHT_ARGUMENT[node.target]])
    if chosen.storage != "int8" or chosen.group_size or chosen.activation_group_size or weight is None:
        return
    if weight.shape[-1] > LONGEST_SUM:
        raise PassError(
            f"{describe_node(node)}: a sum of {weight.shape[-1]:,} products of 8-bit integers may not fit into 32 bits",
            hint="Set group_size = 32 for it, by an override in the recipe.",
        )


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
