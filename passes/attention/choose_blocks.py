"""Restricts layers to a part of a long context, by [adaptive_context] of the recipe."""

from __future__ import annotations

import torch

from enginewright.passes.framework.base import Condition, Pass, PassContext, PassResult, describe_node
from enginewright.passes.framework.match import bound_arguments
from enginewright.passes.framework.records import Rejection
from enginewright.runtime.shared.errors import RecipeError

from ..ir.program import Program
from ..ir.provenance import WHERE, join_where

ew = torch.ops.ew


def _summaries_are_kept(program: Program) -> list[str]:
    """Returns problems: the attentions that choose blocks but have no summaries of blocks in their caches."""
    tables = {program.inputs[f"block_table:{group.name}"]: group for group in program.cache_groups}
    return [
        f"{describe_node(node)} chooses blocks, and its cache keeps no summaries"
        for node in program.nodes_of(ew.paged_attention.default)
        if bound_arguments(node)["choice"] is not None and not tables[bound_arguments(node)["block_table"]].summaries
    ]


class ChooseBlocks(Pass):
    """Sets the argument ``choice`` of every ``ew.paged_attention`` without a window, except in the first layers.

    The caches of these layers also keep summaries of blocks. Layers with a window stay unchanged. (Quest:
    https://arxiv.org/abs/2406.10774, which leaves the first two layers whole too.)
    """

    name = "choose_blocks"
    exact = False
    ensures = (Condition("who chooses blocks has summaries of them", _summaries_are_kept),)

    def wanted(self, context: PassContext) -> bool:
        return context.recipe.adaptive_context is not None

    def call(self, program: Program, context: PassContext) -> PassResult:
        options, result = context.recipe.adaptive_context, PassResult()
        if options is None:
            return result
        chosen = set()
        for i, node in enumerate(program.nodes_of(ew.paged_attention.default)):
            arguments = bound_arguments(node)
            if arguments["window"]:
                result.rejected.append(Rejection(node.name, join_where(node.meta[WHERE]), "it has a window already"))
            elif i >= options.whole_layers:
                node.kwargs = {**node.kwargs, "choice": list(options.choice)}
                chosen.add(arguments["block_table"])
                result.matched += 1
        if not chosen:
            raise RecipeError(
                f"recipe {context.recipe.name}: adaptive_context: no layer of the model would choose anything",
                hint="Recurrent layers and those with a window never do, nor do the first whole_layers of the others: "
                "make it less, or leave it out.",
            )
        program.cache_groups = tuple(
            group.model_copy(update={"summaries": program.inputs[f"block_table:{group.name}"] in chosen})
            for group in program.cache_groups
        )
        return result
