"""Steps compute what the program means: formats of weights and caches, long contexts, products in parts."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from msgspec.structs import replace as replace_struct

from enginewright.plugins.cuda.serve import ops
from enginewright.plugins.cuda.serve.program import lay_narrow
from enginewright.plugins.gpu import step_calls, tiles
from enginewright.plugins.gpu.call import Call
from enginewright.plugins.gpu.jit_launcher import JitLauncher
from enginewright.plugins.gpu.tiles import GPUS
from enginewright.runtime.shared.lowered_program import Affine
from tests.passes.small_programs import Steps
from tests.plugins.cuda.serve import cuda_cases as cases
from tests.triton_interpreter import interpreter as interpreter


@pytest.mark.parametrize(
    ("case", "recipe", "cache", "tolerance"),
    [
        ("Llama", "int8", None, cases.EXACT),
        ("GPT2", "int8", None, cases.EXACT),
        ("Llama", "int4", None, cases.EXACT),
        ("Mixtral", "int8", None, cases.EXACT),
        ("Llama", "f32", "int8", cases.EXACT),
        ("Llama", "f32", "fp8", cases.EXACT),
        ("Gemma2", "f32", "k4v4", cases.EXACT),
        # The program rounds activations to bf16 before products that are in it (fp8's head is): the target doesn't.
        ("Llama", "fp8", None, 4e-3),
        ("Mixtral", "fp8", None, 8e-3),
    ],
)
def test_formats_mean_what_they_say(
    case: str, recipe: str, cache: str | None, tolerance: float, interpreter: ProcessPoolExecutor
) -> None:
    for error, largest in interpreter.submit(cases.differences, case, recipe, "f32", cache).result():
        assert error <= tolerance * largest


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("case", "recipe", "floats", "cache"),
    [
        ("Llama", "f32", "bf16", None),
        ("Gemma2", "f32", "bf16", None),
        ("Llama", "int4", "bf16", None),
        ("Llama", "int8", "bf16", "int8"),
        ("Qwen2", "f32", "bf16", "fp8"),
        ("Llama", "f32", "f16", None),
    ],
)
def test_narrow_activations_are_off_by_their_rounding(
    case: str, recipe: str, floats: Any, cache: str | None, interpreter: ProcessPoolExecutor
) -> None:
    # Some 20 roundings on the way to a logit, of half a unit in the last place each: 2^-9 for bf16, 2^-12 for f16.
    # A key that is off by that may get another code of 8 bits, the next one.
    rounding = {"bf16": 2.0**-9, "f16": 2.0**-12}[floats]
    code = {"int8": 2.0**-7, "fp8": 2.0**-4}.get(cache or "", 0.0)
    for error, largest in interpreter.submit(cases.differences, case, recipe, floats, cache).result():
        assert 0 < error <= (20 * rounding + code) * largest


@pytest.mark.parametrize(
    ("case", "length", "cache", "given"),
    [
        pytest.param("Llama", 1061, None, True, marks=pytest.mark.matrix),
        pytest.param("Llama", 561, None, False, marks=pytest.mark.soak),
        pytest.param("Llama", 1061, "int8", False, marks=pytest.mark.soak),
        pytest.param("Mistral", 1061, None, False, marks=pytest.mark.soak),  # its layers have windows
    ],
)
def test_long_contexts_are_put_together_from_parts(
    case: str, length: int, cache: str | None, given: bool, interpreter: ProcessPoolExecutor
) -> None:
    assert interpreter.submit(cases.long_contexts, case, length, cache, given).result() <= cases.EXACT


def mixed_decodes(case: str, cache: str | None, length: int, size: int) -> tuple[float, list[str]]:
    """The largest difference of a logit, as a share of the largest, of prompts beside decodes with contexts of several
    parts, where these have kernels of their own; and which kernels ran in the last step. Keys and values are random."""
    program, context = cases.program_of(case, cache=cache)
    lowering = cases.lowered(program, context, "f32")
    names = [group.name for group in lowering.program.cache_groups]
    ran: list[str] = []

    class Noting(JitLauncher):
        def bind(self, call: Call) -> Callable[[], object]:
            launch = super().bind(call)
            return lambda: (ran.append(call.kernel), launch())

    plain = cases.steps_of(lowering, 256, blocks=64)
    shape_of = plain._shape_of
    plain._shape_of = lambda *given: replace(shape_of(*given), mixed=False)
    mixed = cases.steps_of(lowering, 256, launcher=Noting(), blocks=64)
    for (_, one), (_, other) in zip(plain._program.caches.items(), mixed._program.caches.items(), strict=True):
        for ours, theirs in ((one.of.keys, other.of.keys), (one.of.values, other.of.values)):
            random = torch.Generator().manual_seed(5)
            ours.copy_(torch.randn(ours.shape, generator=random) * (20 if cache == "int8" else 1))
            theirs.copy_(ours)
        for ours, theirs in ((one.of.key_scales, other.of.key_scales), (one.of.value_scales, other.of.value_scales)):
            if ours is not None and theirs is not None:
                ours.fill_(0.01)
                theirs.copy_(ours)
    steps = {key: Steps(names, 64) for key in ("plain", "own")}
    worst = 0.0
    for stepper in steps.values():  # contexts that nobody reads in
        stepper.step({"a": [3] * length, "b": [4] * 5})
    for chunks in ({"a": [7], "c": list(range(size)), "b": [9]}, {"b": [3], "d": [5], "a": [2], "c": [1, 2, 3]}):
        ran.clear()
        expected = plain.start(cases.step_input(steps["plain"].step(chunks))).result().logits
        logits = mixed.start(cases.step_input(steps["own"].step(chunks))).result().logits
        assert expected is not None
        assert logits is not None
        worst = max(worst, float(np.abs(logits - expected).max() / np.abs(expected).max()))
    return worst, sorted(set(ran))


@pytest.mark.parametrize(
    ("case", "cache", "length", "size"),
    [
        ("Llama", None, 561, 19),
        pytest.param("Llama", "int8", 700, 40, marks=pytest.mark.matrix),
        pytest.param("Mistral", None, 561, 33, marks=pytest.mark.matrix),  # its layers have windows
        pytest.param("GptOss", None, 561, 3, marks=pytest.mark.matrix),  # sinks
    ],
)
def test_decodes_beside_prompts_have_kernels_of_their_own(
    case: str, cache: str | None, length: int, size: int, interpreter: ProcessPoolExecutor
) -> None:
    worst, ran = interpreter.submit(mixed_decodes, case, cache, length, size).result()
    assert worst <= cases.EXACT
    assert {"paged_attention", "decode_work", "listed_attention", "combine_splits"} <= set(ran)


def products_otherwise(recipe: str, floats: str, module: str, **values: int) -> tuple[float, list[str]]:
    """The largest difference of a logit, as a share of the largest, from where a module has its own values; kernels
    that ran where it has these."""
    program, context = cases.program_of("Llama", recipe)
    lowering = cases.lowered(program, context, floats)
    ran: list[str] = []

    class Noting(JitLauncher):
        def bind(self, call: Call) -> Callable[[], object]:
            launch = super().bind(call)
            return lambda: (ran.append(call.kernel), launch())

    of = {"ops": ops, "tiles": tiles}[module]
    plain = cases.steps_of(lowering, 256)
    with patch.multiple(of, **values):
        steps_alone = cases.steps_of(lowering, 256, launcher=Noting())
    ours, theirs, worst = Steps(["full"], cases.BLOCKS), Steps(["full"], cases.BLOCKS), 0.0
    for chunks in ({"a": [3, 4, 5]}, {"a": [6], "b": [8]}):
        expected = plain.start(cases.step_input(theirs.step(chunks))).result().logits
        with patch.multiple(of, **values):
            logits = steps_alone.start(cases.step_input(ours.step(chunks))).result().logits
        assert expected is not None
        assert logits is not None
        worst = max(worst, float(np.abs(logits - expected).max() / np.abs(expected).max()))
    return worst, ran


@pytest.mark.parametrize("recipe", ["int8", "int4"])
def test_narrow_weights_lie_by_group(recipe: str) -> None:
    """Each with its scales, once; one that a step reads in part stays as it is."""
    program, context = cases.program_of("Llama", recipe)
    lowering = cases.lowered(program, context, "bf16")
    lowered = lowering.program
    stored = cases.weights_of(lowering)
    linears = [step for step in lowered.steps if step.op == "linear"]
    split = linears[0].inputs[1]
    part = replace_struct(split, shape=(Affine(constant=1), split.shape[1]))
    number = lowered.steps.index(linears[0])
    step = replace_struct(linears[0], inputs=(linears[0].inputs[0], part, *linears[0].inputs[2:]))
    lowered = replace_struct(lowered, steps=(*lowered.steps[:number], step, *lowered.steps[number + 1 :]))

    weights = dict(stored)
    laid = lay_narrow(lowered, weights)
    assert split.name not in laid and weights[split.name] is stored[split.name]
    others = [of.inputs for of in linears if of.inputs[1].name != split.name]
    narrow = [inputs for inputs in others if stored[inputs[2].name].shape[1] > 1]
    assert len(narrow) >= 3
    for _, weight, scales, *_rest in narrow:
        assert {weight.name, scales.name} <= laid
        codes, factors = stored[weight.name], stored[scales.name]
        rows, groups = factors.shape
        by_group = weights[weight.name]
        assert by_group.shape == (groups, rows, codes.shape[1] // groups) and by_group.is_contiguous()
        assert torch.equal(by_group.transpose(0, 1).reshape(codes.shape), codes)
        assert torch.equal(weights[scales.name].t(), factors) and weights[scales.name].is_contiguous()
    again = dict(weights)
    assert lay_narrow(lowered, again) == laid
    assert all(again[name] is weights[name] for name in weights)


def test_products_in_parts_in_a_step(interpreter: ProcessPoolExecutor) -> None:
    """The least part is made small, so that a tiny model's products have several."""
    worst, ran = interpreter.submit(products_otherwise, "int8", "f32", "tiles", _LEAST_PART=32).result()
    assert worst <= cases.EXACT
    assert ran.count("sum_parts") == 4  # down projections of two layers, in two steps


