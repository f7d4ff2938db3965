"""The units that get a format each, their possible formats, and the bytes of these."""

from __future__ import annotations

import pytest

from enginewright.optimizer.search.format_units import bytes_of, bytes_of_others, find_units
from enginewright.passes.formats.weight_format import WeightFormat
from tests.optimizer.search.formats_prepared import (
    BF16,
    F32,
    INT4_32,
    INT4_64,
    INT4_CHANNEL,
    INT4_OFFSETS,
    INT8,
    before_formats,
)


@pytest.mark.parametrize("layers", [2, 3])
def test_each_product_after_fusion_is_a_unit(layers: int) -> None:
    program = before_formats("Llama", num_hidden_layers=layers, tie_word_embeddings=False)
    units = find_units(program, [INT4_32, INT8, BF16])
    attention, mlp = "model.layers.0.self_attn", "model.layers.0.mlp"
    assert [u.paths for u in units[:5]] == [
        ("model.embed_tokens",),
        (f"{attention}.q_proj", f"{attention}.k_proj", f"{attention}.v_proj"),
        (f"{attention}.o_proj",),
        (f"{mlp}.gate_proj", f"{mlp}.up_proj"),
        (f"{mlp}.down_proj",),
    ]
    assert len(units) == 4 * layers + 2
    assert [u.layer for u in units[1:7]] == ["model.layers.0"] * 4 + ["model.layers.1"] * 2
    assert units[0].layer == "model.embed_tokens"
    assert units[1].formats == (INT4_32, INT8, BF16)
    assert bytes_of_others(program, units) == 4 * (64 * (2 * layers + 1) + 8)  # norms, and frequencies of positions


def test_a_head_that_is_the_table_is_one_unit() -> None:
    units = find_units(before_formats("Llama", tie_word_embeddings=True), [INT8, BF16])
    tied = [u for u in units if "lm_head" in u.paths]
    assert [u.paths for u in tied] == [("model.embed_tokens", "lm_head")]
    assert tied[0].sizes == (bytes_of((256, 64), INT8), bytes_of((256, 64), BF16))


def test_experts_of_a_module_are_one_unit_and_routers_none() -> None:
    units = find_units(before_formats("Mixtral"), [INT4_32, INT8])
    experts = [u for u in units if "experts" in u.where]
    assert [len(u.nodes) for u in experts] == [2, 2]
    assert not [u for u in units if "gate" in u.where and "experts" not in u.where]
    paths = [p for u in units for p in u.paths]
    assert len(set(paths)) == len(paths)  # an override can name each


def test_groups_that_do_not_divide_are_left_out() -> None:
    program = before_formats("Llama", hidden_size=96, intermediate_size=80, num_attention_heads=6)
    units = {u.paths[-1].rpartition(".")[2]: u for u in find_units(program, [INT4_64, INT4_32])}
    assert units["v_proj"].formats == (INT4_32,)
    assert units["down_proj"].formats == (F32,)  # 80 isn't a multiple of either
    units = {u.paths[-1].rpartition(".")[2]: u for u in find_units(program, [INT4_64, INT4_CHANNEL])}
    assert units["down_proj"].formats == units["v_proj"].formats == (INT4_CHANNEL,)
    program = before_formats("Llama", intermediate_size=84)
    units = {u.paths[-1].rpartition(".")[2]: u for u in find_units(program, [INT4_CHANNEL])}
    assert units["down_proj"].formats == (F32,)  # 84 isn't a multiple of 8


@pytest.mark.matrix
def test_only_linears_inside_of_a_model_may_be_sparse() -> None:
    sparse = INT8.model_copy(update={"sparsity": "2:4"})
    for units in (
        find_units(before_formats("Llama", tie_word_embeddings=False), [INT8, sparse]),
        find_units(before_formats("Mixtral"), [INT8, sparse]),
    ):
        dense = {u.where for u in units if sparse not in u.formats}
        assert all("embed_tokens" in where or "lm_head" in where or "experts" in where for where in dense)
        assert len(dense) < len(units)


@pytest.mark.parametrize(
    ("shape", "weight_format", "expected"),
    [
        ((64, 64), F32, 64 * 64 * 4),
        ((64, 64), F32.model_copy(update={"sparsity": "2:4"}), 64 * 64 * 17 // 8),
        ((64, 64), INT8.model_copy(update={"sparsity": "2:4"}), 64 * 64 * 5 // 8 + 64 * 2 * 2),
        ((64, 64), BF16, 64 * 64 * 2),
        ((64, 64), INT8, 64 * 64 + 64 * 2 * 2),
        ((64, 128), INT4_CHANNEL, 64 * 64 + 64 * 2),
        ((64, 64), WeightFormat(storage="int8", activation="int8"), 64 * 64 + 64 * 2),
        ((64, 64), INT4_32, 64 * 32 + 64 * 2 * 2),
        ((64, 128), INT4_64, 64 * 64 + 64 * 2 * 2),
        ((64, 64), INT4_OFFSETS, 64 * 32 + 2 * 64 * 2 * 2),
        ((3, 40, 64), INT4_32, 3 * (64 * 32 + 64 * 2 * 2)),  # 40 rows take two panels
        ((40, 64), WeightFormat(storage="fp8"), 64 * 64 + 64 * 2),
        ((3, 40, 64), WeightFormat(storage="fp8", group_size=32), 3 * (64 * 64 + 64 * 2 * 2)),
    ],
)
def test_bytes(shape: tuple[int, ...], weight_format: WeightFormat, expected: int) -> None:
    assert bytes_of(shape, weight_format) == expected
