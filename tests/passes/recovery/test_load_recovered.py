"""LoadRecovered: tensors in the places of weights, with their provenance, and nothing where nothing was recovered."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

from enginewright.passes.framework.base import PassContext
from enginewright.passes.ir.recovered import Recovered, RecoveredWeights, trainable_weights
from enginewright.passes.ir.weights import COMPUTED, WeightExpr
from enginewright.passes.recovery.load_recovered import LoadRecovered
from enginewright.runtime.shared.errors import PassError
from tests.passes.captured import normalized, packed


class Doubled(RecoveredWeights):
    """Every weight times a factor, kept in memory."""

    def __init__(self, factor: float) -> None:
        self.factor = factor
        self.asked: list[str] = []

    def replacing(self, weights: Mapping[str, WeightExpr]) -> dict[str, Recovered]:
        self.asked = list(weights)
        values = {name: (expr.evaluate() * self.factor).contiguous() for name, expr in weights.items()}
        return {n: Recovered(e, n, f"{self.factor}", lambda v=values[n]: v) for n, e in weights.items()}


@pytest.mark.parametrize(("family", "lengths"), [("Llama", (5, 3)), ("GPT2", (7,)), ("Gemma2", (11, 2))])
def test_equal_tensors_leave_the_logits_as_they_were(family: str, lengths: tuple[int, ...]) -> None:
    program, _ = normalized(family)
    inputs = packed(lengths)
    before = program.evaluate(inputs)[0]
    parts = {name: program.weights[name].parts() for name in program.weights}
    source = Doubled(1.0)
    record = LoadRecovered().run(program, PassContext(recovered=source))
    assert record.matched == len(source.asked) == len(trainable_weights(program.weights))
    # The same numbers; of weights that were transposed on the way sums may come in another order.
    assert torch.allclose(program.evaluate(inputs)[0], before, rtol=0, atol=1e-5)
    replaced = {n: program.weights[n] for n in program.weights if isinstance(program.weights[n], Recovered)}
    for name, expr in replaced.items():
        assert expr.parts() == parts[name.removesuffix(".recovered")]
    names = [program.weights[n] for n in program.weights if n not in replaced]
    assert all(p.source.startswith(COMPUTED) for expr in names for p in expr.parts())


def test_a_tied_table_is_one_tensor_and_moves_both_its_uses() -> None:
    program, _ = normalized("Llama", tie_word_embeddings=True)
    untied, _ = normalized("Llama")
    assert len(trainable_weights(program.weights)) == len(trainable_weights(untied.weights)) - 1
    inputs = packed((6,))
    before = program.evaluate(inputs)[0]
    LoadRecovered().run(program, PassContext(recovered=Doubled(2.0)))
    assert not torch.allclose(program.evaluate(inputs)[0], before)


def test_nothing_is_done_without_a_recovery() -> None:
    program, _ = normalized("Llama")
    names = list(program.weights)
    one = LoadRecovered()
    assert not one.wanted(PassContext())
    assert one.wanted(PassContext(recovered=Doubled(1.0)))
    assert one.run(program, PassContext()).matched == 0
    assert list(program.weights) == names


def test_a_tensor_of_another_shape_is_refused() -> None:
    program, _ = normalized("Llama")
    name = next(iter(trainable_weights(program.weights)))
    wrong = Recovered(program.weights[name], name, "", lambda: torch.zeros(3))
    with pytest.raises(PassError, match=r"recovered .*\(3,\)"):
        wrong.evaluate()
