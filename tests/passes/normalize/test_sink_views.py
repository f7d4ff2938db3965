from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from enginewright.passes.normalize.sink_views import SinkViews
from tests.passes.rewriting import op_counts, rewrite
from tests.passes.small_programs import program_from

aten, ew = torch.ops.aten, torch.ops.ew
Inputs = dict[str, torch.Tensor]


class Weights(nn.Module):
    def __init__(self, heads: int = 3, size: int = 4) -> None:
        super().__init__()
        torch.manual_seed(heads)
        self.heads, self.size, h = heads, size, heads * size
        self.table = nn.Parameter(torch.randn(256, h))
        self.weight = nn.Parameter(torch.randn(h, h))
        self.bias = nn.Parameter(torch.randn(h))
        self.freq = nn.Parameter(torch.randn(size))


def _x(m: nn.Module, i: Inputs) -> torch.Tensor:
    return aten.embedding.default(m.table, i["ids"][None])  # [1, T, H]


def _heads(m: Weights, x: torch.Tensor) -> torch.Tensor:
    """[1, T, H] -> [1, N, T, D], as transformers has it."""
    return x.view(1, x.shape[1], -1, m.size).transpose(1, 2)


def _joined(m: Weights, x: torch.Tensor) -> torch.Tensor:
    """[1, N, T, D] -> [T, H]."""
    return x.transpose(1, 2).reshape(1, x.shape[2], -1)[0]


BATCHED: dict[str, tuple[Callable[[Weights, torch.Tensor], torch.Tensor], set[str]]] = {
    "elementwise": (lambda m, x: (x + m.bias * torch.tanh(x))[0], set()),
    "linear": (lambda m, x: aten.linear.default(x, m.weight, m.bias)[0], set()),
    "matmul": (lambda m, x: aten.matmul.default(x, m.weight)[0], set()),
    "addmm on rows": (lambda m, x: torch.addmm(m.bias, x.view(-1, x.shape[2]), m.weight).view(x.shape)[0], set()),
    "norm": (lambda m, x: aten.layer_norm.default(x, [x.shape[2]], m.bias)[0], set()),
    "mean of a row": (lambda m, x: (x - x.mean(-1, keepdim=True) + x.sum(2)[..., None])[0], {"aten.unsqueeze"}),
    "slices": (lambda m, x: torch.cat([x[:, :, 2:], x[..., :2], x[0:1, :, ::2]], -1).squeeze(0), set()),
    "heads": (lambda m, x: _joined(m, _heads(m, x)), {"aten.view"}),
    "heads, elementwise": (lambda m, x: _joined(m, -_heads(m, x) * m.freq), {"aten.view"}),
    "heads and a table": (
        lambda m, x: _joined(m, _heads(m, x) * x[..., : m.size].unsqueeze(1)), {"aten.view", "aten.unsqueeze"}
    ),
    "halves of heads": (
        lambda m, x: _joined(m, torch.cat([-_heads(m, x)[..., 2:], _heads(m, x)[..., :2]], -1)), {"aten.view"}
    ),
    "pairs of heads": (
        lambda m, x: _joined(m, torch.stack([-_heads(m, x)[..., 1::2], _heads(m, x)[..., ::2]], -1).flatten(-2)),
        {"aten.view"},
    ),
    "softmax": (lambda m, x: _joined(m, aten.softmax.int(_heads(m, x), -1)), {"aten.view"}),
    "repeated columns": (lambda m, x: aten.repeat_interleave.self_int(x, 2, -1)[0], set()),
    "permuted": (lambda m, x: x.permute(2, 0, 1).permute(1, 2, 0)[0], set()),
    "expanded to itself": (lambda m, x: x.expand(1, -1, -1)[0], set()),
    "one head": (lambda m, x: _heads(m, x).select(1, 1)[0], {"aten.view", "aten.select"}),
}  # fmt: skip


