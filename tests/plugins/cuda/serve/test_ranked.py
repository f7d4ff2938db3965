"""The cuda target on several ranks without a GPU: kernels are interpreted, and gloo's collectives join the ranks."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from enginewright import LLM, SamplingParams
from enginewright.optimizer.export import export
from enginewright.optimizer.recipes.recipe import load_recipe
from enginewright.passes.lowering.lower_program import Lowering
from enginewright.plugins.cuda.compile.emitter import CudaEmitter
from enginewright.plugins.cuda.serve import executor
from enginewright.plugins.cuda.serve.exchange import Collectives
from enginewright.plugins.cuda.serve.executor import check_ranks
from enginewright.plugins.cuda.serve.ops import attended_heads, heads_bytes
from enginewright.plugins.cuda.serve.program import CudaProgram, Place
from enginewright.plugins.cuda.serve.steps import CudaSteps
from enginewright.plugins.gpu.jit_launcher import JitLauncher
from enginewright.plugins.gpu.recipe import EnginesSection
from enginewright.plugins.gpu.tiles import GPUS
from enginewright.plugins.ranks.messages import Mail, packed_step, unpacked_step
from enginewright.plugins.steps.packed_steps import StepLimits
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.ranks.partition import Partition
from enginewright.runtime.ranks.rank_programs import partition
from enginewright.runtime.shared.contracts import CacheGroup, FloatArray, StepInput
from enginewright.runtime.shared.errors import BundleError, EnginewrightError, RequestError, TargetError
from enginewright.runtime.shared.lowered_program import Affine, Operand, Step, WeightUse
from tests.conftest import make_tiny_model
from tests.passes import small_programs
from tests.passes.small_programs import Steps
from tests.plugins.cuda.serve import cuda_cases as cases
from tests.plugins.cuda.serve.fake_graphs import FakeGraph, RecordingLauncher, recorded
from tests.triton_interpreter import interpreter as interpreter
from tests.waiting import HANG, wait_until

EXACT = 1e-5
"""The share of the largest logit, in float32: a library's product may add in another order where it has other columns.
"""


def rows_of(use: WeightUse, weights: dict[str, Tensor]) -> Tensor:
    """The part of a weight that a rank loads."""
    return weights[use.source][use.first : use.first + use.shape[0]].clone() if use.source else weights[use.name]


class Threads:
    """Ranks as threads of this process. Each has a program of its own, and gloo joins them.

    Triton's interpreter has one grid at a time: so a rank holds a lock but for when it waits for others.
    """

    def __init__(self, lowering: Lowering, how: Partition, capture: Any = None, launcher: Any = JitLauncher) -> None:
        self.programs = partition(lowering.program, how)
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._turn = threading.Lock()
        weights = cases.weights_of(lowering)
        self.exchanges: list[Collectives] = []
        self.steps = [self._steps(r, how, weights, capture, launcher) for r in range(how.ranks)]
        port = self._store.port
        self._all(lambda rank: self.exchanges[rank].open(TCPStore("127.0.0.1", port, is_master=False), cases.CPU))

    def _steps(self, rank: int, how: Partition, weights: Any, capture: Any, launcher: Any) -> CudaSteps:
        program = self.programs[rank]
        exchange = Collectives(rank, how.ranks, program.ranks, HANG, "127.0.0.1")
        self.exchanges.append(exchange)
        device_launcher = launcher()
        bound = CudaProgram(
            program,
            {use.name: rows_of(use, weights) for use in program.weights},
            Place(cases.CPU, GPUS[80], device_launcher),
            blocks={group.name: cases.BLOCKS for group in program.cache_groups},
            limits=StepLimits(tokens=128, requests=8, rows=128, blocks=48),
            exchange=_Yielding(exchange, self._turn),
        )
        cases.poison(bound.arena)
        for room in bound._rooms.values():
            cases.poison(room)
        return CudaSteps(bound, 256, device_launcher, capture)

    def _all(self, work: Callable[[int], None]) -> None:
        problems: list[BaseException] = []

        def run(rank: int) -> None:
            try:
                work(rank)
            except BaseException as e:  # noqa: BLE001
                import traceback

                traceback.print_exc()
                problems.append(e)

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(self.programs))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if problems:
            raise problems[0]

    def logits(self, step: StepInput) -> FloatArray:
        """The logits of rank 0 for a step that the others receive as bytes."""
        results: list[FloatArray] = []
        groups = [group.name for group in self.programs[0].cache_groups]

        def run(rank: int) -> None:
            with self._turn:
                if rank:
                    self.steps[rank].start(unpacked_step(groups, packed_step(groups, step)))
                    return
                logits = self.steps[0].start(step).result().logits
            assert logits is not None
            results.append(logits)

        self._all(run)
        return results[0]


class _Yielding:
    """An exchange that lets other ranks go on while it waits for them."""

    def __init__(self, exchange: Collectives, turn: threading.Lock) -> None:
        self._exchange, self._turn, self.place = exchange, turn, exchange.place

    def __getattr__(self, name: str) -> Callable[..., None]:
        method = getattr(self._exchange, name)

        def call(*given: Any) -> None:
            self._turn.release()
            try:
                method(*given)
            finally:
                self._turn.acquire()

        return lambda *given: recorded(partial(call, *given))


def on_ranks(case: str, recipe: str, how: str, floats: Any = "f32", cache: str | None = None) -> float:
    """The largest difference of a logit from one rank's, as a share of the largest, in a step of prompts beside decodes
    and one of decodes."""
    program, context = cases.program_of(case, recipe, cache)
    lowering = cases.lowered(program, context, floats)
    alone, ranks = cases.steps_of(lowering, 256), Threads(lowering, Partition.parse(how))
    ours, theirs = (small_programs.steps_of(lowering.program.cache_groups, cases.BLOCKS) for _ in range(2))
    worst = 0.0
    for chunks in cases.schedule()[2:4]:
        want = alone.start(cases.step_input(ours.step(chunks))).result().logits
        got = ranks.logits(cases.step_input(theirs.step(chunks)))
        assert want is not None and got.shape == want.shape
        worst = max(worst, float(np.abs(want - got).max() / np.abs(want).max()))
    return worst


@pytest.mark.parametrize(
    ("case", "recipe", "how"),
    [
        ("Llama", "f32", "tensor=2"),
        *(
            pytest.param(*one, marks=pytest.mark.matrix)
            for one in (("Llama", "int4", "tensor=3"), ("Mixtral", "f32", "tensor=2"))
        ),
        *(
            pytest.param(*one, marks=pytest.mark.soak)
            for one in (
                ("Mixtral", "int8", "tensor=2,pipeline=2"),
                ("Llama", "int8", "pipeline=2"),
                ("GPT2", "int8", "tensor=2"),
                ("DeepseekV3", "f32", "tensor=2"),
            )
        ),
    ],
)
def test_ranks_have_the_logits_of_one(case: str, recipe: str, how: str, interpreter: ProcessPoolExecutor) -> None:
    assert interpreter.submit(on_ranks, case, recipe, how).result() <= EXACT


def replayed_on_ranks(case: str, how: str) -> tuple[list[int], float]:
    """Graphs that each rank has replayed, and the largest difference from one rank's steps, with all memory poisoned
    between steps."""
    program, context = cases.program_of(case)
    lowering = cases.lowered(program, context, "f32")
    names = [group.name for group in lowering.program.cache_groups]
    alone = cases.steps_of(lowering, 256)
    ranks = Threads(lowering, Partition.parse(how), FakeGraph, RecordingLauncher)
    ours, theirs, worst = Steps(names, cases.BLOCKS), Steps(names, cases.BLOCKS), 0.0
    for chunks in ({"a": [5]}, {"a": [9]}, {"a": [7]}):
        want = alone.start(cases.step_input(ours.step(chunks))).result().logits
        got = ranks.logits(cases.step_input(theirs.step(chunks)))
        assert want is not None
        worst = max(worst, float(np.abs(want - got).max() / np.abs(want).max()))
        for steps in ranks.steps:
            for memory in (steps._program.arena, *steps._program._rooms.values()):
                cases.poison(memory)
    return [steps.graphs.launches for steps in ranks.steps], worst


@pytest.mark.parametrize(
    ("case", "how"),
    [
        pytest.param("Llama", "tensor=2", marks=pytest.mark.matrix),
        pytest.param("Mixtral", "tensor=2", marks=pytest.mark.soak),
        pytest.param("Llama", "pipeline=2", marks=pytest.mark.soak),
    ],
)
def test_graphs_hold_collectives(case: str, how: str, interpreter: ProcessPoolExecutor) -> None:
    launches, worst = interpreter.submit(replayed_on_ranks, case, how).result()
    assert launches == [1, 1]  # the first two of the three decode steps are run call by call
    assert worst <= EXACT


PROMPTS = [[5, 6, 7, 8, 9], [11, 12, 13]]
PARAMS = [
    SamplingParams(max_tokens=4, ignore_eos=True),
    SamplingParams(max_tokens=4, ignore_eos=True, temperature=0.9, seed=3),
]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model for the target, without kernels: interpreted ones aren't compiled."""
    path = tmp_path_factory.mktemp("cuda") / "llama.bundle"
    engines = EnginesSection(dtype="f32", requests=8, chunk=64, partitions=("tensor=2",))
    recipe = load_recipe("f32").model_copy(update={"engines": engines})
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(CudaEmitter, "_kernels", lambda *_: {})
        export(make_tiny_model("Llama"), path, recipe=recipe, targets=["cuda"])
    return path


