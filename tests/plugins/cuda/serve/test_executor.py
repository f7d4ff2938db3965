"""The cuda target without a GPU: CPU tensors with interpreted kernels, graphs that are replayed, fake tensors."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import gpu_fault
import numpy as np
import pytest
import torch
from msgspec.structs import replace as replace_struct
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from enginewright.optimizer.export import export
from enginewright.optimizer.recipes.recipe import load_recipe
from enginewright.plugins.cuda.compile.emitter import CudaEmitter
from enginewright.plugins.cuda.section import CudaSection
from enginewright.plugins.cuda.serve import executor as cuda_blocks
from enginewright.plugins.cuda.serve import ops
from enginewright.plugins.cuda.serve import program as program_module
from enginewright.plugins.cuda.serve import steps as steps_module
from enginewright.plugins.cuda.serve.program import TORCH_DTYPES, CudaProgram, Place, lay_narrow, step_memory
from enginewright.plugins.cuda.serve.steps import logprobs_of
from enginewright.plugins.gpu import step_calls, tiles
from enginewright.plugins.gpu.call import Call
from enginewright.plugins.gpu.jit_launcher import JitLauncher
from enginewright.plugins.gpu.recipe import EnginesSection
from enginewright.plugins.gpu.tiles import GPUS
from enginewright.plugins.native.sampling import RowSampler
from enginewright.plugins.steps.packed_steps import StepLimits, StepShape, input_shapes
from enginewright.runtime.requests.logit_rules import PLAIN, sampling_batch
from enginewright.runtime.shared.contracts import NO_TOKEN
from enginewright.runtime.shared.errors import BundleError, CapacityError, EnginewrightError, RequestError, TargetError
from enginewright.runtime.shared.lowered_program import Affine
from tests.passes.small_programs import Steps, random_sequences
from tests.plugins.cuda.serve import cuda_cases as cases
from tests.plugins.cuda.serve.fake_graphs import FakeGraph, RecordingLauncher
from tests.plugins.gpu.fake_driver import FakeCuda
from tests.runtime.server.conftest import Server
from tests.runtime.server.conftest import make_server as make_server
from tests.triton_interpreter import interpreter as interpreter

EXACT = 1e-5
"""The share of the largest logit, where all is float32: sums in another order. Measured: 2.6e-6 at most."""

ROUNDED = 20 * 2.0**-9
"""The share with bf16 activations: some 20 roundings on the way to a logit, of half a unit in the last place each."""


@pytest.mark.parametrize(
    ("case", "recipe", "cache", "tolerance"),
    [
        ("Llama", "int8", None, EXACT),
        ("GPT2", "int8", None, EXACT),
        ("Llama", "int4", None, EXACT),
        ("Mixtral", "int8", None, EXACT),
        ("Llama", "f32", "int8", EXACT),
        ("Llama", "f32", "fp8", EXACT),
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
    assert interpreter.submit(cases.long_contexts, case, length, cache, given).result() <= EXACT


def replayed(case: str) -> tuple[int, float]:
    """Graphs that ran, and the largest difference from steps without, with all memory poisoned between steps."""
    program, context = cases.program_of(case)
    lowering = cases.lowered(program, context, "f32")
    names = [group.name for group in lowering.program.cache_groups]
    plain, graphs = cases.steps_of(lowering, 256), cases.steps_of(lowering, 256, FakeGraph, RecordingLauncher())
    ours, theirs = Steps(names, cases.BLOCKS), Steps(names, cases.BLOCKS)
    a, b = random_sequences((12, 9), 250)
    chunks = [{"a": a[:6], "b": b[:3]}, *({"a": a[i : i + 1], "b": b[i - 3 : i - 2]} for i in range(6, 12))]
    worst = 0.0
    for chunk in chunks:
        want = plain.start(cases.step_input(ours.step(chunk))).result().logits
        got = graphs.start(cases.step_input(theirs.step(chunk))).result().logits
        assert want is not None
        assert got is not None
        worst = max(worst, float(np.abs(want - got).max()))
        cases.poison(graphs._program.arena)
        graphs._inputs.host[:] = 0x7F7F7F7F
    return graphs.graphs.launches, worst


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
    assert worst <= EXACT
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
    assert worst <= EXACT
    assert ran.count("sum_parts") == 4  # down projections of two layers, in two steps


@pytest.mark.matrix
@pytest.mark.parametrize("recipe", ["int8", "int4"])
def test_many_rows_meet_floats_made_of_narrow_weights(recipe: str, interpreter: ProcessPoolExecutor) -> None:
    """Many are made few here."""
    worst, ran = interpreter.submit(products_otherwise, recipe, "bf16", "ops", UNPACKED_ROWS=3).result()
    assert worst <= ROUNDED
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


@pytest.mark.matrix
@pytest.mark.parametrize("case", ["Llama", "Mixtral", "GPT2"])
def test_a_graph_depends_on_nothing_that_the_host_held(case: str, interpreter: ProcessPoolExecutor) -> None:
    launches, worst = interpreter.submit(replayed, case).result()
    assert launches == 4  # the first two of the six decode steps are run call by call
    assert worst == 0.0


def dropped_graphs(full: bool) -> tuple[int, dict[str, int], str]:
    """Graphs that ran, counts of late work, and why graphs aren't made, where one graph alone is kept. In ``full``,
    there is no memory for the first graph."""
    program, context = cases.program_of("Llama")
    lacking = [full]

    def capture(work: Callable[[], None]) -> FakeGraph:
        if lacking.pop() if lacking else False:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")
        return FakeGraph(work)

    with patch.object(steps_module, "MOST_GRAPHS", 1):
        lowering = cases.lowered(program, context, "f32")
        steps, stepper = cases.steps_of(lowering, 256, capture, RecordingLauncher()), Steps(["full"], cases.BLOCKS)
        for number in range(9):
            chunks = {name: [3 + number] for name in ("ab" if number // 3 == 1 else "a")}
            steps.start(cases.step_input(stepper.step(chunks))).result()
    return steps.graphs.launches, dict(steps.late), steps.graphs.not_captured


@pytest.mark.matrix
@pytest.mark.parametrize("full", [False, True])
def test_a_dropped_graph_is_captured_at_its_next_step(full: bool, interpreter: ProcessPoolExecutor) -> None:
    launches, late, reason = interpreter.submit(dropped_graphs, full).result()
    assert (launches, late["late_graphs"]) == ((1, 1) if full else (4, 3))
    assert late.get("late_memory", 0) == full == reason.startswith("memory: the GPU has none left")


def without_graphs() -> tuple[list[str], str, int, float]:
    """Warnings, the reason, graphs that ran, and the largest difference, where each capture fails."""
    program, context = cases.program_of("Llama")
    lowering = cases.lowered(program, context, "f32")

    def fail(work: Callable[[], None]) -> Any:
        works.append(work)
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nSearch for it.")

    works: list[Callable[[], None]] = []
    plain, failing = cases.steps_of(lowering, 256), cases.steps_of(lowering, 256, fail)
    ours, theirs, worst = Steps(["full"], cases.BLOCKS), Steps(["full"], cases.BLOCKS), 0.0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(6):
            chunks = {name: [3 + number] for name in ("ab" if number < 3 else "a")}
            expected = plain.start(cases.step_input(theirs.step(chunks))).result().logits
            logits = failing.start(cases.step_input(ours.step(chunks))).result().logits
            assert expected is not None
            assert logits is not None
            worst = max(worst, float(np.abs(expected - logits).max()))
    assert len(works) == 1
    ours_alone = [str(w.message) for w in caught if "target cuda" in str(w.message)]
    return ours_alone, failing.graphs.not_captured, failing.graphs.launches, worst


@pytest.mark.matrix
def test_a_capture_that_fails_is_said_once_and_steps_go_on(interpreter: ProcessPoolExecutor) -> None:
    messages, reason, launches, worst = interpreter.submit(without_graphs).result()
    assert reason == "CUDA error: operation not permitted when stream is capturing"
    (only,) = messages
    assert reason in only
    assert "kernel by kernel" in only
    assert (launches, worst) == (0, 0.0)


def held_and_left() -> tuple[int, int, list[str]]:
    """Bytes that steps hold beside weights and caches, what they were said to, and what is left after ``close``."""
    program, context = cases.program_of("Mistral")
    lowering = cases.lowered(program, context, "f32")
    steps, stepper = cases.steps_of(lowering, 256, FakeGraph, RecordingLauncher()), Steps(["full"], cases.BLOCKS)
    stepper = Steps([group.name for group in lowering.program.cache_groups], cases.BLOCKS)
    sampled = cases.as_options([{"temperature": 0.5, "top_k": 3}])
    for chunks in ({"a": [1, 2, 3]}, {"a": [4]}, {"a": [5]}):
        steps.start(cases.step_input(stepper.step(chunks), sampled)).result()
    executable = steps._program
    memory = [value for value in vars(steps._memory).values() if isinstance(value, torch.Tensor)]
    held = [executable.arena, executable._scratch, *executable._lists.values(), *executable._rooms.values(), *memory]
    logits = 4 * executable.limits.rows * 256
    # Logits that are changed or given back, and what log-probabilities take of them, are made when they are asked for.
    bytes_held = step_memory(lowering.program, executable.limits, 256) - 2 * logits - logits // 5
    caches = [cache.of.keys for cache in executable.caches.values()]
    every = {
        "weights": next(iter(executable._weights.values())),
        "cache": caches[0],
        "arena": executable.arena,
        "made": memory[0],
    }
    total, alive = sum(x.nbytes for x in held), {name: weakref.ref(x) for name, x in every.items()}
    del held, memory, caches, every, executable
    steps.close()
    gc.collect()
    return total, bytes_held, [name for name, of in alive.items() if of() is not None]


@pytest.mark.matrix
def test_what_steps_hold_is_known_before_and_gone_afterwards(interpreter: ProcessPoolExecutor) -> None:
    held, bytes_known, left = interpreter.submit(held_and_left).result()
    assert held <= bytes_known <= held + 4 * 4 * (1 + 2 * 8 * 3)  # lists of work are made where contexts are cut
    assert left == []


def test_long_contexts_take_room_for_their_parts() -> None:
    """The memory of attention's parts, next to the arena, grows with the longest context."""
    program, context = cases.program_of("Llama")
    lowered = cases.lowered(program, context, "bf16").program
    short, long = (step_memory(lowered, StepLimits(64, 256, 256, blocks), 256) for blocks in (1, 131072 // 32))
    assert long - short > 1 << 20


def test_products_add_in_float32_while_a_model_is_open() -> None:
    """Settings of the process are changed once, whatever the order in which models are closed, and then restored."""
    products: Any = torch.backends.cuda.matmul
    names = ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")

    def settings() -> list[bool]:
        return [getattr(products, name) for name in names]

    gc.collect()  # steps of other tests
    before = settings()
    program, context = cases.program_of("Llama")
    lowering = cases.lowered(program, context, "f32")
    first, second = (cases.steps_of(lowering, 256, launcher=_Devices(cases.CPU)) for _ in range(2))
    assert settings() == [False, False]
    first.close()
    first.close()
    assert settings() == [False, False]
    second.close()
    assert settings() == before == [True, True]


def on_gpu(monkeypatch: pytest.MonkeyPatch, cuda: FakeCuda) -> Callable[[], Any]:
    """Opens the first GPU of a driver in memory, since torch has no CUDA."""
    processors = SimpleNamespace(multi_processor_count=4)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: processors)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda stream, device: stream)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(cuda_blocks, "load_cuda", lambda: cuda)
    monkeypatch.setattr(cuda_blocks, "_idle", {})
    return lambda: cuda_blocks._OnGpu(cuda.gpus[0], "8.9")


