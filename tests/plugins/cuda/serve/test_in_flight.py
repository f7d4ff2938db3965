"""Steps that follow one in flight: the device has drawn tokens and changed tables, and the host's arrays are free."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from enginewright.plugins.cuda.serve.program import BoundStep, CudaProgram
from enginewright.plugins.cuda.serve.steps import CudaSteps
from enginewright.plugins.gpu.call import Call
from enginewright.plugins.gpu.jit_launcher import JitLauncher
from enginewright.plugins.gpu.placing import TableChanges
from enginewright.plugins.steps.packed_steps import StepLimits, StepShape
from enginewright.runtime.engine.engine import Engine
from enginewright.runtime.executors.base import Pending
from enginewright.runtime.requests.request import FailedRequestError, Generation
from enginewright.runtime.requests.sampling import SamplingParams
from enginewright.runtime.scheduler.limits import SchedulerConfig
from enginewright.runtime.shared.contracts import CacheGroup, ExecutorCaps, StepInput
from enginewright.runtime.shared.errors import RequestError
from tests.passes.small_programs import Steps, random_sequences, steps_of
from tests.plugins.cuda.serve import cuda_cases as cases
from tests.plugins.cuda.serve.fake_graphs import RecordingLauncher, captured
from tests.triton_interpreter import interpreter as interpreter

VOCAB, BLOCK, BLOCKS = 256, 16, 24
POISON = 0x7F7F7F7F
GROUPS = tuple(
    CacheGroup(name, (layer,), kv_heads=1, key_head_size=1, value_head_size=1, block_size=BLOCK, window=window)
    for layer, (name, window) in enumerate((("full", 0), ("near", 24)))
)


class Checksums:
    """A ``CudaProgram`` whose logits depend on every token that a row sees, as found through the tables.

    A later token weighs more than an earlier one, so an order, a table or a slot that is wrong shows.
    """

    ranked = exact = False

    def __init__(self) -> None:
        self.program, self.groups, self.device = SimpleNamespace(ports=()), GROUPS, torch.device("cpu")
        self.limits = StepLimits(tokens=64, requests=8, rows=8, blocks=36)
        self.pools = {group.name: torch.full((BLOCKS, BLOCK), -1) for group in GROUPS}
        self.pieces_until_no_memory = -1

    def bound(self, shape: StepShape, inputs: Mapping[str, Tensor], *, taps: bool, keeps: bool) -> BoundStep:
        logits = torch.zeros(shape.rows, VOCAB)

        def write() -> None:
            for group in GROUPS:
                slots = inputs[f"slots:{group.name}"]
                self.pools[group.name].view(-1)[slots[slots >= 0].long()] = inputs["ids"][slots >= 0].long()

        def read() -> None:
            self.pieces_until_no_memory -= 1
            if self.pieces_until_no_memory == 0:
                raise torch.OutOfMemoryError("tried to allocate")
            rows = inputs["rows"].long()
            ends = inputs["positions"][rows].long() + 1
            owners = torch.searchsorted(inputs["q_start"], rows, right=True) - 1
            places = torch.arange(shape.blocks * BLOCK)
            total = torch.zeros(shape.rows, dtype=torch.long)
            for group in GROUPS:
                blocks = inputs[f"block_table:{group.name}"][owners.clamp(max=shape.requests - 1)]
                held = self.pools[group.name][blocks.long().clamp(min=0)].view(shape.rows, -1)
                seen = (places < ends[:, None]) & (places >= ends[:, None] - (group.window or 1 << 20))
                total += ((held + 3) * (places * places + 7) * seen).sum(1)
            logits.zero_().scatter_(1, (total * 40503 % 65521 % VOCAB)[:, None], 9.0)

        return BoundStep([write, read], {"logits": logits}, [read])

    def clear(self, group: str, blocks: list[int]) -> None:
        self.pools[group][blocks] = -1

    def copy(self, group: str, pairs: list[list[int]]) -> None:
        for source, to in pairs:
            self.pools[group][to] = self.pools[group][source]

    def close(self) -> None:
        self.pools.clear()


class InNumpy(JitLauncher):
    """Places tokens and draws the greatest logits as the kernels do, but fast; the interpreter runs other kernels."""

    def bind(self, call: Call) -> Callable[[], object]:
        arrays: dict[str, Any] = {
            name: value.numpy() if isinstance(value, Tensor) else value for name, value in call.arguments.items()
        }
        if call.kernel == "place":

            def place() -> None:
                rows, changes = arrays["sources"], arrays["changes"][: arrays["count"][0]]
                arrays["ids"][rows >= 0] = arrays["drawn"][rows[rows >= 0]].clip(0, arrays["vocab"] - 1)
                arrays["tables"].reshape(-1)[changes[:, 0]] = changes[:, 1]

            return place
        if call.kernel == "largest":

            def largest() -> None:
                arrays["places"][: len(arrays["logits"])] = arrays["logits"].argmax(1)  # one piece has the whole row
                arrays["values"][: len(arrays["logits"])] = arrays["logits"].max(1)

            return largest
        if call.kernel == "choose_largest":
            rows = call.grid[0]

            def choose() -> None:
                arrays["tokens"][:rows], arrays["tops"][:rows] = arrays["places"][:rows], arrays["values"][:rows]

            return choose
        return super().bind(call)


class Again:
    """A graph that does its work once more."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.launch, self.close = work, lambda: None


