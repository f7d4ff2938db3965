from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from enginewright.optimizer.verify.packed_run import blocks_for, plan_steps, run_packed
from enginewright.plugins.cpu.serve.executor import CpuExecutor
from enginewright.plugins.onnx.serve.executor import OnnxExecutor
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.engine.llm import LLM
from enginewright.runtime.executors.target import Placement
from tests.plugins.steps import tiny_onnx


@pytest.mark.parametrize("context", [1, 2, 3, 5, 16, 31, 40, 47, 48, 512])
def test_a_plan_fits_the_context(context: int) -> None:
    plan = plan_steps(context)
    first, second = plan.lengths
    assert 1 <= second <= first <= context
    assert all(a or b for a, b in plan.steps)


def test_the_usual_plan_has_everything() -> None:
    plan = plan_steps(48)
    assert plan == plan_steps(1 << 20)
    assert plan.steps == ((29, 0), (11, 26), *([(1, 1)] * 8))
    assert plan.lengths == (48, 34)
    assert blocks_for(plan, 32) == 4
    for length, prompt in zip(plan.lengths, (40, 26), strict=True):
        assert length > 32  # both go on in a second block,
        assert prompt != length
    assert plan.steps[0][0] + plan.steps[1][0] > 32  # one within its prompt
    assert plan.steps[1][1] < 32  # and the other while it decodes


@pytest.mark.parametrize("context", [6, 512])
@pytest.mark.parametrize("seed", [0, 1])
def test_it_equals_the_engine(context: int, seed: int, tiny_bundle: Path) -> None:
    """Bit for bit: a row doesn't depend on the rest of the batch, on chunks, or on where its blocks lie."""
    bundle = Bundle.open(tiny_bundle)
    plan = plan_steps(context)
    groups = bundle.program("cpu").cache_groups
    executor = CpuExecutor(bundle, {g.name: blocks_for(plan, g.block_size) for g in groups}, Placement(threads=1))
    ids = np.random.default_rng(seed).integers(0, bundle.model.vocab_size, (2, max(plan.lengths)), dtype=np.int32)
    sequences = [row[:length] for row, length in zip(ids, plan.lengths, strict=True)]
    packed = run_packed(executor, sequences, plan, seed)
    executor.close()
    with LLM(tiny_bundle, threads=1, memory="16MiB") as llm:
        for logits, sequence in zip(packed, sequences, strict=True):
            np.testing.assert_array_equal(logits, llm.logits(sequence.tolist()))


@pytest.mark.parametrize("context", [3, tiny_onnx.CONTEXT])
def test_slots(context: int, tmp_path: Path) -> None:
    """An executor of one phase a step: whole requests in slots, the same one in each group."""
    plan = plan_steps(context)
    bundle = Bundle.open(tiny_onnx.write_bundle(tmp_path / "tiny.bundle"))
    capacity = max(plan.lengths) + 1
    assert blocks_for(plan, capacity) == 2
    executor = OnnxExecutor(bundle, {g.name: 2 for g in tiny_onnx.GROUPS}, capacity, threads=1)
    sequences = [np.arange(length, dtype=np.int32) * 7 % tiny_onnx.V for length in plan.lengths]
    packed = run_packed(executor, sequences, plan, seed=0)
    executor.close()
    for logits, sequence in zip(packed, sequences, strict=True):
        # Rounding of logits up to 35; measured 3e-5.
        np.testing.assert_allclose(logits, tiny_onnx.reference(sequence.tolist()), atol=1e-4)
