"""The kernels variant of tiny models: transformers' logits in f32, and the program's own in formats that round."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

from enginewright.optimizer.verify.random_tokens import tolerance_of
from enginewright.passes.formats.weight_format import WeightFormat
from enginewright.passes.framework.base import PassContext
from enginewright.passes.framework.pass_options import PassOptions
from enginewright.passes.framework.token_sequences import packed_inputs
from enginewright.passes.framework.weight_formats import WeightFormats
from enginewright.passes.ir.program import Program
from enginewright.plugins.graphs.emit_model import OPSET
from enginewright.plugins.steps.linear_io import CONTRIB_FILE, KERNELS_FILE, LinearIo, Variant
from tests.acceptance.tiny_configs import tiny_family
from tests.passes.small_programs import program_from
from tests.plugins.graphs.linear_session import (
    SEQUENCES,
    LinearSession,
    Logits,
    emit,
    lowered,
    lowered_family,
    reference_logits,
    run_plan,
    run_tokens,
    tokens_of,
)
from tests.plugins.graphs.test_contrib import CHUNKS_ALONE, CONTEXT, TAKEN

ew = torch.ops.ew

# Windows, a softcap and a tied table; biases; two groups of heads on one; experts beside linears.
USUALLY = ("gemma2", "gpt2", "llama 6/2", "gpt_oss")
FAMILIES = [case if case in USUALLY else pytest.param(case, marks=pytest.mark.matrix) for case in TAKEN]


def kernels_graph(folder: Path) -> onnx.GraphProto:
    return onnx.load(folder / KERNELS_FILE, load_external_data=False).graph


def attributes(node: onnx.NodeProto) -> dict[str, Any]:
    return {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}


def products(graph: onnx.GraphProto) -> list[dict[str, Any]]:
    """The attributes of each Linear."""
    return [attributes(node) for node in graph.node if (node.domain, node.op_type) == ("enginewright", "Linear")]


@pytest.mark.parametrize("case", FAMILIES)
def test_families(case: str, tmp_path: Path) -> None:
    """Both requests' logits are transformers' within what ``optimize verify`` allows for rounding."""
    model = tiny_family(case.partition(" ")[0], **TAKEN[case])
    program = lowered(model)
    io = emit(program, tmp_path, contrib=CONTEXT, kernels=CONTEXT)
    assert io.variants == ("standard", "contrib", "kernels")
    graph = kernels_graph(tmp_path)
    kinds = Counter(node.op_type for node in graph.node)
    assert kinds["Linear"] == len(program.nodes_of(ew.linear.default)) > 4
    assert kinds["Gemm"] == 0 and kinds["GroupQueryAttention"] >= 2
    assert {p["storage"] for p in products(graph)} == {b"f32"}
    expected, largest = reference_logits(model), 0.0
    for slot, logits in run_plan(LinearSession(tmp_path, io.of_variant("kernels")), CHUNKS_ALONE).items():
        largest = max(largest, float(np.abs(expected[slot]).max()))
        # Sums of 32-bit floats in another order, as of the other files: measured 2e-5 at most.
        np.testing.assert_allclose(logits, expected[slot], rtol=0, atol=tolerance_of(io.summed_products) * largest)


BF16 = WeightFormat(storage="bf16", activation="bf16")
FP8, FP8_GROUPS = WeightFormat(storage="fp8"), WeightFormat(storage="fp8", group_size=32)
INT8 = WeightFormat(storage="int8", activation="int8")
INT8_GROUPS = WeightFormat(storage="int8", group_size=32, activation="int8", activation_group_size=32)
INT8_OF_WEIGHTS = WeightFormat(storage="int8", group_size=32, activation="int8")
INT8_OF_X = WeightFormat(storage="int8", activation="int8", activation_group_size=32)
INT4 = WeightFormat(storage="int4", group_size=32, activation="int8", activation_group_size=32)
INT4_OFFSETS = WeightFormat(storage="int4", group_size=64, zero_point=True, activation="int8", activation_group_size=64)


def sparse(dense: WeightFormat) -> WeightFormats:
    sparse_format = WeightFormat(
        storage=dense.storage,
        group_size=dense.group_size,
        activation=dense.activation,
        activation_group_size=dense.activation_group_size,
        sparsity="2:4",
    )
    return WeightFormats(default=sparse_format, sparsify="magnitude")


WIDE: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 192}

# A family, what it has instead of its usual sizes, formats, and storages of products with whether they are sparse.
FORMATS: dict[str, tuple[str, Mapping[str, Any], WeightFormats, set[tuple[bytes, int]]]] = {
    "bf16": ("llama", {}, WeightFormats(default=BF16), {(b"bf16", 0)}),
    "bf16, wide, biases": ("gpt2", {"n_embd": 128}, WeightFormats(default=BF16), {(b"bf16", 0)}),
    "fp8, tied": ("gemma2", {}, WeightFormats(default=FP8), {(b"fp8", 0)}),
    "fp8 in groups, wide": ("llama", WIDE, WeightFormats(default=FP8_GROUPS), {(b"fp8", 0)}),
    "int8": ("qwen2", {}, WeightFormats(default=INT8, embeddings=INT8_GROUPS), {(b"int8", 0)}),
    "int8, wide, tied": ("gemma2", WIDE, WeightFormats(default=INT8), {(b"int8", 0)}),
    "int8, groups of weights": ("llama", {}, WeightFormats(default=INT8_OF_WEIGHTS), {(b"int8", 0)}),
    "int8, groups of x": ("llama", WIDE, WeightFormats(default=INT8_OF_X), {(b"int8", 0)}),
    "int4, tied": ("gemma2", {}, WeightFormats(default=INT4, embeddings=INT4), {(b"int4", 0)}),
    "int4, wide": ("llama", WIDE, WeightFormats(default=INT4, embeddings=INT8), {(b"int4", 0), (b"int8", 0)}),
    "offsets": ("qwen2", {}, WeightFormats(default=INT4_OFFSETS, embeddings=INT4_OFFSETS), {(b"int4", 0)}),
    "offsets, wide": (
        "llama",
        WIDE,
        WeightFormats(default=INT4_OFFSETS, embeddings=INT8),
        {(b"int4", 0), (b"int8", 0)},
    ),
    "f32, 2:4": ("llama", {}, sparse(WeightFormat()), {(b"f32", 1), (b"f32", 0)}),
    "bf16, 2:4": ("gemma2", {}, sparse(BF16), {(b"bf16", 1), (b"bf16", 0)}),
    "int8, 2:4": ("gpt2", {}, sparse(INT8_GROUPS), {(b"int8", 1), (b"int8", 0)}),
    "int4, 2:4, wide": ("llama", WIDE, sparse(INT4), {(b"int4", 1), (b"int4", 0)}),
}
FORMATS_USUALLY = ("bf16, wide, biases", "fp8, tied", "int8", "int4, wide", "offsets", "int8, 2:4")


@pytest.mark.parametrize(
    "case", [case if case in FORMATS_USUALLY else pytest.param(case, marks=pytest.mark.matrix) for case in FORMATS]
)
def test_activations_are_rounded_as_the_recipe_says(case: str, tmp_path: Path) -> None:
    family, overrides, formats, storages = FORMATS[case]
    program = lowered(tiny_family(family, **overrides), PassContext(recipe=PassOptions(weights=formats)))
    io = emit(program, tmp_path, contrib=CONTEXT, kernels=CONTEXT)
    graph = kernels_graph(tmp_path)
    assert {(p["storage"], p["sparse"]) for p in products(graph)} == storages
    assert len(products(graph)) == len(program.nodes_of(ew.linear.default, ew.quantized_linear.default))
    logits, floats = (logits_of(tmp_path, io, variant) for variant in ("kernels", "standard"))
    expected = evaluated(program)
    rounding = tolerance_of(io.summed_products) * float(np.abs(expected).max())
    if {storage for storage, _ in storages} <= {b"f32", b"fp8"}:  # floats in another order
        np.testing.assert_allclose(logits, expected, rtol=0, atol=rounding)
        return
    # Floats before it that differ in their last bit may round x the other way now and then, which moves that token's
    # logits by some hundredths, and those behind it. The standard file, which doesn't round, is off at every token.
    close = np.abs(logits - expected).max(-1) < rounding
    assert close.mean() > 0.25
    assert not (np.abs(floats - expected).max(-1) < rounding).any()
    assert np.abs(logits - expected).mean() < np.abs(floats - expected).mean() / 2


def logits_of(folder: Path, io: LinearIo, variant: Variant) -> Logits:
    """Computes those of both requests, one behind the other [T, V]."""
    return np.concatenate(list(run_plan(LinearSession(folder, io.of_variant(variant)), CHUNKS_ALONE).values()))


def evaluated(program: Program) -> Logits:
    """The logits by the ops' own definitions."""
    inputs = packed_inputs(program, [torch.tensor(tokens_of(slot)) for slot in SEQUENCES])
    logits: Logits = program.evaluate(inputs)[0].numpy()
    return logits


