from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from enginewright.passes.cleanup.merge_common_subexpressions import MergeCommonSubexpressions
from enginewright.passes.cleanup.remove_noops import RemoveNoops
from enginewright.passes.ir.program import Program
from enginewright.passes.normalize.normalize_rope import NormalizeRope
from enginewright.passes.normalize.sink_views import SinkViews
from tests.passes.rewriting import op_counts, rewrite
from tests.passes.small_programs import program_from

aten, ew = torch.ops.aten, torch.ops.ew
Inputs = dict[str, torch.Tensor]
Apply = Callable[["Heads", torch.Tensor, torch.Tensor], torch.Tensor]

HEADS = 3
# The same products and sums of numbers of size 1, in another order.
TOLERANCE = 2e-6


class Heads(nn.Module):
    """q [1, N, T, D] of embedded tokens, and F frequencies."""

    def __init__(self, size: int, frequencies: int) -> None:
        super().__init__()
        torch.manual_seed(size)
        self.size = size
        self.table = nn.Parameter(torch.randn(256, HEADS * size))
        self.register_buffer("inv_freq", 100.0 ** -torch.linspace(0, 1, frequencies))

    def q(self, i: Inputs) -> torch.Tensor:
        x = aten.embedding.default(self.table, i["ids"][None])
        return x.view(1, x.shape[1], -1, self.size).transpose(1, 2)

    def angles(self, i: Inputs) -> torch.Tensor:
        return i["positions"][None][:, :, None].float() * self.inv_freq  # [1, T, F]


def _half(x: torch.Tensor) -> torch.Tensor:
    a, b = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-b, a), -1)


def _pairs(x: torch.Tensor) -> torch.Tensor:
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)


