"""Feed-forward networks in programs: which they are, what is left when channels go, and what is none."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from enginewright.passes.framework.verify_program import verify_program
from enginewright.passes.ir.chosen_rows import Chosen
from enginewright.passes.ir.weights import Source
from enginewright.passes.sparsity.feed_forwards import feed_forwards
from tests.passes.small_programs import Shape, decoder
from tests.passes.sparsity.pruned import logits, normal

aten, ew = torch.ops.aten, torch.ops.ew

# The same products in other groups: rounding of float32.
TOLERANCE = 2e-5


@pytest.mark.parametrize(
    ("family", "overrides", "parts", "width"),
    [
        ("Llama", {}, [1, 1], 128),
        ("Llama", {"intermediate_size": 96}, [1, 1], 96),
        ("Phi3", {}, [2], 128),  # gate and up in one linear
        ("GPT2", {}, [1], 256),  # one linear opens it; biases; an activation in pieces
    ],
)
def test_what_is_left_computes_the_same(family: str, overrides: dict[str, Any], parts: list[int], width: int) -> None:
    program = normal(family, **overrides)
    networks, rejected = feed_forwards(program)
    assert len(networks) == 2 and not rejected
    one = networks[1]
    assert [o.parts for o in one.openings] == parts and one.width == width
    assert one.path.startswith(("model.layers.1.mlp", "transformer.h.1.mlp"))
    order = list(program.graph.nodes)
    assert list(one.between) == sorted(one.between, key=order.index)

    weight = one.down.args[1]
    expr = program.weight_of(weight)
    assert expr is not None and isinstance(weight, torch.fx.Node)
    left = tuple(range(1, width, 3))
    value = expr.evaluate().clone()
    value[:, [i for i in range(width) if i not in left]] = 0  # these add nothing
    silent = Source(str(weight.target), expr.shape, expr.dtype, lambda: value)
    program.change_weight(weight, silent)
    before = logits(program)
    one.keep(program, left, Chosen(silent, 1, left))
    verify_program(program)
    for now, expected in zip(logits(program), before, strict=True):
        torch.testing.assert_close(now, expected, rtol=TOLERANCE, atol=TOLERANCE)
    assert [n.width for n in feed_forwards(program)[0]] == [width, len(left)]


def test_experts_keep_theirs() -> None:
    networks, rejected = feed_forwards(normal("Mixtral", num_local_experts=2, num_experts_per_tok=1))
    assert not networks and [r.reason for r in rejected] == ["experts keep their channels"] * 2


def test_what_is_like_one_but_is_none() -> None:
    program = decoder(Shape(windows=(0, 0, 0, 0)))
    read, normed, biased, _ = program.nodes_of(ew.gated_activation.default)
    with program.inserting_before(read.next):
        program.call(aten.neg.default, read, where=("x",))  # read by others
    size = program.weight("ones", Source("ones", (48,), torch.float32, lambda: torch.ones(48)))
    with program.inserting_before(normed.next):
        norm = program.call(ew.rms_norm.default, normed, size, 1e-6, where=("x",))
    normed.replace_all_uses_with(norm, delete_user_cb=lambda user: user is not norm)  # channels see one another
    cat = biased.args[0]
    assert isinstance(cat, torch.fx.Node)
    with program.inserting_before(biased):
        moved = program.call(aten.mul.Tensor, cat, cat, where=("x",))
    biased.update_arg(0, moved)  # gate and up are not what the activation gets
    networks, rejected = feed_forwards(program)
    assert [n.path for n in networks] == ["layers.3.down_proj"]
    reasons = [r.reason for r in rejected]
    assert len(reasons) == 2  # the one behind a norm isn't even like one
    assert reasons[0].startswith(f"{read.name} is also read by")
    assert reasons[1] == f"{moved.name} (aten.mul.Tensor) is between the linears"
