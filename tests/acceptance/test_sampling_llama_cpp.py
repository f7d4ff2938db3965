"""DRY, top-n-sigma and XTC beside llama.cpp's samplers, with SmolLM2's vocabulary and sequence breakers in texts.

llama.cpp applies penalties, DRY, top-n-sigma, top_k, min_p and XTC in this order, and so does the runtime.
``llama_cpp_oracle`` says how to run it.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from enginewright.plugins.cpu.extension import cpu_extension as cpu
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.requests.logit_rules import LogitRules, sampling_batch
from enginewright.runtime.requests.sampling import SamplingParams
from enginewright.runtime.text.sequence_breakers import SequenceBreakers
from enginewright.runtime.text.tokenizer import Tokenizer
from tests.acceptance.llama_cpp_oracle import MARKS

pytestmark = MARKS

TEXTS = [
    'The cat sat on the mat.\nThe cat sat on the hat: "the cat sat on the mat" the cat sat on',
    "a b c a b c a b c a b",
    "x--- foo ---bar x--- foo",
    "12:12:12:12",
    "hello <|im_end|> hello <|im_end|>",
]
BREAKERS = [("\n", ":", '"', "*"), ("--- ", "cat sat"), (), ("a b", "b c a"), (" the",)]


def llama_cpps(
    vocab: Any, params: SamplingParams, history: list[int], logits: npt.NDArray[np.float32]
) -> npt.NDArray[np.float64]:
    """The distribution that llama.cpp draws from at temperature 1."""
    import llama_cpp as L

    texts = (ctypes.c_char_p * len(params.dry_sequence_breakers))(*[s.encode() for s in params.dry_sequence_breakers])
    last = 8192 if params.dry_penalty_last_n < 0 else params.dry_penalty_last_n
    dry = (params.dry_multiplier, params.dry_base, params.dry_allowed_length, last)
    chain = L.llama_sampler_chain_init(L.llama_sampler_chain_default_params())
    for sampler in (
        L.llama_sampler_init_penalties(len(logits), 8192, params.repetition_penalty, 0.0, 0.0),
        L.llama_sampler_init_dry(vocab, *dry, texts, len(texts)),
        L.llama_sampler_init_top_n_sigma(params.top_n_sigma),
        L.llama_sampler_init_top_k(params.top_k),
        L.llama_sampler_init_min_p(params.min_p, 0),
        L.llama_sampler_init_xtc(params.xtc_probability, params.xtc_threshold, 0, 1),
    ):
        L.llama_sampler_chain_add(chain, sampler)
    for token in history:
        L.llama_sampler_accept(chain, token)
    data = (L.llama_token_data * len(logits))(*[L.llama_token_data(i, float(x), 0.0) for i, x in enumerate(logits)])
    array = L.llama_token_data_array(data, len(logits), -1, False)
    L.llama_sampler_apply(chain, ctypes.byref(array))
    weights = np.zeros(len(logits))
    for i in range(array.size):
        weights[array.data[i].id] = np.exp(np.float64(array.data[i].logit - array.data[0].logit))
    L.llama_sampler_free(chain)
    return weights / weights.sum()


def test_distributions_are_llama_cpps(smollm2_gguf: Path, smollm2_bundle: Path) -> None:
    import llama_cpp as L

    options = L.llama_model_default_params()
    options.vocab_only = True
    model = L.llama_model_load_from_file(str(smollm2_gguf).encode(), options)
    vocab = L.llama_model_get_vocab(model)
    size = L.llama_vocab_n_tokens(vocab)
    tokenizer = Tokenizer.of_bundle(Bundle.open(smollm2_bundle))
    assert tokenizer is not None
    finder, rng, penalized = SequenceBreakers(tokenizer, size), np.random.default_rng(0), 0
    for trial in range(100):
        history = tokenizer.encode(TEXTS[trial % len(TEXTS)])
        if trial % 2:
            history = rng.choice(history[:8], 40).tolist()
        params = SamplingParams(
            temperature=1.0,
            top_k=50,
            min_p=0.05,
            repetition_penalty=float(rng.choice([1, 1.3])),
            top_n_sigma=float(rng.choice([0, 0.5, 1])),
            xtc_probability=float(rng.choice([0, 1])),
            xtc_threshold=float(rng.choice([0.001, 0.02])),
            dry_multiplier=float(rng.choice([0.8, 2.5])),
            dry_base=float(rng.choice([1.75, 1.1, 1.0])),
            dry_allowed_length=int(rng.choice([1, 2, 3])),
            dry_penalty_last_n=int(rng.choice([-1, -1, 12])),
            dry_sequence_breakers=BREAKERS[int(rng.integers(len(BREAKERS)))],
        )
        logits = (3 * rng.standard_normal(size)).astype(np.float32)
        rules = LogitRules.from_params(params, history, breakers=finder.find(list(params.dry_sequence_breakers)))
        batch = sampling_batch([(params, 1, 0)], [rules])
        penalized += batch.dry is not None
        weights = cpu.RowSampler(1).distribution(logits[None], batch.options())[0].astype(np.float64)
        expected = llama_cpps(vocab, params, history, logits)
        np.testing.assert_array_equal(weights > 0, expected > 0)
        np.testing.assert_allclose(weights / weights.sum(), expected, rtol=2e-4)  # sums in float32 there
    assert penalized > 30
    L.llama_model_free(model)