def test_a_gpu_gets_back_what_torch_kept_then_memory_and_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    place = on_gpu(monkeypatch, FakeCuda())()
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: done.append("cache"))
    monkeypatch.setattr(place._opened, "empty", lambda: done.append("memory and kernels"))
    place.close()
    assert done == ["cache", "memory and kernels"]


def test_a_stream_outlives_its_executor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch records an event on it when pinned memory is freed, which may be at the end of the process."""
    cuda = FakeCuda()
    opened = on_gpu(monkeypatch, cuda)
    first = opened()
    first._opened.allocate(8)
    first.close()
    assert [(device.closed, device.memory) for device in cuda.devices] == [(False, {})]
    again, other = opened(), opened()
    assert again._opened is first._opened  # opening and closing adds no streams
    assert other._opened is not again._opened
    again.close()
    other.close()
    opened()
    assert [device.closed for device in cuda.devices] == [False, False]


def test_work_is_on_the_place_s_own_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    current = ["the caller's"]

    @contextmanager
    def stream(chosen: Any) -> Iterator[None]:
        current.append(chosen)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "stream", stream)
    place = on_gpu(monkeypatch, FakeCuda())()
    assert current == ["the caller's"]
    with place.entered():
        assert current[-1] == place._opened.stream
    assert current == ["the caller's"]


def test_a_lost_gpu_is_not_opened_again_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda()
    opened = on_gpu(monkeypatch, cuda)
    place = opened()

    def lost() -> None:
        raise EnginewrightError("CUDA: cuStreamSynchronize failed")

    monkeypatch.setattr(place._opened, "empty", lost)
    with pytest.raises(EnginewrightError):
        place.close()
    assert opened()._opened is not place._opened


def drawn() -> list[tuple[list[int], list[int]]]:
    """Tokens of each step, by the executor and by the cpu target's sampler from the executor's logits."""
    program, context = cases.program_of("Llama")
    lowering = cases.lowered(program, context, "f32")
    options = [
        {},
        {"temperature": 0.8, "seed": 1, "counter": 3},
        {"temperature": 1.2, "top_k": 5, "seed": 2},
        {"temperature": 0.9, "top_p": 0.7, "min_p": 0.02, "seed": 2**63 + 5, "counter": 9},
    ]
    steps, stepper = cases.steps_of(lowering, 256), Steps(["full"], cases.BLOCKS)
    tokens = []
    for chunks in ({str(i): [3 + i, 9, 40 + i] for i in range(4)}, {str(i): [7 + i] for i in range(4)}):
        step = cases.step_input(stepper.step(chunks), cases.as_options(options))
        step.outputs = ("logits",)
        assert step.sampling is not None
        step.sampling.logprobs = 2
        output = steps.start(step).result()
        assert output.tokens is not None
        assert output.logits is not None
        assert output.token_logprobs is not None
        assert output.top_logprobs is not None
        expected = RowSampler(1).sample(output.logits, step.sampling)
        assert expected.tokens is not None
        np.testing.assert_allclose(output.token_logprobs, expected.token_logprobs, rtol=0, atol=1e-5)
        np.testing.assert_array_equal(output.top_ids, expected.top_ids)
        np.testing.assert_allclose(output.top_logprobs, expected.top_logprobs, rtol=0, atol=1e-5)
        tokens.append((output.tokens.tolist(), expected.tokens.tolist()))
    return tokens


def test_tokens_are_drawn_on_the_device(interpreter: ProcessPoolExecutor) -> None:
    for ours, theirs in interpreter.submit(drawn).result():
        assert ours == theirs


def in_parts() -> float:
    """The largest difference between a step of 9 requests in parts of 8, and requests' own."""
    program, context = cases.program_of("Llama")
    lowering = cases.lowered(program, context, "f32")
    sequences = random_sequences([3, 1, 4, 2, 1, 2, 1, 3, 2], 250)
    stepper = Steps(["full"], cases.BLOCKS)
    many = cases.steps_of(lowering, 256).start(
        cases.step_input(stepper.step({str(i): sequence for i, sequence in enumerate(sequences)}))
    )
    logits, worst = many.result().logits, 0.0
    assert logits is not None
    alone = cases.steps_of(lowering, 256)
    for i, sequence in list(enumerate(sequences))[::4]:
        logits_alone = (
            alone.start(cases.step_input(Steps(["full"], cases.BLOCKS).step({"x": sequence}))).result().logits
        )
        assert logits_alone is not None
        worst = max(worst, float(np.abs(logits_alone[0] - logits[i]).max()))
    return worst


