"""Records the inputs of attentions while a program is evaluated, so that merged heads can be fitted to them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.fx.node import Node

from enginewright.passes.framework.fast_evaluation import FastEvaluation
from enginewright.passes.framework.match import bound_arguments

from ..ir.program import Program
from .fit_kv_heads import RopeLayout
from .kv_sites import Site, run_post
from .regroup_heads import Seen

_PER_QUERY_HEAD = ("sinks", "slopes")
"""The arguments of an attention that have one number for each query head."""


class HeadObserver:
    """Records the values that the fits of ``sites`` need, during an evaluation that calls ``before`` and ``after`` for
    every call.
    """

    def __init__(self, program: Program, sites: Sequence[Site], fast: FastEvaluation) -> None:
        self._program, self._fast = program, fast
        self._wanted = {branch.pre for site in sites for branch in (site.q, site.k, site.v)}
        self._posts = {node for site in sites for branch in (site.q, site.k) for node in branch.post}
        self._values: dict[Node, torch.Tensor] = {}
        self._arguments: dict[Node, tuple[object, ...]] = {}

    def before(self, node: Node, args: Sequence[Any]) -> None:
        """Records the values of a call's arguments, if a fit needs them; called before the call is computed."""
        if node in self._posts:
            self._arguments[node] = tuple(args)

    def after(self, node: Node, value: Any) -> None:
        """Records the value of a call's result, if a fit needs it; called after the call is computed."""
        if node in self._wanted:
            self._values[node] = value

    def seen(self, site: Site, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Seen:
        """Returns the recorded inputs of an attention, and removes them from the observer.

        ``args`` and ``kwargs`` are the values of the arguments of the attention's call, which is computed next.
        """
        q, k, v = (self._values.pop(branch.pre) for branch in (site.q, site.k, site.v))
        arguments = {node: self._arguments.pop(node) for branch in (site.q, site.k) for node in branch.post}
        weight = self._program.weight_of(bound_arguments(site.output)["weight"])
        assert weight is not None
        return Seen(
            q,
            k,
            v,
            lambda x: run_post(site.q, x, arguments),
            lambda x: run_post(site.k, x, arguments),
            site.q.normed or site.k.normed,
            layout_of(self._program, site),
            lambda *heads: self._attend(site.attention, args, kwargs, *heads),
            weight.evaluate().float(),
        )

    def _attend(
        self,
        node: Node,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        heads: torch.Tensor,
    ) -> torch.Tensor:
        names = list(bound_arguments(node))

        def own(name: str, value: Any) -> Any:
            return value[heads] if name in _PER_QUERY_HEAD and value is not None else value

        positional = [own(name, value) for name, value in zip(names, args, strict=False)]
        named = {name: own(name, value) for name, value in kwargs.items()}
        result: torch.Tensor = self._fast.compute(node, [q, k, v, *positional[3:]], named)
        return result


def layout_of(program: Program, site: Site) -> RopeLayout:
    """Returns the pairs of dimensions of an attention's heads that rope rotates."""
    size = int(program.value(site.k.pre).shape[2])
    rope = site.k.rope
    if rope is None:
        return RopeLayout.from_sizes(size, 0, False)
    arguments = bound_arguments(rope)
    return RopeLayout.from_sizes(
        size, int(program.value(arguments["table"]).shape[-1]) // 2, bool(arguments["interleaved"])
    )