def test_values_go_from_product_to_product_as_they_are(tmp_path: Path) -> None:
    """By request between attentions, and with no cast: x is rounded in the operator."""
    program = lowered(
        tiny_family("llama"), PassContext(recipe=PassOptions(weights=WeightFormats(default=INT4, embeddings=INT4)))
    )
    emit(program, tmp_path, contrib=CONTEXT, kernels=CONTEXT)
    contrib, kernels = (
        Counter(node.op_type for node in onnx.load(tmp_path / name, load_external_data=False).graph.node)
        for name in (CONTRIB_FILE, KERNELS_FILE)
    )
    assert contrib["DequantizeLinear"] == kernels["Linear"] == 9
    assert not kernels["DequantizeLinear"] + kernels["MatMul"]
    for kind in ("Cast", "Reshape", "GroupQueryAttention", "GatherBlockQuantized", "SkipSimplifiedLayerNormalization"):
        assert kernels[kind] == contrib[kind], kind


def test_a_tied_table_is_rows_and_panels(tmp_path: Path) -> None:
    """Both are of the same weight; what nothing of the kernels reads isn't in their file."""
    emit(lowered_family("gemma2"), tmp_path, kernels=CONTEXT)
    graph = kernels_graph(tmp_path)
    (gather,) = (node for node in graph.node if node.op_type == "Gather" and node.input[0].endswith(".onnx"))
    head = next(node for node in graph.node if node.op_type == "Linear" and node.input[1].startswith(gather.input[0]))
    assert head.input[1] == f"{gather.input[0]}.panels"
    weights = {t.name: t for t in graph.initializer}
    assert list(weights[gather.input[0]].dims) == [256, 64]
    assert list(weights[head.input[1]].dims) == [8, 64, 32]
    assert {name for node in graph.node for name in node.input} >= set(weights)


