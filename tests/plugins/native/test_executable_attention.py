"""The KV cache and paged attention through the interpreter: numbers, memory layout, and independence of company."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest
import torch

from enginewright.passes.ops.attention import block_estimates
from enginewright.plugins.native.executable import CpuProgram, isas
from enginewright.runtime.kv_cache.kinds.table import cache_block_bytes
from enginewright.runtime.shared.contracts import StepInput
from tests.plugins.native.lowered_builder import LoweredBuilder, T, step_input, view

Float = npt.NDArray[np.float32]
GROUP = "full"
CHOICE = ("first_blocks", "last_blocks", "best_blocks", "all_below")


class Attention:
    """One attention over tables of queries, keys and values by token id, and its reference."""

    def __init__(self, tokens: int, heads: int, kv_heads: int, size: int, value_size: int, **options: float) -> None:
        rng = np.random.default_rng(tokens)
        self.q, self.k, self.v = (
            rng.standard_normal(shape).astype(np.float32)
            for shape in ((tokens, heads, size), (tokens, kv_heads, size), (tokens, kv_heads, value_size))
        )
        self.window, self.softcap = int(options.get("window", 0)), float(options.get("softcap", 0))
        self.scale = size**-0.5
        self.sinks = rng.standard_normal(heads).astype(np.float32) if options.get("sinks") else None
        slopes = 2.0 ** -np.linspace(1, 8, heads)  # ALiBi's own
        self.slopes = slopes.astype(np.float32) if options.get("slopes") else None
        self.builder = b = LoweredBuilder()
        self.choice = choice = [int(options[name]) for name in CHOICE if name in options]
        b.group(GROUP, [0], kv_heads, size, value_size, self.window, summaries=bool(choice))
        q, k, v = (b.values(x) for x in (self.q, self.k, self.v))
        b.step("kv_write", [k, v, b.input(f"slots:{GROUP}"), b.cache(f"{GROUP}/0")], [])
        inputs = [q, b.cache(f"{GROUP}/0"), *(b.input(i) for i in (f"block_table:{GROUP}", "q_start", "kv_len"))]
        self.step = b.step(
            "paged_attention",
            inputs + [b.weight(each) for each in (self.sinks, self.slopes) if each is not None],
            [b.buffer(T, heads, value_size)],
            scale=self.scale,
            window=self.window,
            softcap=self.softcap,
            has_sinks=self.sinks is not None,
            has_slopes=self.slopes is not None,
            **dict(zip(CHOICE, choice, strict=bool(choice))),
        )

    def program(self, isa: str, threads: int = 1) -> CpuProgram:
        return self.builder.build(blocks={GROUP: 64}, isa=isa, threads=threads)

    def run(self, program: CpuProgram, step: StepInput) -> Float:
        return program.trace(step, self.step)[0].astype(np.float32, copy=False)

    def expected(self, ids: Sequence[int]) -> npt.NDArray[np.float64]:
        """[S, heads, value_size] for a sequence of token ids."""
        repeat = self.q.shape[1] // self.k.shape[1]
        q, k, v = (x[list(ids)].astype(np.float64) for x in (self.q, self.k, self.v))
        k, v = k.repeat(repeat, 1), v.repeat(repeat, 1)
        scores = np.einsum("qhd,khd->hqk", q, k) * self.scale
        if self.softcap:
            scores = self.softcap * np.tanh(scores / self.softcap)
        query, key = np.arange(len(ids))[:, None], np.arange(len(ids))[None]
        if self.slopes is not None:
            scores = scores + self.slopes[:, None, None] * (key - query)
        seen = (key <= query) & ((key > query - self.window) if self.window else True)
        if self.choice:
            seen = seen & self.chosen(ids).repeat(repeat, 0)
        weights = np.exp(np.where(seen, scores, -np.inf))
        sinks = np.exp(self.sinks.astype(np.float64))[:, None] if self.sinks is not None else 0
        return np.einsum("hqk,khd->qhd", weights / (weights.sum(-1) + sinks)[..., None], v)

    def chosen(self, ids: Sequence[int]) -> npt.NDArray[np.bool_]:
        """[kv heads, S, S]: which keys a query's choice leaves, by the estimates that the op's reference gives."""
        first, last, best, below = self.choice
        count, whole = len(ids), len(ids) // 32
        q, k = (torch.from_numpy(x[list(ids)]) for x in (self.q, self.k))
        blocks = k[: whole * 32].unflatten(0, (whole, 32)).expand(count, -1, -1, -1, -1)
        estimates = block_estimates(q, blocks).numpy() if whole else np.zeros((count, k.shape[1], 1, 0))
        seen = np.ones((k.shape[1], count, -(-count // 32)), bool)
        for position in range(below, count):
            others = np.arange(first, position // 32 - last)
            for head in range(k.shape[1]):
                if len(others) > best:
                    of_heads = estimates[position, head][:, others]
                    order = np.argsort(-(of_heads - of_heads.max(-1, keepdims=True)).max(0), kind="stable")
                    seen[head, position, others[order[best:]]] = False
        return seen.repeat(32, -1)[..., :count]


VARIANTS = [
    {},
    {"window": 5},
    {"window": 40, "softcap": 3.0},
    {"softcap": 2.0, "sinks": True},
    {"sinks": True},
    {"slopes": True},
    {"slopes": True, "sinks": True, "window": 40},
    dict(zip(CHOICE, (0, 0, 1, 0), strict=True)),
    {"sinks": True, "softcap": 2.0} | dict(zip(CHOICE, (1, 1, 2, 100), strict=True)),
]
isa_of_all = pytest.mark.parametrize("isa", isas())
# Weights sum to 1 and values are of size 1, so the error is that of scores of size sqrt(D) or so.
TOLERANCE = 2e-6


@isa_of_all
@pytest.mark.parametrize("options", VARIANTS, ids=str)
@pytest.mark.parametrize("shape", [(6, 2, 2, 8, 8), (75, 4, 2, 16, 12), (600, 3, 1, 24, 24)])
def test_prefill(isa: str, options: dict[str, float], shape: tuple[int, int, int, int, int]) -> None:
    attention = Attention(*shape, **options)
    ids = list(range(shape[0]))
    out = attention.run(attention.program(isa), step_input([ids], groups=[GROUP]))
    np.testing.assert_allclose(out, attention.expected(ids), atol=TOLERANCE)


@isa_of_all
@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_company_chunks_and_threads_change_no_bit(isa: str, options: dict[str, float]) -> None:
    attention = Attention(120, 4, 2, 16, 16, **options)
    sequences = [list(range(75)), list(range(119, 50, -1)), [3, 4, 5]]
    tables = [[7, 2, 9], [1, 0, 4], [8]]
    alone = [
        attention.run(attention.program(isa), step_input([s], groups=[GROUP], tables=[t]))
        for s, t in zip(sequences, tables, strict=True)
    ]
    together = attention.program(isa, threads=2)
    whole = attention.run(together, step_input(sequences, groups=[GROUP], tables=tables))
    np.testing.assert_array_equal(whole, np.concatenate(alone))
    for chunk in (1, 16, 33):
        program, past, parts = attention.program(isa, threads=2), [0, 0, 0], [[], [], []]  # type: ignore[var-annotated]
        while any(done < len(s) for done, s in zip(past, sequences, strict=True)):
            live = [b for b in range(3) if past[b] < len(sequences[b])]
            new = [sequences[b][past[b] : past[b] + chunk] for b in live]
            step = step_input(new, [past[b] for b in live], groups=[GROUP], tables=[tables[b] for b in live])
            out = attention.run(program, step)
            for i, b in enumerate(live):
                parts[b].append(out[step.q_start[i] : step.q_start[i + 1]])
                past[b] += len(new[i])
        for b in range(3):
            np.testing.assert_array_equal(np.concatenate(parts[b]), alone[b])


@isa_of_all
@pytest.mark.parametrize(("first", "past"), [(1, 7), (2, 3), (0, 4)])
def test_some_heads_have_the_bits_of_all(isa: str, first: int, past: int) -> None:
    """A part of 9 heads in groups of 3 begins and ends within a kv head's group."""
    attention = Attention(75, 9, 3, 16, 16, window=40)
    b = attention.builder
    whole = b.steps[attention.step]
    q = view(whole.inputs[0], (T, past - first, 16), (9 * 16, 16, 1), first * 16)
    out, attrs = b.buffer(T, past - first, 16), {**whole.attrs, "group": 3, "first_head": first}
    part = b.step("paged_attention", [q, *whole.inputs[1:]], [out], **attrs)  # type: ignore[arg-type]
    program, step = attention.program(isa), step_input([list(range(75))], groups=[GROUP])
    (whole_output,), (got,) = program.trace(step, attention.step), program.trace(step, part)
    np.testing.assert_array_equal(got, whole_output[:, first:past])