class Executor:
    """``CudaSteps`` as an engine takes them. The host's arrays are garbage as soon as a step has been submitted."""

    def __init__(self, caps: ExecutorCaps) -> None:
        self.steps = CudaSteps(cast(CudaProgram, Checksums()), VOCAB, InNumpy(), Again)
        self.cache_groups, self.blocks = GROUPS, {group.name: BLOCKS for group in GROUPS}
        self.caps = replace(caps, max_tokens=64, max_requests=8, shared_blocks=True)
        self.counts = Counter[str]()
        write = self.steps._changes.write

        def counted(*arguments: Any) -> int:
            changes = write(*arguments)
            self.counts["changed"] += changes
            return changes

        self.steps._changes.write = counted  # type: ignore[method-assign]

    def submit(self, step: StepInput) -> Pending:
        if step.sources is not None:
            step.ids[step.sources >= 0] = POISON
            self.counts["placed"] += int((step.sources >= 0).sum())
        self.counts["steps"] += 1
        pending = self.steps.start(step)
        self.counts["entries"] += sum(table.size for table in step.block_tables.values())
        self.steps._inputs.host[:] = POISON
        self.steps._changed.host[:] = POISON
        self.steps._lists.host[:] = POISON
        return pending

    def close(self) -> None:
        self.steps.close()


def served(caps: ExecutorCaps, count: int, seed: int) -> tuple[list[list[int]], Counter[str]]:
    """Returns the tokens of requests that arrive, end at any token, are preempted or aborted; and counts."""
    random = np.random.default_rng(seed)
    executor = Executor(caps)
    engine = Engine(executor, SchedulerConfig(8, 48, prefix_cache=True))  # type: ignore[arg-type]
    requests: list[tuple[Generation, bool]] = []
    while executor.counts["steps"] < count or engine.has_work():
        if executor.counts["steps"] < count and len(engine.scheduler.running) + len(engine.scheduler.waiting) < 9:
            prompt = [*range(int(random.integers(1, 40))), *random.integers(0, VOCAB, random.integers(1, 60)).tolist()]
            max_tokens = int(random.integers(1, 80))
            params = SamplingParams(
                max_tokens=max_tokens,
                temperature=float(len(requests) % 40 == 7),
                seed=len(requests),
                stop_token_ids=random.integers(0, VOCAB, 6).tolist(),
                min_tokens=max_tokens if len(requests) % 40 == 21 else 0,
            )
            requests.append((Generation(prompt, params), len(requests) % 17 == 5))
            engine.add_request(requests[-1][0])
        engine.step()
        if requests[-1][1] and requests[-1][0].output_length > 2:
            engine.abort(requests[-1][0])
        executor.counts["flying"] += engine.steps_in_flight
    executor.counts["preempted"] = engine.preemptions
    executor.counts["late"] = executor.steps.graphs.captures
    executor.counts["launches"] = executor.steps.graphs.launches
    assert all(pool.free_blocks == pool.total_blocks for pool in engine.pools.values())
    return [request.tokens for request, aborted in requests if not aborted], executor.counts


