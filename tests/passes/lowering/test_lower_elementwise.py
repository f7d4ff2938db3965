from __future__ import annotations

import pytest
import torch

from enginewright.passes.lowering.lower_program import lower_program
from enginewright.runtime.shared.errors import UnsupportedModelError
from tests.passes.lowering.lowered import Call, check, features, ops
from tests.passes.small_programs import program_from

ew = torch.ops.ew


def _scalars(m: torch.nn.Module, i: dict[str, torch.Tensor]) -> torch.Tensor:
    x = features(i)
    y = 1.0 - torch.tanh(x / 3.0) * 3.0 + torch.add(x, x, alpha=0.5) + 2.0**x
    return ew.take_rows(y.clamp(-4.0, 4.0) + torch.reciprocal(x.abs() + 1.0) + x.square(), i["rows"])


def _integers(m: torch.nn.Module, i: dict[str, torch.Tensor]) -> torch.Tensor:
    moved = (i["positions"] + 2) * 3 - i["ids"]
    return ew.take_rows(moved.float()[:, None] * torch.tensor([0.0, 0.5, 1.0]), i["rows"])


def _reduced(m: torch.nn.Module, i: dict[str, torch.Tensor]) -> torch.Tensor:
    x = features(i, 12).view(-1, 3, 4)
    y = x.mean(-1) + x.sum(1)[:, :3] + x.transpose(1, 2).amax(2)[:, 1:] + x.mean((1, 2))[:, None]
    return ew.take_rows(y, i["rows"])


def _where(m: torch.nn.Module, i: dict[str, torch.Tensor]) -> torch.Tensor:
    x = features(i)
    return ew.take_rows(torch.where(torch.tensor([True, False] * 3), x, -x), i["rows"])


def _rounded(m: torch.nn.Module, i: dict[str, torch.Tensor]) -> torch.Tensor:
    x = features(i)
    y = (x * 3).floor() + (x * 3).round() + torch.expm1(x.clamp(-4.0, 1.0)) + torch.log1p(x.abs())
    return ew.take_rows(y, i["rows"])


@pytest.mark.parametrize(
    ("call", "copies"),
    [
        (_rounded, 0),
        (_scalars, 0),
        (_integers, 0),
        (_reduced, 2),
        (_where, 0),
    ],
)
def test_elementwise_and_reductions(call: Call, copies: int) -> None:
    # The same torch functions run on other strides, where vector and scalar code may differ in the last bits.
    program = check(program_from(call), atol=1e-5)
    assert ops(program).count("copy") == copies


def test_softplus_is_made_of_others() -> None:
    def call(m: torch.nn.Module, i: dict[str, torch.Tensor]) -> torch.Tensor:
        return ew.take_rows(torch.nn.functional.softplus(features(i) * 30), i["rows"])

    # A logarithm of numbers from 1 to 2 is exact to a unit of 1, results are up to 200.
    check(program_from(call), atol=2e-5)


def test_refuses_what_the_kernels_would_do_differently() -> None:
    def steep(m: torch.nn.Module, i: dict[str, torch.Tensor]) -> torch.Tensor:
        return ew.take_rows(torch.nn.functional.softplus(features(i), beta=2), i["rows"])

    def rounds(m: torch.nn.Module, i: dict[str, torch.Tensor]) -> torch.Tensor:
        return ew.take_rows(torch.div(features(i), 2.0, rounding_mode="floor"), i["rows"])

    def over_tokens(m: torch.nn.Module, i: dict[str, torch.Tensor]) -> torch.Tensor:
        return ew.take_rows(features(i) - features(i).sum(0, keepdim=True), i["rows"])

    def half(m: torch.nn.Module, i: dict[str, torch.Tensor]) -> torch.Tensor:
        return ew.take_rows(features(i).half() * 2, i["rows"])

    cases = ((rounds, "rounds"), (over_tokens, "over tokens"), (half, "float16"), (steep, "beta 2"))
    for call, reason in cases:
        with pytest.raises(UnsupportedModelError, match=reason):
            lower_program(program_from(call))
