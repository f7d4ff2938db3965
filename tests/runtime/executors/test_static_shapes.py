"""Steps padded to buckets: the same bits as without, and padding that is counted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from enginewright.optimizer.export import export
from enginewright.optimizer.recipes.bucket_section import BucketsSection
from enginewright.optimizer.recipes.recipe import load_recipe
from enginewright.plugins.cpu.serve.executor import CpuExecutor
from enginewright.plugins.native.executable import CpuProgram
from enginewright.runtime.bundle.buckets import Bucket, BucketPlan
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.engine.llm import LLM
from enginewright.runtime.executors.static_shapes import StaticShapes, pad, padding_blocks, use_lines
from enginewright.runtime.executors.target import Placement
from enginewright.runtime.kv_cache.kinds.table import cache_block_bytes
from enginewright.runtime.requests.outputs import RequestOutput
from enginewright.runtime.requests.sampling import SamplingParams
from enginewright.runtime.shared.contracts import CacheGroup, ExecutorCaps, SamplingBatch, StepInput, StepOutput
from enginewright.runtime.shared.errors import CapacityError, RequestError

PLAN = BucketPlan.from_sizes((7, 40, 96), (1, 2, 6), 64)
GROUPS = (CacheGroup("full", (0,), 1, 8, 8), CacheGroup("window", (1,), 1, 8, 8, window=8, block_size=16))


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory, tiny_model: Callable[..., PreTrainedModel]) -> dict[str, Path]:
    """Alternating windows in f32, without buckets; learned positions in int8, with them."""
    folder = tmp_path_factory.mktemp("bundles")
    export(tiny_model("Gemma2"), folder / "f32", recipe="f32")
    sizes = BucketsSection(tokens=(7, 40, 96), batch=(1, 2, 6))
    export(tiny_model("GPT2"), folder / "int8", recipe=load_recipe("int8").model_copy(update={"buckets": sizes}))
    return {name: folder / name for name in ("f32", "int8")}


def static(path: Path, plan: BucketPlan, blocks: int) -> tuple[LLM, StaticShapes]:
    bundle = Bundle.open(path)
    groups = bundle.program("cpu").cache_groups
    padding = padding_blocks(plan, groups)
    counts = {g.name: blocks + padding[g.name] for g in groups}
    executor = StaticShapes(CpuExecutor(bundle, counts, Placement(threads=2)), plan)
    assert set(executor.blocks.values()) == {blocks}
    return LLM.from_executor(executor, bundle.model, prefill_chunk=96), executor


def traffic(seed: int) -> tuple[list[list[int]], list[SamplingParams]]:
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, 256, rng.integers(1, 150)).tolist() for _ in range(14)]
    params = [
        SamplingParams(
            max_tokens=int(n),
            ignore_eos=True,
            temperature=float(i % 2),
            top_k=i % 5,
            repetition_penalty=1 + 0.2 * (i % 3),
            logprobs=(None, 0, 2)[i % 3],
            seed=i,
        )
        for i, n in enumerate(rng.integers(1, 30, len(prompts)))
    ]
    return prompts, params


def run(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> list[RequestOutput]:
    with llm:
        return llm.generate(prompts, params)


@pytest.mark.parametrize("name", ["f32", "int8"])
def test_random_traffic_has_the_same_bits(name: str, bundles: dict[str, Path]) -> None:
    for seed, plan in enumerate((PLAN, BucketPlan.from_sizes((130,), (), 4))):
        prompts, params = traffic(seed)
        llm, executor = static(bundles[name], plan, blocks=24)  # too few for all at once: some start over
        results = run(llm, prompts, params)
        assert results == run(LLM(bundles[name], threads=1, buckets=False), prompts, params)
        use = executor.use.values()
        for bucket, u in zip(plan.buckets, use, strict=True):
            assert u.tokens + u.padded_tokens == u.steps * bucket.tokens
            assert u.rows + u.padded_rows == u.steps * bucket.rows
        assert sum(u.tokens for u in use) >= sum(len(p) for p in prompts)
        assert sum(u.padded_tokens for u in use) > 0


@pytest.mark.matrix
def test_each_bucket_is_used_by_the_steps_that_fit_it(bundles: dict[str, Path]) -> None:
    ids = np.random.default_rng(4).integers(0, 256, 96).tolist()
    llm, executor = static(bundles["f32"], PLAN, blocks=24)
    with llm:  # one request at a time: which requests share a step depends on when they arrive
        for size, buckets in ((1, {"batch-1"}), (7, {"tokens-7"}), (8, {"tokens-40"}), (96, {"tokens-96"})):
            before = {name: use.steps for name, use in executor.use.items()}
            llm.generate([ids[-size:]], SamplingParams(max_tokens=3, ignore_eos=True))
            steps = {name: use.steps - before[name] for name, use in executor.use.items()}
            assert {name for name, n in steps.items() if n} == buckets | {"batch-1"}
            assert sum(steps.values()) == 3


def test_logits_of_a_prompt_in_chunks_have_the_same_bits(bundles: dict[str, Path]) -> None:
    ids = np.random.default_rng(5).integers(0, 256, 301).tolist()
    for name in ("f32", "int8"):
        llm, executor = static(bundles[name], PLAN, blocks=24)
        with llm, LLM(bundles[name], buckets=False) as other:
            np.testing.assert_array_equal(llm.logits(ids), other.logits(ids))
            statistics = llm.info()["buckets"]
        assert [s["name"] for s in statistics] == [b.name for b in PLAN.buckets]
        assert executor.use["tokens-96"].steps == 3 and executor.use["tokens-40"].padded_tokens == 40 - 13
        assert executor.use["tokens-96"].rows == 288 and executor.use["tokens-96"].padded_rows == 0
        assert executor.use["tokens-40"].waste == pytest.approx(27 / 40)


def test_a_bundle_with_buckets_is_served_with_them(bundles: dict[str, Path]) -> None:
    prompts, params = traffic(7)
    block = cache_block_bytes(Bundle.open(bundles["int8"]).program("cpu").cache_groups[0])
    with LLM(bundles["int8"], memory=26 * block, max_requests=4) as llm:
        results, info = llm.generate(prompts, params), llm.info()
    assert results == run(LLM(bundles["int8"], buckets=False), prompts, params)
    assert info["executor"]["buckets"] == 6
    assert info["kv_cache_tokens"] == 24 * 32  # two blocks for padding: of 55 tokens at most
    assert sum(use["tokens"] for use in info["buckets"]) > sum(map(len, prompts))
    lines = use_lines(info["buckets"])
    assert len(lines) == 8 and lines[-1].startswith("all ") and lines[1].startswith("tokens-7 ")
    with LLM(bundles["f32"]) as llm:
        assert llm.info()["buckets"] == [] == use_lines([])
    with pytest.raises(CapacityError, match=r"holds no block: 32 tokens need .* beside .* for padding") as caught:
        LLM(bundles["int8"], memory=2 * block)
    assert f"{3 * block} bytes" in str(caught.value.hint)


def test_all_steps_have_the_sizes_of_a_bucket(bundles: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[int, int, int]] = []
    run_any = CpuProgram.run

    def noted(self: CpuProgram, step: StepInput) -> StepOutput:
        ran.append((len(step.ids), len(step.kv_len), len(step.rows)))
        return run_any(self, step)

    monkeypatch.setattr(CpuProgram, "run", noted)
    sizes = {(b.tokens, b.requests, b.rows) for b in PLAN.buckets}
    prompts, params = traffic(3)
    with LLM(bundles["int8"]) as llm:
        llm.generate(prompts, params)
        assert ran and set(ran) <= sizes
        ran.clear()
        llm.logits(prompts[0][:20])  # more rows than the bucket has, which stay
        assert ran == [(40, 7, 20)]
    with LLM(bundles["int8"], buckets=False) as llm:
        ran.clear()
        llm.generate(prompts[:1], params[:1])
        assert ran[0] == (len(prompts[0]), 1, 1) not in sizes


def step(*counts: int, start: int = 0, rows: int | None = None) -> StepInput:
    """A step of a request with ``start`` tokens before for each count; the first blocks are theirs."""
    owners = np.repeat(np.arange(len(counts)), counts)
    positions = np.concatenate([np.arange(start, start + c, dtype=np.int32) for c in counts])
    tables, slots = {}, {}
    for group in GROUPS:
        width = -(-(start + max(counts)) // group.block_size)
        table = np.arange(len(counts) * width, dtype=np.int32).reshape(-1, width)
        tables[group.name] = table
        slots[group.name] = (table[owners, positions // group.block_size] * group.block_size).astype(np.int32) + (
            positions % group.block_size
        )
    count = len(counts) if rows is None else rows
    one = np.ones(count, np.float32)
    draw = np.arange(count)
    sampling = SamplingBatch(
        one, draw.astype(np.int32), one, one, draw.astype(np.uint64), draw.astype(np.uint64), logprobs=2
    )
    return StepInput(
        ids=np.arange(1, len(owners) + 1, dtype=np.int32),
        positions=positions,
        q_start=np.cumsum([0, *counts], dtype=np.int32),
        kv_len=np.asarray([start + c for c in counts], np.int32),
        block_table=tables,
        slots=slots,
        rows=np.arange(count, dtype=np.int32),
        sampling=sampling if count else None,
    )


def check(found: StepInput, bucket: Bucket, real: StepInput, first: int, plan: BucketPlan = PLAN) -> None:
    """The sizes are the bucket's, what was there is as it was, and padding keeps to its own slots, each to one."""
    assert (len(found.ids), len(found.kv_len), len(found.rows)) == (bucket.tokens, bucket.requests, bucket.rows)
    tokens, requests = len(real.ids), len(real.kv_len)
    for name in ("ids", "positions", "kv_len", "rows"):
        np.testing.assert_array_equal(getattr(found, name)[: len(getattr(real, name))], getattr(real, name))
        assert getattr(found, name).dtype == np.int32
    np.testing.assert_array_equal(found.q_start[: requests + 1], real.q_start)
    assert found.q_start[-1] == bucket.tokens and (np.diff(found.q_start) >= 0).all()
    counts = np.diff(found.q_start)
    for b in range(requests, bucket.requests):
        begin, end = found.q_start[b], found.q_start[b + 1]
        assert found.positions[begin:end].tolist() == list(range(found.kv_len[b] - counts[b], found.kv_len[b]))
        for group in GROUPS:
            row = found.block_tables[group.name][b]
            places = found.positions[begin:end]
            expected = row[places // group.block_size] * group.block_size + places % group.block_size
            assert found.slots[group.name][begin:end].tolist() == expected.tolist()
    for group in GROUPS:
        np.testing.assert_array_equal(found.slots[group.name][:tokens], real.slots[group.name])
        width = real.block_tables[group.name].shape[1]
        np.testing.assert_array_equal(found.block_tables[group.name][:requests, :width], real.block_tables[group.name])
        slots = found.slots[group.name][tokens:]
        assert len(set(slots.tolist())) == len(slots) and (slots >= first * group.block_size).all()
        assert (slots < (first + padding_blocks(plan, GROUPS)[group.name]) * group.block_size).all()


@pytest.mark.parametrize("counts", [(1,), (8,), (5, 1, 30), (60, 1), (1, 1), (1, 1, 1), (7,)])
def test_padding_stands_apart(counts: tuple[int, ...]) -> None:
    executor = StaticShapes(Recorder(), PLAN)
    for start in (0, 37):
        for rows in (len(counts), 0):
            real = step(*counts, start=start, rows=rows)
            bucket = executor.bucket_of(real)
            check(pad(real, bucket, GROUPS, {"full": 50, "window": 50}), bucket, real, 50)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_any_step_within_the_limits_has_a_bucket(data: st.DataObject) -> None:
    tokens = data.draw(st.sets(st.integers(1, 90), min_size=1, max_size=4))
    batch = data.draw(st.sets(st.integers(1, max(tokens)), max_size=3))
    plan = BucketPlan.from_sizes(tuple(tokens), tuple(batch), data.draw(st.integers(1, 20)))
    executor = StaticShapes(Recorder(), plan)  # type: ignore[arg-type]
    counts = [data.draw(st.integers(1, executor.caps.max_tokens))]
    while (
        len(counts) < executor.caps.max_requests and sum(counts) < executor.caps.max_tokens and data.draw(st.booleans())
    ):
        counts.append(data.draw(st.integers(1, executor.caps.max_tokens - sum(counts))))
    if data.draw(st.booleans()):
        counts = [1] * len(counts)
    real = step(*counts, start=data.draw(st.integers(0, 40)), rows=data.draw(st.integers(0, len(counts))))
    bucket = executor.bucket_of(real)
    check(pad(real, bucket, GROUPS, {"full": 9000, "window": 9000}), bucket, real, 9000, plan)


def test_padded_rows_are_greedy() -> None:
    real = step(1, 1, 1)
    padded = pad(real, Bucket.of_batch(6), GROUPS, {"full": 50, "window": 50})
    sampling = padded.sampling
    assert sampling is not None and sampling.logprobs == 2
    assert sampling.temperature.tolist() == [1, 1, 1, 0, 0, 0] and sampling.top_p.tolist() == [1] * 6
    assert sampling.seed.tolist() == [0, 1, 2, 0, 0, 0] and sampling.seed.dtype == np.uint64


def test_a_step_that_fits_exactly_is_left_as_it_is() -> None:
    real = step(1, 1)
    assert pad(real, Bucket.of_batch(2), GROUPS, {"full": 50, "window": 50}) is real


class Recorder:
    """An executor that runs nothing."""

    caps = ExecutorCaps()
    cache_groups = GROUPS
    blocks: Mapping[str, int] = {"full": 52, "window": 54}


def test_the_tightest_bucket_is_taken() -> None:
    executor = StaticShapes(Recorder(), PLAN)  # type: ignore[arg-type]
    names = {
        (1,): "batch-1",
        (1, 1): "batch-2",
        (1, 1, 1): "batch-6",
        (2,): "tokens-7",
        (7,): "tokens-7",
        (8,): "tokens-40",
        (1, 1, 1, 1, 1, 2): "tokens-7",
        (90, 1, 1, 1, 1, 1): "tokens-96",
    }
    assert {counts: executor.bucket_of(step(*counts)).name for counts in names} == names
    assert executor.caps == ExecutorCaps(max_tokens=96, max_requests=6)
    assert executor.blocks == {"full": 52 - 4, "window": 54 - 4}  # 55 tokens between 40 and 96, in blocks of 16


def test_a_step_beyond_the_largest_bucket_is_refused() -> None:
    executor = StaticShapes(Recorder(), PLAN)  # type: ignore[arg-type]
    for counts in ((97,), (1,) * 8, (2,) + (1,) * 6):
        with pytest.raises(RequestError, match="no bucket holds"):
            executor.submit(step(*counts))
    assert not any(use.steps for use in executor.use.values())
