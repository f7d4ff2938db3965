"""Reduces the number of key/value heads of attentions: groups of heads become one head each, also in the cache.

A merged head is the mean of its group (Ainslie et al. 2023, https://arxiv.org/abs/2305.13245), or is fitted to the
results of attention on calibration tokens (fit_kv_heads.py). The recipe has the number of heads of each layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.fx.node import Node

from enginewright.passes.framework.base import Metric, Pass, PassContext, PassResult, Rejection, contains, free_of
from enginewright.passes.framework.fast_evaluation import FastEvaluation, WeightCache
from enginewright.passes.framework.kv_options import KvOptions
from enginewright.passes.framework.match import bound_arguments
from enginewright.passes.framework.token_sequences import packed_inputs, spread
from enginewright.runtime.shared.errors import PassError

from ..ir.mixed_rows import Mix, MixedRows
from ..ir.program import Program
from ..ir.provenance import WHERE, join_where
from ..ir.weights import Slice, WeightExpr
from .kv_sites import Branch, Site, attention_paths, find_site
from .observe_heads import HeadObserver
from .regroup_heads import HeadMixes, mean_mixes, neighbours, regroup

aten, ew = torch.ops.aten, torch.ops.ew

MOST_TOKENS = 4096
"""The most calibration tokens that are used: several for each unknown of a least-squares system."""


class GroupKvHeads(Pass):
    """Replaces the k and v projections of attentions by projections to fewer heads, whose rows are combinations of the
    old rows.

    The layers are fitted one after the other, each on the outputs of the changed layers before it, with the memory of
    one layer. An attention stays unchanged if the weights around it can't be divided into heads; its rejection has the
    reason.
    """

    name = "group_kv_heads"
    exact = False
    reshapes = True
    requires = (
        contains(ew.attention.default, name="the program has attention in the captured form"),
        free_of(aten.scaled_dot_product_attention.default, name="attention is the one ew op"),
    )

    def wanted(self, context: PassContext) -> bool:
        return context.recipe.attention is not None

    def needs_tokens(self, context: PassContext) -> bool:
        return context.recipe.attention is not None and context.recipe.attention.calibrated

    def call(self, program: Program, context: PassContext) -> PassResult:
        options = context.recipe.attention
        if options is None:
            return PassResult()
        options.check(attention_paths(program), context.recipe.name)
        result, sites = PassResult(), dict[Site, int]()
        for site, count in sites_to_group(program, options, result.rejected):
            sites[site] = count
        if not sites:
            reasons = "; ".join(f"{r.where}: {r.reason}" for r in result.rejected[:3])
            raise PassError(
                f"recipe {context.recipe.name}: attention: no key/value heads of this model can be grouped: {reasons}",
                hint="Leave [attention] out.",
            )
        if options.calibrated:
            sweep = _Sweep(program, sites, options, context)
            sweep.run()
            mixes_of_sites = sweep.mixes
            result.metrics += sweep.metrics
        else:
            mixes_of_sites = {site: plain_mixes(program, site, count) for site, count in sites.items()}
        for number, (site, mixes) in enumerate(mixes_of_sites.items()):
            if mixes.note:
                result.rejected.append(Rejection(site.k.linear.name, site.path, mixes.note))
            result.metrics += [
                Metric(site.path, "key/value heads before", sum(map(len, mixes.groups))),
                Metric(site.path, "key/value heads", len(mixes.groups)),
                Metric(site.path, "numbers of a key and a value", mixes.keys.shape[1] + mixes.values.shape[1]),
            ]
            regroup_site(program, site, mixes, _file(context, number))
            result.matched += 1
        return result


def _file(context: PassContext, number: int) -> Path | None:
    return None if context.scratch is None else context.scratch / f"heads-{number}"


def sites_to_group(program: Program, options: KvOptions, rejected: list[Rejection]) -> list[tuple[Site, int]]:
    """Returns the attentions that get fewer heads, each with its number of heads; adds to ``rejected`` those that
    can't.
    """
    to_group: list[tuple[Site, int]] = []
    for attention in program.nodes_of(ew.attention.default):
        path = join_where(attention.meta[WHERE])
        heads = int(program.value(bound_arguments(attention)["k"]).shape[1])
        count = options.heads_of(path, heads)
        if count == heads:
            continue
        site = find_site(program, attention)
        if isinstance(site, str):
            rejected.append(Rejection(attention.name, path, site))
        elif reason := _why_not_reordered(program, site):
            rejected.append(Rejection(attention.name, path, reason))
        else:
            to_group.append((site, count))
    return to_group


def _why_not_reordered(program: Program, site: Site) -> str | None:
    arguments = bound_arguments(site.attention)
    for name in ("sinks", "slopes"):
        if arguments[name] is not None and program.weight_of(arguments[name]) is None:
            return f"its {name}, one for each query head, are computed"
    return None


def plain_mixes(program: Program, site: Site, count: int) -> HeadMixes:
    """Returns the combinations that average neighbouring key/value heads, so that ``count`` heads remain.

    They need no calibration tokens.
    """
    queries, size = (int(n) for n in program.value(site.q.pre).shape[1:])
    heads, value_size = (int(n) for n in program.value(site.v.pre).shape[1:])
    return mean_mixes(neighbours(heads, count), queries, size, value_size)


@dataclass
class _Sweep:
    """One evaluation of the program on calibration tokens, in which the heads of ``sites`` are fitted.

    An attention is fitted when its call is reached, and the evaluation goes on with its new result.

    Attributes:
        program: the program, which isn't changed.
        sites: the attentions, with their new numbers of key/value heads.
        options: the recipe's options.
        context: the pass's context.
        mixes: the fitted matrices, filled by ``run``.
        metrics: the relative errors, filled by ``run``.
    """

    program: Program
    sites: Mapping[Site, int]
    options: KvOptions
    context: PassContext
    mixes: dict[Site, HeadMixes] = field(default_factory=dict)
    metrics: list[Metric] = field(default_factory=list)

    def run(self) -> None:
        self._fast = FastEvaluation(self.program, WeightCache(0))
        self._observer = HeadObserver(self.program, list(self.sites), self._fast)
        self._attentions = {site.attention: site for site in self.sites}
        self._outputs: dict[Node, torch.Tensor | None] = {site.output: None for site in self.sites}
        inputs = packed_inputs(self.program, some_tokens(self.context.calibration))
        inputs["rows"] = inputs["rows"][:1]  # the end of the program is not looked at
        self.program.evaluate(inputs, compute=self._compute, read=self._fast.read)

    def _compute(self, node: Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        self._observer.before(node, args)
        if node in self._attentions:
            site = self._attentions[node]
            self.context.progress(len(self.mixes), len(self.sites), site.path)
            one = regroup(self._observer.seen(site, args, kwargs), self.sites[site], self.options)
            self.mixes[site], self._outputs[site.output] = one.mixes, one.output
            self.metrics.append(Metric(site.path, "relative error of what attention adds", one.error))
            return one.context
        weight = self._outputs.pop(node, None)
        value = self._fast.compute(node, args if weight is None else [args[0], weight, *args[2:]], kwargs)
        self._observer.after(node, value)
        return value


def some_tokens(sequences: Sequence[torch.Tensor], most: int = MOST_TOKENS) -> list[torch.Tensor]:
    """Returns evenly spaced sequences of at most ``most`` tokens in total. At least one sequence is returned, shortened
    to ``most``.
    """
    total = sum(len(s) for s in sequences)
    count = min(len(sequences), max(1, len(sequences) * most // max(total, 1)))
    return [sequence[:most] for sequence in spread(sequences, count)]


# ---- rewriting


def regroup_site(program: Program, site: Site, mixes: HeadMixes, file: Path | None = None) -> None:
    """Replaces an attention, its projections and their views by those with merged heads.

    ``file`` stores the largest matrices; None keeps them in memory.
    """
    attention, arguments = site.attention, bound_arguments(site.attention)
    value_size = int(program.value(site.v.pre).shape[2])
    with program.inserting_before(attention):
        q = arguments["q"]
        if mixes.queries is not None or mixes.reordered:
            rows = site.q.rows[list(mixes.order)]
            mix = mixes.queries
            matrices = torch.eye(rows.shape[1]).expand(len(rows), -1, -1) if mix is None else mix
            q = _projected(program, site.q, "q", Mix.of(rows.tolist(), matrices), len(rows))
        k = _projected(program, site.k, "k", _mix(site.k, mixes, mixes.keys), len(mixes.groups))
        v = _projected(program, site.v, "v", _mix(site.v, mixes, mixes.values), len(mixes.groups))
        per_head = {name: _reordered(program, arguments[name], mixes) for name in ("sinks", "slopes")}
        changed: dict[str, Any] = {**arguments, "q": q, "k": k, "v": v, **per_head}
        new = program.call(attention.target, *changed.values(), where=attention.meta[WHERE])  # type: ignore[arg-type]
    program.replace(attention, new)
    columns = (torch.tensor(mixes.order)[:, None] * value_size + torch.arange(value_size)).flatten()
    if mixes.output is not None:
        blocks = columns.view(len(mixes.groups), -1)
        _mix_columns(program, site.output, Mix.of(blocks.tolist(), mixes.output.mT, file))
    elif mixes.reordered:
        eye = torch.eye(value_size).expand(len(mixes.order), -1, -1)
        _mix_columns(program, site.output, Mix.of(columns.view(len(mixes.order), -1).tolist(), eye))


def _mix(branch: Branch, mixes: HeadMixes, matrices: torch.Tensor) -> Mix:
    rows = [branch.rows[list(group)].flatten().tolist() for group in mixes.groups]
    return Mix.of(rows, matrices)


def _projected(program: Program, branch: Branch, letter: str, mix: Mix, heads: int) -> Node:
    """Adds a projection to merged heads, with the branch's norms and rotations after it; returns the result [T, N, D].

    Args:
        program: the program.
        branch: the former branch.
        letter: "q", "k" or "v", for the names of new weights.
        mix: the combinations of rows of the former weight.
        heads: N.
    """
    arguments, where = bound_arguments(branch.linear), branch.linear.meta[WHERE]
    weight = _named(program, branch, arguments["weight"], letter, mix)
    bias = None if arguments["bias"] is None else _named(program, branch, arguments["bias"], letter, mix)
    linear = program.call(ew.linear.default, arguments["x"], weight, bias, where=where)
    value = program.call(aten.view.default, linear, [-1, heads, branch.rows.shape[1]], where=branch.pre.meta[WHERE])
    for node in branch.post:
        value = program.call(node.target, value, *node.args[1:], where=node.meta[WHERE], **node.kwargs)  # type: ignore[arg-type]
    return value


def _named(program: Program, branch: Branch, node: Node, letter: str, mix: Mix) -> Node:
    """Replaces a projection's weight or bias ``node`` by its product with ``mix``, and returns the new node.

    It has a new name, with ``letter`` as the name of its module, if something else reads the old projection.
    """
    base = program.weight_of(node)
    assert base is not None
    if branch.alone:
        program.change_weight(node, mixed(base, mix))
        return node
    owner, _, role = str(node.target).rpartition(".")
    return program.weight(f"{owner}.{letter}.{role}", mixed(base, mix), where=node.meta[WHERE])


def mixed(base: WeightExpr, mix: Mix, axis: int = 0) -> WeightExpr:
    """Returns a weight whose rows are linear combinations of rows of ``base``.

    It is a slice of ``base``, or ``base`` itself, if the rows are adjacent float32 rows that aren't changed.

    Args:
        base: the original weight.
        mix: the combinations: indices of rows, and matrices.
        axis: the dimension whose indices are combined; 1 combines columns.
    """
    rows = [i for block in mix.indices for i in block]
    matrices = mix.read()
    plain = (
        torch.equal(matrices, torch.eye(mix.size).expand_as(matrices)) if matrices.shape[1:] == (mix.size,) * 2 else 0
    )
    if plain and rows == list(range(rows[0], rows[0] + len(rows))) and base.dtype == torch.float32:
        return base if len(rows) == base.shape[axis] else Slice(base, axis, rows[0], rows[0] + len(rows))
    return MixedRows(base, mix, axis)


def _reordered(program: Program, node: Node | None, mixes: HeadMixes) -> Node | None:
    """Returns an argument with a number for each query head, [Nq], in the new order of the heads.

    ``node`` is the argument. It is returned unchanged if it is None or if the order doesn't change.
    """
    if node is None or not mixes.reordered:
        return node
    base = program.weight_of(node)
    assert base is not None
    mix = Mix.of([[i] for i in mixes.order], torch.ones(len(mixes.order), 1, 1))
    return program.weight(f"{node.target}.grouped", MixedRows(base, mix), where=node.meta[WHERE])


def _mix_columns(program: Program, linear: Node, mix: Mix) -> None:
    weight = bound_arguments(linear)["weight"]
    base = program.weight_of(weight)
    assert base is not None
    program.change_weight(weight, MixedRows(base, mix, axis=1))
