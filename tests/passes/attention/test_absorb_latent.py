from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from enginewright.optimizer.capture import capture
from enginewright.optimizer.pipeline.pipeline import default_pipeline, split_before
from enginewright.passes.attention.absorb_latent import AbsorbLatent
from enginewright.passes.attention.lower_attention import LowerAttention
from enginewright.passes.attention.round_kv_cache import RoundKvCache
from enginewright.passes.framework.base import PassContext
from enginewright.passes.framework.kv_options import CacheOptions, ContextOptions
from enginewright.passes.framework.manager import PassManager
from enginewright.passes.framework.pass_options import PassOptions
from enginewright.passes.ir.program import Program
from tests.acceptance.tiny_configs import tiny_family
from tests.passes.small_programs import (
    Linear,
    Norm,
    PagedEvaluation,
    check_logits,
    program_from,
    random_sequences,
    whole_inputs,
)

aten, ew = torch.ops.aten, torch.ops.ew
LATENT = PassContext(latent_caches=True)
# Float32 sums in another order, over logits of a few units.
TOLERANCE = 2e-5


def before(name: str, program: Program) -> Program:
    """The program when the pass of this name is to run."""
    context = PassContext()
    PassManager([one for one in split_before(default_pipeline(), name)[0] if one.wanted(context)], context).run(program)
    return program


class Latent(torch.nn.Module):
    """The linears of one attention over a latent vector: N heads, D and Dv channels of each from r, p shared ones.

    ``group``: the heads of queries for each head of keys and values.
    """

    def __init__(
        self, heads: int, key: int, value: int, rank: int, shared: int, bias: bool = False, group: int = 1
    ) -> None:
        super().__init__()
        torch.manual_seed(heads)
        self.queries = heads * group
        self.heads, self.key, self.value, self.rank, self.shared = heads, key, value, rank, shared
        self.table = torch.nn.Parameter(torch.randn(67, 24))
        self.q = Linear(self.queries * (key + shared), 24)
        self.down = Linear(rank + shared, 24)
        self.norm = Norm(rank)
        self.up = Linear(heads * (key + value), rank, bias)
        self.head = Linear(67, self.queries * value)


def latent_attention(m: Latent, i: dict[str, torch.Tensor], change: Callable[..., Any] = lambda k, v: (k, v)) -> Any:
    """Attention as a model writes it, of which ``change`` may change keys and values [T, N, D]; scores by D^-0.5."""
    x = ew.embedding(i["ids"], m.table)
    q = m.q(x).view(-1, m.queries, m.key + m.shared)
    both = m.down(x)
    latent, shared = m.norm(both[:, : m.rank]), both[:, m.rank :]
    k, v = m.up(latent).view(-1, m.heads, m.key + m.value).split([m.key, m.value], -1)
    k = torch.cat((k, shared[:, None].expand(-1, m.heads, -1)), -1)
    k, v = change(k, v)
    out = ew.attention(q, k, v, i["q_start"], 0, k.shape[-1] ** -0.5, 0, 0.0, None)
    return ew.take_rows(m.head(out.reshape(-1, m.queries * m.value)), i["rows"])


def program_with(m: Latent, change: Callable[..., Any] = lambda k, v: (k, v)) -> Program:
    return before("drop_layers", program_from(lambda m, i: latent_attention(m, i, change), m))


def expected(m: Latent, ids: list[int]) -> np.ndarray:
    """The logits of a sequence in numpy, head by head and token by token, from all heads' keys and values."""
    weight = {name: p.detach().double().numpy() for name, p in m.named_parameters()}
    x = weight["table"][ids]
    q = (x @ weight["q.weight"].T).reshape(len(ids), m.heads, -1)
    both = x @ weight["down.weight"].T
    latent, shared = both[:, : m.rank], both[:, m.rank :]
    latent = latent / np.sqrt((latent**2).mean(-1, keepdims=True) + 1e-5) * weight["norm.weight"]
    up = weight["up.weight"].reshape(m.heads, m.key + m.value, m.rank)
    out = np.zeros((len(ids), m.heads, m.value))
    for h in range(m.heads):
        k = np.concatenate((latent @ up[h, : m.key].T, shared), -1)
        v = latent @ up[h, m.key :].T
        for t in range(len(ids)):
            scores = k[: t + 1] @ q[t, h] * k.shape[-1] ** -0.5
            shares = np.exp(scores - scores.max())
            out[t, h] = shares / shares.sum() @ v[: t + 1]
    result: np.ndarray = out.reshape(len(ids), -1) @ weight["head.weight"].T
    return result


