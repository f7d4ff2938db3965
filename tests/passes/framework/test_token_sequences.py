from __future__ import annotations

import pytest
import torch

from enginewright.optimizer.pipeline.pipeline import default_pipeline
from enginewright.passes.framework import token_sequences
from enginewright.passes.framework.manager import PassManager
from enginewright.passes.framework.token_sequences import beginnings, mean_kl, packed_inputs, spread
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


@pytest.mark.matrix
def test_sliding_windows_have_a_group_of_their_own() -> None:
    program = captured("Gemma2")
    sequences = [torch.arange(70), torch.arange(3)]
    expected = program.evaluate(packed_inputs(program, sequences))[0]
    PassManager(default_pipeline()).run(program)
    assert len(program.cache_groups) == 2
    torch.testing.assert_close(program.evaluate(packed_inputs(program, sequences))[0], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("many", "count", "taken"), [(5, 5, [0, 1, 2, 3, 4]), (5, 2, [0, 2]), (9, 4, [0, 2, 4, 6])])
def test_spread(many: int, count: int, taken: list[int]) -> None:
    assert spread(range(many), count) == taken


@pytest.mark.parametrize(
    ("sequences", "most", "length", "sizes"),
    [(6, 64, 16, [16] * 4), (2, 64, 16, [32, 32]), (6, 10, 16, [10]), (1, 500, 16, [100]), (6, 64, 40, [64])],
)
def test_beginnings(sequences: int, most: int, length: int, sizes: list[int]) -> None:
    sequences_of = [torch.arange(100) + 1000 * i for i in range(sequences)]
    tokens = beginnings(sequences_of, most, length)
    assert [len(f) for f in tokens] == sizes
    assert all(
        torch.equal(f, whole[: len(f)]) for f, whole in zip(tokens, spread(sequences_of, len(tokens)), strict=True)
    )


@pytest.mark.parametrize(("rows", "vocabulary", "together"), [(3, 7, 1 << 22), (11, 50, 100)])
def test_the_mean_over_rows(rows: int, vocabulary: int, together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_sequences, "_ELEMENTS", together)  # two rows at a time
    generator = torch.Generator().manual_seed(rows)
    a, b = (torch.randn(rows, vocabulary, generator=generator) for _ in range(2))
    p, q = a.double().softmax(-1), b.double().softmax(-1)
    assert mean_kl(a, b) == pytest.approx(float((p * (p / q).log()).sum(-1).mean()), rel=1e-5)
    assert mean_kl(a, a) == 0