def opened(path: Path, **more: Any) -> LLM:
    return LLM(path, target="cuda", trust="code", memory="1MiB", verify=False, **more)


def answers(path: Path, **more: Any) -> list[tuple[int, ...]]:
    with opened(path, **more) as llm:
        results = llm.generate(PROMPTS, PARAMS, progress=False, raise_errors=True)
        return [tuple(result.outputs[0].token_ids) for result in results]


@pytest.mark.parametrize(
    "how",
    [pytest.param("tensor=2", marks=pytest.mark.matrix), pytest.param("pipeline=2", marks=pytest.mark.soak)],
)
def test_processes_have_the_tokens_of_one(bundle: Path, how: str, interpreter: ProcessPoolExecutor) -> None:
    alone, ranks = (interpreter.submit(answers, bundle, partition=p).result() for p in (None, how))
    assert alone == ranks


def lost(path: Path) -> tuple[str, str, list[bool], list[tuple[int, ...]]]:
    """The errors of a request after a rank was killed, and of a later one; the processes that still run; and the
    answers after the bundle was opened again.
    """
    with opened(path, ranks=2) as llm:
        executor: Any = llm.engine.executor
        pids = executor.places.pids
        stream = llm.stream(PROMPTS[0], SamplingParams(max_tokens=200, ignore_eos=True))
        next(stream)
        os.kill(pids[0], signal.SIGKILL)
        errors = []
        for again in (lambda: list(stream), lambda: llm.generate(PROMPTS, PARAMS, progress=False)):
            with pytest.raises(EnginewrightError) as raised:
                again()
            errors.append(raised.value.message)
        there = [Path(f"/proc/{pid}").exists() for pid in pids]
    return errors[0], errors[1], there, answers(path, ranks=2)


