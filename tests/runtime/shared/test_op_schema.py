"""An op is declared once: its checks, costs, lowering, C++ table and rows of docs follow from the declaration."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from enginewright.passes.lowering.lower_program import lower_program
from enginewright.passes.ops import REFERENCES
from enginewright.plugins.native.ops.write_declarations import declarations, load_ops
from enginewright.runtime.shared import op_schema
from enginewright.runtime.shared.errors import BundleError
from enginewright.runtime.shared.lowered_program import Affine, LoweredProgram, Operand, Step
from enginewright.runtime.shared.op_schema import OPS, Attribute, Input, OpSchema, problem_of_step
from enginewright.runtime.shared.step_costs import StepSizes, step_costs
from tests.passes.small_programs import program_from

DOCS = Path(__file__).parents[3] / "docs" / "inside"
HEAD = ["| op | inputs | attributes | outputs |", "| --- | --- | --- | --- |"]
HEAD_OF_IR = ["| op | shapes and meaning |", "| --- | --- |"]


def tables(head: list[str], text: str) -> list[tuple[int, int]]:
    """The places of the rows of each table with these heads."""
    starts = [m.end() for m in re.finditer(re.escape("\n".join(head) + "\n"), text)]
    return [(start, text.index("\n\n", start)) for start in starts]


def with_rows(head: list[str], text: str, rows: list[list[str]]) -> str:
    """The text with the rows of its tables in place of theirs."""
    places = tables(head, text)
    assert len(places) == len(rows)
    for (start, end), new in reversed(list(zip(places, rows, strict=True))):
        text = text[:start] + "\n".join(new) + text[end:]
    return text


def lowered_rows(ops: Mapping[str, OpSchema] = OPS) -> list[list[str]]:
    """The rows of lowered-ops.md, by table."""
    names = ("plain", "narrow", "experts", "recurrent", "fused", "ranks")
    return [[op.row(name) for name, op in ops.items() if op.table == table] for table in names]


def ir_row(name: str, reference: Callable[..., Any]) -> str:
    """A reference's row of ops.md: its arguments, and the first paragraph of its docstring."""
    parameters = inspect.signature(reference).parameters.values()
    arguments = ", ".join(p.name + ("?" if "None" in str(p.annotation) else "") for p in parameters)
    meaning = " ".join((inspect.getdoc(reference) or "").split("\n\n")[0].split()).replace("``", "`")
    meaning = re.sub(r"(?<=[\w\]])\*(?=\w)", r"\\*", meaning)
    return f"| `{name}({arguments})` | {meaning} |"


@pytest.mark.parametrize(
    ("page", "head", "rows"),
    [
        ("lowered-ops.md", HEAD, lowered_rows()),
        ("ops.md", HEAD_OF_IR, [[ir_row(name, reference) for name, reference in REFERENCES.items()]]),
    ],
    ids=["lowered-ops", "ops"],
)
def test_docs_have_the_declared_rows(
    page: str, head: list[str], rows: list[list[str]], request: pytest.FixtureRequest
) -> None:
    path = DOCS / page
    text = path.read_text(encoding="utf-8")
    if request.config.getoption("--update-golden"):
        path.write_text(with_rows(head, text, rows), encoding="utf-8")
        return
    assert with_rows(head, text, rows) == text, "run this test with --update-golden"


def step(op: str, inputs: int, outputs: int = 1, **attrs: int | float | bool | str) -> Step:
    operand = Operand(
        kind="buffer", name="b", dtype="f32", shape=(Affine(t=1), Affine(8)), strides=(Affine(8), Affine(1))
    )
    return Step(op=op, inputs=(operand,) * inputs, outputs=(operand,) * outputs, attrs=attrs)