SIZES = [(4, 16, 24, 16, 8), (5, 7, 9, 11, 3), (8, 12, 4, 13, 0)]
"""Heads, channels of a key and of a value, of the latent vector, and shared ones."""


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_logits_are_those_of_all_heads_keys_and_values(sizes: tuple[int, ...]) -> None:
    m = Latent(*sizes)
    program = program_with(m)
    assert AbsorbLatent().run(program, LATENT).matched == 1
    for ids in random_sequences((1, 40), 67):
        got = program.evaluate(whole_inputs([ids], list(range(len(ids)))))[0]
        np.testing.assert_allclose(got.numpy(), expected(m, ids), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_the_cache_has_the_latent_and_the_shared_part(sizes: tuple[int, ...]) -> None:
    """Also in chunks, over a paged cache whose empty slots are NaN."""
    *_, rank, shared = sizes
    m = Latent(*sizes)
    program = program_with(m)
    for one in (AbsorbLatent(), LowerAttention()):
        one.run(program, LATENT)
    (group,) = program.cache_groups
    assert group.sizes[:3] == (1, rank + shared, rank) and group.values_in_keys
    assert [plane.token_bytes for plane in group.planes] == [4 * (rank + shared), 0]
    (ids,) = random_sequences((70,), 67)
    paged = PagedEvaluation(program)
    got = torch.cat([paged.run({"a": ids[at : at + 9]}, list(range(len(ids[at : at + 9])))) for at in range(0, 70, 9)])
    np.testing.assert_allclose(got.numpy(), expected(m, ids), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("dtype", ["bf16", "int8", "fp8"])
def test_values_of_a_narrow_cache_are_those_of_the_rounded_keys(dtype: str) -> None:
    program = program_with(Latent(*SIZES[0]))
    context = PassContext(recipe=PassOptions(kv_cache=CacheOptions(dtype=dtype)), latent_caches=True)
    for one in (AbsorbLatent(), LowerAttention(), RoundKvCache()):
        one.run(program, context)
    paged = PagedEvaluation(program)
    paged.run({"a": random_sequences((40,), 67)[0]})
    keys, values = (paged.caches[f"{half}_cache:0"] for half in "kv")
    assert torch.equal(keys[..., : values.shape[-1]][~values.isnan()], values[~values.isnan()])
    assert not values.isnan().all()


@pytest.mark.parametrize(
    "family", ["deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3", "kimi_linear", "youtu", "bailing_hybrid"]
)
def test_families_are_recognised(family: str) -> None:
    program = before("absorb_latent", capture(tiny_family(family)).program)
    absorbed, attentions = program.copy(), len(program.nodes_of(ew.attention.default))
    assert AbsorbLatent().run(absorbed, LATENT).matched == attentions > 0
    check_logits(absorbed, program, TOLERANCE)


@pytest.mark.parametrize("family", ["llama", "gpt2", "bloom", "mpt", "gemma2"])
def test_other_families_stay(family: str) -> None:
    program = before("absorb_latent", capture(tiny_family(family)).program)
    record = AbsorbLatent().run(program, LATENT)
    assert record.matched == 0 and not record.rejected


CHANGES: dict[str, Callable[..., Any]] = {
    "keys are scaled": lambda k, v: (k * 2, v),
    "values have an activation": lambda k, v: (k, torch.relu(v)),
    "a head has the channels of another": lambda k, v: (k, torch.cat((v[:, 1:], v[:, 1:2]), 1)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_other_forms_stay(change: str) -> None:
    program = program_with(Latent(*SIZES[0]), CHANGES[change])
    assert AbsorbLatent().run(program, LATENT).matched == 0


def test_a_bias_is_a_reason() -> None:
    program = program_with(Latent(*SIZES[0], bias=True))
    record = AbsorbLatent().run(program, LATENT)
    assert record.matched == 0 and "bias" in record.rejected[0].reason


def test_heads_of_keys_that_queries_share_are_a_reason() -> None:
    program = program_with(Latent(*SIZES[0], group=2))
    record = AbsorbLatent().run(program, LATENT)
    assert record.matched == 0 and "share" in record.rejected[0].reason


def test_a_small_gain_is_none() -> None:
    program = program_with(Latent(2, 8, 8, 16, 4))  # 20 in place of 40
    assert AbsorbLatent().run(program, LATENT).matched == 0


def test_the_pass_needs_targets_with_such_caches_and_layers_that_read_all_of_them() -> None:
    chosen = PassContext(recipe=PassOptions(adaptive_context=ContextOptions(best=32)), latent_caches=True)
    rotated = PassContext(recipe=PassOptions(kv_cache=CacheOptions(dtype="k8v4")), latent_caches=True)
    for context in (chosen, rotated):
        assert not AbsorbLatent().wanted(context)
    program = program_with(Latent(*SIZES[0]))
    AbsorbLatent().run(program, LATENT)
    LowerAttention().run(program, PassContext())
    assert not program.cache_groups[0].values_in_keys