@isa_of_all
@pytest.mark.parametrize("window", [5, 64])
def test_blocks_before_the_window_may_be_gone(isa: str, window: int) -> None:
    attention = Attention(140, 2, 1, 8, 8, window=window)
    ids = list(range(140))
    program = attention.program(isa)
    attention.run(program, step_input([ids[:-1]], groups=[GROUP]))
    last = step_input([ids[-1:]], [139], groups=[GROUP])
    first_needed = (139 - window + 1) // 32
    last.block_tables[GROUP][0, :first_needed] = -1
    np.testing.assert_allclose(attention.run(program, last)[0], attention.expected(ids)[-1], atol=TOLERANCE)


@isa_of_all
def test_cache_memory(isa: str) -> None:
    attention = Attention(40, 2, 2, 8, 4)
    program = attention.program(isa)
    attention.run(program, step_input([list(range(40))], groups=[GROUP], tables=[[5, 3]]))
    k, v = program.cache_arrays(GROUP, 0)
    assert k.shape == (64, 2, 8, 32) and v.shape == (64, 2, 32, 4)
    assert program.cache_bytes == k.nbytes + v.nbytes == 64 * cache_block_bytes(attention.builder.groups[0])
    np.testing.assert_array_equal(k[5].transpose(2, 0, 1), attention.k[:32])
    np.testing.assert_array_equal(v[3, :, :8].transpose(1, 0, 2), attention.v[32:])
    assert not k[3, ..., 8:].any() and not k[[0, 1, 2, 4, 6]].any()  # the rest is untouched zeros


def test_two_groups_have_tables_of_their_own() -> None:
    b = LoweredBuilder()
    table = np.random.default_rng(0).standard_normal((9, 8)).astype(np.float32)
    b.group("one", [0], 1, 8, 8)
    b.group("two", [1], 1, 8, 8)
    x = view(b.values(table), (T, 1, 8))
    for i, name in enumerate(("one", "two")):
        b.step("kv_write", [x, x, b.input(f"slots:{name}"), b.cache(f"{name}/{i}")], [])
    program = b.build(blocks={"one": 2, "two": 4})
    step = step_input([[1, 2, 3]], groups=["one", "two"])
    step.arrays["slots:two"] += 3 * 32
    step.arrays["block_table:two"] += 3
    program.run(step)
    for name, layer, block in (("one", 0, 0), ("two", 1, 3)):
        np.testing.assert_array_equal(program.cache_arrays(name, layer)[1][block, 0, :3], table[[1, 2, 3]])