@pytest.mark.matrix
def test_what_is_too_much_for_a_step_runs_in_parts(interpreter: ProcessPoolExecutor) -> None:
    assert interpreter.submit(in_parts).result() <= EXACT * 4


def with_penalties_and_many_rows() -> tuple[list[list[int]], list[list[int]], int, float]:
    """Tokens, and tokens with the top logprobs, of a step of 12 rows, more than there is room for, with lists; the same
    by the cpu target's sampler; how often attention ran; and the largest difference of logits from a step with room."""
    program, context = cases.program_of("Llama")
    lowering, ran = cases.lowered(program, context, "f32"), list[str]()

    class Noting(JitLauncher):
        def bind(self, call: Call) -> Callable[[], object]:
            launch = super().bind(call)
            return lambda: (ran.append(call.kernel), launch())

    steps, stepper = cases.steps_of(lowering, 256, launcher=Noting(), rows=4), Steps(["full"], cases.BLOCKS)
    step = cases.step_input(stepper.step({"a": [3, 9, 40, 7, 5, 6], "b": [1, 2, 3, 4, 5, 6]}, rows=range(12)))
    options = [{"temperature": 0.9 * (i % 3 > 0), "top_k": 7 * (i % 2), "seed": i} for i in range(12)]
    step.sampling = cases.as_options(options)
    step.sampling.repetition_penalty = np.linspace(0.5, 3, 12).astype(np.float32)
    step.sampling.seen_start = np.arange(0, 13 * 40, 40).astype(np.int32)
    step.sampling.seen = np.tile(np.arange(40), 12).astype(np.int32)
    step.sampling.typical_p = np.linspace(0.1, 1, 12).astype(np.float32)
    step.sampling.biased_start = np.arange(13, dtype=np.int32)
    step.sampling.biased, step.sampling.bias = np.arange(30, 42, dtype=np.int32), np.full(12, 2.5, np.float32)
    step.sampling.allowed_start = np.array([0, 30, *[30] * 11], np.int32)  # the first row's
    step.sampling.allowed = np.arange(30, dtype=np.int32)
    step.sampling.logprobs, step.outputs = 2, ("logits",)
    output = steps.start(step).result()
    assert output.logits is not None
    whole = cases.steps_of(lowering, 256).start(step.changed(sampling=None)).result().logits
    expected = RowSampler(1).sample(output.logits, step.sampling)
    drawn = [[of.tokens.tolist(), of.top_ids.tolist()] for of in (output, expected)]
    return *drawn, ran.count("paged_attention"), float(np.abs(whole - output.logits).max())