def both_ways(count: int) -> tuple[int, Counter[str]]:
    """Returns the number of requests with the same tokens in flight as one step at a time, and the counts in flight."""
    tokens, counts = served(ExecutorCaps(in_flight=2, chains=True), count, 1)
    expected, _ = served(ExecutorCaps(), count, 1)
    together = min(len(tokens), len(expected))
    assert tokens[:together] == expected[:together]
    return together, counts


@pytest.mark.parametrize("count", [150, pytest.param(20_000, marks=pytest.mark.soak)])
def test_steps_in_flight_with_poisoned_host_arrays_equal_one_at_a_time(
    count: int, interpreter: ProcessPoolExecutor
) -> None:
    same, counts = interpreter.submit(both_ways, count).result()
    assert same > count / 12
    assert counts["placed"] > count and counts["flying"] > 0.9 * count and counts["preempted"] > 0
    assert counts["launches"] > 0.8 * count
    assert counts["changed"] < counts["entries"] / 4  # tables go to the device entry by entry


def beside_prompts(caps: ExecutorCaps, no_memory_at: int = -1) -> list[list[int]] | str:
    """Returns the tokens of requests that decode while the log-probabilities of a prompt give a step more rows than
    sampling has memory for; or the error if memory runs out in piece ``no_memory_at`` of the steps' rows.
    """
    executor = Executor(caps)
    cast(Checksums, executor.steps.program).pieces_until_no_memory = no_memory_at
    engine = Engine(executor, SchedulerConfig(8, 48))  # type: ignore[arg-type]
    requests = [Generation([1, 2, 3], SamplingParams(max_tokens=12, temperature=0))]
    engine.add_request(requests[0])
    engine.step()
    params = SamplingParams(max_tokens=4, temperature=0, prompt_logprobs=0)
    requests += [Generation([*range(20)], params), Generation([9, 10, 11], SamplingParams(max_tokens=6, temperature=0))]
    for request in requests[1:]:
        engine.add_request(request)
    while engine.has_work():
        try:
            engine.step()
        except FailedRequestError as e:
            return str(e.__cause__)
    return [request.tokens for request in requests]


def test_tokens_that_were_drawn_in_pieces_are_placed(interpreter: ProcessPoolExecutor) -> None:
    expected = interpreter.submit(beside_prompts, ExecutorCaps()).result()
    assert interpreter.submit(beside_prompts, ExecutorCaps(in_flight=2, chains=True)).result() == expected


def test_a_step_whose_tokens_are_overwritten_is_not_tried_again(interpreter: ProcessPoolExecutor) -> None:
    """Each piece of a step's rows draws into the memory that the step has taken its tokens from."""
    caps = ExecutorCaps(in_flight=2, chains=True)
    expected = interpreter.submit(beside_prompts, caps).result()
    results = [interpreter.submit(beside_prompts, caps, piece).result() for piece in range(2, 8)]
    errors = [result for result in results if isinstance(result, str)]
    assert errors and all("the GPU has none left for a step" in error for error in errors)
    assert all(result == expected for result in results if not isinstance(result, str))


def chained(case: str) -> tuple[list[list[int]], list[list[int]], int]:
    """Returns the greedy tokens of decode steps with the tokens that the host gives, and with those that the device
    places, where the host has garbage; and how many steps were graphs.
    """
    program, context = cases.program_of(case)
    lowering = cases.lowered(program, context, "f32")
    prompts = dict(zip("ab", random_sequences((6, 3), 250), strict=True))
    results = []
    for follows in (False, True):
        held: list[CudaSteps] = []
        steps = cases.steps_of(lowering, VOCAB, lambda work: captured(work, held[0]), RecordingLauncher())  # noqa: B023
        held.append(steps)
        stepper, drawn = steps_of(lowering.program.cache_groups, cases.BLOCKS), list[list[int]]()
        chunks = prompts
        for number in range(6):
            step = cases.step_input(stepper.step(chunks), cases.greedy(2))
            if follows and number:
                step.ids[:], step.sources = POISON, np.arange(2, dtype=np.int32)
            pending = steps.start(step)
            steps._inputs.host[:] = POISON
            cases.poison(steps._program.arena)
            tokens = pending.result().tokens
            assert tokens is not None
            drawn.append(tokens.tolist())
            chunks = {name: [token] for name, token in zip("ab", drawn[-1], strict=True)}
        results.append(drawn)
    return results[0], results[1], steps.graphs.launches


