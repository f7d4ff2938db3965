from __future__ import annotations

import pytest
import torch

from tests.passes.lowering.lowered import Call, check, features, ops
from tests.passes.small_programs import program_from

ew = torch.ops.ew


def _strided(m: torch.nn.Module, i: dict[str, torch.Tensor]) -> torch.Tensor:
    x = features(i, 24).view(-1, 4, 6)
    y = x.transpose(1, 2)[:, 1:5:2, :].permute(0, 2, 1)  # [T, 4, 2]
    z = x[:, :, -2:].unsqueeze(2).expand(-1, 4, 3, 2).select(2, 1)  # [T, 4, 2]
    return ew.take_rows((y * 2 + z).flatten(1), i["rows"])


def _copied(m: torch.nn.Module, i: dict[str, torch.Tensor]) -> torch.Tensor:
    x = features(i, 12).view(-1, 3, 4).transpose(1, 2).reshape(-1, 12)
    return ew.take_rows(x, i["rows"])


def _cat_of_views(m: torch.nn.Module, i: dict[str, torch.Tensor]) -> torch.Tensor:
    x = features(i, 12)
    parts = torch.cat((x[:, 3:6], torch.tanh(x[:, :2]), x[:, :1], x[:, :1]), -1)
    return ew.take_rows(torch.cat((parts.view(-1, 7, 1), x[:, :7].view(-1, 7, 1)), 1).flatten(1), i["rows"])


def _chunks(m: torch.nn.Module, i: dict[str, torch.Tensor]) -> torch.Tensor:
    a, b, c = features(i, 12).split([4, 2, 6], -1)
    d, e = a.unbind(-1)[:2]
    return ew.take_rows((c * d[:, None] - b.sum(-1, keepdim=True) / e.unsqueeze(1)).unsqueeze(1).squeeze(1), i["rows"])


def _parts_of_inputs(m: torch.nn.Module, i: dict[str, torch.Tensor]) -> torch.Tensor:
    x = i["ids"][:, None] * torch.tensor([[1, 2, 3]]) + i["ids"][:, None]  # one copy of ids serves both
    return ew.take_rows(x.float(), i["rows"])


def _looked_up_by_part(m: torch.nn.Module, i: dict[str, torch.Tensor]) -> torch.Tensor:
    table = torch.tensor([[0.5 * j + k for j in range(4)] for k in range(20)])
    ends = ew.embedding(i["q_start"][1:], table)  # [B, 4]
    return ew.take_rows(features(i, 4) + ends.mean(1)[:1, None], i["rows"])


def _rank_five(m: torch.nn.Module, i: dict[str, torch.Tensor]) -> torch.Tensor:
    x = features(i, 24).view(-1, 2, 3, 2, 2)
    return ew.take_rows((x * x).flatten(1), i["rows"])


@pytest.mark.parametrize(
    ("call", "copies"),
    [
        (_strided, 0),
        (_copied, 1),
        (_cat_of_views, 5),
        (_chunks, 0),
        (_parts_of_inputs, 1),
        (_looked_up_by_part, 1),
        (_rank_five, 0),
    ],
)
def test_views(call: Call, copies: int) -> None:
    # The same torch functions run on other strides, where vector and scalar code may differ in the last bits.
    program = check(program_from(call), atol=1e-5)
    assert ops(program).count("copy") == copies