@pytest.mark.matrix
def test_more_rows_than_there_is_room_for(interpreter: ProcessPoolExecutor) -> None:
    """Steps by row run for some rows at a time, and all else once."""
    ours, theirs, ran, apart = interpreter.submit(with_penalties_and_many_rows).result()
    assert ours == theirs
    assert ran == 2  # layers
    assert apart == 0


def after_bad_numbers() -> tuple[list[int], bool, bool]:
    """Tokens of a step one of whose requests' caches is NaN; whether its blocks are zero after a step that clears them,
    and the other's not."""
    program, context = cases.program_of("Llama")
    steps, stepper = cases.steps_of(cases.lowered(program, context, "f32"), 256), Steps(["full"], cases.BLOCKS)
    steps.start(cases.step_input(stepper.step({"a": [4, 5], "b": [6, 7]}), cases.greedy(2))).result()
    bad, good = (stepper.requests[name].blocks["full"][0] for name in "ab")
    for cache in steps._program.caches.values():
        cache.of.keys[bad] = float("nan")
    step = cases.step_input(stepper.step({"a": [9], "b": [9]}), cases.greedy(2))
    tokens = steps.start(step).result().tokens
    assert tokens is not None
    step = cases.step_input(stepper.step({"b": [9]}), cases.greedy(1))
    step.clears = {"full": np.array([bad], np.int32)}
    steps.start(step).result()
    keys = [cache.of.keys for cache in steps._program.caches.values()]
    return tokens.tolist(), not any(k[bad].any() for k in keys), all(bool(k[good].any()) for k in keys)


