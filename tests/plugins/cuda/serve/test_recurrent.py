"""Recurrent and hybrid models on the cuda target: the cpu target's tokens, by interpreted kernels."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from enginewright import LLM, SamplingParams
from enginewright.optimizer.export import export
from enginewright.optimizer.recipes.recipe import load_recipe
from enginewright.plugins.cuda.compile.emitter import CudaEmitter
from enginewright.plugins.cuda.serve.steps import CudaSteps
from enginewright.plugins.gpu.recipe import EnginesSection
from enginewright.runtime.engine.engine import Engine
from enginewright.runtime.requests.request import Generation
from enginewright.runtime.scheduler.limits import SchedulerConfig
from enginewright.runtime.shared.contracts import STATE, ExecutorCaps
from enginewright.runtime.shared.errors import CapacityError
from tests.acceptance.tiny_configs import tiny_family
from tests.passes import small_programs
from tests.passes.small_programs import PagedEvaluation, random_sequences
from tests.plugins.cuda.serve import cuda_cases as cases
from tests.plugins.cuda.serve.fake_graphs import RecordingLauncher, captured
from tests.plugins.cuda.serve.test_ranked import on_ranks
from tests.triton_interpreter import interpreter as interpreter

KINDS = {
    "lfm2": "short convolutions",
    "mamba": "a selective scan",
    "mamba2": "a scan of Mamba-2",
    "qwen3_5_text": "a gated delta rule",
    "kimi_linear": "KDA",
    "falcon_h1": "Mamba-2 beside attention in one layer",
}
"""Families, and what their recurrent layers are."""

SAMPLED = {"temperature": 0.8, "seed": 5, "ignore_eos": True}


@pytest.fixture(
    scope="module",
    params=[pytest.param(one, marks=[] if one == "qwen3_5_text" else pytest.mark.matrix) for one in KINDS],
)
def bundle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model for both targets, whose kernels aren't compiled: they are interpreted."""
    folder = tmp_path_factory.mktemp(request.param)
    tiny_family(request.param, **cases.SIZES.get(request.param, {})).save_pretrained(folder / "saved")
    engines = EnginesSection(dtype="f32", requests=4, chunk=64)
    recipe = load_recipe("f32").model_copy(update={"engines": engines})
    with patch.object(CudaEmitter, "_kernels", lambda *_: {}):
        export(folder / "saved", folder / "model.bundle", recipe=recipe, targets=["cpu", "cuda"])
    return folder / "model.bundle"


def prompts() -> list[list[int]]:
    """Prompts of which three begin alike, and diverge within a block."""
    rng = np.random.default_rng(11)
    common = rng.integers(3, 250, 41).tolist()
    return [*(common[:n] + rng.integers(3, 250, m).tolist() for n, m in ((41, 2), (37, 5), (41, 3))), [7]]


def answers(bundle: Path, target: str, together: bool, **options: Any) -> tuple[list[Any], Mapping[str, Any]]:
    """The tokens of every prompt, in one call or one after the other, and what the prefix cache did."""
    options = {"speculate": None, "context": 96, "verify": False, **options}
    params = SamplingParams(max_tokens=4, **SAMPLED)
    with LLM(bundle, target=target, trust="code", **options) as llm:
        batches = [prompts()] if together else [[prompt] for prompt in prompts()]
        results = [one for batch in batches for one in llm.generate(batch, params, progress=False)]
        return [one.outputs[0].token_ids for one in results], llm.info()["prefix_cache"]


@pytest.mark.parametrize(
    ("together", "options"),
    [
        (True, {"prefix_cache": False}),
        pytest.param(True, {"prefill_chunk": 7, "max_requests": 2}, marks=pytest.mark.matrix),
        pytest.param(False, {}, marks=pytest.mark.matrix),
    ],
    ids=["together", "in chunks", "one after the other"],
)
def test_tokens_are_those_of_the_cpu_target(
    bundle: Path, together: bool, options: dict[str, Any], interpreter: ProcessPoolExecutor
) -> None:
    """Prompts whole and in chunks, in batches, and from snapshots of states."""
    expected, _ = answers(bundle, "cpu", False, prefix_cache=False)
    tokens, use = interpreter.submit(answers, bundle, "cuda", together, **options).result()
    assert tokens == expected
    if options.get("prefix_cache", True) and not together:
        assert use["reused"] >= 37, "the third prompt begins as the first one"


