"""Smoothing of whole programs: floats stay what they were, rounding costs less, what can't be scaled is said."""

from __future__ import annotations

import math
from itertools import takewhile

import pytest
import torch

from enginewright.optimizer.pipeline.pipeline import default_pipeline
from enginewright.passes.formats.weight_format import WeightFormat
from enginewright.passes.framework.base import PassContext, PassRecord
from enginewright.passes.framework.manager import PassManager
from enginewright.passes.framework.pass_options import PassOptions
from enginewright.passes.framework.token_sequences import packed_inputs
from enginewright.passes.framework.weight_formats import FormatOverride, Method, WeightFormats
from enginewright.passes.ir.program import Program
from enginewright.passes.ir.recovered import Recovered
from enginewright.passes.ir.scaled import Scaled
from enginewright.passes.quantization.quantize_embeddings import QuantizeEmbeddings
from enginewright.passes.quantization.quantize_linears import QuantizeLinears
from enginewright.passes.quantization.scalable_channels import Scaling, channels_read_by, put_weights, scaled_weights
from enginewright.passes.quantization.smooth_activations import SmoothActivations
from enginewright.runtime.shared.errors import PassError
from tests.passes.captured import captured

INT8 = WeightFormat(storage="int8", group_size=32, activation="int8", activation_group_size=32)
INT4 = WeightFormat(storage="int4", group_size=32, activation="int8", activation_group_size=32)
POST_NORM = {"do_layer_norm_before": False, "ffn_dim": 96, "word_embed_proj_dim": 64}
"""Fields of OPT's configuration: norms after the sums, as in most encoders."""
CHANNEL = WeightFormat(storage="int8", activation="int8")