@pytest.mark.matrix
@pytest.mark.parametrize("recipe", ["int8", "int4"])
def test_many_rows_meet_floats_made_of_narrow_weights(recipe: str, interpreter: ProcessPoolExecutor) -> None:
    """Many are made few here."""
    worst, ran = interpreter.submit(products_otherwise, recipe, "bf16", "ops", UNPACKED_ROWS=3).result()
    assert worst <= cases.ROUNDED
    assert ran.count("unpack") >= 5
    assert "product" in ran  # of the second step, of two rows


def unpacked_in_pieces(bias: bool) -> tuple[list[int], float]:
    """Rows of a weight that were made floats at a time, and how far the product is from the whole weight's."""
    torch.manual_seed(3)
    n, k, launcher, pieces = 600, 64, JitLauncher(), []
    values, scales = torch.randint(-127, 128, (n, k), dtype=torch.int8), torch.rand(n, 2).half()
    x, added = torch.randn(5, k).bfloat16(), torch.randn(n).bfloat16() if bias else None
    out = torch.full((5, n + 8), float("nan")).bfloat16()[:, :n]

    def room(name: str, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        pieces.append(shape[0])
        return torch.full(shape, float("nan"), dtype=dtype)

    binder: Any = SimpleNamespace(room=room, launch=launcher.bind, gpu=GPUS[90], bias_like=lambda bias, out: bias)
    with patch.object(ops, "_MOST_UNPACKED", n * k):
        works = ops._unpacked_product(binder, x, step_calls.Stored(values, "int8", scales, None, 32), added, out)
    for work in works:
        work()
    want = x.float() @ (values.float() * scales.float().repeat_interleave(32, 1)).t()
    want = want if added is None else want + added.float()
    return pieces, float((out.float() - want).abs().max() / want.abs().max())


@pytest.mark.matrix
@pytest.mark.parametrize("bias", [False, True])
def test_a_weight_is_made_floats_in_pieces(bias: bool, interpreter: ProcessPoolExecutor) -> None:
    pieces, apart = interpreter.submit(unpacked_in_pieces, bias).result()
    assert pieces == [512, 88]
    assert apart <= 2.0**-8  # a weight is rounded, and a result