def logits_of_many_rows(family: str) -> float:
    """The largest difference of a logit of all rows of a prompt, of which a step has room for four, and of the token
    behind it; as a share of the largest. Rows are in another order, and one of them is there twice."""
    program, context = cases.program_of(family)
    lowering = cases.lowered(program, context, "f32")
    groups = lowering.program.cache_groups
    evaluation, steps = PagedEvaluation(program, cases.BLOCKS), cases.steps_of(lowering, 256, rows=4)
    stepper = small_programs.steps_of(groups, cases.BLOCKS)
    a, b = random_sequences((12, 3), 250)
    worst = 0.0
    for chunks, rows in (({"a": a[:11], "b": b[:2]}, [12, *range(12), 3]), ({"a": a[11:], "b": b[2:]}, [0, 1])):
        expected = evaluation.run(chunks, rows)
        logits = steps.start(cases.step_input(stepper.step(chunks, rows))).result().logits
        assert logits is not None
        worst = max(worst, float(np.abs(logits - expected.numpy()).max() / expected.abs().max()))
    return worst


@pytest.mark.parametrize("family", ["qwen3_5_text", pytest.param("jamba", marks=pytest.mark.matrix)])
def test_a_token_of_a_step_that_is_cut_is_computed_once(family: str, interpreter: ProcessPoolExecutor) -> None:
    assert interpreter.submit(logits_of_many_rows, family).result() <= cases.EXACT


def replayed(family: str) -> tuple[int, float, bool]:
    """Graphs that ran, the largest difference from steps without, and whether states of no request stayed as they
    were: three requests are padded to four."""
    program, context = cases.program_of(family)
    lowering = cases.lowered(program, context, "f32")
    groups = lowering.program.cache_groups
    plain = cases.steps_of(lowering, 256)
    held: list[CudaSteps] = []

    graphs = cases.steps_of(lowering, 256, lambda work: captured(work, held[0]), RecordingLauncher())
    held.append(graphs)
    states = [cache.of for cache in graphs._program.caches.values() if cache.group.kind == STATE]
    for one in states:
        one.fill_(float("nan"))
    ours, theirs = (small_programs.steps_of(groups, cases.BLOCKS) for _ in range(2))
    a, b, c = random_sequences((10, 8, 7), 250)
    chunks = [{"a": a[:6], "b": b[:4], "c": c[:3]}]
    chunks += [{"a": a[i + 6 : i + 7], "b": b[i + 4 : i + 5], "c": c[i + 3 : i + 4]} for i in range(4)]
    worst = 0.0
    for chunk in chunks:
        want = plain.start(cases.step_input(ours.step(chunk))).result().logits
        got = graphs.start(cases.step_input(theirs.step(chunk))).result().logits
        assert want is not None and got is not None
        worst = max(worst, float(np.abs(want - got).max()))
        cases.poison(graphs._program.arena)
        graphs._inputs.host[:] = 0x7F7F7F7F
    name = next(group.name for group in groups if group.kind == STATE)
    used = {request.blocks[name][0] for request in theirs.requests.values()}
    others = [block for block in range(cases.BLOCKS) if block not in used]
    return graphs.graphs.launches, worst, all(bool(one[others].isnan().all()) for one in states)


@pytest.mark.parametrize("family", ["qwen3_5_text", pytest.param("mamba2", marks=pytest.mark.matrix)])
def test_graphs_go_on_from_states_and_padding_has_none(family: str, interpreter: ProcessPoolExecutor) -> None:
    launches, worst, untouched = interpreter.submit(replayed, family).result()
    assert launches == 2 and worst == 0.0 and untouched


class _Served:
    """``CudaSteps`` as an engine takes them, with fewer blocks of keys than its requests need."""

    def __init__(self, lowering: Any, blocks: int) -> None:
        self._steps = cases.steps_of(lowering, 256, blocks=16)
        self.cache_groups = lowering.program.cache_groups
        self.blocks = {group.name: 4 if group.kind == STATE else blocks for group in self.cache_groups}
        self.caps = ExecutorCaps(max_tokens=128, max_requests=8, shared_blocks=True)
        self.submit = self._steps.start


