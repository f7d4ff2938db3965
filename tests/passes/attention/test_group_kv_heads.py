"""Fewer key/value heads: what the program then is, and what it computes, for each way and several families."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from enginewright.optimizer.capture.build_model import build_model
from enginewright.optimizer.capture.trace import trace
from enginewright.passes.attention.group_kv_heads import GroupKvHeads
from enginewright.passes.attention.lower_attention import LowerAttention
from enginewright.passes.framework.base import PassContext, PassRecord
from enginewright.passes.framework.kv_options import KvGrouping, KvHeadsOverride, KvMethod, KvOptions
from enginewright.passes.framework.manager import PassManager
from enginewright.passes.framework.match import bound_arguments
from enginewright.passes.framework.pass_options import PassOptions
from enginewright.passes.framework.token_sequences import packed_inputs
from enginewright.passes.fusion.fuse_qkv import FuseQkv
from enginewright.passes.ir.program import Program
from enginewright.passes.ir.weights import Source
from enginewright.runtime.shared.errors import PassError, RecipeError
from tests.conftest import make_tiny_model
from tests.passes.captured import normalized, normalizing_passes, op_counts, packed

ew = torch.ops.ew


MHA = {"num_key_value_heads": 4}
WIDE = {**MHA, "hidden_size": 96, "head_dim": 24}


def sequences(*lengths: int, seed: int = 5) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(3, 250, (n,), generator=generator, dtype=torch.int32) for n in lengths)


def group(program: Program, options: KvOptions, lengths: tuple[int, ...] = (60,) * 6) -> PassRecord:
    return GroupKvHeads().run(
        program, PassContext(recipe=PassOptions(attention=options), calibration=sequences(*lengths))
    )


def errors(record: PassRecord) -> list[float]:
    return [f.value for f in record.metrics if f.name.startswith("relative error")]


def logits(program: Program, *lengths: int) -> torch.Tensor:
    return program.evaluate(packed_inputs(program, sequences(*lengths, seed=9)))[0]


@pytest.mark.parametrize(
    ("family", "sizes", "count", "grouping"),
    [
        ("Llama", MHA, 1, "neighbours"),
        ("Llama", WIDE, 2, "similar"),
        ("Qwen3", MHA, 2, "similar"),  # norms of q and k
        ("GPT2", {}, 1, "similar"),  # one linear of all three; nothing is rotated; biases
        ("GPTNeoX", {}, 2, "similar"),  # a quarter is rotated; q, k and v are cut out head by head
        ("Gemma2", {}, 1, "neighbours"),  # a GQA model goes on; windows, a cap
    ],
)
def test_structure_and_numbers(family: str, sizes: dict[str, int], count: int, grouping: KvGrouping) -> None:
    program, _ = normalized(family, **sizes)
    before = op_counts(program)
    calibrated, pooled = program.copy(), program.copy()
    record = group(calibrated, KvOptions(kv_heads=count, method="calibrated", grouping=grouping))
    plain = group(pooled, KvOptions(kv_heads=count, method="mean", grouping="similar"))
    assert record.matched == plain.matched == 2
    # The fit has nothing to do with the tokens that it is judged by only as far as it is right: it must be far better.
    assert all(a < 0.8 * b for a, b in zip(errors(record), errors(plain), strict=True))
    for node in calibrated.nodes_of(ew.attention.default):
        arguments = bound_arguments(node)
        assert calibrated.shape(arguments["k"])[1] == calibrated.shape(arguments["v"])[1] == count
    after = op_counts(calibrated)
    assert after["ew.attention"] == before["ew.attention"] and after["ew.rope"] == before["ew.rope"]
    assert after["ew.linear"] == before["ew.linear"] + (0 if family in ("Llama", "Qwen2", "Qwen3", "Gemma2") else 4)
    assert logits(calibrated, 7, 12).isfinite().all()
    # The cache follows, and the projections are fused again.
    PassManager([FuseQkv(), LowerAttention()]).run(calibrated)
    assert {g.kv_heads for g in calibrated.cache_groups} == {count}
    assert op_counts(calibrated)["ew.linear"] == before["ew.linear"] - (
        0 if after["ew.linear"] > before["ew.linear"] else 4
    )


@pytest.mark.parametrize(("family", "sizes"), [("Llama", WIDE), ("Qwen2", MHA)])  # the latter has biases
def test_the_mean_is_plain_pooling(family: str, sizes: dict[str, int]) -> None:
    """The program equals that of a model whose heads were averaged by hand."""
    model = make_tiny_model(family, **sizes)
    program, _ = normalized(family, **sizes)
    group(program, KvOptions(kv_heads=2, method="mean", grouping="neighbours"), ())
    size = model.config.hidden_size // 4 if family == "Qwen2" else model.config.head_dim
    for layer in model.model.layers:
        for linear in (layer.self_attn.k_proj, layer.self_attn.v_proj):
            for value in (linear.weight, linear.bias):
                if value is not None:
                    heads = value.data.view(2, 2, size, -1).mean(1, keepdim=True)
                    value.data.copy_(heads.expand(-1, 2, -1, -1).reshape(value.shape))
    for lengths in ((5,), (3, 9)):
        inputs = packed(lengths)
        rows = [model(input_ids=ids[None].long()).logits[0] for ids in inputs["ids"].split(list(lengths))]
        # Means in 64 bits there and 32 here: a few rounding errors of logits around 5.
        torch.testing.assert_close(program.evaluate(inputs)[0], torch.cat(rows).detach(), rtol=2e-4, atol=2e-4)


def turned(family: str, sizes: dict[str, int]) -> Program:
    """A model whose heads of keys are rotations and multiples of each group's first, pair by pair, and whose heads of
    values are linear maps of it."""
    model = make_tiny_model(family, **sizes)
    generator = torch.Generator().manual_seed(2)
    for layer in model.model.layers:
        attention = layer.self_attn
        size = attention.head_dim
        for linear, map_of in ((attention.k_proj, pair_map), (attention.v_proj, free_map)):
            for value in (linear.weight, linear.bias):
                if value is None:
                    continue
                heads = value.data.view(4, size, -1)
                for first in (0, 2):
                    heads[first + 1] = map_of(size, first, generator if value is linear.weight else None) @ heads[first]
    weights = {
        name: Source(name, tuple(v.shape), v.dtype, lambda v=v: v.detach()) for name, v in model.state_dict().items()
    }
    program = trace(build_model(model.config), weights)
    PassManager(normalizing_passes()).run(program)
    return program


_MAPS: dict[tuple[Callable[..., torch.Tensor], int, int], torch.Tensor] = {}


def pair_map(size: int, first: int, generator: torch.Generator | None) -> torch.Tensor:
    """Rotations and multiples of the pairs (i, i + size/2); the last one again for a bias, without a generator."""
    if generator is not None:
        c = torch.complex(*torch.randn(2, size // 2, generator=generator))
        real, imaginary = torch.diag(c.real), torch.diag(c.imag)
        _MAPS[pair_map, size, first] = torch.cat([torch.cat([real, -imaginary], 1), torch.cat([imaginary, real], 1)])
    return _MAPS[pair_map, size, first]


def free_map(size: int, first: int, generator: torch.Generator | None) -> torch.Tensor:
    if generator is not None:
        _MAPS[free_map, size, first] = torch.randn(size, size, generator=generator) * size**-0.5
    return _MAPS[free_map, size, first]


@pytest.mark.parametrize(("family", "sizes"), [("Llama", WIDE), ("Qwen2", MHA)])
def test_heads_that_are_turned_copies_lose_nothing(family: str, sizes: dict[str, int]) -> None:
    program = turned(family, sizes)
    expected = logits(program, 20, 33)
    pooled = program.copy()
    record = group(program, KvOptions(kv_heads=2, method="calibrated", grouping="neighbours"))
    assert max(errors(record)) < 1e-9
    # The fit is solved from values of 32 bits: their rounding, a few times over, of logits around 5.
    torch.testing.assert_close(logits(program, 20, 33), expected, rtol=1e-3, atol=2e-3)
    group(pooled, KvOptions(kv_heads=2, method="mean", grouping="neighbours"))
    assert (logits(pooled, 20, 33) - expected).abs().max() > 0.1


def test_similar_heads_find_each_other() -> None:
    """Heads 0 and 2 are copies, and 1 and 3: by neighbours much is lost, by likeness nothing."""
    model = make_tiny_model("Llama", **MHA)
    for layer in model.model.layers:
        for linear in (layer.self_attn.k_proj, layer.self_attn.v_proj):
            heads = linear.weight.data.view(4, 16, -1)
            heads[2:] = heads[:2]
    weights = {n: Source(n, tuple(v.shape), v.dtype, lambda v=v: v.detach()) for n, v in model.state_dict().items()}
    program = trace(build_model(model.config), weights)
    PassManager(normalizing_passes()).run(program)
    expected = logits(program, 14, 25)
    methods: tuple[KvMethod, ...] = ("mean", "calibrated")
    for method in methods:
        similar, lying = program.copy(), program.copy()
        record = group(similar, KvOptions(kv_heads=2, method=method, grouping="similar"))
        assert max(errors(record)) < 1e-9
        torch.testing.assert_close(logits(similar, 14, 25), expected, rtol=1e-3, atol=2e-3)
        group(lying, KvOptions(kv_heads=2, method=method, grouping="neighbours"))
        assert (logits(lying, 14, 25) - expected).abs().max() > 0.05


def test_sources_of_each_new_head_are_all_heads_of_its_group() -> None:
    program, _ = normalized("Llama", **MHA)
    group(program, KvOptions(kv_heads=2, method="calibrated", grouping="neighbours"))
    name = "model.layers.0.self_attn.k_proj.weight"
    parts = program.weights[name].parts(0)
    assert [(p.source, p.start, p.stop, p.size) for p in parts] == [(name, 0, 32, 16), (name, 32, 64, 16)]
    assert [(p.start, p.stop) for p in program.weights[name.replace("k_proj", "o_proj")].parts(1)] == [(0, 64)]
    assert [(p.start, p.stop) for p in program.weights[name.replace("k_proj", "q_proj")].parts(0)] == [(0, 64)]


def test_layers_may_differ() -> None:
    program, _ = normalized("Llama", **MHA)
    record = group(
        program,
        KvOptions(
            kv_heads=None,
            overrides=(KvHeadsOverride(layers="model.layers.1.*", kv_heads=2),),
            method="mean",
            grouping="neighbours",
        ),
    )
    assert record.matched == 1
    PassManager([LowerAttention()]).run(program)
    assert {g.layers: g.kv_heads for g in program.cache_groups} == {(0,): 4, (1,): 2}
    assert logits(program, 6).isfinite().all()


def test_what_can_not_be_grouped_keeps_its_heads_and_says_why() -> None:
    program, _ = normalized("Llama", **MHA)
    first, _ = program.nodes_of(ew.attention.default)
    key = bound_arguments(first)["k"]
    with program.inserting_before(first):
        doubled = program.call(torch.ops.aten.mul.Tensor, key, 2.0, where=key.meta["where"])
    first.update_arg(1, doubled)
    record = group(program, KvOptions(kv_heads=1, method="mean", grouping="neighbours"))
    assert record.matched == 1
    (rejection,) = record.rejected
    assert rejection.where == "model.layers.0.self_attn"
    assert "k does not come from a linear, but from aten.mul.Tensor" in rejection.reason


def test_a_norm_behind_the_keys_is_said() -> None:
    program, _ = normalized("Qwen3", **MHA)
    record = group(program, KvOptions(kv_heads=2, grouping="neighbours"))
    assert record.matched == 2
    assert all("a norm stands behind the keys" in r.reason for r in record.rejected)


def test_without_tokens_or_with_wrong_numbers() -> None:
    program, _ = normalized("Llama", **MHA)
    with pytest.raises(PassError, match="no calibration tokens"):
        group(program, KvOptions(kv_heads=2), ())
    for count, message in ((3, "does not divide"), (8, "which has 4"), (4, "as many key/value heads")):
        with pytest.raises(RecipeError, match=message):
            group(program, KvOptions(kv_heads=count))
    with pytest.raises(RecipeError, match="matches no attention"):
        group(program, KvOptions(kv_heads=2, overrides=(KvHeadsOverride(layers="model.layer.1", kv_heads=1),)))


def test_nothing_happens_unasked() -> None:
    program, _ = normalized("Llama")
    assert not GroupKvHeads().wanted(PassContext())
    assert GroupKvHeads().run(program, PassContext()).matched == 0
