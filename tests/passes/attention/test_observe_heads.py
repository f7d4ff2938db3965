"""The recorded surroundings of an attention reproduce its result, whole and for some of its heads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch.fx.node import Node

from enginewright.passes.attention.fit_kv_heads import RopeLayout
from enginewright.passes.attention.kv_sites import Site, find_site
from enginewright.passes.attention.observe_heads import HeadObserver, layout_of
from enginewright.passes.attention.regroup_heads import Seen
from enginewright.passes.framework.fast_evaluation import FastEvaluation, WeightCache
from enginewright.passes.framework.token_sequences import packed_inputs
from enginewright.passes.ir.program import Program
from tests.passes.captured import normalized

ew = torch.ops.ew
TOLERANCE = 1e-5
"""Equal sums of float32 in another order."""


def sites_of(program: Program) -> list[Site]:
    sites = [find_site(program, node) for node in program.nodes_of(ew.attention.default)]
    assert all(isinstance(site, Site) for site in sites)
    return sites  # type: ignore[return-value]


def observe(program: Program, sites: Sequence[Site]) -> list[tuple[Seen, torch.Tensor]]:
    """The recording of each site, and the result of its attention."""
    fast = FastEvaluation(program, WeightCache(0))
    observer = HeadObserver(program, sites, fast)
    attentions = {site.attention: site for site in sites}
    results: list[tuple[Seen, torch.Tensor]] = []

    def compute(node: Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        observer.before(node, args)
        seen = observer.seen(attentions[node], args, kwargs) if node in attentions else None
        value = fast.compute(node, args, kwargs)
        if seen is not None:
            results.append((seen, value))
        observer.after(node, value)
        return value

    sequences = [torch.arange(3, 20), torch.arange(40, 45)]
    program.evaluate(packed_inputs(program, sequences), compute=compute)
    return results


CASES: list[tuple[str, dict[str, Any], tuple[int, int]]] = [
    ("Llama", {}, (16, 16)),  # dimensions of a head, and those that are rotated
    ("Llama", {"hidden_size": 96, "head_dim": 24, "num_key_value_heads": 4}, (24, 24)),
    ("Qwen3", {}, (16, 16)),  # norms of q and k
    ("GPTNeoX", {}, (16, 4)),  # a quarter is rotated; one linear of all three
    ("GPT2", {}, (16, 0)),
]


@pytest.mark.parametrize(("family", "overrides", "rotated"), CASES)
def test_attention_again(family: str, overrides: dict[str, Any], rotated: tuple[int, int]) -> None:
    program, _ = normalized(family, **overrides)
    sites = sites_of(program)
    results = observe(program, sites)
    assert len(results) == 2
    for site, (seen, expected) in zip(sites, results, strict=True):
        heads, size = seen.q.shape[1], rotated[0]
        assert seen.q.shape == (22, len(site.q.rows), size) and seen.k.shape == (22, len(site.k.rows), size)
        assert seen.normed == (family == "Qwen3")
        assert seen.layout == layout_of(program, site) == RopeLayout.from_sizes(size, rotated[1] // 2, False)
        again = seen.attend(seen.after_q(seen.q), seen.after_k(seen.k), seen.v, torch.arange(heads))
        torch.testing.assert_close(again, expected, rtol=TOLERANCE, atol=TOLERANCE)
        # The last group alone: keys and queries of other heads have no part in it.
        each = heads // seen.k.shape[1]
        mine = torch.arange(heads - each, heads)
        one = seen.attend(seen.after_q(seen.q[:, mine]), seen.after_k(seen.k[:, -1:]), seen.v[:, -1:], mine)
        torch.testing.assert_close(one, expected[:, mine], rtol=TOLERANCE, atol=TOLERANCE)
        weight = program.weight_of(site.output.args[1])
        assert weight is not None and torch.equal(seen.output, weight.evaluate())


def test_numbers_of_each_query_head_go_with_their_heads() -> None:
    """Sinks are a head's own: of some heads, some sinks."""
    program, _ = normalized("GptOss", num_local_experts=2, num_experts_per_tok=1, head_dim=16)
    sites = sites_of(program)
    for seen, expected in observe(program, sites):
        for mine in (torch.tensor([0, 1]), torch.tensor([2, 3])):
            one = int(mine[0]) // 2
            k, v = seen.after_k(seen.k[:, one : one + 1]), seen.v[:, one : one + 1]
            part = seen.attend(seen.after_q(seen.q[:, mine]), k, v, mine)
            torch.testing.assert_close(part, expected[:, mine], rtol=TOLERANCE, atol=TOLERANCE)
            other = seen.attend(seen.after_q(seen.q[:, mine]), k, v, 3 - mine)
            assert (other - expected[:, mine]).abs().max() > 100 * TOLERANCE


def test_what_is_seen_is_given_away() -> None:
    """Memory holds one layer's values: they can be asked for once."""
    program, _ = normalized("Llama")
    (site, _) = sites_of(program)
    fast = FastEvaluation(program, WeightCache(0))
    observer = HeadObserver(program, [site], fast)
    for branch in (site.q, site.k, site.v):
        observer.after(branch.pre, torch.zeros(1, 1, 16))
        for node in branch.post:
            observer.before(node, (torch.zeros(1, 1, 16), None))
    observer.seen(site, [], {})
    with pytest.raises(KeyError):
        observer.seen(site, [], {})
