"""Predicted costs against the KL of programs in which one weight is really quantized."""

from __future__ import annotations

import pytest
import torch

from enginewright.optimizer.pipeline.pipeline import default_pipeline
from enginewright.optimizer.search.format_sensitivity import measure_sensitivities, plan_measurements
from enginewright.optimizer.search.format_units import FormatUnit, find_units
from enginewright.optimizer.search.measure_choices import FEWEST_TOKENS, WORK
from enginewright.passes.formats.weight_format import WeightFormat
from enginewright.passes.framework.base import PassContext
from enginewright.passes.framework.manager import PassManager
from enginewright.passes.framework.pass_options import PassOptions
from enginewright.passes.framework.token_sequences import mean_kl, packed_inputs
from enginewright.passes.framework.weight_formats import FormatOverride, WeightFormats
from enginewright.passes.ir.program import Program
from tests.optimizer.search.formats_prepared import (
    BF16,
    F32,
    INT4_32,
    INT4_CHANNEL,
    INT4_OFFSETS,
    INT8,
    before_formats,
    random_tokens,
)

TOKENS = random_tokens(40, 33)


def measured(
    program: Program, unit: FormatUnit, weight_format: WeightFormat, formats: WeightFormats | None = None
) -> float:
    """KL of the program with this one unit in that format, made by the passes."""
    changed = program.copy()
    names = [p.name for p in default_pipeline()]
    passes = default_pipeline()[names.index("choose_formats") :]
    overrides = tuple(FormatOverride(layers=path, format=weight_format) for path in unit.paths)
    PassManager(
        passes, PassContext(recipe=PassOptions(weights=formats or WeightFormats(default=F32, overrides=overrides)))
    ).run(changed)
    reference = program.evaluate(packed_inputs(program, TOKENS))[0]
    return mean_kl(reference, changed.evaluate(packed_inputs(changed, TOKENS))[0])


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("Llama", {"tie_word_embeddings": True}),
        ("Qwen2", {"hidden_size": 128, "intermediate_size": 192}),
        ("Mixtral", {}),
    ],
)
def test_a_units_smallest_format_costs_what_it_costs_alone(family: str, sizes: dict[str, int]) -> None:
    program = before_formats(family, **sizes)
    units = find_units(program, [INT8, INT4_32, BF16])
    places: list[str] = []
    groups = [(i,) for i in range(len(units))]
    costs = measure_sensitivities(program, units, groups, TOKENS, lambda done, total, where: places.append(where))
    assert len(places) == len(units) + 1
    for unit, cost in list(zip(units, costs, strict=True))[::2]:
        assert unit.smallest == 1
        exact = measured(program, unit, INT4_32)
        # The same numbers, but for the order of sums, and activations on the edge of two integers.
        assert cost[1] == pytest.approx(exact, rel=0.05)
        # Others are predicted from errors; random weights make the KL of tiny models rough.
        assert cost[0] == pytest.approx(measured(program, unit, INT8), rel=1.0, abs=1e-6)
        assert 0 < cost[2] < cost[0] < cost[1]


def test_layers_changed_together_share_their_cost_by_their_errors() -> None:
    program = before_formats("Llama")
    units = find_units(program, [INT4_32, INT4_OFFSETS])
    layers = plan_measurements(units, WORK, 40).groups
    assert [len(g) for g in layers] == [len([u for u in units if u.layer == units[g[0]].layer]) for g in layers]
    costs = measure_sensitivities(program, units, layers, TOKENS, lambda *_: None)
    alone = measure_sensitivities(program, units, [(i,) for i in range(len(units))], TOKENS, lambda *_: None)
    for group in layers:
        together = sum(costs[i][0] for i in group)
        assert together == pytest.approx(sum(alone[i][0] for i in group), rel=0.6)  # costs add up, roughly
    assert all(a > b > 0 for a, b in costs)


def test_how_much_is_measured_depends_on_the_size_of_the_model() -> None:
    units = find_units(before_formats("Llama", num_hidden_layers=3), [INT8, BF16])
    small = plan_measurements(units, 1_000_000, 512)
    assert (len(small.groups), small.tokens) == (len(units), 512)
    large = plan_measurements(units, 8_000_000_000, 512)
    assert len(large.groups) < len(units)
    assert sorted(i for g in large.groups for i in g) == list(range(len(units)))
    assert plan_measurements(units, WORK, 512).tokens == FEWEST_TOKENS
    assert plan_measurements(units, 1_000_000, 16).tokens == 16


def test_8_bit_floats_cost_less_than_4_bits_and_more_than_8_bit_integers() -> None:
    program = before_formats("Llama")
    units = find_units(program, [INT4_32, WeightFormat(storage="fp8"), INT8])
    for costs in measure_sensitivities(program, units, [(i,) for i in range(len(units))], TOKENS[:1], lambda *_: None):
        assert costs[0] > costs[1] > costs[2] > 0


def test_larger_groups_of_4_bits_cost_more() -> None:
    program = before_formats("Llama")
    units = find_units(program, [INT4_CHANNEL, INT4_32])
    costs = measure_sensitivities(program, units, [(i,) for i in range(len(units))], TOKENS[:1], lambda *_: None)
    assert sum(c[0] for c in costs) > sum(c[1] for c in costs) > 0


def test_a_format_that_loses_nothing_costs_nothing() -> None:
    program = before_formats("Llama")
    units = find_units(program, [F32])
    costs = measure_sensitivities(program, units, [(0,), (1,)], TOKENS, lambda *_: None)
    assert costs[:2] == [(0.0,), (0.0,)]


def test_kl_is_its_definition() -> None:
    torch.manual_seed(0)
    a, b = torch.randn(7, 300), torch.randn(7, 300)
    p, q = a.double().softmax(-1), b.double().softmax(-1)
    assert mean_kl(a, b) == pytest.approx(float((p * (p / q).log()).sum(-1).mean()), rel=1e-5)
    assert mean_kl(a, a) == 0


def test_a_sparse_format_costs_what_keeping_the_largest_weights_does() -> None:
    program, sparse = before_formats("Llama"), INT8.model_copy(update={"sparsity": "2:4"})
    units = find_units(program, [INT8, sparse])
    costs = measure_sensitivities(program, units, [(i,) for i in range(len(units))], TOKENS, lambda *_: None)
    checked = 0
    for unit, cost in zip(units, costs, strict=True):
        if sparse in unit.formats and unit.paths[0].endswith("down_proj"):
            assert unit.formats[unit.smallest] == sparse
            formats = WeightFormats(
                default=F32, overrides=(FormatOverride(layers=unit.paths[0], format=sparse),), sparsify="magnitude"
            )
            assert cost[1] == pytest.approx(measured(program, unit, sparse, formats), rel=0.05)
            assert cost[1] > 3 * cost[0]
            checked += 1
    assert checked == 2
