"""The search for cache formats: the costs of layers are those of programs in which one layer alone is rounded."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from enginewright.optimizer.recipes.recipe import Recipe
from enginewright.optimizer.search.kv_formats import CacheUnit, KvFormatSearch, cached_attention, measure_layers
from enginewright.optimizer.search.search import NothingToChooseError, Task
from enginewright.passes.attention.lower_attention import LowerAttention
from enginewright.passes.attention.round_kv_cache import RoundKvCache
from enginewright.passes.framework.base import PassContext
from enginewright.passes.framework.kv_options import CacheOptions, CacheOverride
from enginewright.passes.framework.pass_options import PassOptions
from enginewright.passes.framework.token_sequences import mean_kl, packed_inputs
from enginewright.passes.ir.program import Program
from enginewright.passes.ir.provenance import WHERE, join_where
from enginewright.runtime.shared.progress import silent
from tests.conftest import make_tiny_model
from tests.optimizer.search.formats_prepared import random_tokens
from tests.optimizer.search.kv_heads_prepared import before_grouping

NAMES = ("bf16", "k8v8", "k4v4")


def _program(**overrides: Any) -> Program:
    return before_grouping(make_tiny_model("Llama", head_dim=32, max_position_embeddings=1024, **overrides))


def _units(program: Program) -> list[CacheUnit]:
    nodes = program.nodes_of(torch.ops.ew.attention.default)
    return [CacheUnit(node, NAMES, NAMES, False) for node in nodes]  # type: ignore[arg-type]


def test_the_worst_format_costs_what_it_costs_alone() -> None:
    program, tokens = _program(), random_tokens(600)
    places = list[str]()
    costs = measure_layers(program, _units(program), tokens, 600, lambda done, total, where: places.append(where))
    reference = program.evaluate(packed_inputs(program, tokens))[0]
    for unit, cost in zip(_units(program), costs, strict=True):
        assert 0 < cost[0] < cost[1] < cost[2]
        changed, path = program.copy(), join_where(unit.attention.meta[WHERE])
        options = CacheOptions(dtype="f32", overrides=(CacheOverride(layers=path, dtype="k4v4"),))
        context = PassContext(recipe=PassOptions(kv_cache=options))
        for one in (LowerAttention(), RoundKvCache()):
            one.run(changed, context)
        alone = mean_kl(reference, changed.evaluate(packed_inputs(changed, tokens))[0])
        assert cost[2] == pytest.approx(alone, rel=0.02)  # another order of sums
    assert len(places) == len(costs) + 1


def test_ends_have_8_bits() -> None:
    """Up to 256 tokens all are ends, in k8v8; later queries read some in 4 bits."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(600, heads, 32) for heads in (4, 2, 2))
    arguments = {
        **{"q": q, "k": k, "v": v, "q_start": torch.tensor([0, 600]), "layer": 0, "scale": 0.2, "window": 0},
        **{"softcap": 0.0, "sinks": None, "slopes": None},
    }
    few, wide = (cached_attention(arguments, dtype) for dtype in ("k4v4", "k8v8"))
    torch.testing.assert_close(few[:256], wide[:256])
    assert (few[400:] - wide[400:]).abs().max() > 1e-3


def _search(program: Program, **section: Any) -> None:
    recipe = Recipe(name="mine", kv_cache=CacheOptions(dtype="auto", max_bytes_per_token=10_000, **section))
    seen = random_tokens(300, 300)
    context = PassContext(recipe=recipe, calibration=tuple(seen))
    KvFormatSearch(Task(program, recipe, 200_000, seen[:1], [], context, silent)).run()


def test_heads_that_no_candidate_fits_are_refused() -> None:
    program = before_grouping(make_tiny_model("Llama", head_dim=12))
    with pytest.raises(NothingToChooseError, match=r"kv_cache.candidates: none has heads of 12 channels for keys"):
        _search(program, candidates=("k6v4", "k5v4"))