NORM = {"eps": 1e-5, "has_weight": False}


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        (step("rms_norm", 1, **NORM), None),
        (step("rms_norm", 2, **NORM), "it has 2 inputs and 1 outputs, and takes 1 and 1"),
        (step("rms_norm", 1, **NORM | {"has_weight": True}), "it has 1 inputs and 1 outputs, and takes 2 and 1"),
        (step("rms_norm", 1, 2, **NORM), "it has 1 inputs and 2 outputs, and takes 1 and 1"),
        (step("rms_norm", 1, eps=1e-5), "attribute has_weight is missing"),
        (step("rms_norm", 1, **NORM | {"eps": True}), "attribute eps is not a number"),
        (step("rms_norm", 1, **NORM | {"has_weight": 1}), "attribute has_weight is not a boolean"),
        (step("rms_norm", 1, **NORM, has_bias=True), "it has no attribute has_bias"),
        (step("top_k", 1, 2, k=1.0), "attribute k is not an integer"),
        (step("reduce", 1, kind=1), "attribute kind is not a string"),
        (step("reduce", 1, kind="min"), "attribute kind is 'min', and none of sum, mean, max"),
        (step("linear", 2), None),
        (step("linear", 5, has_residual=True), None),
        (step("linear", 1), "it has 1 inputs and 1 outputs, and takes 2 to 4 and 1"),
        (step("send", 3, 3, first=1, ranks=1), None),
        (step("send", 3, 2, first=1, ranks=1), "it has 3 inputs and 2 outputs"),
        (step("of_another_target", 9, flavour="x"), None),
    ],
)
def test_a_step_is_as_declared(wrong: Step, problem: str | None) -> None:
    assert problem_of_step(wrong) == problem
    program = LoweredProgram(cache_groups=(), weights=(), buffers=(), steps=(step("copy", 1), wrong), outputs={})
    if problem is None:
        assert LoweredProgram.from_json(program.to_json()) == program
        return
    with pytest.raises(BundleError) as caught:
        LoweredProgram.from_json(program.to_json(), source="a/program.json")
    assert f"a/program.json: steps.1 {wrong.op}: {problem}" in str(caught.value)


def test_cpp_has_the_same_table() -> None:
    assert op_schema.__file__ is not None
    ops = load_ops(Path(op_schema.__file__))
    assert declarations(ops) == declarations(OPS)
    text = declarations(OPS)
    assert '{"rms_norm", kInputs_rms_norm, kAttributes_rms_norm, 1, false},' in text
    assert 'kInputs_rms_norm[] = {{"x", ""}, {"weight", "has_weight"}};' in text


def toy_blend(x: torch.Tensor, y: torch.Tensor | None, amount: float) -> torch.Tensor:
    """x [M, C], y [M, C] -> [M, C]: x + amount * y."""
    return x.clone() if y is None else x + amount * y


@pytest.fixture
def blend(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A toy op: its meaning, and its declaration."""
    library = torch.library.Library("ew", "FRAGMENT")
    library.define(torch.library.infer_schema(toy_blend, op_name="toy_blend", mutates_args=()))
    library.impl("toy_blend", toy_blend, "CompositeExplicitAutograd")
    torch.library.register_fake("ew::toy_blend", lambda x, y, amount: torch.empty_like(x), lib=library)
    declared = OpSchema(
        "plain",
        "all",
        (Input("x", "[M,C]"), Input("y", "[M,C]", "has_y")),
        ("[M,C]",),
        (Attribute("has_y", "flag"), Attribute("amount", "number")),
    )
    monkeypatch.setitem(OPS, "toy_blend", declared)  # type: ignore[arg-type]
    yield torch.ops.ew.toy_blend.default
    library._destroy()


@pytest.mark.parametrize("two", [False, True])
def test_a_toy_op_needs_its_meaning_and_its_declaration(blend: Any, two: bool) -> None:
    """It is lowered, checked, counted and documented, and C++ gets its row: no other file says anything of it."""

    def body(module: torch.nn.Module, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        x = torch.ops.ew.embedding(inputs["ids"], module.get_parameter("weight"))
        return torch.ops.ew.take_rows(blend(x, x if two else None, 0.5), inputs["rows"])

    lowered = lower_program(program_from(body, torch.nn.Linear(8, 40, bias=False))).program
    (blend_step,) = (s for s in lowered.steps if s.op == "toy_blend")
    assert (len(blend_step.inputs), dict(blend_step.attrs)) == (1 + two, {"has_y": two, "amount": 0.5})
    assert problem_of_step(blend_step) is None
    assert LoweredProgram.from_json(lowered.to_json()) == lowered
    costs = step_costs(lowered, StepSizes((3,), (3,)))[lowered.steps.index(blend_step)]
    size = blend_step.outputs[0].shape[-1].constant
    assert (costs.activations_read, costs.activations_written) == ((1 + two) * 3 * size * 4, 3 * size * 4)
    assert "| `toy_blend` | x [M,C], y [M,C]? | `has_y`, `amount` | [M,C] |" in lowered_rows()[0]
    assert '{"toy_blend", kInputs_toy_blend, kAttributes_toy_blend, 1, false},' in declarations(OPS)
