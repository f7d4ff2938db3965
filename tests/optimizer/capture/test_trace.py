"""Captured programs against transformers' own models: packed sequences of other lengths than were traced."""

from __future__ import annotations

import pytest
import torch
import transformers

from enginewright.optimizer.capture import capture
from enginewright.optimizer.capture.build_model import build_model
from enginewright.optimizer.capture.trace import trace
from enginewright.passes.ir.weights import Source
from enginewright.runtime.shared.errors import UnsupportedModelError
from tests.acceptance.tiny_configs import tiny_family

# Sums of at most 128 products in f32 in another order, through two layers, into logits of up to 30.
# Both sides are f32 over 2 layers with sums in another order, which differs with the number of threads too; logits
# reach 30, and a rounding there is 2e-6. What is captured wrongly moves logits by 1e-2 and more.
TOLERANCE = {"rtol": 1e-5, "atol": 5e-5}


def step_inputs(sequences, rows=None):
    """A step of whole sequences; without a cache, what is about slots and blocks doesn't matter."""
    lengths = [len(s) for s in sequences]
    total = sum(lengths)

    def i32(values):
        return torch.as_tensor(values, dtype=torch.int32)

    return {
        "ids": torch.cat(sequences).int(),
        "positions": torch.cat([torch.arange(n) for n in lengths]).int(),
        "q_start": i32([0, *torch.tensor(lengths).cumsum(0).tolist()]),
        "kv_len": i32(lengths),
        "block_table": torch.zeros(len(lengths), 4, dtype=torch.int32),
        "slots": torch.arange(total, dtype=torch.int32),
        "rows": i32(range(total) if rows is None else rows),
    }


def eager_logits(model, sequences):
    with torch.no_grad():
        return torch.cat([model(s[None], use_cache=False).logits[0] for s in sequences])


@pytest.mark.parametrize("lengths", [(9, 21), (1,)])
def test_families_equal_eager(tiny_model, tiny_family, lengths, captured_families):
    model, captured = captured_families(tiny_family)
    torch.manual_seed(1)
    sequences = [torch.randint(3, 250, (n,)) for n in lengths]
    got = captured.program.evaluate(step_inputs(sequences))[0]
    torch.testing.assert_close(got, eager_logits(model, sequences), **TOLERANCE)


def test_structure(tiny_family, captured_families):
    model, captured = captured_families(tiny_family)
    program = captured.program
    letters = [[str(n) for n in program.shape(node)] for node in program.inputs.values()]
    assert list(program.inputs) == ["ids", "positions", "q_start", "kv_len", "block_table", "slots", "rows"]
    assert letters == [["T"], ["T"], ["B + 1"], ["B"], ["B", "M"], ["T"], ["R"]]
    assert [str(n) for n in program.shape(program.logits)] == ["R", str(model.config.vocab_size)]
    attention = program.nodes_of(torch.ops.ew.attention.default)
    assert [n.args[4] for n in attention] == list(range(model.config.num_hidden_layers))
    assert len(program.nodes_of(torch.ops.ew.take_rows.default)) == 1
    modules = {path for path, _ in model.named_modules()}
    for node in program.graph.nodes:
        if node.op in ("call_function", "get_attr"):
            assert set(node.meta["where"]) <= modules, node
    linears = {path for path, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    assert linears <= {w for n in program.graph.nodes for w in n.meta["where"]}
    targets = {str(n.target) for n in program.graph.nodes}
    assert not {t for t in targets if "_assert" in t or "sym_constrain" in t}
    names: dict[int, set[str]] = {}  # tied parameters go by several
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), set()).add(name)
    assert all(len(same & set(program.weights)) == 1 for same in names.values())


def test_windows_and_caps_are_captured(captured_families):
    calls = {
        family: [n.args[5:8] for n in captured_families(family)[1].program.nodes_of(torch.ops.ew.attention.default)]
        for family in ("Gemma2", "Mistral", "Llama")
    }
    assert calls["Gemma2"] == [(24**-0.5, 8, 50.0), (24**-0.5, 0, 50.0)]
    assert calls["Mistral"] == [(0.25, 8, 0.0)] * 2
    assert calls["Llama"] == [(0.25, 0, 0.0)] * 2


def test_rows_are_taken(captured_families):
    model, captured = captured_families("Llama")
    sequences = [torch.randint(3, 250, (5,)), torch.randint(3, 250, (3,))]
    got = captured.program.evaluate(step_inputs(sequences, rows=[7, 4]))[0]
    torch.testing.assert_close(got, eager_logits(model, sequences)[[7, 4]], **TOLERANCE)


def test_packing_is_not_one_long_sequence(captured_families):
    """Must not match: two requests in one step don't see each other."""
    model, captured = captured_families("Llama")
    sequences = [torch.randint(3, 250, (9,)), torch.randint(3, 250, (6,))]
    got = captured.program.evaluate(step_inputs(sequences))[0]
    joined = eager_logits(model, [torch.cat(sequences)])
    assert (got - joined)[9:].abs().max() > 1e-2


def _trace(config):
    model = build_model(config)
    return trace(model, {k: Source(k, tuple(v.shape), v.dtype, v.detach) for k, v in model.state_dict().items()})


SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64}
SIZES |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            transformers.Llama4TextConfig(
                **SIZES,
                head_dim=8,
                num_key_value_heads=2,
                intermediate_size=32,
                intermediate_size_mlp=32,
                num_local_experts=2,
                attention_chunk_size=16,
            ),
            "neither causal nor causal within a sliding window",
        ),
        (
            transformers.LongcatFlashConfig(
                **{k: v for k, v in SIZES.items() if k != "num_hidden_layers"},
                num_layers=1,
                ffn_hidden_size=32,
                expert_ffn_hidden_size=32,
                q_lora_rank=16,
                kv_lora_rank=16,
                qk_rope_head_dim=8,
                qk_nope_head_dim=16,
                v_head_dim=16,
                head_dim=8,
                n_routed_experts=4,
                zero_expert_num=2,
                moe_topk=2,
            ),
            r"model\.layers\.0\.mlp\.experts can't be traced",
        ),
    ],
    ids=["chunked-mask", "experts-of-its-own"],
)
def test_models_that_attend_or_compute_otherwise_are_refused(config, message):
    with pytest.raises(UnsupportedModelError, match=message):
        _trace(config)


@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("minimax", r"model\.layers\.1\.self_attn \(modeling_minimax.*\) assumes .* of the number of tokens T"),
        ("recurrent_gemma", r"layers\.0\.temporal_block\.rg_lru \(.* in _rnn_scan\) fixes the number of tokens"),
        ("rwkv", r"blocks\.0\.attention \(.* in rwkv_linear_attention_cpu\) fixes the number of tokens"),
        ("xlstm", r"blocks\.0\.mlstm_layer\.mlstm_backend \(modeling_xlstm.*\) assumes .* of the number of tokens T"),
    ],
)
def test_recurrences_without_a_kernel_function_are_refused_by_name(family, message):
    with pytest.raises(UnsupportedModelError, match=message) as caught:
        _trace(tiny_family(family).config)
    assert "recurrences without a kernel function" in caught.value.hint


def test_capture_leaves_the_model_alone(tiny_model):
    model = tiny_model("Llama")
    before = {k: v.clone() for k, v in model.state_dict().items()}
    capture(model)
    assert model.config._attn_implementation == "eager"
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(p.requires_grad for p in model.parameters())