@pytest.mark.matrix
def test_a_rank_that_is_killed_is_named_and_none_stays(bundle: Path, interpreter: ProcessPoolExecutor) -> None:
    error, later, there, again = interpreter.submit(lost, bundle).result()
    assert "rank 1 (process " in error and "was killed by SIGKILL" in error
    assert "rank 1" in later
    assert there == [False]
    assert again == interpreter.submit(answers, bundle).result()


def sent(path: Path, place: str) -> tuple[list[tuple[int, ...]] | str, list[bytes], int]:
    """Returns the answers, or the error, of two ranks of which the first runs out of memory once: in a step's
    "sampling", or "behind" its computation. Also returns the steps that the other rank got, and how many rank 0 ran.
    """
    posted, failing = list[bytes](), [True]
    ran = 0
    post, run, draw = Mail.post, CudaSteps._run, CudaSteps._draw

    def fail_in(here: str) -> None:
        if place == here and failing and failing.pop():
            raise torch.OutOfMemoryError("tried to allocate")

    def counted_post(mail: Mail, step: Any, copies: Any) -> None:
        posted.append(step.tobytes())
        post(mail, step, copies)

    def counted_run(steps: CudaSteps, *given: Any) -> None:
        nonlocal ran
        ran += 1
        run(steps, *given)
        fail_in("behind")

    def drawn(steps: CudaSteps, *given: Any) -> Any:
        tokens = draw(steps, *given)
        fail_in("sampling")
        return tokens

    with patch.object(Mail, "post", counted_post), patch.multiple(CudaSteps, _run=counted_run, _draw=drawn):
        try:
            return answers(path, ranks=2), posted, ran
        except EnginewrightError as e:
            return e.message, posted, ran


