"""Rotated values: floats stay what they were, the weights are other ones, and what can't be rotated is said."""

from __future__ import annotations

from itertools import takewhile

import pytest
import torch

from enginewright.optimizer.pipeline.pipeline import default_pipeline
from enginewright.passes.formats.weight_format import WeightFormat
from enginewright.passes.framework.base import PassContext, PassRecord
from enginewright.passes.framework.manager import PassManager
from enginewright.passes.framework.pass_options import PassOptions
from enginewright.passes.framework.token_sequences import packed_inputs
from enginewright.passes.framework.weight_formats import WeightFormats
from enginewright.passes.ir.program import Program
from enginewright.passes.ir.scaled import Rotated, hadamard
from enginewright.passes.ir.weights import Source
from enginewright.passes.quantization.quantize_linears import QuantizeLinears
from enginewright.passes.quantization.rotate_values import RotateValues
from enginewright.runtime.shared.errors import PassError
from tests.passes.captured import captured

INT4 = WeightFormat(storage="int4", group_size=32, activation="int8", activation_group_size=32)
FORMATS = WeightFormats(default=INT4, rotate=True)


def prepared(family: str, formats: WeightFormats = FORMATS, **overrides: object) -> Program:
    """A program whose formats are chosen."""
    program = captured(family, **overrides)
    passes = takewhile(lambda p: p.name not in ("rotate_values", "quantize_linears"), default_pipeline())
    PassManager(list(passes), PassContext(recipe=PassOptions(weights=formats))).run(program)
    return program


def rotate(program: Program) -> PassRecord:
    return RotateValues().run(program, PassContext(recipe=PassOptions(weights=FORMATS)))


def logits(program: Program) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    sequences = [torch.randint(0, 250, (n,), generator=generator, dtype=torch.int32) for n in (33, 20)]
    result: torch.Tensor = program.evaluate(
        packed_inputs(program, sequences), read=lambda n: program.weights[n].evaluate()
    )[0]
    return result


def turned(program: Program) -> list[Rotated]:
    return [expr for name in program.weights if isinstance(expr := program.weights[name], Rotated)]


@pytest.mark.parametrize(
    ("family", "sizes", "block"),
    [
        ("Llama", {}, 16),
        ("Llama", {"head_dim": 32}, 32),
        ("Llama", {"head_dim": 24}, 8),
        ("Qwen2", {}, 16),  # values have a bias
        ("Gemma2", {}, 16),
        ("Mixtral", {}, 16),
    ],
)
def test_rotating_alone_changes_nothing_but_rounding(family: str, sizes: dict[str, int], block: int) -> None:
    program = prepared(family, **sizes)
    before = logits(program)
    record = rotate(program)
    layers = len({expr.describe() for expr in turned(program) if expr.axis == -1 and len(expr.shape) == 2})
    assert record.matched == layers > 0 and not record.rejected
    assert {expr.size for expr in turned(program)} == {block}
    # Sums in another order: some units of the last place of the largest logit. A wrong matrix changes the first digits.
    torch.testing.assert_close(logits(program), before, rtol=0, atol=2e-5 * float(before.abs().max()))


@pytest.mark.matrix
def test_a_loud_channel_of_values_costs_less() -> None:
    """One row of each head's values is 40 times the others, so 4 bits round the others of its group to zero."""

    def error(formats: WeightFormats) -> float:
        program = prepared("Llama", formats, hidden_size=128, head_dim=32)
        for name in list(program.weights):
            if "v_proj" in name:
                expr = program.weights[name]
                value = expr.evaluate().clone()
                value[-64::32] *= 40  # of the two heads of values
                program.weights.change(name, Source(name, tuple(value.shape), torch.float32, lambda value=value: value))
        exact = logits(program)
        context = PassContext(recipe=PassOptions(weights=formats))
        RotateValues().run(program, context)
        QuantizeLinears().run(program, context)
        return float((logits(program) - exact).square().mean())

    assert error(FORMATS) < 0.8 * error(FORMATS.model_copy(update={"rotate": False}))


def test_floats_are_left_alone() -> None:
    program = prepared("Llama", WeightFormats(rotate=True))
    assert rotate(program).matched == 0 and not turned(program)


def test_a_recipe_that_keeps_integers_refuses_it() -> None:
    with pytest.raises(ValueError, match="keep_blocks keeps a file's integers, and rotate rotates weights"):
        WeightFormats(keep_blocks=True, rotate=True)


@pytest.mark.parametrize("size", [1, 2, 64, 256])
def test_the_matrix_is_its_own_inverse(size: int) -> None:
    torch.testing.assert_close(hadamard(size) @ hadamard(size), torch.eye(size, dtype=torch.float64))


def test_blocks_must_fit() -> None:
    base = Source("w", (6, 8), torch.float32, lambda: torch.ones(6, 8))
    with pytest.raises(PassError, match="blocks of 4 of 0:6 of axis -2"):
        Rotated(base, -2, 0, 6, 4)
    with pytest.raises(PassError, match="blocks of 3"):
        Rotated(base, -2, 0, 6, 3)
    assert Rotated(base, -1, 0, 8, 8).evaluate()[:, 0].allclose(torch.full((6,), 8**0.5))
