"""Torch-TensorRT receives the program: of any size, made of ATen's ops, and equal to it bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from enginewright.optimizer.pipeline.pipeline import default_pipeline
from enginewright.passes.framework.base import PassContext
from enginewright.passes.framework.manager import PassManager
from enginewright.passes.ir.program import Program
from enginewright.passes.ops.library import REFERENCES
from enginewright.plugins.torch_tensorrt.compile.exported_step import KEPT, ExportedStep, exported_step, step_example
from tests.passes.captured import captured


def evaluated(program: Program, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The logits, and each cache after the write to it."""
    values: dict[str, torch.Tensor] = {}

    def keep(node: torch.fx.Node, value: Any) -> None:
        if node.target is torch.ops.ew.kv_write.default:
            values.update(zip((str(cache.target) for cache in node.args[:2]), value, strict=True))

    (logits,) = program.evaluate(inputs, keep)
    return {"logits": logits, **values}


ATTENTION = {"ew.kv_write.default", "ew.paged_attention.default"}
EXPERTS = {"ew.combine_experts.default", "ew.grouped_linear.default", "ew.route_experts.default"}


@pytest.fixture(scope="module", params=["Mistral", pytest.param("Mixtral", marks=pytest.mark.matrix)])
def program(request: pytest.FixtureRequest) -> Program:
    """Lowers one with a window, and one with experts."""
    program = captured(request.param)
    PassManager(default_pipeline(), PassContext()).run(program)
    return program


@pytest.fixture(scope="module")
def step(program: Program) -> ExportedStep:
    return exported_step(program)


def test_it_is_the_program_at_any_size(program: Program, step: ExportedStep) -> None:
    assert step.inputs == tuple(program.inputs)
    caches = [name for name in program.inputs if "_cache:" in name]
    assert step.results == ("logits", *caches) and len(caches) == 4
    routed = any(name.endswith("gate.weight") for name in program.weights)
    assert {str(op) for op in step.kept()} == ATTENTION | (EXPERTS if routed else set())
    for lengths in ((3, 7, 11), (2, 70)):
        arguments = step_example(program, lengths)
        expected = evaluated(program, dict(zip(step.inputs, arguments, strict=True)))
        with torch.no_grad():
            results = dict(zip(step.results, step.exported.module()(*arguments), strict=True))
        assert results["logits"].shape == (sum(lengths), 256)
        assert results.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(results[name], value, rtol=0, atol=0)  # the same operations in the same order


def test_shapes_of_one_size(step: ExportedStep) -> None:
    shapes = dict(zip(step.inputs, step.shapes(9), strict=True))
    assert shapes["ids"] == shapes["rows"] == (9,)
    assert shapes["q_start"] == (10,)
    (table,) = [shape for name, shape in shapes.items() if name.startswith("block_table")]
    assert table == (9, 9)
    assert shapes["k_cache:0"] == (9, *step.example[step.inputs.index("k_cache:0")].shape[1:])


def test_what_stays_ours_is_among_our_ops() -> None:
    assert set(KEPT) <= set(REFERENCES)