def sequences(*lengths: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(len(lengths))
    return tuple(torch.randint(0, 250, (n,), generator=generator, dtype=torch.int32) for n in lengths)


def prepared(family: str, default: WeightFormat, **overrides: object) -> Program:
    """A program whose formats are chosen."""
    program = captured(family, **overrides)
    passes = takewhile(lambda p: p.name not in ("smooth_activations", "quantize_linears"), default_pipeline())
    PassManager(list(passes), PassContext(recipe=PassOptions(weights=WeightFormats(default=default)))).run(program)
    return program


def smooth(program: Program, method: Method = "nearest") -> PassRecord:
    context = PassContext(
        recipe=PassOptions(weights=WeightFormats(smooth=True, method=method)), calibration=sequences(48, 40, 30)
    )
    return SmoothActivations().run(program, context)


def logits(program: Program) -> torch.Tensor:
    """Computes those of other tokens than those of the calibration."""
    return program.evaluate(packed_inputs(program, sequences(33, 20)), read=lambda n: program.weights[n].evaluate())[0]


def rounded(program: Program) -> torch.Tensor:
    program, context = program.copy(), PassContext()
    QuantizeLinears().run(program, context)
    QuantizeEmbeddings().run(program, context)
    return logits(program)


@pytest.mark.parametrize(
    ("family", "default", "sizes"),
    [
        ("Llama", INT8, {}),
        ("Llama", INT8, {"tie_word_embeddings": True}),
        ("Qwen2", INT4, {"hidden_size": 128, "intermediate_size": 192}),
        ("Gemma2", INT8, {}),
        ("Qwen2", CHANNEL, {"hidden_size": 96, "intermediate_size": 136}),
        ("Mixtral", INT8, {}),
        ("OPT", INT8, POST_NORM),
    ],
)
def test_scaling_alone_changes_nothing_but_rounding(family: str, default: WeightFormat, sizes: dict[str, int]) -> None:
    program = prepared(family, default, **sizes)
    before = logits(program)
    record = smooth(program)
    assert record.matched > 0
    alphas = [f.value for f in record.metrics if f.name == "alpha"]
    assert max(alphas) > 0
    errors = {name: [f.value for f in record.metrics if f.name == name] for name in ("error before", "error after")}
    assert all(a <= b for b, a in zip(errors["error before"], errors["error after"], strict=True))
    # Scaled weights are rounded twice more, and sums over K anew: c sqrt(K) eps with K together some 2000.
    assert (logits(program) - before).abs().max() <= 2 * math.sqrt(2000) * 1.2e-7 * before.abs().max()


@pytest.mark.parametrize("sizes", [{}, {"hidden_size": 128, "intermediate_size": 192}])
def test_rounding_costs_less_where_channels_are_loud(sizes: dict[str, int]) -> None:
    """Norms of a trained model are loud in some channels, which the weights behind them multiply by little."""
    program = prepared("Llama", INT8, **sizes)
    values = [c for c in channels_read_by(program, program.nodes_of(torch.ops.ew.linear.default)) if c.producer]
    scalings = []
    for one in values:
        assert one.producer is not None
        if one.producer.folds[0].axis == -1:  # a norm's
            quiet = torch.ones(1, one.producer.folds[0].stop)
            quiet[:, 3::29] = 1 / 30
            scalings.append(Scaling(one, quiet, quiet))
    put_weights(program, scaled_weights(program, scalings), "loud")
    exact = logits(program)
    without = (rounded(program) - exact).square().mean()
    smooth(program)
    assert (rounded(program) - exact).square().mean() < 0.5 * without


def test_a_norm_that_is_a_residual_too_is_multiplied_before_its_linears() -> None:
    program = prepared("OPT", INT8, **POST_NORM)
    assert smooth(program).matched > 0
    linears = program.nodes_of(torch.ops.ew.linear.default)
    read = [(n.args[0], n) for n in linears if getattr(n.args[0], "target", None) is torch.ops.aten.mul.Tensor]
    modules = ["decoder.layers.0.fc1", "decoder.layers.1.self_attn.q_proj", "decoder.layers.1.fc1"]
    assert [linear.meta["where"][0].removeprefix("model.") for _, linear in read] == modules
    for _, linear in read:
        assert isinstance(program.weight_of(linear.args[1]), Scaled)
    residuals = [name for name in program.weights if "layers.0.final_layer_norm" in name]  # what the sums add stays
    assert len(residuals) == 2
    assert not any(isinstance(program.weights[name], Scaled) for name in residuals)


def test_a_tied_table_is_stored_scaled_and_its_result_divided() -> None:
    program = prepared("Llama", INT8, tie_word_embeddings=True)
    smooth(program)
    [table] = program.nodes_of(torch.ops.ew.embedding.default)
    [head] = [n for n in program.nodes_of(torch.ops.ew.linear.default) if n.args[1] is table.args[1]]
    assert isinstance(program.weight_of(head.args[1]), Scaled)
    [divided] = table.users
    assert divided.target is torch.ops.aten.mul.Tensor


def test_what_training_moves_keeps_the_scales_that_it_was_trained_with() -> None:
    """An export of recovered weights scales them as the training did, whose weights were the source's at first."""
    plain, moved = (prepared("Llama", INT8) for _ in range(2))
    for name in moved.weights:
        expr = moved.weights[name]
        if name.endswith("proj.weight") and expr.dtype == torch.float32:
            other = expr.evaluate() * 3 + 0.1
            moved.weights.change(name, Recovered(expr, name, "moved", lambda other=other: other))  # type: ignore[misc]
    for program in (plain, moved):
        smooth(program)
    factors = [{n: e.factors for n in p.weights if isinstance(e := p.weights[n], Scaled)} for p in (plain, moved)]
    assert factors[0] == factors[1]


def test_what_can_not_be_scaled_is_said() -> None:
    record = smooth(prepared("GPT2", INT8))
    assert {(r.where, "gelu" in r.reason) for r in record.rejected} == {
        ("transformer.h.0.mlp.c_proj", True),
        ("transformer.h.1.mlp.c_proj", True),
    }


@pytest.mark.parametrize("method", ["awq", "gptq"])
def test_weights_of_4_bits_are_left_to_their_method(method: Method) -> None:
    assert smooth(prepared("Llama", INT4), method).matched == 0
    assert smooth(prepared("Llama", INT8), method).matched > 0


def test_floats_are_not_scaled() -> None:
    assert smooth(prepared("Llama", WeightFormat(storage="bf16", activation="bf16"))).matched == 0


def test_without_calibration_tokens_it_says_so() -> None:
    with pytest.raises(PassError, match="no calibration tokens"):
        SmoothActivations().run(
            prepared("Llama", INT8), PassContext(recipe=PassOptions(weights=WeightFormats(smooth=True)))
        )


def test_an_override_in_floats_is_scaled_with_the_others_that_read_the_value() -> None:
    program = captured("Llama")
    formats = WeightFormats(
        default=INT8, smooth=True, overrides=(FormatOverride(layers="*.mlp.down_proj", format=WeightFormat()),)
    )
    passes = takewhile(lambda p: p.name not in ("smooth_activations", "quantize_linears"), default_pipeline())
    PassManager(list(passes), PassContext(recipe=PassOptions(weights=formats))).run(program)
    before = logits(program)
    record = SmoothActivations().run(
        program, PassContext(recipe=PassOptions(weights=formats), calibration=sequences(48, 40))
    )
    assert not any("down_proj" in f.where for f in record.metrics)  # a float's input isn't rounded
    torch.testing.assert_close(logits(program), before, rtol=1e-4, atol=1e-5)