def preempted(family: str) -> list[tuple[int, list[list[int]]]]:
    """Returns how often a request was preempted, and the greedy tokens of each, with many blocks and with few."""
    program, context = cases.program_of(family)
    lowering = cases.lowered(program, context, "f32")
    results = []
    for blocks in (16, 3):
        engine = Engine(_Served(lowering, blocks), SchedulerConfig(2, 16))  # type: ignore[arg-type]
        prompts_of = random_sequences((30, 31, 9), 250)
        requests = [Generation(prompt, SamplingParams(max_tokens=5, ignore_eos=True)) for prompt in prompts_of]
        for request in requests:
            engine.add_request(request)
        while engine.has_work():
            engine.step()
        results.append((engine.preemptions, [request.tokens[request.prompt_length :] for request in requests]))
    return results


@pytest.mark.matrix
@pytest.mark.parametrize("family", ["qwen3_5_text", "falcon_h1"])
def test_a_preempted_request_goes_on_with_its_tokens(family: str, interpreter: ProcessPoolExecutor) -> None:
    (never, expected), (often, tokens) = interpreter.submit(preempted, family).result()
    assert never == 0 < often and tokens == expected


def without_memory(family: str, place: str) -> tuple[str, int]:
    """Returns the error of a step whose memory runs out once, and how often its work began. ``place``: "before" its
    work, "behind" it, or in its "sampling".
    """
    program, context = cases.program_of(family)
    lowering = cases.lowered(program, context, "f32")
    steps = cases.steps_of(lowering, 256)
    runs, failing = [0], [True]
    run, bound_for, draw = steps._run, steps._bound_for, steps._draw

    def fail_in(here: str) -> None:
        if place == here and failing and failing.pop():
            raise torch.OutOfMemoryError("tried to allocate")

    def counted(*given: Any) -> None:
        runs[0] += 1
        run(*given)
        fail_in("behind")

    def bound(*given: Any, **more: Any) -> Any:
        fail_in("before")
        return bound_for(*given, **more)

    def drawn(*given: Any) -> Any:
        tokens = draw(*given)
        fail_in("sampling")
        return tokens

    inputs = small_programs.steps_of(lowering.program.cache_groups, cases.BLOCKS).step({"a": [3, 4, 5]})
    with patch.multiple(steps, _run=counted, _bound_for=bound, _draw=drawn):
        try:
            step = cases.step_input(inputs, cases.greedy(1))
            step.outputs = ("logits",)
            output = steps.start(step).result()
            assert output.tokens is not None and output.logits is not None
            assert output.tokens.tolist() == output.logits.argmax(-1).tolist()
        except CapacityError as e:
            return e.message, runs[0]
    return "", runs[0]


def test_a_step_that_changed_states_is_not_tried_again(interpreter: ProcessPoolExecutor) -> None:
    """A second run would begin with the states that the first one has written. Its sampling is tried again."""
    for family, place, error, runs in (
        ("lfm2", "before", "", 1),
        ("lfm2", "behind", "memory: the GPU has none left for a step: tried to allocate", 1),
        ("lfm2", "sampling", "", 1),
        ("Llama", "behind", "", 2),
    ):
        assert interpreter.submit(without_memory, family, place).result() == (error, runs)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("family", "how"), [("qwen3_5_text", "tensor=2"), ("mamba2", "tensor=2"), ("lfm2", "pipeline=2")]
)
def test_ranks_have_the_logits_of_one(family: str, how: str, interpreter: ProcessPoolExecutor) -> None:
    assert interpreter.submit(on_ranks, family, "f32", how).result() <= cases.EXACT


def test_states_are_floats_of_32_bits_whatever_the_keys_are() -> None:
    program, context = cases.program_of("lfm2", cache="int8")
    groups = {group.kind: group.dtype for group in cases.lowered(program, context, "bf16").program.cache_groups}
    assert groups == {"": "i8", STATE: "f32"}
