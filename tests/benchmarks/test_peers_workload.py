from __future__ import annotations

import json

import numpy as np
import pytest
from peers.models import MODELS
from peers.shapes import parameters
from peers.workload import Workload, kl_divergence


def test_prompts_are_never_repeated() -> None:
    work = Workload(seed=1)
    kinds = [work.prompts(3, 20), work.prompts(3, 20, stream=2), Workload(seed=2).prompts(3, 20)]
    every = [tuple(prompt) for prompts in kinds for prompt in prompts]
    assert len(set(every)) == 9
    assert work.prompts(3, 20) == kinds[0]
    assert all(3 <= token < work.vocabulary for prompt in every for token in prompt)


def test_a_workload_survives_the_command_line() -> None:
    work = Workload(batches=(4, 2), steps=7)
    assert Workload.parse(work.to_json()) == work
    with pytest.raises(TypeError, match="speed"):
        Workload.parse(json.dumps({"speed": 1}))


def test_the_context_has_room_for_every_batch() -> None:
    work = Workload(short_prompt=10, steps=5, batches=(16, 8, 4))
    assert work.short_context >= 10 + 3 * 5


@pytest.mark.parametrize(("tokens", "vocabulary"), [(1, 3), (7, 50)])
def test_kl_is_that_of_the_definition(tokens: int, vocabulary: int) -> None:
    random = np.random.default_rng(0)
    exact, rounded = random.standard_normal((2, tokens, vocabulary), np.float32) * 4
    p, q = (np.exp(x.astype(np.float64)) for x in (exact, rounded))
    p, q = p / p.sum(1, keepdims=True), q / q.sum(1, keepdims=True)
    expected = float((p * np.log(p / q)).sum(1).mean())
    # Both are computed in 64-bit floats, in another order.
    assert kl_divergence(exact, rounded) == pytest.approx(expected, rel=1e-9)
    assert kl_divergence(exact, exact + 3) == pytest.approx(0, abs=1e-7)  # float32 rounds the sum
    with pytest.raises(ValueError, match="logits of"):
        kl_divergence(exact, rounded[:, 1:])


def test_sizes_are_those_of_the_models() -> None:
    assert parameters(MODELS["smollm2"].sizes) == 134_515_008
    assert parameters(MODELS["llama-1b"].sizes) == pytest.approx(1.04e9, rel=0.04)
    assert parameters(MODELS["qwen35-1b"].sizes) == pytest.approx(1.01e9, rel=0.01)
    assert parameters(MODELS["mamba2-1b"].sizes) == pytest.approx(1.03e9, rel=0.01)
