"""Each handler against the op itself, in one graph of a few that go together, at two sizes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.passes.small_programs import program_from
from tests.plugins.graphs.linear_session import emit, run_tokens

ew = torch.ops.ew

Inputs = dict[str, torch.Tensor]
Call = Callable[[torch.nn.Module, Inputs], torch.Tensor]


def _features(i: Inputs, width: int = 6) -> torch.Tensor:
    """[T, width] of floats from -1 to 1 that depend on token and position."""
    steps = torch.tensor([float(n) for n in range(1, width + 1)])
    return torch.sin(i["ids"].float()[:, None] * steps + i["positions"].float()[:, None] * 0.1)


def _scalars(m: torch.nn.Module, i: Inputs) -> torch.Tensor:
    x = _features(i)
    y = 1.0 - torch.tanh(x / 3.0) * 3.0 + torch.add(x, x, alpha=0.5) + torch.sub(x, x * 2, alpha=3) + 2.0**x
    y = y + torch.rsqrt(x.abs() + 1) + x.abs().sqrt() + torch.erf(x) - torch.exp(-x) + torch.cos(x) ** 2
    return y.clamp(-4.0, 4.0) + torch.reciprocal(x.abs() + 1.0) + x.square() + x.clamp(min=0.1) + x.clamp(max=0.2)


def _activations(m: torch.nn.Module, i: Inputs) -> torch.Tensor:
    x, f = _features(i) * 3, torch.nn.functional
    y = f.silu(x) + f.gelu(x) + f.gelu(x, approximate="tanh") + torch.relu(x) + torch.sigmoid(x) + f.softplus(x * 10)
    kinds = ("silu", "gelu", "gelu_tanh", "relu", "sigmoid")
    return y + torch.cat([ew.gated_activation(x, kind) for kind in kinds], -1)[:, :6]


def _rounded(m: torch.nn.Module, i: Inputs) -> torch.Tensor:
    x = _features(i)
    return (x * 3).floor() + (x * 3).round() + torch.expm1(x.clamp(-4.0, 1.0)) + torch.log1p(x.abs()) + torch.log(x + 2)


def _integers(m: torch.nn.Module, i: Inputs) -> torch.Tensor:
    moved = (i["positions"] + 2) * 3 - i["ids"]
    small = torch.maximum(moved, i["ids"]) + torch.minimum(moved, i["positions"])
    halved = (small.float()[:, None] * torch.tensor([0.0, 0.5, 1.0])) + (moved > 3.5)[:, None].float()
    return halved + (moved / 2)[:, None]


def _conditions(m: torch.nn.Module, i: Inputs) -> torch.Tensor:
    x, ids = _features(i), i["ids"][:, None]
    low, late = x < 0.1, ids >= 20
    both = (low & late) | ~(x <= x.mean(-1, keepdim=True)) | (ids != 7) & (x > 0.5) | (ids == 9)
    y = torch.where(both, x, -x) + torch.where(torch.tensor([True, False] * 3), x, x * 0)
    return y.masked_fill(torch.logical_not(low), -2.0) + torch.logical_or(low, late).float()


def _reduced(m: torch.nn.Module, i: Inputs) -> torch.Tensor:
    x = _features(i, 12).view(-1, 3, 4)
    return x.mean(-1) + x.sum(1)[:, :3] + x.transpose(1, 2).amax(2)[:, 1:] + x.mean((1, 2))[:, None]


def _views(m: torch.nn.Module, i: Inputs) -> torch.Tensor:
    x = _features(i, 12)
    a, b, c = x.view(-1, 3, 4).unbind(1)
    left, right = x.split([5, 7], -1)
    halves = x.reshape(-1, 2, 6).permute(1, 0, 2)
    wide = a[:, None].expand(-1, 3, -1).reshape(-1, 12) + torch.cat([x[:, ::2], x[:, 1::2]], -1)
    y = torch.cat([b, c, left[:, 1:], right.chunk(2, -1)[0]], -1)[:, :12]
    return wide + y + torch.cat([halves[1], halves.select(0, -1)], -1) + torch.ones_like(x) + x.unsqueeze(0).squeeze(0)


def _sized(m: torch.nn.Module, i: Inputs) -> torch.Tensor:
    """Tensors whose size is only known when a step runs, made of nothing that has it."""
    x = _features(i)
    return x + torch.full((x.shape[0], 6), 0.5) + torch.tensor([1.0, 2.0, 3.0] * 2).expand(x.shape[0], 6) * 0.5


def _router(m: torch.nn.Module, i: Inputs) -> torch.Tensor:
    x = _features(i, 8)
    weights, chosen = torch.topk(torch.softmax(x, -1), 3, -1)
    best = x.view(-1, 2, 4).max(-1)[0]
    mask = torch.zeros_like(x).scatter(1, chosen, 1.0)
    again = x.gather(1, chosen)
    return torch.cat([weights, again, best, mask.masked_fill(mask == 0, -1.0)], -1)


def _norms(m: torch.nn.Module, i: Inputs) -> torch.Tensor:
    x, weight = _features(i), torch.tensor([0.5, 0.7, 0.9, 1.1, 1.3, 1.5])
    normed, total = ew.add_rms_norm(x, x * 0.5, weight, 1e-5)
    other, more = ew.add_layer_norm(x, normed, weight, weight - 1, 1e-5)
    return normed + total + other + more + ew.rms_norm(x, None, 1e-6) + ew.layer_norm(x, None, None, 1e-5)


def _rotations(m: torch.nn.Module, i: Inputs) -> torch.Tensor:
    x = _features(i, 24).view(-1, 3, 8)
    frequencies = torch.tensor([1.0, 0.5, 0.1])
    part = ew.rope_table(i["positions"], frequencies, 0.9)  # 6 of 8
    whole = torch.cat([part, part[:, :2]], -1)
    turned = ew.rope(x, part, False) + ew.rope(x, part, True) + ew.rope(x, whole, False) + ew.rope(x, whole, True)
    return turned.reshape(-1, 24)


CALLS = (
    _scalars,
    _activations,
    _rounded,
    _integers,
    _conditions,
    _reduced,
    _views,
    _sized,
    _router,
    _norms,
    _rotations,
)


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__.removeprefix("_"))
def test_handlers(call: Call, tmp_path: Path) -> None:
    program = program_from(lambda m, i: ew.take_rows(call(m, i), i["rows"]))
    emit(program, tmp_path)
    for tokens in (5, 12):
        generator = torch.Generator().manual_seed(tokens)
        ids = torch.randint(0, 50, (tokens,), generator=generator)
        rows = torch.tensor([tokens - 1, 0, 2])
        inputs_of = {"ids": ids, "positions": torch.arange(tokens), "rows": rows}
        inputs = {
            name: inputs_of.get(name, torch.zeros(1)).to(program.value(node).dtype)
            for name, node in program.inputs.items()
        }
        (expected,) = program.evaluate(inputs)
        # The same functions by other libraries: the last bits of numbers up to 100 may differ.
        torch.testing.assert_close(run_tokens(tmp_path, ids, rows), expected.float(), rtol=0, atol=3e-5)
