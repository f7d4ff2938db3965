from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import sympy
import torch

from enginewright.optimizer.verify.random_tokens import tolerance_of
from enginewright.passes.ir.weights import Source
from enginewright.runtime.shared.errors import UnsupportedModelError
from tests.acceptance.tiny_configs import tiny_family
from tests.families import working_families
from tests.plugins.graphs.linear_session import (
    LinearSession,
    emit,
    lowered,
    lowered_family,
    reference_logits,
    run_plan,
)

aten = torch.ops.aten

# What each has that the others don't: rotations of a part of the heads and biases; a softcap, windows and a tied
# table; sinks, experts with limits and biases; value heads of a size of their own and interleaved rotations.
FAMILIES = ("gpt_neox", "gemma2", "gpt_oss", "deepseek_v3")


def check_family(family: str, folder: Path) -> None:
    """Both requests' logits are transformers' within what ``optimize verify`` allows for rounding."""
    model = tiny_family(family)
    io = emit(lowered_family(family), folder)
    expected, largest = reference_logits(model), 0.0
    for slot, logits in run_plan(LinearSession(folder, io)).items():
        largest = max(largest, float(np.abs(expected[slot]).max()))
        np.testing.assert_allclose(logits, expected[slot], rtol=0, atol=tolerance_of(io.summed_products) * largest)


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family: str, tmp_path: Path) -> None:
    check_family(family, tmp_path)


@pytest.mark.matrix
@pytest.mark.parametrize("family", working_families(recurrent=False))
def test_more_families(family: str, tmp_path: Path) -> None:
    check_family(family, tmp_path)


def test_the_same_program_gives_the_same_bytes_and_only_standard_operators(tmp_path: Path) -> None:
    program = lowered(tiny_family("llama"))
    files = []
    for folder in (tmp_path / "a", tmp_path / "b"):
        folder.mkdir()
        io = emit(program, folder)
        files.append([(folder / "model.onnx").read_bytes(), (folder / "weights/weights-00000.bin").read_bytes()])
    assert files[0] == files[1]
    model = onnx.load(tmp_path / "a" / "model.onnx", load_external_data=False)
    assert {node.domain for node in model.graph.node} == {""} and [o.version for o in model.opset_import] == [io.opset]
    kinds = [node.op_type for node in model.graph.node]
    assert (kinds.count("Attention"), kinds.count("TensorScatter"), kinds.count("RMSNormalization")) == (2, 4, 5)
    assert [entry.name for entry in model.graph.input] == [
        *("input_ids", "position_ids", "write_index", "rows", "mask"),
        *("past_key_0", "past_value_0", "past_key_1", "past_value_1"),
    ]
    held = sum(len(t.raw_data) for t in model.graph.initializer)
    assert held < 1000  # shapes and numbers; weights are outside


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_the_shapes_in_the_file_are_those_that_come_out(family: str, tmp_path: Path) -> None:
    """They are those of every tensor that the graph computes: sizes that are numbers, and names by what the inputs
    have."""
    emit(lowered_family(family), tmp_path)
    model = onnx.load(tmp_path / "model.onnx", load_external_data=False)
    declared = {value.name: value for value in model.graph.value_info}
    computed = {name for node in model.graph.node for name in node.output if name}
    results = {value.name for value in model.graph.output}
    assert declared.keys() == computed - results
    assert list(declared) == sorted(declared)
    model.graph.output.extend(declared.values())
    onnx.save(model, tmp_path / "all.onnx")
    sizes = {"B": 2, "S": 3, "C": 16, "N": 6, "R": 4}
    feeds: dict[str, np.ndarray] = {"write_index": np.zeros(2, np.int64), "rows": np.arange(4)}
    feeds |= {name: np.tile(np.arange(3), (2, 1)) for name in ("input_ids", "position_ids")}
    for entry in model.graph.input:
        shape = [d.dim_value or sizes[d.dim_param] for d in entry.type.tensor_type.shape.dim]
        if entry.name.startswith("mask"):
            feeds[entry.name] = np.tril(np.ones(shape, bool))
        elif entry.name.startswith("past_"):
            feeds[entry.name] = np.zeros(shape, np.float32)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(tmp_path / "all.onnx", options, providers=["CPUExecutionProvider"])
    named = 0
    for name, value in zip(declared, session.run(list(declared), feeds), strict=True):
        dims = declared[name].type.tensor_type.shape.dim
        assert len(dims) == value.ndim, name
        for dim, size in zip(dims, value.shape, strict=True):
            if dim.HasField("dim_value"):
                assert dim.dim_value == size, name
            elif dim.dim_param:
                named += 1
                assert int(sympy.sympify(dim.dim_param, dict(sizes))) == size, (name, dim.dim_param)
    free = sum(not (d.dim_value or d.dim_param) for v in declared.values() for d in v.type.tensor_type.shape.dim)
    assert named > 50 and free < named


def test_what_no_operator_expresses_is_refused_by_name(tmp_path: Path) -> None:
    program = lowered(tiny_family("llama"))
    logits = program.logits
    with program.inserting_before(program.output):
        summed = program.call(aten.cumsum.default, logits, -1, where=("lm_head",))
    program.output.args = ((summed,),)
    with pytest.raises(UnsupportedModelError, match=r"aten.cumsum at lm_head: standard ONNX operators"):
        emit(program, tmp_path)
    assert not (tmp_path / "model.onnx").exists()


def test_each_weight_is_read_once(tmp_path: Path) -> None:
    program = lowered(tiny_family("llama"))
    read: list[str] = []
    names = [name for name in program.weights if isinstance(program.weights[name], Source)]
    for name in names:
        source = program.weights[name]
        assert isinstance(source, Source)

        def noted(name: str = name, source: Source = source) -> torch.Tensor:
            read.append(name)
            return source.read()

        program.weights.change(name, Source(name, source.source_shape, source.source_dtype, noted))
    emit(program, tmp_path)
    assert sorted(read) == sorted(names)
