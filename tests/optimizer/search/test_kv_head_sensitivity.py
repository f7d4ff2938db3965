"""What a layer is predicted to cost with fewer heads, against the KL of programs whose heads are really fewer."""

from __future__ import annotations

import pytest

from enginewright.optimizer.search.kv_head_sensitivity import LayerUnit, measure_layers
from enginewright.passes.attention.group_kv_heads import GroupKvHeads
from enginewright.passes.attention.kv_sites import Site, find_site
from enginewright.passes.framework.base import PassContext
from enginewright.passes.framework.divergence import mean_kl
from enginewright.passes.framework.kv_options import KvHeadsOverride, KvMethod, KvOptions
from enginewright.passes.framework.step_inputs import packed_inputs
from enginewright.passes.ir.program import Program
from tests.optimizer.search.formats_prepared import random_tokens
from tests.optimizer.search.kv_heads_prepared import before_grouping, model_with_pairs

TOKENS = random_tokens(40, 56)


def units_of(program: Program, counts: tuple[int, ...]) -> list[LayerUnit]:
    sites = [find_site(program, node) for node in program.graph.nodes if "ew.attention" in str(node.target)]
    return [LayerUnit(site, counts) for site in sites if isinstance(site, Site)]


def measured(program: Program, path: str, heads: int, options: KvOptions) -> float:
    """KL of the program with that one layer converted by the pass, on the tokens that it was fitted to."""
    changed = program.copy()
    one = KvOptions(None, (KvHeadsOverride(path, heads),), options.method, options.grouping)
    GroupKvHeads().run(changed, PassContext(calibration=tuple(TOKENS), kv_heads=one))
    reference = program.evaluate(packed_inputs(program, TOKENS))[0]
    return mean_kl(reference, changed.evaluate(packed_inputs(changed, TOKENS))[0])


@pytest.mark.parametrize(("heads", "hidden", "method"), [(4, 64, "calibrated"), (8, 128, "mean")])
def test_the_fewest_heads_cost_what_they_cost_alone(heads: int, hidden: int, method: KvMethod) -> None:
    program = before_grouping(model_with_pairs(1, heads, hidden))
    options, places = KvOptions(method=method), list[str]()
    units = units_of(program, (heads, heads // 2, 1))
    nodes = len(program.graph.nodes)
    costs = measure_layers(program, units, options, TOKENS, lambda done, total, where: places.append(where))
    assert len(program.graph.nodes) == nodes and len(places) == len(units) + 1
    for unit, cost in zip(units, costs, strict=True):
        assert cost[0] == 0 and cost[2] > 0
        # The same fit in another order of sums.
        assert cost[2] == pytest.approx(measured(program, unit.site.path, 1, options), rel=0.05)
    # Heads that are alike become one for next to nothing, and only in that layer.
    assert costs[1][1] < 1e-3 * costs[1][2]
    assert costs[0][1] > 1e-2 * costs[0][2]
