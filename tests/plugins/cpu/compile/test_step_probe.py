from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from enginewright.optimizer.plan.ranks import alone
from enginewright.plugins.cpu.compile import step_probe
from enginewright.plugins.cpu.compile.step_probe import StepProbe, _first_of_each
from enginewright.plugins.steps.planning import CountedSteps
from enginewright.runtime.ranks.partition import Partition
from enginewright.runtime.ranks.rank_programs import partition
from enginewright.runtime.shared.errors import CapacityError
from enginewright.runtime.shared.lowered_program import LoweredProgram
from enginewright.runtime.shared.step_costs import StepSizes

DECODE, PROMPT = StepSizes((1,) * 3, (70,) * 3), StepSizes((20,), (50,))


@pytest.fixture(autouse=True)
def _one_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_probe, "_SECONDS", 0.0)


def test_every_kind_is_timed(tiny_steps: CountedSteps) -> None:
    probe = StepProbe(tiny_steps, [DECODE, PROMPT], threads=1)
    for sizes in (DECODE, PROMPT):
        times = probe.seconds(sizes)
        assert set(times.kinds) == {kind.key for kind in tiny_steps.kinds}
        assert all(0 <= seconds < 10 for seconds in times.kinds.values()) and times.around >= 0
        assert sum(times.kinds.values()) > 0


@pytest.mark.parametrize("rank", [0, 1])
def test_a_stage_without_logits_is_timed(rank: int, tiny_program: LoweredProgram) -> None:
    """The last stage has rank 0 and the logits; the first one has the table that ids are looked up in."""
    steps = CountedSteps(alone(partition(tiny_program, Partition(pipeline=2))[rank]))
    assert ("logits" in steps.program.outputs) is (rank == 0)
    probe = StepProbe(steps, [DECODE, PROMPT], threads=1)
    assert {kind.key for kind in steps.kinds} <= set(probe.seconds(PROMPT).kinds)


def test_as_many_layers_as_memory_holds(tiny_steps: CountedSteps, monkeypatch: pytest.MonkeyPatch) -> None:
    uses = {use.name: use for use in tiny_steps.program.weights}
    assert len(_first_of_each(tiny_steps, uses)) == len(tiny_steps.keys)
    monkeypatch.setattr(step_probe, "MOST_BYTES", 1)
    probed = _first_of_each(tiny_steps, uses)
    assert [key for _, key in probed] == [kind.key for kind in tiny_steps.kinds]  # one of each, in the program's order
    probe = StepProbe(tiny_steps, [DECODE], threads=1)  # whose weights lie in the same memory
    assert set(probe.seconds(DECODE).kinds) == {kind.key for kind in tiny_steps.kinds}


def test_no_place_for_made_up_weights(
    tiny_steps: CountedSteps, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    with pytest.raises(CapacityError, match=r"no temporary file of .* bytes to measure kernels with") as error:
        StepProbe(tiny_steps, [DECODE], threads=1)
    assert "TMPDIR" in str(error.value.hint)


def test_products_of_experts_are_left_out(tiny_program: LoweredProgram) -> None:
    steps = tuple(s.model_copy(update={"op": "grouped_linear"}) if s.op == "linear" else s for s in tiny_program.steps)
    counted = CountedSteps(tiny_program.model_copy(update={"steps": steps}))
    ops = {step.op for step, _ in _first_of_each(counted, {use.name: use for use in tiny_program.weights})}
    assert "grouped_linear" not in ops and "paged_attention" in ops