def test_numbers_that_are_not_finite_stay_with_their_request(interpreter: ProcessPoolExecutor) -> None:
    tokens, cleared, others = interpreter.submit(after_bad_numbers).result()
    assert tokens[0] == NO_TOKEN
    assert tokens[1] != NO_TOKEN
    assert cleared
    assert others


class _Operations(TorchDispatchMode):
    """The names of torch's operations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name().removeprefix("aten::"))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("at_once", [1, 1 << 20])
def test_blocks_of_all_layers_are_copied_together(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies are made in order, so that a copy may be copied again. One list is uploaded for all layers and planes."""
    monkeypatch.setattr(program_module, "_MOST_COPIED", at_once)
    family, context = cases.program_of("Llama", cache="int8")
    program = cases.steps_of(cases.lowered(family, context, "f32"), 256, launcher=_Devices(cases.CPU))._program
    layers = [tensor for pool in program.pools["full"] for tensor in pool]
    for number, tensor in enumerate(layers):
        tensor.copy_((torch.arange(cases.BLOCKS) + number).view(-1, *[1] * (tensor.dim() - 1)))
    expected = [tensor.clone() for tensor in layers]
    for source, to in (pairs := [[1, 2], [2, 3], [5, 1], [4, 4], [3, 6]]):
        for tensor in expected:
            tensor[to] = tensor[source]
    with _Operations() as operations:
        program.copy("full", pairs)
        program.clear("full", [7, 8])
    for tensor in expected:
        tensor[7:9] = 0
    assert all(torch.equal(*pair) for pair in zip(layers, expected, strict=True)) and len(layers) == 8
    copies = operations.names.count("index_copy_")
    assert copies == (8 if at_once == 1 else 4) and operations.names.count("index_fill_.int_Scalar") == 4
    assert operations.names.count("lift_fresh") == 3  # arrays that the host makes
    for cache in program.caches.values():  # a layer's cache is a view of the memory of all
        assert not cache.of.keys[8].any() and cache.of.keys[9].any() and not cache.of.value_scales[8].any()


@pytest.mark.parametrize(
    ("changed", "message"),
    [({"top_p": 1.5}, "row 1 has a top_p"), ({"temperature": -1.0}, "row 1 has a temperature"), ({}, "no tokens")],
)
def test_what_is_wrong_with_a_step_is_said(
    changed: dict[str, float], message: str, interpreter: ProcessPoolExecutor
) -> None:
    with pytest.raises(RequestError, match=message):
        interpreter.submit(refused, changed).result()


def refused(changed: dict[str, float]) -> None:
    program, context = cases.program_of("Llama")
    steps, stepper = cases.steps_of(cases.lowered(program, context, "f32"), 256), Steps(["full"], cases.BLOCKS)
    step = cases.step_input(stepper.step({"a": [1], "b": [2]}), cases.as_options([{}, changed]))
    if not changed:
        step.arrays["ids"] = step.ids[:0]
    steps.start(step)


