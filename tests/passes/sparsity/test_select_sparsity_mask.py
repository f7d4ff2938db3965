"""2:4 through whole programs: which weights it is for, how well each method chooses, and what stays as it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from enginewright.passes.formats.weight_format import WeightFormat
from enginewright.passes.framework.base import PassContext, PassRecord
from enginewright.passes.framework.pass_options import PassOptions
from enginewright.passes.framework.weight_formats import FormatOverride, WeightFormats
from enginewright.passes.ir.chosen_codes import ChosenCodes
from enginewright.passes.ir.program import Program
from enginewright.passes.ir.two_of_four import is_two_of_four
from enginewright.passes.lowering.lower_program import lower_program
from enginewright.passes.quantization.apply_gptq import ApplyGptq
from enginewright.passes.quantization.cast_weights_to_bf16 import CastWeightsToBf16
from enginewright.passes.quantization.quantize_embeddings import QuantizeEmbeddings
from enginewright.passes.quantization.quantize_linears import QuantizeLinears
from enginewright.passes.sparsity.select_sparsity_mask import ERROR, MAGNITUDE_ERROR, SelectSparsityMask
from enginewright.runtime.shared.errors import CapacityError, PassError
from tests.passes.quantization.test_apply_gptq import INT4, INT8, SEQUENCES, formatted, logits, metrics

ew = torch.ops.ew
F32 = WeightFormat(sparsity="2:4")
BF16 = WeightFormat(storage="bf16", activation="bf16", sparsity="2:4")
SPARSE_8, SPARSE_4 = INT8.model_copy(update={"sparsity": "2:4"}), INT4.model_copy(update={"sparsity": "2:4"})


def choose(program: Program, formats: WeightFormats, **context: Any) -> PassRecord:
    options: dict[str, Any] = {"recipe": PassOptions(weights=formats), "calibration": SEQUENCES} | context
    return SelectSparsityMask().run(program, PassContext(**options))


def sparse_weights(program: Program) -> list[str]:
    return [name for name in program.weights if is_two_of_four(program.weights[name])]


def all_have_the_form(program: Program) -> bool:
    values = [program.weights[name].evaluate() for name in sparse_weights(program)]
    return all((v.unflatten(-1, (-1, 4)) != 0).sum(-1).max() <= 2 for v in values)


@pytest.mark.parametrize(("family", "overrides"), [("Llama", {}), ("Qwen3", {"hidden_size": 96})])
def test_linears_are_sparse_and_head_and_table_are_not(family: str, overrides: dict[str, Any]) -> None:
    formats = WeightFormats(default=F32, sparsify="wanda")
    program = formatted(formats, family, **overrides)
    record = choose(program, formats)
    assert record.matched == len(sparse_weights(program)) == 8
    assert all_have_the_form(program)
    kinds = {n.meta["format"].sparsity for n in program.nodes_of(ew.embedding.default)}
    assert kinds == {"dense"}
    assert len(metrics(record, ERROR)) == len(metrics(record, MAGNITUDE_ERROR)) == 8
    lowered = lower_program(program).program
    assert sum(use.layout == "sparse32" for use in lowered.weights) == 8


def test_methods_that_look_at_inputs_are_nearer_to_the_source() -> None:
    errors = {}
    for method in ("wanda", "sparsegpt"):
        formats = WeightFormats(default=F32, sparsify=method)  # type: ignore[arg-type]
        record = choose(formatted(formats), formats)
        pairs = list(zip(metrics(record, ERROR), metrics(record, MAGNITUDE_ERROR), strict=True))
        assert all(ours < plain for ours, plain in pairs)
        errors[method] = sum(ours for ours, _ in pairs)
    assert errors["sparsegpt"] < 0.8 * errors["wanda"]


@pytest.mark.parametrize("storage", [SPARSE_8, SPARSE_4])
def test_sparsegpt_chooses_integers_in_its_sweep(storage: WeightFormat) -> None:
    formats = WeightFormats(default=storage, embeddings=INT8, method="gptq", sparsify="sparsegpt")
    if storage == SPARSE_8:
        formats = formats.model_copy(update={"method": "nearest"})
    program = formatted(formats)
    choose(program, formats)
    chosen = [program.weights[name] for name in sparse_weights(program)]
    assert all(isinstance(expr, ChosenCodes) for expr in chosen)
    assert (
        ApplyGptq().run(program, PassContext(recipe=PassOptions(weights=formats), calibration=SEQUENCES)).matched == 0
    )
    QuantizeLinears().run(program, PassContext(recipe=PassOptions(weights=formats)))
    assert sorted(sparse_weights(program))  # their integers, as they were chosen
    assert all_have_the_form(program)


def test_integers_of_4_bits_chosen_behind_it_keep_its_zeros() -> None:
    formats = WeightFormats(default=SPARSE_4, embeddings=INT8, method="gptq", sparsify="wanda")
    program = formatted(formats)
    choose(program, formats)
    context = PassContext(recipe=PassOptions(weights=formats), calibration=SEQUENCES)
    for one in (ApplyGptq(), QuantizeLinears(), QuantizeEmbeddings()):
        one.run(program, context)
    assert all_have_the_form(program)
    assert sum(use.layout == "sparse32" for use in lower_program(program).program.weights) == 8


def test_a_program_computes_with_what_is_kept() -> None:
    formats = WeightFormats(default=BF16, sparsify="magnitude")
    program = formatted(formats)
    record = choose(program, formats, calibration=())  # magnitudes ask no tokens
    assert record.metrics == ()
    before = logits(program, SEQUENCES[:1])
    CastWeightsToBf16().run(program, PassContext(recipe=PassOptions(weights=formats)))
    after = logits(program, SEQUENCES[:1])
    assert (after - before).abs().max() < 0.05 * before.abs().max()  # rounding to bf16 of a small model
    assert all_have_the_form(program)


def test_a_weight_that_has_the_form_stays_bit_for_bit() -> None:
    formats = WeightFormats(default=F32, sparsify="magnitude")
    program = formatted(formats)
    choose(program, formats)
    before = {name: program.weights[name].evaluate() for name in sparse_weights(program)}
    for method in ("wanda", "sparsegpt"):
        again = program.copy()
        choose(again, formats.model_copy(update={"sparsify": method}))  # type: ignore[arg-type]
        after = [again.weights[name].evaluate() for name in sparse_weights(again)]
        assert len(after) == len(before)
        for one in after:
            assert any(torch.equal(one, other) for other in before.values())


def test_dense_formats_are_left_alone() -> None:
    formats = WeightFormats(
        default=INT8, overrides=(FormatOverride(layers="*.down_proj", format=SPARSE_8),), sparsify="magnitude"
    )
    program = formatted(formats)
    assert choose(program, formats).matched == 2
    assert len(sparse_weights(program)) == 2
    assert not SelectSparsityMask().wanted(PassContext(recipe=PassOptions(weights=WeightFormats(default=INT8))))


def test_what_cannot_be_sparse_is_refused_by_name() -> None:
    with pytest.raises(PassError, match=r"lm_head.*an override gives it the sparsity 2:4.*gives the logits"):
        formatted(WeightFormats(default=INT8, overrides=(FormatOverride(layers="lm_head", format=SPARSE_8),)))
    with pytest.raises(PassError, match=r"its input dimension of 66 isn't a multiple of 4"):
        formatted(WeightFormats(default=SPARSE_8), hidden_size=66, num_attention_heads=3, num_key_value_heads=3)


def test_it_needs_tokens_and_room() -> None:
    formats = WeightFormats(default=F32, sparsify="wanda")
    with pytest.raises(PassError, match="select_sparsity_mask has no calibration tokens"):
        choose(formatted(formats), formats, calibration=())
    with pytest.raises(CapacityError, match="the pass select_sparsity_mask takes"):
        choose(formatted(formats), formats, memory_budget=1000)
