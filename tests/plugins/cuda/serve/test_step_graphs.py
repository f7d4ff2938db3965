"""Graphs of steps: what they depend on, and steps whose graph was dropped or can't be made."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from enginewright.plugins.cuda.serve import steps as steps_module
from tests.passes.small_programs import Steps, random_sequences
from tests.plugins.cuda.serve import cuda_cases as cases
from tests.plugins.cuda.serve.fake_graphs import FakeGraph, RecordingLauncher
from tests.triton_interpreter import interpreter as interpreter


def replayed(case: str) -> tuple[int, float]:
    """Graphs that ran, and the largest difference from steps without, with all memory poisoned between steps."""
    program, context = cases.program_of(case)
    lowering = cases.lowered(program, context, "f32")
    names = [group.name for group in lowering.program.cache_groups]
    plain, graphs = cases.steps_of(lowering, 256), cases.steps_of(lowering, 256, FakeGraph, RecordingLauncher())
    ours, theirs = Steps(names, cases.BLOCKS), Steps(names, cases.BLOCKS)
    a, b = random_sequences((12, 9), 250)
    chunks = [{"a": a[:6], "b": b[:3]}, *({"a": a[i : i + 1], "b": b[i - 3 : i - 2]} for i in range(6, 12))]
    worst = 0.0
    for chunk in chunks:
        want = plain.start(cases.step_input(ours.step(chunk))).result().logits
        got = graphs.start(cases.step_input(theirs.step(chunk))).result().logits
        assert want is not None
        assert got is not None
        worst = max(worst, float(np.abs(want - got).max()))
        cases.poison(graphs._program.arena)
        graphs._inputs.host[:] = 0x7F7F7F7F
    return graphs.graphs.launches, worst


@pytest.mark.matrix
@pytest.mark.parametrize("case", ["Llama", "Mixtral", "GPT2", "DeepseekV3"])
def test_a_graph_depends_on_nothing_that_the_host_held(case: str, interpreter: ProcessPoolExecutor) -> None:
    launches, worst = interpreter.submit(replayed, case).result()
    assert launches == 4  # the first two of the six decode steps are run call by call
    assert worst == 0.0


def dropped_graphs(full: bool) -> tuple[int, dict[str, int], str]:
    """Graphs that ran, counts of late work, and why graphs aren't made, where one graph alone is kept. In ``full``,
    there is no memory for the first graph."""
    program, context = cases.program_of("Llama")
    lacking = [full]

    def capture(work: Callable[[], None]) -> FakeGraph:
        if lacking.pop() if lacking else False:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")
        return FakeGraph(work)

    with patch.object(steps_module, "MOST_GRAPHS", 1):
        lowering = cases.lowered(program, context, "f32")
        steps, stepper = cases.steps_of(lowering, 256, capture, RecordingLauncher()), Steps(["full"], cases.BLOCKS)
        for number in range(9):
            chunks = {name: [3 + number] for name in ("ab" if number // 3 == 1 else "a")}
            steps.start(cases.step_input(stepper.step(chunks))).result()
    return steps.graphs.launches, dict(steps.late), steps.graphs.not_captured


@pytest.mark.matrix
@pytest.mark.parametrize("full", [False, True])
def test_a_dropped_graph_is_captured_at_its_next_step(full: bool, interpreter: ProcessPoolExecutor) -> None:
    launches, late, reason = interpreter.submit(dropped_graphs, full).result()
    assert (launches, late["late_graphs"]) == ((1, 1) if full else (4, 3))
    assert late.get("late_memory", 0) == full == reason.startswith("memory: the GPU has none left")


def without_graphs() -> tuple[list[str], str, int, float]:
    """Warnings, the reason, graphs that ran, and the largest difference, where each capture fails."""
    program, context = cases.program_of("Llama")
    lowering = cases.lowered(program, context, "f32")

    def fail(work: Callable[[], None]) -> Any:
        works.append(work)
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nSearch for it.")

    works: list[Callable[[], None]] = []
    plain, failing = cases.steps_of(lowering, 256), cases.steps_of(lowering, 256, fail)
    ours, theirs, worst = Steps(["full"], cases.BLOCKS), Steps(["full"], cases.BLOCKS), 0.0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(6):
            chunks = {name: [3 + number] for name in ("ab" if number < 3 else "a")}
            expected = plain.start(cases.step_input(theirs.step(chunks))).result().logits
            logits = failing.start(cases.step_input(ours.step(chunks))).result().logits
            assert expected is not None
            assert logits is not None
            worst = max(worst, float(np.abs(expected - logits).max()))
    assert len(works) == 1
    ours_alone = [str(w.message) for w in caught if "target cuda" in str(w.message)]
    return ours_alone, failing.graphs.not_captured, failing.graphs.launches, worst


@pytest.mark.matrix
def test_a_capture_that_fails_is_said_once_and_steps_go_on(interpreter: ProcessPoolExecutor) -> None:
    messages, reason, launches, worst = interpreter.submit(without_graphs).result()
    assert reason == "CUDA error: operation not permitted when stream is capturing"
    (only,) = messages
    assert reason in only
    assert "kernel by kernel" in only
    assert (launches, worst) == (0, 0.0)
