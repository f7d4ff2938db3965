from __future__ import annotations

from collections.abc import Callable

import pytest
from transformers import PreTrainedModel

from enginewright.optimizer.capture import capture
from enginewright.optimizer.pipeline.pipeline import default_pipeline
from enginewright.optimizer.report.diffs import _MOST_WIDTH, _PASS_LINES, _SECTION_LINES, DiffRecorder, ProgramDiff
from enginewright.passes.framework.base import PassRecord
from enginewright.passes.framework.manager import PassManager
from enginewright.passes.framework.print_program import print_program
from enginewright.passes.ir.program import Program


def diffs_of(model: PreTrainedModel) -> dict[str, ProgramDiff]:
    """The last diff of each pass that changed something."""
    program = capture(model).program
    recorder = DiffRecorder()
    recorder.start(print_program(program, node_names=True))
    number = 0

    def after(changed: Program, record: PassRecord) -> None:
        nonlocal number
        recorder.changed(number, record.name, print_program(changed, node_names=True))
        number += 1

    PassManager(default_pipeline(), after_pass=after).run(program)
    assert [d.number for d in recorder.diffs] == sorted({d.number for d in recorder.diffs})
    return {d.name: d for d in recorder.diffs}


@pytest.mark.matrix
@pytest.mark.parametrize(("hidden", "layers"), [(64, 2), (96, 4)])
def test_what_all_layers_share_is_said_once(
    hidden: int, layers: int, tiny_model: Callable[..., PreTrainedModel]
) -> None:
    diffs = diffs_of(tiny_model("Llama", hidden_size=hidden, num_hidden_layers=layers))
    (section,) = diffs["fuse_qkv"].sections
    assert (section.layer, section.same_in, section.omitted) == (0, tuple(range(1, layers)), 0)
    removed = [line for line in section.lines if line.startswith("-%") and " = ew.linear(" in line]
    added = [line for line in section.lines if line.startswith("+%") and " = ew.linear(" in line]
    assert (len(removed), len(added)) == (3, 1)
    assert "q_proj+k_proj+v_proj.weight" in added[0]
    # All layers are counted, if not shown.
    shown = sum(line.startswith("+") for line in section.lines)
    assert diffs["fuse_qkv"].added == shown * layers
    # lower_attention's calls differ between layers by the layer's number alone; the last layer's sampled rows apart.
    by_layer = {s.layer: s.same_in for s in diffs["lower_attention"].sections}
    assert by_layer[0] == tuple(range(1, layers - 1))
    assert None in by_layer  # the new inputs


def test_a_layer_that_differs_is_told_apart() -> None:
    before = "".join(f"%a_{i} = op(%x_{i}) : f32[T]  # m.layers.{i}.mlp\n" for i in range(4))
    after = before.replace("op(", "new(").replace("new(%x_2)", "other(%x_2)")
    recorder = DiffRecorder()
    recorder.start(before)
    recorder.changed(7, "change", after)
    (diff,) = recorder.diffs
    assert (diff.number, diff.name, diff.added, diff.removed) == (7, "change", 4, 4)
    assert [(s.layer, s.same_in) for s in diff.sections] == [(0, (1, 3)), (2, ())]
    assert diff.sections[1].lines[1:] == (
        "-%a_2 = op(%x_2) : f32[T]  # m.layers.2.mlp",
        "+%a_2 = other(%x_2) : f32[T]  # m.layers.2.mlp",
    )


def test_no_change_leaves_no_diff() -> None:
    recorder = DiffRecorder()
    recorder.start("%a = op(%x) : f32[T]\n")
    recorder.changed(0, "nothing", "%a = op(%x) : f32[T]\n")
    assert recorder.diffs == []


@pytest.mark.parametrize("layers", [1, 9])
def test_long_diffs_are_cut_and_say_so(layers: int) -> None:
    def text(op: str) -> str:
        lines = (f"%a_{i}_{j} = {op}({'x' * (i * 500)}) # m.{i}\n" for i in range(layers) for j in range(900))
        return "".join(line.replace(" # ", "  # ").replace("m.", "m.layers.") for line in lines)

    recorder = DiffRecorder()
    recorder.start(text("old"))
    recorder.changed(0, "rename", text("new"))
    sections = recorder.diffs[0].sections
    assert len(sections) == layers
    assert sum(len(s.lines) for s in sections) == min(_PASS_LINES, layers * _SECTION_LINES)
    assert all(len(s.lines) + s.omitted == 1 + 2 * 900 for s in sections)
    assert max(len(line) for s in sections for line in s.lines) <= _MOST_WIDTH