@pytest.mark.parametrize("case", ["Llama", "lfm2", pytest.param("qwen3_5_text", marks=pytest.mark.matrix)])
def test_a_graph_takes_the_tokens_that_the_step_before_has_drawn(case: str, interpreter: ProcessPoolExecutor) -> None:
    from_host, placed, launches = interpreter.submit(chained, case).result()
    assert from_host == placed
    assert launches == 3


def warmed() -> tuple[dict[str, int], dict[str, int], int]:
    """Returns the counts of late work after warming and steps of many sizes, those of steps with other options, and
    how many graphs there are.
    """
    executor = Executor(ExecutorCaps())
    executor.steps.warm()
    graphs = executor.steps.graphs.captures
    random = np.random.default_rng(0)
    counts = []
    for options in ({}, {"logprobs": 2}):
        engine = Engine(executor, SchedulerConfig(8, 48))  # type: ignore[arg-type]
        for number in range(12):
            prompt = random.integers(0, VOCAB, int(random.integers(1, 64))).tolist()
            params = SamplingParams(max_tokens=6, temperature=float(number % 2), seed=number, **options)
            engine.add_request(Generation(prompt, params))
            engine.step()
        while engine.has_work():
            engine.step()
        counts.append(dict(executor.steps.late))
    return counts[0], counts[1], graphs


def test_after_warming_nothing_is_bound_or_captured_while_requests_run(interpreter: ProcessPoolExecutor) -> None:
    plain, with_logprobs, graphs = interpreter.submit(warmed).result()
    assert plain == with_logprobs == {}
    assert graphs == 2 * 4 * 2 + 4 * 2  # decode steps of 1, 2, 4, 8 requests, short or long, two ways; prompts


def test_a_table_sends_what_changes_and_a_long_request_widens_no_other() -> None:
    """Rows of requests that have left become -1. Before a window, what a tile reads is a block of its request."""
    changes, staged = TableChanges(GROUPS, 4, 64), np.zeros((600, 2), np.int32)
    memory = np.full(changes.shape, -1, np.int32).reshape(-1)

    def sent(full: list[list[int]], near: list[list[int]]) -> int:
        width = max(map(len, full))
        tables = [np.array([row + [-1] * (width - len(row)) for row in rows], np.int32) for rows in (full, near)]
        arrays = {f"block_table:{group.name}": table for group, table in zip(GROUPS, tables, strict=True)}
        count = changes.write(arrays, staged)
        memory[staged[:count, 0]] = staged[:count, 1]
        assert (memory.reshape(changes.shape)[0, : len(full), :width] == tables[0]).all()
        assert (memory.reshape(changes.shape)[:, len(full) :] == -1).all()
        return count

    long = list(range(60))
    assert sent([[1, 2], [3]], [[1, 2], [3]]) == 6
    assert sent([[1, 2, 4], [3]], [[1, 2, 4], [3]]) == 2
    assert sent([[1, 2, 4], [3], long], [[-1, 2, 4], [3], [-1] * 57 + long[57:]]) == 60 + 1 + 3 + 8
    table = memory.reshape(changes.shape)[1]
    assert table[0, :3].tolist() == [2, 2, 4]
    assert table[2, 48:60].tolist() == [-1, *[57] * 9, 58, 59]
    assert sent([[1, 2, 4, 5], [3], long], [[-1, 2, 4, 5], [3], [-1] * 57 + long[57:]]) == 2
    assert sent([[1, 2, 4, 5]], [[-1, 2, 4, 5]]) == 1 + 60 + 1 + 11


def test_a_step_that_follows_one_in_flight_and_is_too_large_is_refused() -> None:
    executor = Executor(ExecutorCaps())
    inputs = Steps(["full", "near"], BLOCKS).step({"a": list(range(65))})
    step = cases.step_input(inputs, cases.greedy(1))
    step.sources = np.full(65, -1, np.int32)
    with pytest.raises(RequestError, match="too many for a step that follows one in flight"):
        executor.steps.start(step)