def llama(m: Heads, q: torch.Tensor, f: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    both = torch.cat((f, f), -1)
    cos, sin = (both.cos() * scale).unsqueeze(1), (both.sin() * scale).unsqueeze(1)
    return q * cos + _half(q) * sin


def partial(m: Heads, q: torch.Tensor, f: torch.Tensor) -> torch.Tensor:
    cut = 2 * f.shape[-1]
    return torch.cat((llama(m, q[..., :cut], f), q[..., cut:]), -1)


def cohere(m: Heads, q: torch.Tensor, f: torch.Tensor) -> torch.Tensor:
    both = torch.repeat_interleave(f, 2, dim=-1)
    return q * both.cos().unsqueeze(1) + _pairs(q) * both.sin().unsqueeze(1)


def glm(m: Heads, q: torch.Tensor, f: torch.Tensor) -> torch.Tensor:
    both, n = torch.cat((f, f), -1), f.shape[-1]
    cos = both.cos().unsqueeze(1)[..., :n].repeat_interleave(2, dim=-1)
    sin = both.sin().unsqueeze(1)[..., :n].repeat_interleave(2, dim=-1)
    rotated, rest = q[..., : 2 * n], q[..., 2 * n :]
    return torch.cat((rotated * cos + _pairs(rotated) * sin, rest), -1)


def gpt_oss(m: Heads, q: torch.Tensor, f: torch.Tensor) -> torch.Tensor:
    cos, sin = f.cos().unsqueeze(1), f.sin().unsqueeze(1)
    a, b = torch.chunk(q, 2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def deepseek_v3(m: Heads, q: torch.Tensor, f: torch.Tensor) -> torch.Tensor:
    both, n = torch.cat((f, f), -1), f.shape[-1]
    cos, sin = both.cos()[..., :n].unsqueeze(1), both.sin()[..., :n].unsqueeze(1)
    even, odd = q[..., ::2], q[..., 1::2]
    return torch.cat((even * cos - odd * sin, odd * cos + even * sin), -1)


def pairs_in_place(m: Heads, q: torch.Tensor, f: torch.Tensor) -> torch.Tensor:
    cos, sin, even, odd = f.cos().unsqueeze(1), f.sin().unsqueeze(1), q[..., ::2], q[..., 1::2]
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2)


WHOLE: dict[str, tuple[Apply, bool]] = {
    "llama": (llama, False),
    "sums exchanged": (lambda m, q, f: _half(q) * torch.cat((f, f), -1).sin()[:, None]
                       + torch.cat((f, f), -1).cos()[:, None] * q, False),
    "halves of cos": (lambda m, q, f: q * torch.cat((f.cos(), f.cos()), -1)[:, None]
                      + _half(q) * torch.cat((f.sin(), f.sin()), -1)[:, None], False),
    "cohere": (cohere, True),
    "gpt-oss": (gpt_oss, False),
    "pairs in place": (pairs_in_place, True),
}  # fmt: skip
PARTIAL: dict[str, tuple[Apply, bool]] = {"partial": (partial, False), "glm": (glm, True)}

PASSES = (RemoveNoops, SinkViews, RemoveNoops, MergeCommonSubexpressions, NormalizeRope, MergeCommonSubexpressions)


def _program(apply: Apply, size: int, frequencies: int) -> Program:
    def call(m: nn.Module, i: Inputs) -> torch.Tensor:
        assert isinstance(m, Heads)
        rotated = apply(m, m.q(i), m.angles(i))
        return rotated.transpose(1, 2)[0].reshape(-1, HEADS * size)

    return program_from(call, Heads(size, frequencies))


@pytest.mark.parametrize("name", [*WHOLE, *PARTIAL])
@pytest.mark.parametrize("size", [8, 12])
def test_spellings(name: str, size: int) -> None:
    apply, interleaved = (WHOLE | PARTIAL)[name]
    frequencies = size // 2 if name in WHOLE else 2
    program = _program(apply, size, frequencies)
    rewrite(program, *(p() for p in PASSES), tolerance=TOLERANCE)
    assert op_counts(program) == {"aten.embedding": 1, "aten.view": 2, "ew.rope_table": 1, "ew.rope": 1}
    (rope,) = program.nodes_of(ew.rope.default)
    assert rope.args[2] is interleaved
    assert [str(s) for s in program.shape(rope.args[0])] == ["T", str(HEADS), str(size)]
    (table,) = program.nodes_of(ew.rope_table.default)
    assert table.args[0] is program.inputs["positions"]
    assert table.args[2] == 1.0


@pytest.mark.parametrize("size", [8, 12])
def test_pairs_that_come_out_apart(size: int) -> None:
    program = _program(deepseek_v3, size, size // 2)
    rewrite(program, *(p() for p in PASSES), tolerance=TOLERANCE)
    counts = {"aten.embedding": 1, "aten.view": 2, "aten.slice": 2, "aten.cat": 1, "ew.rope_table": 1, "ew.rope": 1}
    assert op_counts(program) == counts
    (rope,) = program.nodes_of(ew.rope.default)
    assert rope.args[2] is False


@pytest.mark.parametrize("apply", [llama, deepseek_v3, cohere], ids=["llama", "deepseek-v3", "cohere"])
@pytest.mark.parametrize("size", [8, 12])
def test_one_head_without_a_dimension_of_its_own(apply: Apply, size: int) -> None:
    """Keys that all heads share (MLA) have one head: [1, 1, T, D] becomes [T, D]."""

    def call(m: nn.Module, i: Inputs) -> torch.Tensor:
        assert isinstance(m, Heads)
        x = aten.embedding.default(m.table, i["ids"][None])[..., :size]
        return apply(m, x.view(1, 1, x.shape[1], size), m.angles(i)).reshape(-1, size)

    program = program_from(call, Heads(size, size // 2))
    rewrite(program, *(p() for p in PASSES), tolerance=TOLERANCE)
    (rope,) = program.nodes_of(ew.rope.default)
    assert [str(s) for s in program.shape(rope.args[0])] == ["T", "1", str(size)]
    assert not {"aten.mul", "aten.add", "aten.sub"} & set(op_counts(program))


def test_the_attention_scaling_is_the_tables_scale() -> None:
    program = _program(lambda m, q, f: llama(m, q, f, 1.25), 8, 4)
    rewrite(program, *(p() for p in PASSES), tolerance=TOLERANCE)
    (table,) = program.nodes_of(ew.rope_table.default)
    assert table.args[2] == 1.25


def test_queries_and_keys_share_a_table() -> None:
    program = _program(lambda m, q, f: llama(m, q, f) + llama(m, q * 2.0, f), 8, 4)
    rewrite(program, *(p() for p in PASSES), tolerance=TOLERANCE)
    assert op_counts(program)["ew.rope"] == 2
    assert op_counts(program)["ew.rope_table"] == 1


def _table(f: torch.Tensor) -> torch.Tensor:
    return torch.cat((f, f), -1)


def _twice(f: torch.Tensor) -> torch.Tensor:
    return f.repeat_interleave(2, -1)


def _turned(q: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return q * cos[:, None] + _half(q) * sin[:, None]


NO_ROPE: dict[str, tuple[Apply, str]] = {
    "cos for sin": (
        lambda m, q, f: _turned(q, _table(f).sin(), _table(f).cos()),
        "rotate_half: has sin where cos belongs, and cos where sin does",
    ),
    "other angles": (
        lambda m, q, f: _turned(q, _table(f).cos(), (2 * _table(f)).sin()),
        "rotate_half: no cos and sin [T, 1, ..] of positions times frequencies",
    ),
    "two scales": (
        lambda m, q, f: _turned(q, _table(f).cos(), _table(f).sin() * 2),
        "rotate_half: cos and sin are of different angles",
    ),
    "halves with the columns of pairs": (
        lambda m, q, f: _turned(q, _twice(f).cos(), _twice(f).sin()),
        "rotate_half: the columns of the tables are of the frequencies [0, 0, 1, 1, 2, 2, 3, 3] and "
        "[0, 0, 1, 1, 2, 2, 3, 3]",
    ),
    "the rest cut off": (
        lambda m, q, f: torch.cat((llama(m, q[..., :8], f), q[..., 8:10]), -1),
        "pass_rest: only 10 of 12 columns pass",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NO_ROPE)
def test_what_is_no_rope(name: str) -> None:
    apply, reason = NO_ROPE[name]
    size = 12 if name == "the rest cut off" else 8

    def call(m: nn.Module, i: Inputs) -> torch.Tensor:
        assert isinstance(m, Heads)
        return apply(m, m.q(i), m.angles(i)).transpose(1, 2)[0].flatten(1)

    program = program_from(call, Heads(size, 4))
    records = rewrite(program, *(p() for p in PASSES), tolerance=TOLERANCE)
    assert reason in [r.reason for record in records for r in record.rejected]
    assert op_counts(program)["ew.rope"] == (1 if name == "the rest cut off" else 0)


def test_unequal_halves_are_turned_down() -> None:
    def apply(m: Heads, q: torch.Tensor, f: torch.Tensor) -> torch.Tensor:
        both = torch.cat((f, f), -1)
        turned = torch.cat((-q[..., 3:], q[..., :3]), -1)
        return q * both.cos()[:, None] + turned * both.sin()[:, None]

    program = _program(apply, 8, 4)
    records = rewrite(program, *(p() for p in PASSES), tolerance=TOLERANCE)
    reasons = [r.reason for record in records for r in record.rejected]
    assert "rotate_half: the parts that are exchanged are not the members of pairs" in reasons
    assert op_counts(program)["ew.rope"] == 0
