"""The ops that take up the scales of each linear's input, and the reasons why some inputs can't be scaled."""

from __future__ import annotations

from itertools import takewhile

import pytest
import torch

from enginewright.optimizer.pipeline.pipeline import default_pipeline
from enginewright.passes.formats.weight_format import WeightFormat
from enginewright.passes.framework.manager import PassManager
from enginewright.passes.ir.prequantized import CodeFormat, Codes, SourceCodes
from enginewright.passes.ir.program import Program
from enginewright.passes.ir.weights import Concat, WeightExpr
from enginewright.passes.quantization.choose_formats import FORMAT, LINEARS
from enginewright.passes.quantization.scalable_channels import Channels, channels_read_by, keeps_integers
from tests.passes.captured import captured
from tests.passes.small_programs import Linear, Norm, program_from

ew = torch.ops.ew


def lowered(family: str, *, off: tuple[str, ...] = (), **overrides: object) -> Program:
    """A program as formats are chosen for, less some fusions."""
    program = captured(family, **overrides)
    passes = takewhile(lambda p: p.name != "choose_formats", default_pipeline())
    PassManager([p for p in passes if p.name not in off]).run(program)
    return program


def found(program: Program) -> dict[str, Channels]:
    """Gives them by the module that reads; of fused ones the first."""
    channels = channels_read_by(program, program.nodes_of(*LINEARS))
    return {n.meta["where"][0].rpartition(".")[2]: c for c in channels for n in c.readers}


def folds(channels: Channels) -> list[tuple[str, int, int, int]]:
    assert channels.producer is not None, channels.reason
    return [(str(f.node.args[f.argument]), f.axis, f.start, f.stop) for f in channels.producer.folds]


@pytest.mark.parametrize(("hidden", "intermediate", "heads"), [(64, 128, 4), (96, 160, 8)])
def test_all_linears_of_a_layer(hidden: int, intermediate: int, heads: int) -> None:
    sizes = {"hidden_size": hidden, "intermediate_size": intermediate, "num_attention_heads": heads}
    program = lowered("Llama", **sizes)
    of = found(program)
    norm = [("model_layers_1_input_layernorm_weight", -1, 0, hidden)]
    assert folds(of["q_proj"]) == norm
    norm = [("model_layers_1_post_attention_layernorm_weight", -1, 0, hidden)]
    assert folds(of["gate_proj"]) == norm
    gate_up = "model_layers_1_mlp_gate_proj_up_proj_weight"
    assert folds(of["down_proj"]) == [(gate_up, -2, intermediate, 2 * intermediate)]
    rows = heads * 16 + 2 * 16  # the values come after queries and keys
    qkv = "model_layers_1_self_attn_q_proj_k_proj_v_proj_weight"
    assert folds(of["o_proj"]) == [(qkv, -2, rows, rows + 2 * 16)]
    assert of["o_proj"].producer is not None
    assert of["o_proj"].producer.heads == (2, heads // 2, 16)


def test_linears_that_were_not_fused_share_their_input() -> None:
    of = found(lowered("Qwen2", off=("fuse_qkv", "fuse_gate_up")))
    assert of["q_proj"] is of["k_proj"] is of["v_proj"]
    assert [n.meta["where"][0].rpartition(".")[2] for n in of["q_proj"].readers] == ["q_proj", "k_proj", "v_proj"]
    values = [
        ("model_layers_1_self_attn_v_proj_weight", -2, 0, 32),
        ("model_layers_1_self_attn_v_proj_bias", -1, 0, 32),
    ]
    assert folds(of["o_proj"]) == values  # its bias too


@pytest.mark.matrix
def test_what_relu_passes_on_and_layer_norms_can_be_scaled_and_gelu_can_not() -> None:
    of = found(lowered("GPT2"))
    assert [f[0] for f in folds(of["c_attn"])] == ["transformer_h_1_ln_1_weight", "transformer_h_1_ln_1_bias"]
    assert "gelu" in found(lowered("GPT2"))["c_proj"].reason
    assert [f[1:] for f in folds(found(lowered("GPT2", activation_function="relu"))["c_proj"])] == [
        (-2, 0, 256),
        (-1, 0, 256),
    ]


def test_a_head_that_is_the_table_too_is_left_alone() -> None:
    reason = found(lowered("Llama", tie_word_embeddings=True))["lm_head"].reason
    assert "has other uses" in reason
    assert found(lowered("Llama", tie_word_embeddings=False))["lm_head"].producer is not None


class _Two(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(torch.randn(67, 32))
        self.norm, self.first, self.second = Norm(32), Linear(64, 32), Linear(67, 64)


def _small(call: object) -> Channels:
    program = program_from(call, _Two())  # type: ignore[arg-type]
    last = program.nodes_of(*LINEARS)[-1]
    return channels_read_by(program, [last])[0]


def test_what_can_not_be_scaled_says_why() -> None:
    def x(m: _Two, i: dict[str, torch.Tensor]) -> torch.Tensor:
        result: torch.Tensor = ew.embedding(i["ids"], m.table)
        return result

    def out(m: _Two, i: dict[str, torch.Tensor], y: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = ew.take_rows(m.second(y), i["rows"])
        return result

    def read_twice(m: _Two, i: dict[str, torch.Tensor]) -> torch.Tensor:
        y = m.first(x(m, i))
        return out(m, i, y) + ew.take_rows(y, i["rows"]).sum(-1, keepdim=True)

    assert "is also read by" in _small(read_twice).reason
    assert "nothing before" in _small(lambda m, i: out(m, i, m.first(x(m, i)).sin())).reason
    # Views there and back keep the channels.
    assert _small(lambda m, i: out(m, i, m.first(x(m, i)).view(-1, 2, 32).view(-1, 64))).producer is not None
    halves = _small(lambda m, i: out(m, i, m.norm(m.first(x(m, i)).view(-1, 2, 32)).view(-1, 64)))
    assert halves.reason.startswith("32 channels become the 64 that")


def test_integers_of_the_wanted_format_are_not_rounded_again() -> None:
    """A GGUF file has them: parts of a fused product, all in blocks of 32."""
    program = lowered("Llama")
    linear = next(n for n in program.nodes_of(*LINEARS) if "q_proj" in n.meta["where"][0])
    weight = linear.args[1]
    assert isinstance(weight, torch.fx.Node)
    expr = program.weight_of(weight)
    assert isinstance(expr, Concat)

    def known(base: WeightExpr) -> WeightExpr:
        codes = Codes(torch.zeros(base.shape, dtype=torch.int8), torch.ones(base.shape[0], 2).half())
        return SourceCodes(
            "known", base.shape, torch.float32, base.evaluate, format=CodeFormat(4, 32), read_codes=lambda: codes
        )

    for parts, group, unchanged in ((3, 32, True), (3, 64, False), (2, 32, False)):
        bases = tuple(known(b) if i < parts else b for i, b in enumerate(expr.bases))
        changed = program.weight(f"changed.{parts}.{group}", Concat(bases))
        linear.update_arg(1, changed)
        linear.meta[FORMAT] = WeightFormat(
            storage="int4", group_size=group, activation="int8", activation_group_size=group
        )
        assert keeps_integers(program, linear) == unchanged
        assert (channels_read_by(program, [linear])[0].producer is None) == unchanged
