"""The onnx target through engine and scheduler: a tiny model's tokens and logits are numpy's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from enginewright.plugins.onnx.serve import executor as onnx_slots
from enginewright.plugins.onnx.serve.executor import OnnxExecutor, slot_capacity
from enginewright.plugins.steps.linear_io import linear_io
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.bundle.weights import TensorEntry, WeightsIndex
from enginewright.runtime.engine.llm import LLM
from enginewright.runtime.kv_cache.kinds.table import cache_block_bytes
from enginewright.runtime.requests.request import Generation
from enginewright.runtime.requests.sampling import SamplingParams
from enginewright.runtime.shared.contracts import CacheGroup, StepInput
from enginewright.runtime.shared.errors import (
    BundleError,
    CapacityError,
    EnginewrightError,
    MissingDependencyError,
    RequestError,
    TargetError,
)
from tests.plugins.gpu.fake_driver import FakeCuda, InstalledGpu
from tests.plugins.steps import tiny_onnx as tiny

TOLERANCE = 1e-4
"""The difference of logits up to 35: two layers of 24 values in 32-bit floats, summed in other orders. Measured:
3e-5."""

SLOT_BYTES = 4 * tiny.NKV * (tiny.D + tiny.DV) * 2 * slot_capacity(tiny.CONTEXT)

GREEDY = SamplingParams(temperature=0, max_tokens=tiny.CONTEXT, ignore_eos=True)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_bundle(tmp_path_factory.mktemp("onnx") / "tiny.bundle")


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = np.random.default_rng(1)
    return [rng.integers(0, tiny.V, n).tolist() for n in (1, 2, 3, 5, 5, 6, 9, 11, 20, 33)]


@pytest.fixture(scope="module")
def expected(prompts: list[list[int]]) -> list[list[int]]:
    return [tiny.greedy(prompt, tiny.CONTEXT - len(prompt)) for prompt in prompts]


@pytest.fixture
def make(bundle: Path) -> Iterator[Callable[[int], OnnxExecutor]]:
    """``make(slots)``; closed after the test."""
    executors: list[OnnxExecutor] = []

    def open_it(slots: int) -> OnnxExecutor:
        executors.append(
            OnnxExecutor(Bundle.open(bundle), {"full": slots, "window": slots}, slot_capacity(tiny.CONTEXT), threads=1)
        )
        return executors[-1]

    yield open_it
    for one in executors:
        one.close()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"prefill_chunk": 4},
        {"memory": 3 * SLOT_BYTES, "prefill_chunk": 7},  # most requests wait, and take a slot that another has left
        {"threads": 2, "max_requests": 5},
    ],
)
def test_greedy_tokens(
    bundle: Path, prompts: list[list[int]], expected: list[list[int]], options: dict[str, int]
) -> None:
    with LLM(bundle, **({"threads": 1} | options)) as llm:  # type: ignore[arg-type]
        together = llm.generate(prompts, GREEDY)
        alone = llm.generate(prompts[4], GREEDY)
        free = {name: pool.free_blocks == pool.total_blocks for name, pool in llm.engine.pools.items()}
    assert [list(r.token_ids) for r in together] == expected
    assert list(alone[0].token_ids) == expected[4]
    assert free == {"full": True, "window": True}


def test_logits(bundle: Path, prompts: list[list[int]]) -> None:
    with LLM(bundle, threads=1, prefill_chunk=8) as llm:
        for prompt in prompts:
            np.testing.assert_allclose(llm.logits(prompt), tiny.reference(prompt), atol=TOLERANCE)


def test_a_request_that_is_preempted(bundle: Path, prompts: list[list[int]], expected: list[list[int]]) -> None:
    """Slots hold whole requests, so that none has to give its own up; one that does all the same starts over."""
    with LLM(bundle, threads=1, memory=2 * SLOT_BYTES) as llm:
        requests = [Generation(p, GREEDY, max_tokens=tiny.CONTEXT - len(p)) for p in prompts[2:6]]
        for request in requests:
            llm.engine.add_request(request)
        for steps in range(1000):
            if not llm.engine.has_work():
                break
            if steps in (3, 9, 17):
                queues = llm.engine.scheduler.queues
                queues.preempt(queues.newest())
            llm.engine.step()
        assert llm.engine.preemptions == 3
    assert [list(r.tokens[len(p) :]) for r, p in zip(requests, prompts[2:6], strict=True)] == expected[2:6]


def test_seeds_and_logprobs(bundle: Path, prompts: list[list[int]]) -> None:
    params = [SamplingParams(temperature=0.9, top_p=0.9, seed=i, max_tokens=6, logprobs=3) for i in range(len(prompts))]
    with LLM(bundle, threads=1) as llm:
        together = llm.generate(prompts, params)
        alone = [llm.generate(p, s)[0] for p, s in zip(prompts, params, strict=True)]
    assert [r.token_ids for r in together] == [r.token_ids for r in alone]
    logits = tiny.reference(prompts[3] + list(alone[3].token_ids[:1]))[-2:].astype(np.float64)
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    assert alone[3].logprobs is not None
    for one, row in zip(alone[3].logprobs[:2], logprobs, strict=True):
        assert one.logprob == pytest.approx(row[one.token_id], abs=TOLERANCE)
        assert [token for token, _ in one.top] == np.argsort(-row)[:3].tolist()


def test_idle_rows_touch_nobody(make: Callable[[int], OnnxExecutor]) -> None:
    """A decode over slots 0 to 2 leaves the request in slot 1, which rests, as it is."""
    executor = make(3)
    texts = [[3, 1, 4, 1, 5], [9, 2, 6, 5], [3, 5, 8, 9, 7, 9]]
    executor.submit(_step([(slot, 0, text) for slot, text in enumerate(texts)])).result()
    for position in range(4):
        after = [(slot, len(texts[slot]) + position, [7 + slot]) for slot in (0, 2)]
        output = executor.submit(_step(after)).result()
    output = executor.submit(_step([(1, len(texts[1]), [11])])).result()
    assert output.logits is not None
    np.testing.assert_allclose(output.logits[0], tiny.reference([*texts[1], 11])[-1], atol=TOLERANCE)


def test_logits_are_the_steps_own(make: Callable[[int], OnnxExecutor]) -> None:
    """Another step of the same sizes writes to the same memory."""
    executor = make(2)
    first = executor.submit(_step([(0, 0, [3]), (1, 0, [4])])).result().logits
    executor.submit(_step([(0, 1, [5]), (1, 1, [6])])).result()
    assert first is not None
    np.testing.assert_allclose(first, [tiny.reference([3])[-1], tiny.reference([4])[-1]], atol=TOLERANCE)


def test_rows_in_another_order_than_slots(make: Callable[[int], OnnxExecutor]) -> None:
    logits = make(3).submit(_step([(2, 0, [3]), (0, 0, [4]), (1, 0, [5])])).result().logits
    assert logits is not None
    np.testing.assert_allclose(logits, [tiny.reference([token])[-1] for token in (3, 4, 5)], atol=TOLERANCE)


def test_a_step_without_tokens(make: Callable[[int], OnnxExecutor]) -> None:
    pending = make(1).submit(_step([(0, 0, [])]))
    with pytest.raises(RequestError, match="it has no tokens"):
        pending.result()


def test_what_it_says_of_itself(make: Callable[[int], OnnxExecutor]) -> None:
    executor = make(5)
    assert not executor.caps.ragged
    assert executor.caps.max_requests == 5
    assert executor.cache_groups[1] == CacheGroup(
        "window", (1,), tiny.NKV, tiny.D, tiny.DV, window=tiny.WINDOW, block_size=tiny.CONTEXT + 1
    )
    assert sum(cache_block_bytes(g) for g in executor.cache_groups) == SLOT_BYTES
    about = executor.describe()
    assert {k: about[k] for k in ("target", "provider", "threads", "variant")} == {
        "target": "onnx",
        "provider": "CPUExecutionProvider",
        "threads": 1,
        "variant": "standard",
    }


def test_numbers_that_are_not_finite_go_with_their_request(
    make: Callable[[int], OnnxExecutor], bundle: Path, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    """NaN in a cache would come back in whoever gets the slot next: a mask multiplies it by 0, which is NaN."""
    executor = make(1)
    llm = LLM.from_executor(executor, Bundle.open(bundle).model)
    for memory in executor._caches._memory:
        memory._kept.view(np.float32)[:] = np.nan
    with pytest.raises(EnginewrightError, match="NaN or infinite"):
        llm.generate(prompts[3], GREEDY)
    assert list(llm.generate(prompts[3], GREEDY)[0].token_ids) == expected[3]
    llm.close()


def test_one_request_of_nan_ends_alone(
    make: Callable[[int], OnnxExecutor], bundle: Path, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    """In the middle of its tokens, while others decode in the same run; who gets its slot next is well."""
    executor = make(3)
    with LLM.from_executor(executor, Bundle.open(bundle).model) as llm:
        requests = [Generation(p, GREEDY, max_tokens=tiny.CONTEXT - len(p)) for p in prompts[2:7]]
        for request in requests:
            llm.engine.add_request(request)
        while requests[1].output_length < 4:
            llm.engine.step()
        slot = requests[1].tables["full"][0]
        for memory in executor._caches._memory:
            memory._kept.view(np.float32)[slot] = np.nan
        while llm.engine.has_work():
            llm.engine.step()
        free = [pool.free_blocks for pool in llm.engine.pools.values()]
    assert [r.finish_reason for r in requests] == ["length", "error", "length", "length", "length"]
    assert "new token 4" in str(requests[1].error)
    tokens = [list(r.tokens[r.prompt_length :]) for r in requests]
    assert [tokens[0], *tokens[2:]] == [expected[2], *expected[4:7]]
    assert tokens[1] == expected[3][:4]
    assert free == [3, 3]


def test_logits_that_are_not_finite_stay_with_their_request(make: Callable[[int], OnnxExecutor]) -> None:
    """Asked for logits alone, who wants them sees them; the next in that slot, and the other, are as they should be."""
    executor = make(2)
    executor.submit(_step([(0, 0, [1, 2, 3]), (1, 0, [4, 5, 6])])).result()
    for memory in executor._caches._memory:
        memory._kept.view(np.float32)[1, :, 1:30] = np.nan
    logits = executor.submit(_step([(0, 3, [7]), (1, 3, [8])])).result().logits
    assert logits is not None
    np.testing.assert_allclose(logits[0], tiny.reference([1, 2, 3, 7])[-1], atol=TOLERANCE)
    assert np.isnan(logits[1]).all()
    logits = executor.submit(_step([(0, 4, [9]), (1, 0, [8])])).result().logits
    assert logits is not None
    np.testing.assert_allclose(logits[0], tiny.reference([1, 2, 3, 7, 9])[-1], atol=TOLERANCE)
    np.testing.assert_allclose(logits[1], tiny.reference([8])[-1], atol=TOLERANCE)


def test_a_smaller_context(bundle: Path) -> None:
    with LLM(bundle, threads=1, context=16) as llm:
        assert llm.model.context_length == 16
        assert llm.info()["kv_cache_tokens"] == 64 * 17
        (result,) = llm.generate([[1, 2, 3]], GREEDY)
    assert result.token_ids == tuple(tiny.greedy([1, 2, 3], 13))
    with pytest.raises(CapacityError, match="context: 41 tokens are more than the 40"):
        LLM(bundle, context=41)


def test_memory_for_no_slot(bundle: Path) -> None:
    with pytest.raises(CapacityError, match=f"holds no block: 41 tokens.*\n.*{SLOT_BYTES} bytes or more"):
        LLM(bundle, memory=SLOT_BYTES - 1)


def test_a_request_longer_than_its_slot(make: Callable[[int], OnnxExecutor]) -> None:
    pending = make(1).submit(_step([(0, tiny.CONTEXT, [1])]))
    with pytest.raises(CapacityError, match="has 41 tokens, and a slot holds 40"):
        pending.result()


def test_a_file_that_is_no_model(tmp_path: Path) -> None:
    path = tiny.write_bundle(tmp_path / "bad.bundle", model=tiny.make_model().SerializeToString()[:-2000])
    with pytest.raises(BundleError, match=r"model\.onnx: onnxruntime .* can't load it: .*\n.*optimize verify"):
        LLM(path)


def test_a_file_that_takes_something_else(tmp_path: Path) -> None:
    model = tiny.make_model()
    model.graph.input[0].name = "tokens"
    for node in model.graph.node:
        node.input[:] = ["tokens" if name == "input_ids" else name for name in node.input]
    path = tiny.write_bundle(tmp_path / "bad.bundle", model=model.SerializeToString())
    with pytest.raises(BundleError, match=r"model\.onnx: .*tokens"):
        LLM(path)


def test_a_target_that_says_nothing_of_its_steps(tmp_path: Path) -> None:
    path = tiny.write_bundle(tmp_path / "bad.bundle", io=False)
    with pytest.raises(BundleError, match="target 'onnx' has no description of its steps"):
        linear_io(Bundle.open(path), "onnx")


def test_an_onnxruntime_that_is_too_old_for_the_bundle(tmp_path: Path) -> None:
    path = tiny.write_bundle(tmp_path / "new.bundle", onnxruntime="99.1")
    with pytest.raises(MissingDependencyError, match=r"needs onnxruntime 99\.1 or newer, for opset 24"):
        LLM(path)


def _step(work: list[tuple[int, int, list[int]]]) -> StepInput:
    """Makes a step of requests (slot, tokens before, tokens now); each wants the logits of its last token."""
    slots, before, counts = (np.array(v, np.int32) for v in zip(*((s, b, len(t)) for s, b, t in work), strict=True))
    q_start = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    positions = np.concatenate([np.arange(b, b + n) for b, n in zip(before, counts, strict=True)]).astype(np.int32)
    return StepInput(
        ids=np.concatenate([t for _, _, t in work]).astype(np.int32),
        positions=positions,
        q_start=q_start,
        kv_len=before + counts,
        block_table=dict.fromkeys(("full", "window"), slots[:, None]),
        slots=dict.fromkeys(("full", "window"), np.repeat(slots, counts) * np.int32(tiny.CONTEXT + 1) + positions),
        rows=q_start[1:] - 1,
        outputs=("logits",),
    )


def test_the_caches_take_the_memory_that_they_lie_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Provider cuda takes the GPU's memory, less the weights; others take the machine's."""
    entries = {"a.onnx": 6000, "b.onnx.columns": 4000, "c": 500_000, "a.onnx.f16": 3000, "b.onnx.f16.columns": 2000}
    index = WeightsIndex(tensors={n: _entry(i, size) for i, (n, size) in enumerate(entries.items())})
    bundle: Any = SimpleNamespace(index=index)
    io: dict[str, str] = {"cuda": "standard", "tensorrt-rtx": "standard"}
    monkeypatch.setattr(onnx_slots, "variant_io", lambda b, t, provider, v: SimpleNamespace(variant=io[provider]))
    monkeypatch.setattr(onnx_slots, "load_cuda", lambda: FakeCuda((InstalledGpu(0, "small", "8.9", 50_000),)))
    monkeypatch.setattr(onnx_slots, "default_budget", lambda: 7)
    assert [onnx_slots.device_budget(bundle, "onnx", p) for p in ("cpu", "cuda", "tensorrt-rtx")] == [7, 20_000, 20_000]
    io["cuda"] = "f16"
    assert onnx_slots.device_budget(bundle, "onnx", "cuda") == 22_500
    io["cuda"] = "standard"
    monkeypatch.setattr(onnx_slots, "load_cuda", lambda: FakeCuda((InstalledGpu(0, "small", "8.9", 10_000),)))
    with pytest.raises(CapacityError, match="small has 10,000 bytes free, and the weights alone need 10,000"):
        onnx_slots.device_budget(bundle, "onnx", "cuda")
    monkeypatch.setattr(onnx_slots, "load_cuda", lambda: FakeCuda(()))
    with pytest.raises(TargetError, match="it needs an NVIDIA GPU, and the driver shows none"):
        onnx_slots.device_budget(bundle, "onnx", "cuda")


def _entry(blob: int, nbytes: int) -> TensorEntry:
    return TensorEntry(blob=blob, offset=0, bytes=nbytes, dtype="f32", shape=(nbytes // 4,))