@pytest.mark.matrix
def test_ranks_get_no_step_twice(bundle: Path, interpreter: ProcessPoolExecutor) -> None:
    """The others have computed it, and wait for the next one: a second run on one rank would wait for them forever."""
    tokens, posted, ran = interpreter.submit(sent, bundle, "sampling").result()
    assert tokens == interpreter.submit(answers, bundle).result()
    assert len(posted) == len(set(posted)) == ran >= 4
    error, posted, ran = interpreter.submit(sent, bundle, "behind").result()
    assert "the GPU has none left for a step" in str(error)
    assert len(posted) == ran == 1


FAULT = """
import os, sys
if any("cuda.serve.rank" in word for word in sys.orig_argv):
    from enginewright.plugins.cuda.serve import executor, steps
    def fail(*given):
        if os.path.exists(os.environ["PLANTED"]):
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
    executor._Interpreted.probe = fail
    finish = steps._Started._finish
    steps._Started._finish = lambda step: fail() or finish(step)
"""


def one_of_two_gpus(path: Path, folder: Path) -> tuple[list[str], str]:
    """The errors of the request after which rank 1's GPU is lost, and of the next one; and why the model is lost."""
    (folder / "sitecustomize.py").write_text(FAULT)
    errors, planted = [], folder / "planted"
    with patch.dict(os.environ, PYTHONPATH=str(folder), PLANTED=str(planted)), opened(path, ranks=2) as llm:
        llm.generate(PROMPTS, PARAMS, progress=False)
        planted.touch()
        with pytest.raises(EnginewrightError) as raised:
            llm.generate(PROMPTS, SamplingParams(max_tokens=200, ignore_eos=True), progress=False, raise_errors=True)
        errors.append(raised.value.message)
        wait_until(lambda: llm.lost)
        with pytest.raises(EnginewrightError) as raised:
            llm.generate(PROMPTS, PARAMS, progress=False, raise_errors=True)
        return [*errors, raised.value.message], llm.lost


@pytest.mark.matrix
def test_a_rank_whose_gpu_is_lost_ends_the_model(
    bundle: Path, tmp_path: Path, interpreter: ProcessPoolExecutor
) -> None:
    errors, lost = interpreter.submit(one_of_two_gpus, bundle, tmp_path).result()
    assert "rank 1" in lost and "the GPU is lost to this process" in lost and "illegal memory access" in lost
    assert all("rank 1" in error for error in errors)


@pytest.mark.matrix
def test_what_is_refused(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(RequestError, match="ring=2: target 'cuda' doesn't divide keys among ranks"):
        opened(bundle, partition="ring=2")
    there = Bundle.open(bundle, trust="code")
    with pytest.raises(BundleError, match="no kernels for partition pipeline=2: it has those for tensor=2"):
        check_ranks(there, "cuda", Partition(pipeline=2))
    gpus = [SimpleNamespace(name="H100", capability="9.0", index=0)]
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(executor, "load_cuda", lambda: SimpleNamespace(gpus=gpus))
    with pytest.raises(TargetError, match="ranks: 2 need a GPU each, and here are 1"):
        check_ranks(there, "cuda", Partition(tensor=2))
    gpus *= 2
    check_ranks(there, "cuda", Partition(tensor=2))


@pytest.mark.parametrize(("heads", "kv_heads", "attrs"), [(4, 2, {}), (2, 1, {"group": 4, "first_head": 2})])
def test_heads_that_lie_evenly_stay(heads: int, kv_heads: int, attrs: dict[str, Any]) -> None:
    assert attended_heads(attention(heads, attrs), CacheGroup("g", (0,), kv_heads, 4, 4)) == (0, heads)


def test_heads_of_two_keys_are_filled_up() -> None:
    """Query heads 2, 3 and 4 of 8, of which 4 read a key/value head."""
    step = attention(3, {"group": 4, "first_head": 2})
    cached = CacheGroup("g", (0,), 2, 16, 16)
    assert attended_heads(step, cached) == (2, 8)
    assert heads_bytes(step, cached, (5, 1, 1)) == {"queries": 5 * 8 * 16 * 4, "results": 5 * 8 * 16 * 4}


def attention(heads: int, attrs: dict[str, Any]) -> Step:
    shape = Affine(0, 1), Affine(heads), Affine(16)
    strides = Affine(heads * 16), Affine(16), Affine(1)
    one = Operand(kind="buffer", name="x", dtype="f32", shape=shape, strides=strides)
    return Step(op="paged_attention", inputs=(one,), outputs=(one,), attrs=attrs)
