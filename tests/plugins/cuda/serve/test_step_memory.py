"""The memory of steps: what they hold, allocate, copy and clear, and steps for which there is too little."""

from __future__ import annotations

import gc
import weakref
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from enginewright.plugins.cuda.serve import program as program_module
from enginewright.plugins.cuda.serve.program import step_memory
from enginewright.plugins.cuda.serve.steps import logprobs_of
from enginewright.plugins.steps.packed_steps import StepLimits, StepShape, input_shapes
from enginewright.runtime.requests.logit_rules import PLAIN, sampling_batch
from enginewright.runtime.shared.errors import CapacityError
from tests.passes.small_programs import Steps
from tests.plugins.cuda.serve import cuda_cases as cases
from tests.plugins.cuda.serve.fake_graphs import FakeGraph, RecordingLauncher
from tests.triton_interpreter import interpreter as interpreter


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
    held += [steps._tables, steps._changed.device]
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
    program = cases.steps_of(cases.lowered(family, context, "f32"), 256, launcher=cases.Devices(cases.CPU))._program
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
    """Also where heads aren't contiguous, as in MLA: copies of keys, values and queries have planned memory. All sizes
    share an upload."""
    program, context = cases.program_of(case)
    steps = cases.steps_of(cases.lowered(program, context, "f32"), 256, launcher=cases.Devices(cases.CPU))
    bound, ports = steps._program, steps._program.program.ports

    def bind(shape: StepShape) -> tuple[int, int]:
        """Returns the number of functions of a step, and the bytes that binding them allocates."""
        sizes = input_shapes(bound.groups, shape, ports).items()
        inputs = {name: torch.zeros(size, dtype=torch.int32) for name, size in sizes}
        with _Allocated() as allocated:
            works = bound.bound(shape, inputs).works
        return len(works), allocated.total

    bind(StepShape(0, 8, 8, 8, 32, True))  # which makes the list of attention's parts
    steps._bound_for(steps._padded_shape(8, decodes=True), taps=False, keeps=False)
    with _Allocated() as allocated:
        for shape in steps._shapes():
            steps._bound_for(shape, taps=False, keeps=False)
    assert allocated.total == 0 and len(steps._bound) > 20
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
