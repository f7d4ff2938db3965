"""Random GGUF files of each architecture: the logits of llama.cpp, or refused by name.

``llama_cpp_oracle`` says how to run it. The environment variable GGUF_REPORT names a file that the counts are written
to.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peers.convert_gguf import convert_gguf

from enginewright.optimizer.capture.gguf import recurrent_architectures
from enginewright.optimizer.export import export
from enginewright.runtime.shared.errors import SourceError, UnsupportedModelError
from tests.acceptance.driver import Driver
from tests.acceptance.llama_cpp_oracle import MARKS, Oracle, write_report
from tests.optimizer.capture.gguf.gguf_models import CASES, Array, build, tensors_of, write_model
from tests.optimizer.capture.gguf.test_architectures import ids_of, logits_of

pytestmark = MARKS

VARIATIONS = 50
TABLE_OF_GELU = frozenset({"gemma", "gemma2", "gemma3", "gemma4", "falcon", "bloom", "gpt2", "starcoder2", "phi2"})
"""Architectures with GELU, which llama.cpp reads from a table in float16."""


QUANTIZED = ("llama", *recurrent_architectures.ARCHITECTURES)
"""Architectures whose logits with weights of 8 bits are compared."""


def tolerance(architecture: str) -> float:
    """The largest difference, relative to the largest logit: rounding in float32, or that of GELU's table."""
    return 6e-3 if architecture in TABLE_OF_GELU else 2e-4


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Oracle]:
    oracle = Oracle(tmp_path_factory.mktemp("oracle"))
    yield oracle
    oracle.close()


Keys = dict[str, Any]
Random = random.Random


def _float(low: float, high: float) -> Callable[[Random], Any]:
    return lambda rng: float(np.float32(rng.uniform(low, high)))


def _of(*values: Any) -> Callable[[Random], Any]:
    return lambda rng: rng.choice(values)


KEYS: Mapping[str, Callable[[Random], Any]] = {
    "rope.freq_base": _float(100.0, 1e6),
    "rope.freq_base_swa": _float(100.0, 1e6),
    "rope.scaling.type": _of("none", "linear", "yarn", "longrope", None),
    "rope.scaling.factor": _of(1.0, 2.0, 4.0, 0.5, 8.0),
    "rope.scale_linear": _of(1.0, 2.0, 4.0),
    "rope.scaling.original_context_length": _of(16, 32, 64, 512),
    "rope.scaling.attn_factor": _of(1.0, 0.8, 1.3),
    "rope.scaling.alpha": _of(2.0),
    "rope.scaling.finetuned": _of(True, False),
    "rope.scaling.yarn_ext_factor": _of(1.0, 0.5),
    "rope.scaling.yarn_attn_factor": _of(1.0, 1.2),
    "rope.scaling.yarn_beta_fast": _of(32.0, 16.0),
    "rope.scaling.yarn_beta_slow": _of(1.0, 2.0),
    "rope.scaling.yarn_log_multiplier": _of(0.1, 1.0),
    "rope.dimension_count": _of(8, 12, 16, 24, None),
    "rope.dimension_count_swa": _of(8, 16),
    "rope.dimension_sections": _of([2, 3, 3, 0], [0, 0, 0, 0]),
    "attention.sliding_window": _of(4, 8, 16, 0, None),
    "attention.sliding_window_pattern": _of(1, 2, 3, 6, 0, [True, False, True, False, True, False][:2]),
    "attention.key_length": _of(8, 16, 24, None),
    "attention.value_length": _of(8, 16, 24, None),
    "attention.key_length_swa": _of(8, 16),
    "attention.value_length_swa": _of(8, 16),
    "attention.head_count_kv": _of(1, 2, 4, None, [2, 2], [2, 1]),
    "attention.scale": _of(0.1, 0.3, 0.0),
    "attention.output_scale": _of(0.5, 1.0),
    "attention.value_scale": _of(0.5, 1.0),
    "attention.causal": _of(True, False),
    "attention.clamp_kqv": _of(0.05, 8.0),
    "attention.max_alibi_bias": _of(8.0, 0.0),
    "attention.temperature_scale": _of(0.1),
    "attention.temperature_length": _of(8),
    "attention.layer_norm_epsilon": _of(1e-5, 0.01, 0.1, None),
    "attention.layer_norm_rms_epsilon": _of(1e-6, 0.01, 0.1, None),
    "attention.shared_kv_layers": _of(0, 1),
    "attn_logit_softcapping": _of(2.0, 50.0, 0.0),
    "final_logit_softcapping": _of(1.0, 30.0, 0.0),
    "logit_scale": _of(0.25, 2.0, 1.0, 0.0),
    "residual_scale": _of(0.25, 2.0, 1.0),
    "embedding_scale": _of(0.25, 2.0, 12.0),
    "expert_used_count": _of(1, 2, 3, 4),
    "expert_count": _of(4, 8, None),
    "expert_feed_forward_length": _of(32, 48, None, [32, 32]),
    "expert_shared_feed_forward_length": _of(48, 32, None),
    "expert_shared_count": _of(0, 1, 2),
    "expert_weights_norm": _of(True, False),
    "expert_weights_scale": _of(0.5, 1.0, 2.5),
    "expert_gating_func": _of(0, 1, 2, 3),
    "expert_group_count": _of(1, 2),
    "expert_group_used_count": _of(1),
    "leading_dense_block_count": _of(0, 1),
    "interleave_moe_layer_step": _of(1, 2),
    "moe_every_n_layers": _of(1, 2),
    "nextn_predict_layers": _of(0, 1),
    "use_parallel_residual": _of(True, False),
    "pooling_type": _of(0, 1, 3),
    "context_length": _of(16, 64, 4096),
    "feed_forward_length": _of(96, 48, [96, 96], None),
    "vocab_size": _of(128),
    "swin_norm": _of(True, False),
    "hidden_activation": _of("gelu", "silu"),
    "embedding_length_per_layer_input": _of(0, 16),
    "n_deepstack_layers": _of(0, 1),
    "tensor_data_layout": _of("Meta AI original pth", "something"),
    "a.key.of.later": _of(1.5),
}
"""Values to choose from, by key without the architecture; None leaves the key out."""

