"""Programs without caches: attention over a request's tokens of the step, pooling, and outputs other than logits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from enginewright.passes.ops.attention import attention
from enginewright.passes.ops.pool import KINDS, pool
from enginewright.plugins.native.executable import CpuProgram, isas
from enginewright.runtime.shared.errors import BundleError
from tests.plugins.native.lowered_builder import B, LoweredBuilder, R, T, step_input, view

isa_of_all = pytest.mark.parametrize("isa", isas())
SHAPES = [(6, 2, 2, 8, 8), (75, 4, 2, 16, 12), (600, 3, 1, 24, 24)]
"""Tokens, query heads, key heads, sizes of keys and values."""
VARIANTS: list[dict[str, Any]] = [
    {},
    {"causal": True},
    {"window": 5},
    {"window": 40, "softcap": 3.0, "causal": True},
    {"softcap": 2.0, "sinks": True},
    {"slopes": True},
    {"biases": 3},
    {"biases": 31, "slopes": True, "sinks": True, "window": 40},
    {"dtype": "bf16"},
    {"dtype": "bf16", "window": 40, "sinks": True},
]
TOLERANCE = 2e-6
"""Weights sum to 1 and values are of size 1, so the error is that of scores of size sqrt(D) or so."""
ROUNDED = 5 / 256
"""Queries and weights are rounded to bf16 too: by 2^-8 at most, of results below 5."""


class Encoder:
    """Attention over tables of queries, keys and values by token id, and the op's reference in float64.

    ``pooled`` is a mean of the attention's rows, ``classes`` are the asked rows.
    """

    def __init__(self, tokens: int, heads: int, kv_heads: int, size: int, value_size: int, **options: Any) -> None:
        rng = np.random.default_rng(tokens)
        shapes = (tokens, heads, size), (tokens, kv_heads, size), (tokens, kv_heads, value_size)
        self.arrays = [rng.standard_normal(shape).astype(np.float32) for shape in shapes]
        drawn = {
            "sinks": rng.standard_normal(heads),
            "slopes": 2.0 ** -np.linspace(1, 8, heads),
            "biases": rng.standard_normal((heads, 2 * int(options.get("biases", 1)) - 1)),
        }
        self.optional = {name: array.astype(np.float32) for name, array in drawn.items() if options.get(name)}
        self.attrs: dict[str, Any] = {"scale": size**-0.5, "window": 0, "softcap": 0.0, "causal": False, "dtype": "f32"}
        self.attrs |= {name: value for name, value in options.items() if name in self.attrs}
        self.builder = b = LoweredBuilder()
        out = b.buffer(T, heads, value_size)
        self.step = b.step(
            "attention",
            [*(b.values(array) for array in self.arrays), b.input("q_start"), *map(b.weight, self.optional.values())],
            [out],
            "layers.0.attention",
            **self.attrs,
            **{f"has_{name}": True for name in self.optional},
        )
        rows = view(out, (T, heads * value_size))
        b.outputs = {"pooled": b.buffer(B, heads * value_size), "classes": b.buffer(R, heads * value_size)}
        b.step("pool", [rows, b.input("q_start")], [b.outputs["pooled"]], "pooling", kind="mean")
        b.step("take_rows", [rows, b.input("rows")], [b.outputs["classes"]], "head")

    def expected(self, requests: list[list[int]]) -> torch.Tensor:
        ids = [token for request in requests for token in request]
        q, k, v = (torch.from_numpy(array[ids]).double() for array in self.arrays)
        starts = torch.tensor([0, *np.cumsum([len(request) for request in requests]).tolist()])
        optional = {name: torch.from_numpy(array) for name, array in self.optional.items()}
        return attention(q, k, v, starts, 0, **({"sinks": None} | self.attrs | optional))


def run(program: CpuProgram, requests: list[list[int]]) -> dict[str, np.ndarray]:
    step = step_input(requests)
    step.outputs = ("pooled", "classes")
    return program.run(step).outputs


@isa_of_all
@pytest.mark.parametrize("options", VARIANTS, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_attention_without_a_cache(isa: str, options: dict[str, Any], shape: tuple[int, int, int, int, int]) -> None:
    encoder = Encoder(*shape, **options)
    requests = [list(range(shape[0])), [0], list(range(shape[0] // 2))]
    (out,) = encoder.builder.build(isa=isa, threads=2).trace(step_input(requests), encoder.step)
    allowed = ROUNDED if "dtype" in options else TOLERANCE
    np.testing.assert_allclose(np.asarray(out, np.float32), encoder.expected(requests).numpy(), atol=allowed)


@isa_of_all
@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_outputs_have_the_same_bits_in_any_batch(isa: str, options: dict[str, Any]) -> None:
    """Each text alone on one thread, then all in two orders on 1 to 4 threads."""
    encoder = Encoder(*SHAPES[2], **options)
    texts = [list(range(n)) for n in (600, 1, 16, 128, 33, 47)]
    alone = [run(encoder.builder.build(isa=isa), [text]) for text in texts]
    for threads in (1, 2, 3, 4):
        program = encoder.builder.build(isa=isa, threads=threads)
        for order in ([0, 1, 2, 3, 4, 5], [5, 2, 0, 3]):
            outputs = run(program, [texts[i] for i in order])
            for name in ("pooled", "classes"):
                np.testing.assert_array_equal(outputs[name], np.concatenate([alone[i][name] for i in order]))


@isa_of_all
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [1, 37, 384])
def test_pool(isa: str, kind: str, width: int) -> None:
    hidden = np.random.default_rng(width).standard_normal((90, width)).astype(np.float32)
    b = LoweredBuilder()
    out = b.buffer(B, width)
    step = b.step("pool", [b.values(hidden), b.input("q_start")], [out], kind=kind)
    requests = [list(range(n)) for n in (90, 1, 17)]
    (got,) = b.build(isa=isa, threads=2).trace(step_input(requests), step)
    rows = torch.from_numpy(np.concatenate([hidden[:n] for n in (90, 1, 17)])).double()
    # Sums of at most 90 numbers of size 1, weighted by less than 1.
    np.testing.assert_allclose(
        np.asarray(got, np.float32), pool(rows, torch.tensor([0, 90, 91, 108]), kind).numpy(), atol=1e-6
    )


def test_a_program_without_caches_has_no_memory_for_them() -> None:
    program = Encoder(*SHAPES[0]).builder.build(blocks={})
    assert program.cache_bytes == 0
    program.check_memory()


def test_memory_is_checked_with_all_arrays_of_a_program() -> None:
    b = LoweredBuilder()
    b.outputs = {"classes": b.buffer(R, 4)}
    types = b.buffer(T, 4)
    b.step("embedding", [b.input("types"), b.weight(np.ones((2, 4), np.float32))], [types])
    b.step("take_rows", [types, b.input("rows")], [b.outputs["classes"]])
    program = b.program().model_copy(update={"ports": ("types",)})
    CpuProgram(program, b.weights, blocks={}).check_memory()


def problem(b: LoweredBuilder) -> str:
    with pytest.raises(BundleError) as caught:
        b.build(blocks={})
    return str(caught.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"causal": 1}, "attribute causal is not a boolean"),
        ({"window": -1}, r"attribute window = -1 is not in \[0, 2147483647\]"),
        ({"has_biases": True}, "takes 5"),
        ({"dtype": "i8"}, "attribute dtype: keys and values are packed as f32 or bf16, not i8"),
    ],
)
def test_attributes_of_attention(change: dict[str, Any], words: str) -> None:
    b = Encoder(*SHAPES[0]).builder
    step = b.steps[3]
    assert step.op == "attention"
    b.steps[3] = step.model_copy(update={"attrs": step.attrs | change})
    with pytest.raises(BundleError, match=words):
        b.build(blocks={})


def test_operands_of_attention() -> None:
    b = Encoder(6, 3, 1, 8, 8).builder
    step = b.steps[3]
    q, k, v, starts = step.inputs
    wrong = {
        "aren't queries, keys and values": (q, view(k, (T, 1, 7), (8, 8, 1)), v, starts),
        "must be the step input q_start": (q, k, v, b.input("rows")),
    }
    for words, inputs in wrong.items():
        b.steps[3] = step.model_copy(update={"inputs": inputs})
        assert words in problem(b)
    b = Encoder(6, 2, 2, 8, 8, biases=2).builder
    step = b.steps[3]
    b.steps[3] = step.model_copy(update={"inputs": (*step.inputs[:-1], b.weight(np.zeros((2, 4), np.float32)))})
    assert "has no column in the middle" in problem(b)


def test_a_pooling_that_there_is_not() -> None:
    b = Encoder(*SHAPES[0]).builder
    b.steps[4] = b.steps[4].model_copy(update={"attrs": {"kind": "sum"}})
    assert "no pooling sum" in problem(b)