@pytest.mark.parametrize("name", BATCHED)
@pytest.mark.parametrize(("heads", "size"), [(3, 4), (2, 8)])
def test_the_batch_goes(name: str, heads: int, size: int) -> None:
    call, views = BATCHED[name]
    program = program_from(lambda m, i: call(m, _x(m, i)), Weights(heads, size))
    (record,) = rewrite(
        program, SinkViews(), tolerance=1e-6
    )  # the same sums, taken of tensors in another order in memory
    assert record.matched
    assert not record.rejected
    for node in program.graph.nodes:
        if node.op == "call_function":
            assert str(program.shape(node)[0]) == "T", node.format_node()
    remaining = {op for op in op_counts(program) if op in _VIEWS}
    assert remaining == views


_VIEWS = {"aten.view", "aten.unsqueeze", "aten.squeeze", "aten.select", "aten.transpose", "aten.permute"}
_VIEWS |= {"aten.expand", "aten._unsafe_view", "aten.reshape"}


@pytest.mark.parametrize("heads", [1, 3])
def test_a_single_head_is_no_batch(heads: int) -> None:
    """[T, 1, D] keeps its 1, or rope and attention would find two dimensions."""
    m = Weights(heads, 4)

    def call(m: nn.Module, i: Inputs) -> torch.Tensor:
        q = _heads(m, _x(m, i))[0].transpose(0, 1)  # [T, N, D]
        return ew.attention(q, q, q, i["q_start"], 0, 1.0, 0, 0.0, None).flatten(1)

    program = program_from(call, m)
    rewrite(program, SinkViews())
    (attention,) = program.nodes_of(ew.attention.default)
    q = attention.args[0]
    assert q.target is aten.view.default
    assert [str(s) for s in program.shape(q)] == ["T", str(heads), "4"]


def test_sizes_need_no_sym_size() -> None:
    program = program_from(lambda m, i: _joined(m, _heads(m, _x(m, i))), Weights())
    rewrite(program, SinkViews())
    assert all(isinstance(s, int) for n in program.nodes_of(aten.view.default) for s in n.args[1])


def test_positions_times_frequencies() -> None:
    def call(m: nn.Module, i: Inputs) -> torch.Tensor:
        angles = i["positions"][None][:, :, None].float() * m.freq  # [1, T, F]
        return torch.cat([angles, angles], -1).cos()[0]

    program = program_from(call, Weights())
    rewrite(program, SinkViews())
    (product,) = program.nodes_of(aten.mul.Tensor)
    assert [str(s) for s in program.shape(product)] == ["T", "4"]
    (cat,) = program.nodes_of(aten.cat.default)
    assert cat.args[1] == -1


def test_an_unknown_op_gets_what_it_had() -> None:
    """flip isn't known here: it is called on [1, N, T, D] as before, and what comes after it is right."""
    program = program_from(lambda m, i: _joined(m, aten.flip.default(_heads(m, _x(m, i)), [3])), Weights())
    rewrite(program, SinkViews())
    (flip,) = program.nodes_of(aten.flip.default)
    assert [str(s) for s in program.shape(flip)] == ["1", "3", "T", "4"]
    (embedding,) = program.nodes_of(aten.embedding.default)
    assert [str(s) for s in program.shape(embedding)] == ["T", "12"]


def test_a_sum_over_the_batch_is_turned_down_and_still_right() -> None:
    program = program_from(lambda m, i: aten.sum.dim_IntList(_x(m, i), [0]) * 2.0, Weights())
    (record,) = rewrite(program, SinkViews())
    assert [r.reason for r in record.rejected] == ["aten.sum.dim_IntList: no rule for these dimensions"]
    assert op_counts(program)["aten.sum"] == 1


def test_dimensions_joined_in_another_order_are_copied() -> None:
    """[T, N, D] seen as [N, T*D] and so on can't be a view of the base."""

    def call(m: nn.Module, i: Inputs) -> torch.Tensor:
        swapped = _heads(m, _x(m, i)).transpose(2, 3)  # [1, N, D, T]
        return swapped.transpose(1, 2).reshape(m.size * m.heads, -1).t()

    program = program_from(call, Weights())
    rewrite(program, SinkViews())
    assert [str(s) for s in program.shape(program.logits)] == ["T", "12"]
