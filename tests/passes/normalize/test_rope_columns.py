from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from enginewright.passes.normalize.rope_columns import read_columns
from tests.passes.small_programs import program_from

aten = torch.ops.aten


class Frequencies(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", torch.tensor([1.0, 0.5, 0.25]))


def _angles(m: nn.Module, i: dict[str, torch.Tensor]) -> torch.Tensor:
    return i["positions"][:, None].float() * m.inv_freq


CASES: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], tuple[int, ...], str, float]] = {
    "angle": (lambda f: torch.cat([f, f], 1), (0, 1, 2, 0, 1, 2), "", 1.0),
    "cos": (lambda f: f.cos() * 2.0, (0, 1, 2), "cos", 2.0),
    "sin of pairs": (lambda f: f.repeat_interleave(2, -1).sin(), (0, 0, 1, 1, 2, 2), "sin", 1.0),
    "scaled twice": (lambda f: (f.cos() * 2.0) * 3.0, (0, 1, 2), "cos", 6.0),
    "a slice": (lambda f: torch.cat([f.cos(), f.cos()], -1)[:, 2:5], (2, 0, 1), "cos", 1.0),
    "every other": (lambda f: torch.cat([f, f], -1).sin()[:, ::2], (0, 2, 1), "sin", 1.0),
    "narrow": (lambda f: f.cos().to(torch.bfloat16), (0, 1, 2), "cos", 1.0),
}


@pytest.mark.parametrize("name", CASES)
def test_columns(name: str) -> None:
    make, columns, function, scale = CASES[name]
    program = program_from(lambda m, i: make(_angles(m, i)), Frequencies())
    read = read_columns(program, program.logits)
    assert read is not None
    assert (read.columns, read.function, read.scale) == (columns, function, scale)
    assert read.positions is program.inputs["positions"]
    assert read.frequencies.target == "inv_freq"


OTHERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "scaled angle": lambda f: (f * 2.0).cos(),
    "cos of cos": lambda f: f.cos().cos(),
    "cos and sin": lambda f: torch.cat([f.cos(), f.sin()], -1),
    "tan": lambda f: f.tan(),
    "tokens joined": lambda f: torch.cat([f.cos(), f.cos()], 0),
    "as integers": lambda f: f.cos().to(torch.int32),
}


def test_positions_that_are_no_integers() -> None:
    """The table's op takes positions as the step has them; others stay cosines and sines of products."""

    def call(m: nn.Module, i: dict[str, torch.Tensor]) -> torch.Tensor:
        return ((i["positions"].float() * 0.5)[:, None] * m.inv_freq).cos()

    program = program_from(call, Frequencies())
    assert read_columns(program, program.logits) is None


@pytest.mark.parametrize("name", OTHERS)
def test_other_values(name: str) -> None:
    program = program_from(lambda m, i: OTHERS[name](_angles(m, i)), Frequencies())
    assert read_columns(program, program.logits) is None
