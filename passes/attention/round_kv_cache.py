"""Stores keys and values in fewer than 32 bits, by the recipe's KV-cache formats."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch.fx.node import Node

from enginewright.passes.framework.base import Condition, Pass, PassContext, PassResult
from enginewright.passes.framework.match import bound_arguments
from enginewright.passes.framework.pass_options import PassOptions
from enginewright.runtime.shared.contracts import CacheGroup
from enginewright.runtime.shared.errors import UnsupportedModelError
from enginewright.runtime.shared.kv_formats import KV_FORMATS, LONGEST_HEAD, CacheDtype, head_multiples, heads_fit
from enginewright.runtime.shared.step_schema import SLOTS, group_port

from ..ir.program import Program
from ..ir.provenance import WHERE, join_where
from .keep_ends import add_ends, stored_format

ew = torch.ops.ew

_PLACE = 5
"""The number of the argument ``dtype`` of ``ew.kv_write``."""


def _writes_as_groups_say(program: Program) -> list[str]:
    dtypes = {group.dtype for group in program.cache_groups}
    written = {bound_arguments(node)["dtype"] for node in program.nodes_of(ew.kv_write.default)}
    return [] if written <= dtypes else [f"keys are written in {sorted(written)}, and caches have {sorted(dtypes)}"]


class RoundKvCache(Pass):
    """Makes every ``ew.kv_write`` round to the recipe's cache format, and sets that format in the cache groups, except
    for states.

    Attention reads the keys and values of its own chunk back from the cache too, so results don't depend on the size of
    chunks. Attention without a cache rounds them to bf16 if that is the format, as its products are then twice as fast.
    A format with ends (``KvFormat.ends``) adds a second cache group to each group.
    """

    name = "round_kv_cache"
    exact = False

    def __init__(self, formats: Collection[CacheDtype] = KV_FORMATS.keys() - {"f32"}) -> None:
        """Makes a pass that rounds to ``formats``. It leaves caches of other formats to the target."""
        self._formats = frozenset(formats)

    ensures = (Condition("keys and values are written in their group's format", _writes_as_groups_say),)

    def wanted(self, context: PassContext) -> bool:
        return bool({*context.recipe.caches} & self._formats)

    def call(self, program: Program, context: PassContext) -> PassResult:
        if not self.wanted(context):
            return PassResult()
        writes = program.nodes_of(ew.kv_write.default)
        by_slots = {program.inputs[group_port(SLOTS, group.name)]: group.name for group in program.cache_groups}
        of_group: dict[str, list[Node]] = {}
        for node in writes:
            of_group.setdefault(by_slots[bound_arguments(node)["slots"]], []).append(node)
        groups = [self._stored(group, of_group.get(group.name), context.recipe) for group in program.cache_groups]
        program.cache_groups = tuple(groups)
        for group in groups:
            for node in of_group.get(group.name, ()):
                node.args = (*node.args[:_PLACE], group.dtype)
            if KV_FORMATS[group.dtype].ends is not None:
                add_ends(program, group, of_group[group.name])
        attentions = program.nodes_of(ew.attention.default) if context.recipe.cache == "bf16" else []
        for node in attentions:
            node.kwargs = {**node.kwargs, "dtype": "bf16"}
        return PassResult(matched=len(writes) + len(attentions))

    def _stored(self, group: CacheGroup, writes: Sequence[Node] | None, recipe: PassOptions) -> CacheGroup:
        """Returns a cache group in the format of its layers, which ``writes`` to it name; None for states."""
        if writes is None:
            return group
        caches = {recipe.cache_of(join_where(node.meta[WHERE])) for node in writes}
        for cache in sorted(caches):
            _check_heads(group, cache)
        (stored,) = {stored_format(cache, group.window) for cache in caches}
        return group.model_copy(update={"dtype": stored}) if caches <= self._formats else group


def _check_heads(group: CacheGroup, cache: CacheDtype) -> None:
    """Raises UnsupportedModelError naming a cache group whose heads the format doesn't support."""
    sizes, multiples = (group.key_head_size, group.value_head_size), head_multiples(cache)
    if not heads_fit(cache, *sizes):
        raise UnsupportedModelError(
            f"a KV cache of {KV_FORMATS[cache].name} has heads of up to {LONGEST_HEAD} channels, in multiples "
            f"of {multiples[0]} for keys and {multiples[1]} for values; cache group {group.name} has "
            f"{sizes[0]} and {sizes[1]}",
            hint="Use another kv_cache.dtype, such as int8.",
        )
