"""200 requests on a pool far too small for them: all finish with the tokens they have alone, and no block is lost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from transformers import PreTrainedModel

import enginewright as ew
from enginewright.optimizer.export import export


def test_two_hundred_requests(tiny_model: Callable[..., PreTrainedModel], tmp_path: Path) -> None:
    export(tiny_model("Llama"), tmp_path / "tiny.bundle")
    rng = np.random.default_rng(5)
    prompts = [rng.integers(3, 256, rng.integers(1, 200)).tolist() for _ in range(200)]
    params = [
        ew.SamplingParams(
            temperature=float(rng.choice([0.0, 0.8])), seed=i, max_tokens=int(rng.integers(1, 100)), ignore_eos=True
        )
        for i in range(200)
    ]
    with ew.LLM(tmp_path / "tiny.bundle", memory="64MiB") as roomy:
        alone = [roomy.generate(p, s)[0].token_ids for p, s in zip(prompts, params, strict=True)]
    block = 2 * 2 * 2 * 16 * 32 * 4  # layers, k and v, kv heads, head size, slots, bytes of f32
    with ew.LLM(tmp_path / "tiny.bundle", memory=24 * block, prefill_chunk=64) as tight:
        together = tight.generate(prompts, params)
        assert tight.engine.preemptions > 0
        assert all(pool.free_blocks == pool.total_blocks for pool in tight.engine.pools.values())
    for result, expected, param in zip(together, alone, params, strict=True):
        assert list(result.token_ids) == list(expected)
        assert len(result.token_ids) == param.max_tokens