class _Devices(JitLauncher):
    """Launches nothing, and looks at where the arguments of calls are."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device, self.calls = device, 0

    def bind(self, call: Call) -> Callable[[], object]:
        call.spec(90)

        def run() -> None:
            self.calls += 1
            for name, value in call.arguments.items():
                assert not isinstance(value, torch.Tensor) or value.device == self.device, f"{call.kernel}: {name}"

        return run


@pytest.mark.parametrize(
    ("case", "recipe"),
    [("Llama", "f32"), ("GPT2", "int4"), ("Mixtral", "int8"), ("DeepseekV3", "f32"), ("Phimoe", "f32")],
)
def test_all_that_runs_is_on_the_gpu(case: str, recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step's operations on fake tensors of the device cuda: what has another device, or type, would be refused."""

    def copy(to: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        return torch.ops.aten.copy_.default(to, source, non_blocking)

    def contiguous(x: torch.Tensor) -> torch.Tensor:
        return x.clone(memory_format=torch.contiguous_format)

    # These methods ask for a CUDA that this torch may lack.
    monkeypatch.setattr(torch.Tensor, "copy_", copy)
    monkeypatch.setattr(torch.Tensor, "contiguous", contiguous)
    program, context = cases.program_of(case, recipe)
    lowered = cases.lowered(program, context, "bf16").program
    device = torch.device("cuda", 0)
    launcher = _Devices(device)
    with torch.inference_mode(), FakeTensorMode():
        weights = {}
        for use in lowered.weights:
            shape = (*use.shape[:-1], use.shape[-1] // 2) if use.dtype in ("i4", "u4") else use.shape
            weights[use.name] = torch.empty(shape, dtype=TORCH_DTYPES[use.dtype], device=device)
        bound = CudaProgram(
            lowered,
            weights,
            Place(device, GPUS[90], launcher),
            blocks={group.name: 4 for group in lowered.cache_groups},
            limits=StepLimits(tokens=64, requests=8, rows=64, blocks=32),
        )
        for shape in (StepShape(0, 8, 8, 8, 32, True), StepShape(0, 64, 4, 4, 4, False)):
            inputs = {
                name: torch.empty(size, dtype=torch.int32, device=device)
                for name, size in input_shapes(bound.groups, shape).items()
            }
            works, outputs, _ = bound.bound(shape, inputs)
            logits = outputs["logits"]
            for work in works:
                work()
            assert (tuple(logits.shape), logits.device, logits.dtype) == ((shape.rows, 256), device, torch.bfloat16)
    assert launcher.calls > 10


def test_nothing_of_the_cpu_target_is_loaded() -> None:
    code = "import sys, enginewright.plugins.cuda.serve.executor\n"
    code += "print([m for m in sys.modules if 'enginewright.plugins.cpu' in m or 'enginewright.optimizer' in m])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_torch_without_cuda_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    section = CudaSection(compute_capabilities=("9.0",), dtype="bf16", requests=4, chunk=64)
    with pytest.raises(TargetError, match=r"target cuda: PyTorch .* (is a build without CUDA|sees no GPU)"):
        cuda_blocks.place_of(section)


def test_a_scored_token_s_logprob_is_given_in_place_of_the_drawn_one_s() -> None:
    logits = torch.randn(4, 20, generator=torch.Generator().manual_seed(1))
    tokens = torch.tensor([3, NO_TOKEN, 5, 6], dtype=torch.int32)
    scores = logprobs_of(logits, tokens, sampling_batch([PLAIN] * 4, (), 2, {0: [7, 8]}))["token_logprobs"]
    expected = logits.log_softmax(-1)
    assert scores[1].isnan()
    torch.testing.assert_close(scores[[0, 2, 3]], expected[[0, 2, 3], [7, 5, 6]])


@pytest.mark.parametrize("changed", [False, True])
def test_top_logprobs_are_those_of_a_whole_sort(changed: bool) -> None:
    """Equal ones are in the order of their tokens, as on the cpu target; also those of tokens that can't be. Rows of
    a beam search with a form have theirs from the changed logits: there they may be positive."""
    random = torch.Generator().manual_seed(2)
    logits = torch.randn(37, 300, generator=random).mul(4).round() / 2  # many are equal
    logits[5], logits[8] = 0.0, -0.0
    logits[8, 7::3] = 0.0
    logits[6, 3:] = -torch.inf
    before, sampling, drawn_from, of_top = logits.clone(), sampling_batch([PLAIN] * 37, (), 20), None, logits
    if changed:
        sampling.top_allowed = (np.arange(37) % 2).astype(np.int32)
        drawn_from = torch.where(torch.rand(37, 300, generator=random) < 0.5, logits + 20, -torch.inf)
        of_top = torch.where(torch.from_numpy(sampling.top_allowed)[:, None] != 0, drawn_from, logits)
    rows = logprobs_of(logits, torch.arange(37, dtype=torch.int32), sampling, drawn_from)
    values, ids = of_top.sort(dim=-1, descending=True, stable=True)
    assert torch.equal(rows["top_ids"].long(), ids[:, :20])
    torch.testing.assert_close(rows["top_logprobs"], values[:, :20] - logits.logsumexp(-1, keepdim=True))
    torch.testing.assert_close(logits, before, rtol=0, atol=0)


class _Allocated(TorchDispatchMode):
    """The most bytes that tensors made inside have at a time, and the bytes of all of them."""

    def __init__(self) -> None:
        super().__init__()
        self._held: dict[int, weakref.ref[Any]] = {}
        self._sizes: dict[int, int] = {}
        self.most = self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        old = {x.untyped_storage().data_ptr() for x in args if isinstance(x, torch.Tensor)}
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor) and (at := tensor.untyped_storage().data_ptr()) not in old:
                self._held[at] = weakref.ref(tensor)
                self._sizes[at] = tensor.untyped_storage().nbytes()
                self.total += self._sizes[at]
        live = [at for at, of in self._held.items() if of() is not None]
        self.most = max(self.most, sum(self._sizes[at] for at in live))
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprobs_take_a_fifth_of_the_logits_memory(dtype: torch.dtype) -> None:
    logits, tokens = torch.randn(256, 4096).to(dtype), torch.zeros(256, dtype=torch.int32)
    sampling = sampling_batch([PLAIN] * 256, (), 20)
    sampling.top_allowed, changed = np.ones(256, np.int32), logits.float()
    with _Allocated() as allocated:
        logprobs_of(logits, tokens, sampling, changed)
    assert 0 < allocated.most <= 0.25 * 4 * logits.numel()


@pytest.mark.parametrize("case", ["DeepseekV3", "Llama"])
def test_a_size_that_is_bound_later_allocates_nothing(case: str) -> None:
    """Also where heads aren't contiguous, as in MLA: copies of keys, values and queries have planned memory."""
    program, context = cases.program_of(case)
    steps = cases.steps_of(cases.lowered(program, context, "f32"), 256, launcher=_Devices(cases.CPU))
    bound, ports = steps._program, steps._program.program.ports

    def bind(shape: StepShape) -> tuple[int, int]:
        """Returns the number of functions of a step, and the bytes that binding them allocates."""
        sizes = input_shapes(bound.groups, shape, ports).items()
        inputs = {name: torch.zeros(size, dtype=torch.int32) for name, size in sizes}
        with _Allocated() as allocated:
            works = bound.bound(shape, inputs).works
        return len(works), allocated.total

    bind(StepShape(0, 8, 8, 8, 32, True))  # which makes the list of attention's parts
    for shape in (StepShape(0, 64, 4, 4, 4, False), StepShape(0, 4, 4, 4, 32, True)):
        works, nbytes = bind(shape)
        assert works > 10 and nbytes == 0


def out_of_memory(times: int) -> tuple[list[str], int]:
    """The results of three steps if memory runs out ``times`` times in the second one, and the number of attempts."""
    program, context = cases.program_of("Llama")
    steps, stepper = cases.steps_of(cases.lowered(program, context, "f32"), 256), Steps(["full"], cases.BLOCKS)
    outcomes, left = [], 0
    draw = steps._draw

    def full(*given: Any) -> Any:
        nonlocal left
        left -= 1
        if left >= 0:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.40 GiB.")
        return draw(*given)

    steps._draw = full
    for number in range(3):
        left = times if number == 1 else 0
        step = cases.step_input(stepper.step({"a": [number + 1]}), cases.greedy(1))
        try:
            tokens = steps.start(step).result().tokens
            outcomes.append("tokens" if tokens is not None else "nothing")
        except CapacityError as e:
            outcomes.append(e.message)
    return outcomes, steps.late["late_memory"]


@pytest.mark.matrix
def test_where_memory_runs_out_a_step_is_tried_again(interpreter: ProcessPoolExecutor) -> None:
    outcomes, count = interpreter.submit(out_of_memory, 1).result()
    assert outcomes == ["tokens"] * 3 and count == 1
    outcomes, count = interpreter.submit(out_of_memory, 2).result()
    assert outcomes[::2] == ["tokens"] * 2 and count == 1
    assert outcomes[1].startswith("memory: the GPU has none left for a step: CUDA out of memory")


def lost_gpu(bundle: str) -> list[tuple[str, str]]:
    """The answers of ``LLM`` around a launch that fails, after which the GPU answers nothing."""
    from enginewright import LLM, SamplingParams

    records: list[tuple[str, str]] = []
    broken = False

    class Fails(JitLauncher):
        def bind(self, call: Call) -> Callable[[], object]:
            launch = super().bind(call)
            return lambda: fail() if broken else launch()

    def fail(*given: object) -> None:
        if broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with (
        patch.object(cuda_blocks._Interpreted, "launcher", lambda *given: Fails()),
        patch.object(cuda_blocks._Interpreted, "probe", fail),
        LLM(bundle, target="cuda", trust="code", context=64, max_requests=2, memory="1MiB") as llm,
    ):
        for state in (False, True, True, False):
            broken = state
            try:
                result = llm.generate([1, 2, 3], SamplingParams(max_tokens=1, temperature=0.0))[0]
                records.append((str(len(result.token_ids)), llm.lost))
            except EnginewrightError as e:
                records.append((e.message, llm.lost))
        info = llm.info()["executor"]
        assert info["late_binds"] > 0 and info["late_graphs"] == 0
    return records


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Path:
    """A tiny model for the target, without kernels: interpreted ones aren't compiled."""
    path = tmp_path_factory.mktemp("cuda") / "tiny.bundle"
    engines = EnginesSection(dtype="f32", requests=8, chunk=64, gpus=("8.0",))
    recipe = load_recipe("f32").model_copy(update={"engines": engines})
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(CudaEmitter, "_kernels", lambda *given: {})
        export(tiny_folder, path, recipe=recipe, targets=("cuda", "cpu"))
    return path


@pytest.mark.matrix
def test_a_lost_gpu_is_said_from_then_on(bundle: Path, interpreter: ProcessPoolExecutor) -> None:
    first, *others = interpreter.submit(lost_gpu, str(bundle)).result()
    assert first == ("1", "")
    assert len(others) == 3
    for message, lost in others:
        assert "the GPU is lost to this process" in message and "illegal memory access" in lost


@pytest.mark.matrix
def test_a_server_starts_another_engine_where_the_gpu_is_lost(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_server: Callable[..., Server]
) -> None:
    """A fault is planted in the engine's process: a request fails, ``/health`` is 503, and the next one is answered."""
    fault = tmp_path / "fault"
    (tmp_path / "sitecustomize.py").write_text(gpu_fault.SITE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv(gpu_fault.FILE_VARIABLE, str(fault))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    options = ("--target", "cuda", "--trust", "code", "--context", "64", "--max-requests", "2", "--memory", "1MiB")
    server = make_server(bundle, *options)
    request = {"prompt": [1, 2, 3], "max_tokens": 2, "temperature": 0}
    before = server.complete(**request)
    assert before.status == 200 and server.ask("GET", "/health").status == 200
    (old,) = server.engines()
    fault.touch()
    server.wait(lambda: not fault.exists() and server.complete(**request).status != 200)
    server.wait(lambda: server.ask("GET", "/health").status == 503)
    server.wait(lambda: server.ask("GET", "/health").status == 200)
    assert server.complete(**request).text == before.text
    assert server.engines() != [old]
    assert "the engine ends: the GPU is lost to this process" in server.errors.read_text()


def answers_with_forms(bundle: str, target: str) -> list[list[list[int]]]:
    """Tokens of the sequences of each request: with forms, some beside plain ones, and of beam searches with forms."""
    from enginewright import LLM, SamplingParams

    form = {"regex": "[a-f]{2}(cat|dog|dot)[0-9]+"}
    options = {"target": target, "trust": "code", "context": 64, "max_requests": 8, "memory": "2MiB"}
    with LLM(bundle, **options) as llm:
        params = [
            SamplingParams(max_tokens=8, temperature=t, seed=n, structured_outputs=form if n % 3 else None, logprobs=2)
            for n, t in enumerate((0, 0, 0.9, 1.3, 0.8))
        ]
        results = llm.generate([[5, 6, 7 + n] for n in range(5)], params, progress=False)
        answers = [[list(output.token_ids) for output in result.outputs] for result in results]
        search = SamplingParams(num_beams=3, n=3, max_tokens=6, structured_outputs=form)
        beams = llm.generate([[5, 6, 7], [9, 8]], search, progress=False)
        return [*answers, *([list(output.token_ids) for output in result.outputs] for result in beams)]


@pytest.mark.matrix
def test_forms_have_the_cpu_target_s_tokens_also_with_beams(bundle: Path, interpreter: ProcessPoolExecutor) -> None:
    ours, theirs = (interpreter.submit(answers_with_forms, str(bundle), target).result() for target in ("cuda", "cpu"))
    assert ours == theirs
    assert [len(sequences) for sequences in ours[-2:]] == [3, 3]


def in_its_stream(bundle: str) -> tuple[list[bool], list[str]]:
    """True for each time that the place's stream was the current one as it has to be: when a step starts, not after it
    was submitted, and when its result is read; and what was done after opening failed."""
    from enginewright import LLM, SamplingParams

    inside: list[bool] = []
    done: list[str] = []
    current = threading.local()

    @contextmanager
    def entered(self: Any) -> Iterator[None]:
        before, current.stream = getattr(current, "stream", ""), "ours"
        yield
        current.stream = before

    def noting(method: Callable[..., Any]) -> Callable[..., Any]:
        def run(*given: Any) -> Any:
            inside.append(current.stream == "ours")
            return method(*given)

        return run

    def submit(self: Any, step: Any) -> Any:
        pending = submitted(self, step)
        inside.append(current.stream == "")
        return pending

    submitted = cuda_blocks.CudaExecutor.submit
    opened = {"target": "cuda", "trust": "code", "context": 64, "max_requests": 2, "memory": "1MiB"}
    with (
        patch.object(cuda_blocks._Interpreted, "entered", entered),
        patch.object(steps_module.CudaSteps, "_start", noting(steps_module.CudaSteps._start)),
        patch.object(steps_module._Started, "_finish", noting(steps_module._Started._finish)),
        patch.object(cuda_blocks.CudaExecutor, "submit", submit),
    ):
        with LLM(bundle, **opened) as llm:
            llm.generate([1, 2, 3], SamplingParams(max_tokens=2, logprobs=1))
        assert getattr(current, "stream", "") == ""
    held: list[weakref.ref[torch.Tensor]] = []

    def fails(program: Any, weights: dict[str, torch.Tensor], *given: Any, **options: Any) -> None:
        held.extend(weakref.ref(weight) for weight in weights.values())
        raise BundleError("a step has no kernel")

    def close(self: Any) -> None:
        done.append("closed" if not any(of() is not None for of in held) else "closed before its tensors went")

    with (
        patch.object(cuda_blocks, "CudaProgram", fails),
        patch.object(cuda_blocks._Interpreted, "close", close),
        pytest.raises(BundleError, match="has no kernel"),
    ):
        LLM(bundle, **opened)
    assert held
    return inside, done


@pytest.mark.matrix
def test_the_caller_s_stream_stays_and_a_failed_opening_gives_memory_back(
    bundle: Path, interpreter: ProcessPoolExecutor
) -> None:
    inside, done = interpreter.submit(in_its_stream, str(bundle)).result()
    assert inside == [True] * 6  # two steps
    assert done == ["closed"]
