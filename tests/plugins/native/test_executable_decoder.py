"""A whole two-layer decoder, made by hand: numbers, sampling, sizes that change, R = 0, profiling and tracing."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import pytest

from enginewright.plugins.native.executable import CpuProgram, isas
from enginewright.runtime.shared.contracts import StepOutput
from tests.plugins.native.lowered_builder import LoweredBuilder, R, T, sampling_batch, step_input, view

H, I, HEADS, KV, D, V, LAYERS = 24, 40, 3, 1, 8, 53, 2
Float = npt.NDArray[np.float32]
GROUPS = ["full"]


class Decoder:
    """Llama in small, with fused q/k/v and gate/up, tied embeddings, and a float64 reference."""

    def __init__(self) -> None:
        rng = np.random.default_rng(3)

        def weight(*shape: int) -> Float:
            return (rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)

        self.table = weight(V, H) * 4
        self.norms = 1 + 0.1 * rng.standard_normal((2 * LAYERS + 1, H)).astype(np.float32)
        self.qkv = [weight((HEADS + 2 * KV) * D, H) for _ in range(LAYERS)]
        self.out = [weight(H, HEADS * D) for _ in range(LAYERS)]
        self.gate_up = [weight(2 * I, H) for _ in range(LAYERS)]
        self.down = [weight(H, I) for _ in range(LAYERS)]
        self.inv_freq = (1000.0 ** -np.linspace(0, 1, D // 2)).astype(np.float32)
        self.builder = self._build()

    def _build(self) -> LoweredBuilder:
        b = LoweredBuilder()
        b.group("full", range(LAYERS), KV, D, D)
        norms = [b.weight(w) for w in self.norms]
        norm = {"eps": 1e-5, "has_weight": True}
        table = b.weight(self.table, "panel32")
        residual, normed, trig = b.buffer(T, H), b.buffer(T, H), b.buffer(T, D)
        b.step("embedding", [b.input("ids"), table], [residual], "embed")
        b.step("rope_table", [b.input("positions"), b.weight(self.inv_freq)], [trig], "rope", scale=1.0)
        b.step("rms_norm", [residual, norms[0]], [normed], "layers.0.norm", **norm)
        for i in range(LAYERS):
            width = (HEADS + 2 * KV) * D
            qkv = b.buffer(T, width)
            b.step("linear", [normed, b.weight(self.qkv[i], "panel32")], [qkv], f"layers.{i}.qkv")
            q = view(qkv, (T, HEADS, D), (width, D, 1))
            k = view(qkv, (T, KV, D), (width, D, 1), HEADS * D)
            v = view(qkv, (T, KV, D), (width, D, 1), (HEADS + KV) * D)
            b.step("rope", [q, trig], [q], f"layers.{i}.rope", interleaved=False)
            b.step("rope", [k, trig], [k], f"layers.{i}.rope", interleaved=False)
            b.step("kv_write", [k, v, b.input("slots:full"), b.cache(f"full/{i}")], [])
            mixed = b.buffer(T, HEADS, D)
            tables = [b.input(name) for name in ("block_table:full", "q_start", "kv_len")]
            b.step(
                "paged_attention", [q, b.cache(f"full/{i}"), *tables], [mixed],
                scale=D**-0.5, window=0, softcap=0.0, has_sinks=False,
            )  # fmt: skip
            projected, total = b.buffer(T, H), b.buffer(T, H)
            b.step("linear", [view(mixed, (T, HEADS * D)), b.weight(self.out[i], "panel32")], [projected])
            b.step("add_rms_norm", [projected, residual, norms[2 * i + 1]], [normed, total], **norm)
            gated, fed = b.buffer(T, I), b.buffer(T, H)
            gate_up = b.buffer(T, 2 * I)
            b.step("linear", [normed, b.weight(self.gate_up[i], "panel32")], [gate_up])
            b.step("gated_activation", [gate_up], [gated], kind="silu")
            b.step("linear", [gated, b.weight(self.down[i], "panel32")], [fed])
            residual = b.buffer(T, H)
            b.step("add_rms_norm", [fed, total, norms[2 * i + 2]], [normed, residual], **norm)
        last = b.buffer(R, H)
        b.step("take_rows", [normed, b.input("rows")], [last])
        b.logits = b.buffer(R, V)
        b.step("linear", [last, table], [b.logits], "head")
        return b

    def expected(self, ids: list[int]) -> npt.NDArray[np.float64]:
        """[S, V]"""

        def rms(x: npt.NDArray[np.float64], w: Float) -> npt.NDArray[np.float64]:
            return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * w

        def rope(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
            angle = np.arange(len(ids))[:, None, None] * self.inv_freq.astype(np.float64)
            a, c = np.split(x, 2, axis=-1)
            return np.concatenate([a * np.cos(angle) - c * np.sin(angle), c * np.cos(angle) + a * np.sin(angle)], -1)

        x = self.table[ids].astype(np.float64)
        for i in range(LAYERS):
            qkv = (rms(x, self.norms[2 * i]) @ self.qkv[i].T.astype(np.float64)).reshape(len(ids), -1, D)
            q, k, v = rope(qkv[:, :HEADS]), rope(qkv[:, HEADS : HEADS + KV]), qkv[:, HEADS + KV :]
            scores = np.einsum("qhd,kd->hqk", q, k[:, 0]) * D**-0.5
            weights = np.exp(np.where(np.tri(len(ids), dtype=bool), scores, -np.inf))
            mixed = np.einsum("hqk,kd->qhd", weights / weights.sum(-1, keepdims=True), v[:, 0])
            x = x + mixed.reshape(len(ids), -1) @ self.out[i].T
            gate, up = np.split(rms(x, self.norms[2 * i + 1]) @ self.gate_up[i].T, 2, axis=-1)
            x = x + (gate / (1 + np.exp(-gate)) * up) @ self.down[i].T
        return rms(x, self.norms[-1]) @ self.table.T.astype(np.float64)

    def program(self, threads: int = 1, isa: str | None = None) -> CpuProgram:
        return self.builder.build(blocks={"full": 16}, threads=threads, isa=isa)


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return Decoder()


def logits(output: StepOutput) -> Float:
    assert output.logits is not None
    return output.logits


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("length", [1, 37])
def test_logits(decoder: Decoder, isa: str, length: int) -> None:
    ids = [(7 * i) % V for i in range(length)]
    step = step_input([ids], groups=GROUPS, rows=list(range(length)), return_logits=True)
    # Two layers of float32 with logits of size 10: some hundred roundings of 1e-7 each.
    np.testing.assert_allclose(logits(decoder.program(isa=isa).run(step)), decoder.expected(ids), atol=1e-4)


@pytest.mark.parametrize("threads", [1, 2])
def test_decoding_and_changing_sizes_change_no_bit(decoder: Decoder, threads: int) -> None:
    ids = [[(5 * i) % V for i in range(40)], [(3 * i + 1) % V for i in range(35)]]
    tables = [[4, 2], [0, 9]]
    whole = [
        logits(decoder.program().run(step_input([s], groups=GROUPS, rows=list(range(len(s))), return_logits=True)))
        for s in ids
    ]
    program = decoder.program(threads)
    step = step_input([ids[0][:30], ids[1][:1]], groups=GROUPS, tables=tables, return_logits=True)
    np.testing.assert_array_equal(logits(program.run(step)), [whole[0][29], whole[1][0]])
    past = [30, 1]
    for chunk in ([1, 20], [1, 7], [1, 1], [2, 1], [1, 1]):
        new = [s[p : p + c] for s, p, c in zip(ids, past, chunk, strict=True)]
        step = step_input(new, past, groups=GROUPS, tables=tables, return_logits=True)
        past = [p + c for p, c in zip(past, chunk, strict=True)]
        np.testing.assert_array_equal(logits(program.run(step)), [whole[b][past[b] - 1] for b in range(2)])


def test_many_sizes_are_forgotten_and_resolved_again(decoder: Decoder) -> None:
    program = decoder.program()
    for _ in range(2):
        for length in range(1, 45):
            ids = [i % V for i in range(length)]
            output = program.run(step_input([ids], groups=GROUPS, return_logits=True))
            np.testing.assert_allclose(logits(output)[0], decoder.expected(ids)[-1], atol=1e-4)


def test_sampling_returns_tokens_and_logprobs(decoder: Decoder) -> None:
    ids = [[1, 2, 3], [4, 5]]
    greedy = sampling_batch(2, temperature=0, logprobs=3)
    output = decoder.program().run(step_input(ids, groups=GROUPS, sampling=greedy, return_logits=True))
    reference_logits = logits(output).astype(np.float64)
    reference_logits -= np.log(np.exp(reference_logits).sum(-1, keepdims=True))
    assert output.tokens is not None and output.token_logprobs is not None
    assert output.top_ids is not None and output.top_logprobs is not None
    assert output.tokens.tolist() == reference_logits.argmax(-1).tolist() == output.top_ids[:, 0].tolist()
    assert output.tokens.dtype == output.top_ids.dtype == np.int32
    np.testing.assert_array_equal(output.top_ids, np.argsort(-reference_logits, axis=-1)[:, :3])
    np.testing.assert_allclose(output.top_logprobs, -np.sort(-reference_logits, axis=-1)[:, :3], atol=1e-5)
    np.testing.assert_array_equal(output.token_logprobs, output.top_logprobs[:, 0])


def test_without_rows_there_are_no_logits_but_keys(decoder: Decoder) -> None:
    program = decoder.program()
    none = program.run(step_input([[1, 2, 3]], groups=GROUPS, rows=[], sampling=sampling_batch(0), return_logits=True))
    assert none.tokens is not None and none.tokens.shape == (0,) and logits(none).shape == (0, V)
    output = program.run(step_input([[4]], [3], groups=GROUPS, return_logits=True))
    np.testing.assert_allclose(logits(output)[0], decoder.expected([1, 2, 3, 4])[-1], atol=1e-4)


def test_without_sampling_there_are_no_tokens(decoder: Decoder) -> None:
    output = decoder.program().run(step_input([[1]], groups=GROUPS))
    assert output == StepOutput(tokens=None)


def test_profile_times_each_step(decoder: Decoder) -> None:
    output, seconds = decoder.program().profile(step_input([[1, 2]], groups=GROUPS, rows=[]))
    steps = decoder.builder.steps
    assert output.tokens is None and seconds.shape == (len(steps),)
    assert (seconds[:-2] > 0).all() and (seconds[-2:] == 0).all()  # take_rows and head have no rows


def test_trace_gives_what_a_step_wrote_then(decoder: Decoder) -> None:
    program = decoder.program()
    step = step_input([[1, 2]], groups=GROUPS)
    (first,) = program.trace(step, 0)
    np.testing.assert_array_equal(first, decoder.table[[1, 2]])
    (normed,) = program.trace(step, 2)  # its buffer is written again by later steps
    x = decoder.table[[1, 2]].astype(np.float64)
    expected = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * decoder.norms[0]
    np.testing.assert_allclose(normed, expected, rtol=1e-5)
    kv_write = next(i for i, s in enumerate(decoder.builder.steps) if s.op == "kv_write")
    assert program.trace(step, kv_write) == []


def test_the_arena_grows_with_the_step(decoder: Decoder) -> None:
    program = decoder.program()
    program.run(step_input([[1]], groups=GROUPS))
    small = program.arena_bytes
    program.run(step_input([[1] * 100], groups=GROUPS))
    assert program.arena_bytes > small >= decoder.builder.arena.evaluate(1, 1, 1)
    large = program.arena_bytes
    program.run(step_input([[1]], groups=GROUPS))
    assert program.arena_bytes == large


def test_calls_from_several_threads_take_turns(decoder: Decoder) -> None:
    program = decoder.program(threads=2)
    expected = [logits(decoder.program().run(step_input([[i]], groups=GROUPS, return_logits=True))) for i in range(8)]

    def run(i: int) -> Float:
        step = step_input([[i]], groups=GROUPS, tables=[[i]], return_logits=True)
        return logits(program.run(step))

    with ThreadPoolExecutor(4) as pool:
        for i, result in enumerate(pool.map(run, [i % 8 for i in range(200)])):
            np.testing.assert_array_equal(result, expected[i % 8])


def test_weights_live_as_long_as_the_program() -> None:
    local = Decoder()
    program = local.program()
    step = step_input([[1, 2, 3]], groups=GROUPS, return_logits=True)
    before = logits(program.run(step))
    local.builder.weights.clear()
    gc.collect()
    churn = [np.full(local.table.size, np.nan, np.float32) for _ in range(50)]
    np.testing.assert_array_equal(logits(program.run(step)), before)
    assert len(churn) == 50