SCALING = [key for key in KEYS if key.startswith("rope.")]


def vary(architecture: str, rng: Random, tensors: Mapping[str, Array]) -> tuple[Keys, dict[str, Array | None]]:
    """Chooses one to three keys, and at times a tensor, to be added or left out."""
    pool = SCALING if rng.random() < 0.3 else list(KEYS)
    keys = {name: KEYS[name](rng) for name in rng.sample(pool, rng.choice((1, 1, 1, 2, 2, 3)))}
    changed: dict[str, Array | None] = {}
    generator = np.random.default_rng(rng.randrange(1 << 30))
    if rng.random() < 0.15:
        changed["rope_freqs.weight"] = generator.uniform(1, 8, rng.choice([8, 12])).astype(np.float32)
    if rng.random() < 0.15 and "output.weight" in tensors:
        changed["output.weight"] = None
    if rng.random() < 0.1:
        for layer in range(2):
            for name in ("attn_q", "attn_k", "attn_v"):
                if (weight := tensors.get(f"blk.{layer}.{name}.weight")) is not None:
                    changed[f"blk.{layer}.{name}.bias"] = generator.normal(0, 0.3, len(weight)).astype(np.float32)
    return keys, changed


@pytest.mark.parametrize("architecture", CASES)
def test_random_files_have_llama_cpps_logits_or_are_refused(architecture: str, oracle: Oracle, tmp_path: Path) -> None:
    counts: Counter[str] = Counter()
    worst = 0.0
    wrong: list[str] = []
    model = build(CASES[architecture])
    tensors = tensors_of(architecture, model)
    for seed in range(VARIATIONS):
        rng = Random(f"{architecture} {seed}")
        keys, changed = vary(architecture, rng, tensors) if seed else ({}, {})
        general = {"tokenizer.ggml.model": "none"}
        path = write_model(tmp_path / "tiny.gguf", architecture, model, keys=keys, tensors=changed, general=general)
        ids = ids_of(seed)
        try:
            logits: torch.Tensor | None = logits_of(path, ids)
        except (SourceError, UnsupportedModelError) as e:
            named = str(path) in e.message or "transformers can't build" in e.message
            counts["refused" if named else "refused without a name"] += 1
            continue
        assert logits is not None
        expected = oracle.logits(path, ids.tolist())
        if expected is None:
            counts["read here alone"] += 1
            continue
        difference = float(np.abs(logits.numpy() - expected).max() / np.abs(expected).max())
        worst = max(worst, difference)
        if difference <= tolerance(architecture):
            counts["equal"] += 1
        else:
            wrong.append(f"{architecture} {seed}: {difference:.1e} {keys} {sorted(changed)}")
    write_report({"architecture": architecture, **counts, "wrong": wrong, "worst": worst})
    assert not wrong, "\n".join(wrong)
    assert not counts["refused without a name"]
    assert counts["equal"]


@pytest.mark.parametrize("architecture", QUANTIZED)
def test_bundles_are_as_near_to_quantized_weights_as_llama_cpp(
    architecture: str, oracle: Oracle, tmp_path: Path
) -> None:
    """Both round activations to 8 bits; the exact logits are transformers', in float32 with the weights stored."""
    general = {"tokenizer.ggml.model": "none"}
    plain = write_model(tmp_path / "tiny.gguf", architecture, build(CASES[architecture]), general=general)
    eight = convert_gguf(plain, tmp_path / "eight.gguf", "Q8_0")
    export(eight, tmp_path / "tiny.bundle", recipe="gguf")
    ids = ids_of()
    exact, theirs = logits_of(eight, ids).numpy(), oracle.logits(eight, ids.tolist())
    assert theirs is not None
    with Driver(tmp_path / "tiny.bundle", 1, 4) as driver:
        ours = driver.step({0: ids.tolist()})[0]
    errors = [float(np.sqrt(np.square(logits - exact).mean() / np.square(exact).mean())) for logits in (ours, theirs)]
    write_report({"architecture": architecture, "Q8_0, ours from exact": errors[0], "llama.cpp from exact": errors[1]})
    assert errors[0] <= 1.5 * errors[1], errors
