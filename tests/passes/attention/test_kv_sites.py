"""The sources and uses of heads, in every spelling, and the reasons against grouping them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from enginewright.passes.attention.kv_sites import Site, attention_paths, find_site
from enginewright.passes.framework.match import bound_arguments
from enginewright.passes.ir.program import Program
from tests.passes.captured import normalized

ew = torch.ops.ew

WIDE = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3}


def first(program: Program) -> torch.fx.Node:
    return program.nodes_of(ew.attention.default)[0]


@pytest.mark.parametrize(
    ("family", "overrides", "heads", "post", "linears", "keys"),
    [
        ("Llama", {}, (4, 2, 2), ["rope"], 3, [0, 16]),
        ("Llama", WIDE, (6, 3, 3), ["rope"], 3, [0, 16, 32]),
        ("Qwen3", {}, (4, 2, 2), ["rms_norm", "rope"], 3, [0, 16]),
        ("Phi3", {}, (4, 2, 2), ["rope"], 1, [64, 80]),  # one linear for all three
        ("GPT2", {}, (4, 4, 4), [], 1, [64, 80, 96, 112]),
        ("GPTNeoX", {}, (4, 4, 4), ["rope"], 1, [16, 64, 112, 160]),  # each head's q, k and v side by side
    ],
)
def test_heads_and_what_stands_behind_them(
    family: str, overrides: dict[str, Any], heads: tuple[int, ...], post: list[str], linears: int, keys: list[int]
) -> None:
    program, _ = normalized(family, **overrides)
    node = first(program)
    site = find_site(program, node)
    assert isinstance(site, Site)
    assert tuple(len(b.rows) for b in (site.q, site.k, site.v)) == heads
    assert [n.target.name().removeprefix("ew::").removesuffix(".default") for n in site.k.post] == post
    assert site.k.normed == ("rms_norm" in post) and (site.k.rope is not None) == ("rope" in post)
    assert len({b.linear for b in (site.q, site.k, site.v)}) == linears
    assert site.v.post == () and site.k.alone == (linears == 3)
    assert site.output.target is ew.linear.default and site.path == next(iter(attention_paths(program)))
    rows = [(b.linear.name, int(r)) for b in (site.q, site.k, site.v) for r in b.rows.flatten()]
    assert len(set(rows)) == len(rows)
    assert site.k.rows.tolist() == [list(range(start, start + 16)) for start in keys]


def test_key_value_heads_by_path() -> None:
    program, _ = normalized("Llama", num_hidden_layers=3)
    assert attention_paths(program) == {f"model.layers.{i}.self_attn": 2 for i in range(3)}


@pytest.mark.parametrize(
    ("argument", "reason"),
    [
        ("q", "q does not come from a linear, but from aten.mul.Tensor"),
        ("v", "v does not come from a linear, but from aten.mul.Tensor"),
    ],
)
def test_a_value_that_is_computed_otherwise(argument: str, reason: str) -> None:
    program, _ = normalized("Llama")
    node = first(program)
    value = bound_arguments(node)[argument]
    with program.inserting_before(node):
        doubled = program.call(torch.ops.aten.mul.Tensor, value, 2.0, where=value.meta["where"])
    node.update_arg("qkv".index(argument), doubled)
    assert find_site(program, node) == reason


def test_a_result_that_is_read_twice_and_keys_that_two_read() -> None:
    program, _ = normalized("Llama")
    one, two = program.nodes_of(ew.attention.default)
    (user,) = one.users
    with program.inserting_before(user):
        program.call(torch.ops.aten.neg.default, one, where=one.meta["where"])
    assert find_site(program, one) == "its result is read in several places"
    two.update_arg(1, one.args[1])
    assert find_site(program, two) == "k is read by another attention as well"