def test_experts_and_routers_stay_as_in_the_contrib_variant(tmp_path: Path) -> None:
    formats = WeightFormats(default=INT4_OFFSETS, embeddings=INT8)
    program = lowered(tiny_family("mixtral"), PassContext(recipe=PassOptions(weights=formats)))
    io = emit(program, tmp_path, contrib=CONTEXT, kernels=CONTEXT)
    graph = kernels_graph(tmp_path)
    experts = program.nodes_of(ew.quantized_grouped_linear.default)
    kinds = Counter(node.op_type for node in graph.node)
    assert kinds["DequantizeLinear"] == len(experts) == 4
    assert kinds["Linear"] == len(program.nodes_of(ew.linear.default, ew.quantized_linear.default)) > 4
    logits, floats = (logits_of(tmp_path, io, variant) for variant in ("kernels", "standard"))
    expected = evaluated(program)
    # Experts round nothing in any file: the products beside them alone come nearer.
    assert np.median(np.abs(logits - expected)) < np.median(np.abs(floats - expected))


@pytest.mark.parametrize(("size", "rows"), [(32, 6), (20, 45)])
def test_bias_activation_residual_and_a_weight_that_is_computed(size: int, rows: int, tmp_path: Path) -> None:
    class Small(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            make = torch.Generator().manual_seed(size)
            for name, shape in (("table", (16, size)), ("up", (rows, size)), ("down", (size, rows)), ("bias", (rows,))):
                self.register_parameter(name, torch.nn.Parameter(torch.randn(shape, generator=make)))

    def call(m: torch.nn.Module, i: dict[str, torch.Tensor]) -> torch.Tensor:
        x = ew.embedding(i["ids"], m.table)
        y = ew.linear(x, m.up, m.bias, "relu2")
        y = ew.linear(y, m.down, None, "tanh", x)  # with a residual
        return ew.take_rows(ew.linear(y, m.table * 0.5, None), i["rows"])

    program = program_from(call, Small().eval())
    emit(program, tmp_path, kernels=CONTEXT)
    graph = kernels_graph(tmp_path)
    assert [p["activation"] for p in products(graph)] == [b"relu2", b"tanh"]
    linears = [node for node in graph.node if node.op_type == "Linear"]
    assert [len(node.input) for node in linears] == [5, 2] and list(linears[0].input[2:4]) == ["", ""]
    ids = torch.tensor([3, 1, 4, 15, 9, 2])
    expected = program.evaluate(packed_inputs(program, [ids]))[0]
    logits = run_tokens(tmp_path, ids, torch.arange(len(ids)), KERNELS_FILE)
    torch.testing.assert_close(
        logits, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max())
    )  # sums of 45 floats


def test_the_same_program_gives_the_same_bytes(tmp_path: Path) -> None:
    program = lowered(
        tiny_family("gemma2"), PassContext(recipe=PassOptions(weights=WeightFormats(default=INT4, embeddings=INT4)))
    )
    files = []
    for folder in (tmp_path / "a", tmp_path / "b"):
        folder.mkdir()
        io = emit(program, folder, kernels=CONTEXT)
        files.append([(folder / KERNELS_FILE).read_bytes(), (folder / "weights/weights-00000.bin").read_bytes()])
    assert files[0] == files[1]
    assert io.contrib is None and io.variants == ("standard", "kernels")
    model = onnx.load(tmp_path / "a" / KERNELS_FILE, load_external_data=False)
    versions = {entry.domain: entry.version for entry in model.opset_import}
    assert versions == {"": OPSET, "com.microsoft": 1, "enginewright": 1}
    assert sum(len(t.raw_data) for t in model.graph.initializer) < 1000  # weights are outside


def test_without_attention_that_is_taken_there_is_a_kernels_file_all_the_same(tmp_path: Path) -> None:
    model = tiny_family("llama", head_dim=12)
    io = emit(lowered(model), tmp_path, contrib=CONTEXT, kernels=CONTEXT)
    assert io.variants == ("standard", "kernels")
    assert io.kernels is not None and len(io.kernels.standard) == 2
    slot_logits, expected = run_plan(LinearSession(tmp_path, io.of_variant("kernels"))), reference_logits(model)
    for slot, logits in slot_logits.items():
        atol = tolerance_of(io.summed_products) * float(np.abs(expected[slot]).max())
        np.testing.assert_allclose(logits, expected[slot], rtol=0, atol=atol)
