"""Pools of layers with a window are smaller than others, and nobody notices."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedModel

from enginewright.optimizer.export import export
from enginewright.runtime.engine.engine import Engine
from enginewright.runtime.engine.llm import LLM
from enginewright.runtime.kv_cache.kinds.table import cache_block_bytes
from enginewright.runtime.kv_cache.pool_plan import PoolPlan, bytes_for, enough_for_windows, plan_pools
from enginewright.runtime.requests.request import BeamSearch, Generation
from enginewright.runtime.requests.request_options import RequestOptions
from enginewright.runtime.requests.sampling import SamplingParams
from enginewright.runtime.scheduler.branching import places_taken
from enginewright.runtime.scheduler.limits import SchedulerConfig
from enginewright.runtime.shared.contracts import CacheGroup
from enginewright.runtime.shared.errors import CapacityError


def test_windows_take_what_is_enough_for_them() -> None:
    """The model is like Gemma 3 1B: 22 of 26 layers see 512 tokens. Measured: 161,312 tokens in 4 GiB without, 631,808
    with."""
    full, window = (CacheGroup(str(w), tuple(range(n)), 1, 256, 256, w, "bf16") for w, n in ((0, 4), (512, 22)))
    enough = enough_for_windows([full, window], 64, 512)
    assert enough == {"512": 2 * (64 * (512 + 64) + 2 * 512)}
    plan, whole = (plan_pools([full, window], 4 << 30, 64 * 32768, 0, each) for each in (enough, {}))
    assert plan.tokens > 3.9 * whole.tokens and plan.blocks == {"0": plan.tokens // 32, "512": enough["512"] // 32}
    assert PoolPlan.from_blocks([full, window], plan.blocks) == plan
    # Alone there is nothing to weigh it against.
    assert enough_for_windows([window], 64, 512) == {}


def test_no_group_ever_gets_less_than_would_matter() -> None:
    """In any budget: more tokens than without, and of each window as many as those, or enough; the rest isn't left."""
    rng = np.random.default_rng(0)
    for _ in range(200):
        pools = [
            CacheGroup(f"g{i}", tuple(range(int(rng.integers(1, 9)))), 1, 8, 8, int(w))
            for i, w in enumerate([0, *rng.integers(1, 300, rng.integers(1, 3))])
        ]
        requests, most = int(rng.integers(1, 20)), int(rng.integers(100, 9000))
        enough = enough_for_windows(pools, requests, int(rng.integers(1, 300)))
        budget = int(rng.integers(bytes_for(pools, 32), 3 * bytes_for(pools, most)))
        plan, whole = (plan_pools(pools, budget, most, 0, each) for each in (enough, {}))
        assert plan.tokens >= whole.tokens and plan.bytes <= budget
        for group in pools[1:]:
            held = plan.blocks[group.name] * 32
            assert plan.tokens >= held >= min(plan.tokens, enough[group.name])
        if plan.tokens >= most:  # all of it, or as much as fits of windows
            left = budget - plan.bytes
            assert left < sum(cache_block_bytes(g) for g in pools) or set(plan.blocks.values()) == {plan.tokens // 32}
        assert bytes_for(pools, plan.tokens, enough) <= plan.bytes


@pytest.mark.parametrize("seed", range(6))
def test_nobody_waits_for_a_pool_that_is_enough_for_windows(toy: Any, seed: int) -> None:
    """Small pools of windows beside ones as large as the full one: the same steps, with tenants and beams in it, too.

    The full pool is small enough that requests are preempted. Where a prefix is found may differ, so nothing is kept
    in the runs that are compared step by step; with a cache no block of a window is ever lacking.
    """
    rng = np.random.default_rng(seed)
    requests, prompts = int(rng.integers(2, 7)), int(rng.integers(8, 40))
    windows = (0, int(rng.integers(1, 8)), int(rng.integers(1, 20)))
    groups = toy(block_size=8, windows=windows).cache_groups
    enough = enough_for_windows(groups, requests, prompts)
    full = max(enough.values()) // 8 + int(rng.integers(2, 9))
    load = []
    for i in range(40):
        beams = int(rng.integers(2, requests + 1)) if rng.random() < 0.2 else 1
        most = min(full // beams * 8 - 30, full * 8 // 2)
        params = SamplingParams(max_tokens=int(rng.integers(1, 30)), ignore_eos=True, num_beams=beams)
        load.append((rng.integers(0, 3, rng.integers(1, most)).tolist(), params, f"t{i % 3}"))
    small = tuple(min(full, -(-enough.get(g.name, full * 8) // 8)) for g in groups)
    assert small[1] < full

    def steps(blocks: tuple[int, ...], keep: bool) -> tuple[list[list[int]], int]:
        executor = toy(blocks=blocks, block_size=8, windows=windows)
        engine = Engine(executor, SchedulerConfig(requests, prompts, prefix_cache=keep))
        for prompt, params, tenant in load:
            request = Generation(prompt, params, options=RequestOptions(tenant))
            if params.num_beams > 1:
                BeamSearch.begin(request, 256)
            engine.add_request(request)
        while engine.has_work():
            engine.step()
            if keep and places_taken(engine.scheduler.running) < requests:
                for name in enough:
                    room = engine.pools[name].available("t0") * 8
                    assert room >= windows[int(name[1:])] + prompts + 16, "there is room for one that begins"
        executor.close()
        return [step.kv_len.tolist() for step in executor.steps], engine.preemptions

    wide = (full,) * 3
    assert steps(small, False) == steps(wide, False)
    if seed == 0:
        assert steps(small, False)[1] > 0, "the full pool was too large"
    steps(small, True)


@pytest.mark.matrix
def test_an_opened_model_has_such_pools(tiny_model: Callable[..., PreTrainedModel], tmp_path: Path) -> None:
    """Gemma 2, every second layer with a window: more tokens in the same memory, and a request that needs them runs."""
    export(tiny_model("Gemma2", max_position_embeddings=4096), tmp_path / "bundle", recipe="f32", targets=["cpu"])
    prompt = np.random.default_rng(0).integers(3, 256, 2500).tolist()
    options = {"memory": "1MiB", "prefill_chunk": 64}
    with LLM(tmp_path / "bundle", max_requests=1, **options) as one, LLM(tmp_path / "bundle", **options) as many:
        tokens, without = one.info()["kv_cache_tokens"], many.info()["kv_cache_tokens"]
        assert one.info()["kv_cache_bytes"] <= 1 << 20
        assert tokens > len(prompt) + 4 > without, (tokens, without)
        [result] = one.generate([prompt], SamplingParams(max_tokens=4, ignore_eos=True))
        assert len(result.token_ids) == 4
        assert one.engine.preemptions == 0
        with pytest.raises(CapacityError, match="memory: the request may need 2503 tokens"):
            many.generate([prompt], SamplingParams(max_tokens=4, ignore_eos=True))
