"""Every family's logits through capture, passes, the bundle and the CPU engine are transformers'."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaAttention

from enginewright.optimizer.export import export
from enginewright.plugins.native.executable import isas
from enginewright.runtime.shared.errors import UnsupportedModelError

from .driver import Driver

# Both sides are f32 with sums in another order, over 2 layers and logits of a few units: the difference is some
# 1e-6; a wrong window, norm or rotation moves logits by 1e-2 and more.
TOLERANCE = 1e-4

_ALTERNATING = {"num_hidden_layers": 4, "sliding_window": 8}
_GPT2_NAMES = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512}

MORE_FAMILIES: dict[str, dict[str, Any]] = {
    # What each has that those above don't; a family's name, and what is special about the case.
    "Gemma3Text": {  # layers of two kinds have rotary tables of their own
        **_ALTERNATING,
        "head_dim": 16,
        "query_pre_attn_scalar": 24,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
    "Llama yarn": {  # cosines and sines are scaled
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 8.0,
            "original_max_position_embeddings": 64,
        },
        "tie_word_embeddings": True,
        "attention_bias": True,
        "mlp_bias": True,
    },
    "Phi": {"qk_layernorm": True},  # part of a head is rotated; attention and MLP side by side
    "SmolLM3": {"num_hidden_layers": 4},  # every fourth layer has no positions
    "Olmo": {},  # norms without weights
    "Olmo2": {},  # norms after the block, and of all heads of q and k together
    "Granite": {"embedding_multiplier": 12.0, "logits_scaling": 8.0, "residual_multiplier": 0.22},
    "StableLm": {},
    "StableLm heads": {"qk_layernorm": True, "use_parallel_residual": True},  # a norm of its own for each head
    "Cohere": {"logit_scale": 0.3, "use_qk_norm": True},  # pairs are rotated; norm weights of two dimensions
    "Cohere2": {**_ALTERNATING, "logit_scale": 0.3},
    "Starcoder2": {"sliding_window": 8},
    "OPT": {"ffn_dim": 128, "word_embed_proj_dim": 32},  # position embeddings with an offset, projections around all
    "Glm": {"head_dim": 16},
    "Nemotron": {"head_dim": 16},  # squared ReLU
    "Exaone4": _ALTERNATING,
    "GPTBigCode": _GPT2_NAMES,  # one key/value head
    # Attention is written out.
    "Falcon": {},  # one key/value head
    "Falcon biases": {"alibi": True},
    "Falcon new": {"new_decoder_architecture": True, "num_kv_heads": 2},
    "Mpt": {"d_model": 64, "n_heads": 4, "n_layers": 2},
    "Bloom": {"n_head": 4, "n_layer": 2},
    "CodeGen": {**_GPT2_NAMES, "rotary_dim": 8},
}

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "Rwkv": ({"num_hidden_layers": 2}, "fixes the number of tokens in a step"),
    "Bert": ({"is_decoder": False}, "neither causal nor causal within a sliding window"),
}


def expected_logits(model: PreTrainedModel, ids: list[int]) -> np.ndarray:
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].numpy()


def saved(model: PreTrainedModel, folder: Path) -> Path:
    """Saves a model as its user has it; returns ``folder``."""
    model.save_pretrained(folder)
    return folder


def compare(
    model: PreTrainedModel,
    bundle: Path,
    lengths: Sequence[int],
    steps: int,
    *ways: str,
    source: Path | PreTrainedModel | None = None,
    part: str | None = None,
) -> None:
    """Compares a bundle's logits with a model's: prompts of ``lengths`` in one step, then ``steps`` tokens of each.

    Args:
        model: the model that gives the expected logits.
        bundle: the folder to export to.
        lengths: the number of tokens of each prompt.
        steps: the number of decode steps after the prompts, each with a token of every request.
        ways: instruction sets to run with, one after the other; "best" is the best of this machine.
        source: what is exported; by default the model, saved to a folder next to the bundle.
        part: the part of the source to export; see ``export``.
    """
    export(source or saved(model, bundle.with_suffix(".saved")), bundle, part=part)
    rng = np.random.default_rng(1)
    prompts = [rng.integers(3, 256, n).tolist() for n in lengths]
    texts = [p + rng.integers(3, 256, steps).tolist() for p in prompts]
    expected = [expected_logits(model, text) for text in texts]
    for isa in ways:
        with Driver(bundle, len(prompts), 2, isa=isas()[0] if isa == "best" else isa) as driver:
            got = {r: [logits] for r, logits in driver.step(dict(enumerate(prompts))).items()}
            for i in range(steps):
                for r, logits in driver.step({r: [text[len(prompts[r]) + i]] for r, text in enumerate(texts)}).items():
                    got[r].append(logits)
        for r, row in enumerate(expected):
            np.testing.assert_allclose(np.concatenate(got[r]), row, atol=TOLERANCE, rtol=0, err_msg=isa)


def test_prefill_and_decode_equal_transformers(
    tiny_family: str, tiny_model: Callable[..., PreTrainedModel], tmp_path: Path
) -> None:
    compare(tiny_model(tiny_family), tmp_path / "tiny.bundle", (37, 5, 1), 8, "best", "portable")


@pytest.mark.matrix
@pytest.mark.parametrize("case", MORE_FAMILIES)
def test_other_families_equal_transformers(
    case: str, tiny_model: Callable[..., PreTrainedModel], tmp_path: Path
) -> None:
    model = tiny_model(case.partition(" ")[0], **MORE_FAMILIES[case])
    compare(model, tmp_path / "tiny.bundle", (21, 3), 3, "best")


@pytest.mark.parametrize("family", REFUSED)
def test_families_that_are_refused(family: str, tiny_model: Callable[..., PreTrainedModel], tmp_path: Path) -> None:
    overrides, message = REFUSED[family]
    with pytest.raises(UnsupportedModelError, match=message) as caught:
        export(tiny_model(family, **overrides), tmp_path / "tiny.bundle")
    assert caught.value.hint is not None
    assert not list(tmp_path.iterdir())


def test_tolerance_would_show_a_wrong_window(tiny_model: Callable[..., PreTrainedModel], tmp_path: Path) -> None:
    export(tiny_model("Mistral", sliding_window=9), tmp_path / "tiny.bundle")
    ids = np.random.default_rng(2).integers(3, 256, 30).tolist()
    with Driver(tmp_path / "tiny.bundle", 1, 1) as driver:
        got = driver.step({0: ids})[0]
    assert np.abs(got - expected_logits(tiny_model("Mistral"), ids)).max() > 10 * TOLERANCE


class _AlibiAttention(LlamaAttention):
    """Attention with linear biases: by the interface where that takes slopes, else spelled out, one head at a time."""

    slopes: torch.Tensor

    def __init__(self, config: LlamaConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.register_buffer("slopes", 2.0 ** -torch.linspace(1, 8, config.num_attention_heads), persistent=False)

    def forward(self, hidden_states: torch.Tensor, **given: Any) -> tuple[torch.Tensor, None]:
        heads, size, slopes = self.config.num_attention_heads, self.head_dim, self.slopes
        q, k, v = (p(hidden_states).unflatten(-1, (-1, size)).transpose(1, 2) for p in self._projections())
        if self.config._attn_implementation != "eager":
            attend = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
            out, _ = attend(self, q, k, v, given["attention_mask"], scaling=self.scaling, slopes=slopes)
        else:
            positions = torch.arange(q.shape[2])
            distance = positions[None, :] - positions[:, None]
            k, v = (x.repeat_interleave(heads // x.shape[1], 1) for x in (k, v))
            scores = q @ k.transpose(2, 3) * self.scaling + slopes[:, None, None] * distance
            out = (scores.masked_fill(distance > 0, float("-inf")).softmax(-1) @ v).transpose(1, 2)
        return self.o_proj(out.flatten(2)), None

    def _projections(self) -> tuple[torch.nn.Linear, ...]:
        return self.q_proj, self.k_proj, self.v_proj


class _AlibiForCausalLM(LlamaForCausalLM):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        for number, layer in enumerate(self.model.layers):
            layer.self_attn = _AlibiAttention(config, number)


def test_slopes_of_linear_biases(tiny_model: Callable[..., PreTrainedModel], tmp_path: Path) -> None:
    """No family of transformers hands slopes to the interface; a model of one's own may."""
    plain = tiny_model("Llama")
    model = _AlibiForCausalLM._from_config(plain.config, attn_implementation="eager").eval()
    model.load_state_dict(plain.state_dict())
    compare(model, tmp_path / "tiny.bundle", (21, 3), 3, "best", source=model)  # its class is this file's
    ids = [5, 9, 7, 11]
    assert np.abs(expected_logits(model, ids) - expected_logits(plain, ids)).max() > 1e-2
