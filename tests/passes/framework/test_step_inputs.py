from __future__ import annotations

import pytest
import torch

from enginewright.optimizer.pipeline.pipeline import default_pipeline
from enginewright.passes.framework.manager import PassManager
from enginewright.passes.framework.step_inputs import packed_inputs
from tests.passes.captured import captured, eager_logits


@pytest.mark.parametrize("lengths", [(5,), (40, 7, 65)])
def test_both_forms_give_what_transformers_gives_for_each_sequence(lengths: tuple[int, ...]) -> None:
    program = captured("Llama")
    sequences = [torch.randint(0, 250, (n,), generator=torch.Generator().manual_seed(n)) for n in lengths]
    inputs = packed_inputs(program, sequences)
    expected = eager_logits("Llama", inputs)
    assert set(inputs) == set(program.inputs)
    # Two orders of float32 sums over some hundred terms; logits are about 1.
    torch.testing.assert_close(program.evaluate(inputs)[0], expected, rtol=1e-5, atol=1e-5)

    PassManager(default_pipeline()).run(program)
    inputs = packed_inputs(program, sequences)
    assert set(inputs) == set(program.inputs)
    assert len(inputs["block_table:full"]) == len(lengths)
    torch.testing.assert_close(program.evaluate(inputs)[0], expected, rtol=1e-5, atol=1e-5)


def test_sliding_windows_have_a_group_of_their_own() -> None:
    program = captured("Gemma2")
    sequences = [torch.arange(70), torch.arange(3)]
    expected = program.evaluate(packed_inputs(program, sequences))[0]
    PassManager(default_pipeline()).run(program)
    assert len(program.cache_groups) == 2
    torch.testing.assert_close(program.evaluate(packed_inputs(program, sequences))[0], expected, rtol=1e-5, atol=1e-5)
