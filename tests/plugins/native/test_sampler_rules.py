"""The C++ sampler's rules besides top_k, top_p and min_p, compared with transformers, vLLM's formulas and definitions.

Penalties, biases, bans and typical_p are transformers' or vLLM's. Top-n-sigma, XTC and DRY are those of their papers
and of llama.cpp, in numpy.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from enginewright.plugins.cpu.extension import cpu_extension as cpu
from enginewright.runtime.shared.contracts import NO_TOKEN, SamplingBatch
from tests.plugins.native.lowered_builder import sampling_batch

ROWS, VOCAB = 10_000, 120
Float = npt.NDArray[np.float32]


def logits_of(seed: int, rows: int = ROWS, vocab: int = VOCAB) -> Float:
    return (3 * np.random.default_rng(seed).standard_normal((rows, vocab))).astype(np.float32)


def lists(rng: np.random.Generator, rows: int, most: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Starts, and for each row up to ``most`` distinct tokens."""
    lengths = rng.integers(0, most + 1, rows)
    start = np.zeros(rows + 1, np.int32)
    np.cumsum(lengths, out=start[1:])
    tokens = [rng.permutation(VOCAB)[:length] for length in lengths]
    return start, np.concatenate(tokens).astype(np.int32)


def probabilities(logits: Float, batch: SamplingBatch) -> npt.NDArray[np.float64]:
    weights = cpu.RowSampler(2).distribution(logits, batch.options()).astype(np.float64)
    return weights / weights.sum(1, keepdims=True)


def softmax(logits: npt.NDArray[Any] | torch.Tensor) -> npt.NDArray[np.float64]:
    return torch.softmax(torch.as_tensor(logits).double(), -1).numpy()


def full(value: float, rows: int = ROWS) -> Float:
    return np.full(rows, value, np.float32)


def same(found: npt.NDArray[np.float64], wanted: npt.NDArray[np.float64]) -> None:
    np.testing.assert_array_equal(found > 0, wanted > 1e-37)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-37)  # exp in float32 of x up to 87


def test_all_penalties_and_biases_are_vllms() -> None:
    """They come in vLLM's order: allowed tokens, bias, repetition, frequency, presence (v1/sample/sampler.py)."""
    rng, logits = np.random.default_rng(0), logits_of(1)
    batch = sampling_batch(ROWS, temperature=1.0)
    batch.repetition_penalty = rng.uniform(0.5, 2, ROWS).astype(np.float32)
    batch.frequency_penalty = rng.uniform(-2, 2, ROWS).astype(np.float32)
    batch.presence_penalty = rng.uniform(-2, 2, ROWS).astype(np.float32)
    batch.seen_start, batch.seen = lists(rng, ROWS, 30)
    batch.counted_start, batch.counted = lists(rng, ROWS, 20)
    batch.counts = rng.integers(1, 9, len(batch.counted)).astype(np.int32)
    batch.biased_start, batch.biased = lists(rng, ROWS, 60)
    batch.bias = rng.choice([-np.inf, -3.5, 0.25, 4], len(batch.biased)).astype(np.float32)
    batch.allowed_start, batch.allowed = lists(rng, ROWS, VOCAB)
    expected = logits.copy()
    for r in range(ROWS):
        row = expected[r]
        allowed = batch.allowed[batch.allowed_start[r] : batch.allowed_start[r + 1]]
        if len(allowed):
            row[np.setdiff1d(np.arange(VOCAB), allowed)] = -np.inf
        of = slice(batch.biased_start[r], batch.biased_start[r + 1])
        row[batch.biased[of]] += batch.bias[of]
        seen = batch.seen[batch.seen_start[r] : batch.seen_start[r + 1]]
        penalty = batch.repetition_penalty[r]
        row[seen] = np.where(row[seen] > 0, row[seen] / penalty, row[seen] * penalty)
        of = slice(batch.counted_start[r], batch.counted_start[r + 1])
        row[batch.counted[of]] -= batch.frequency_penalty[r] * batch.counts[of].astype(np.float32)
        row[batch.counted[of]] -= batch.presence_penalty[r]
    left = np.isfinite(expected).any(1)
    assert left.sum() < ROWS  # some rows ban all
    sampled = cpu.RowSampler(2).sample(logits, batch.options() | {"temperature": full(0.0)}, 0)
    tokens = sampled["tokens"]
    assert (tokens[~left] == NO_TOKEN).all()
    np.testing.assert_array_equal(tokens[left], expected[left].argmax(1))
    # Log-probabilities are the model's own, whatever was done to the logits.
    logprobs = np.log(softmax(logits))[np.arange(ROWS), tokens]
    np.testing.assert_allclose(sampled["token_logprobs"][left], logprobs[left], rtol=1e-5, atol=1e-6)
    comparable = np.flatnonzero(left)[:2000]
    few = row_options(batch, comparable)
    same(probabilities(logits[comparable], few), softmax(expected[comparable]))


def row_options(batch: SamplingBatch, rows: npt.NDArray[np.int64]) -> SamplingBatch:
    """The batch of some of the rows."""
    options: dict[str, Any] = {}
    for name, array in batch.options().items():
        if len(array) == ROWS and not name.endswith("_start"):
            options[name] = array[rows].copy()
    for start, names in (
        ("seen_start", ("seen",)), ("counted_start", ("counted", "counts")), ("biased_start", ("biased", "bias")),
        ("allowed_start", ("allowed",)),
    ):  # fmt: skip
        starts = getattr(batch, start)
        parts = [np.arange(starts[r], starts[r + 1]) for r in rows]
        options[start] = np.concatenate([[0], np.cumsum([len(p) for p in parts])]).astype(np.int32)
        for name in names:
            options[name] = getattr(batch, name)[np.concatenate(parts)]
    return replace(batch, **options)


@pytest.mark.parametrize("mass", [0.05, 0.3, 0.9, 0.999])
@pytest.mark.parametrize("temperature", [0.6, 1.0, 2.0])
def test_typical_p_is_transformers(mass: float, temperature: float) -> None:
    logits = logits_of(2)
    batch = replace(sampling_batch(ROWS, temperature=temperature), typical_p=full(mass))
    scores = TemperatureLogitsWarper(temperature)(None, torch.from_numpy(logits).double())  # type: ignore[arg-type]
    filtered = TypicalLogitsWarper(mass=mass)(None, scores)  # type: ignore[arg-type]
    shares, expected, whole = probabilities(logits, batch), softmax(filtered), softmax(scores)
    other = ((shares > 0) != (expected > 1e-37)).any(1)
    assert other.mean() < 1e-3
    for row in np.flatnonzero(other):  # weights are float32, so the sum of a set may fall to either side of the mass
        masses = [np.where(one[row] > 0, whole[row], 0).sum() for one in (shares, expected)]
        assert min(masses) == pytest.approx(mass, abs=1e-6)
    same(shares[~other], expected[~other])


@pytest.mark.parametrize("rows", [2000])
def test_all_cuts_are_transformers_in_its_order(rows: int) -> None:
    logits = logits_of(3, rows)
    batch = sampling_batch(rows, temperature=1.3, top_k=40, top_p=0.95, min_p=0.02)
    batch.typical_p = full(0.8, rows)
    scores = torch.from_numpy(logits).double()
    for warper in (
        *(TemperatureLogitsWarper(1.3), TopKLogitsWarper(40), TopPLogitsWarper(0.95), MinPLogitsWarper(0.02)),
        TypicalLogitsWarper(mass=0.8),
    ):
        scores = warper(None, scores)
    same(probabilities(logits, batch), softmax(scores))


def test_repetition_bias_and_bans_are_transformers() -> None:
    rng, logits = np.random.default_rng(4), logits_of(4, 500)
    ids = torch.from_numpy(rng.integers(0, VOCAB, (500, 12)))
    bias = {(7,): 2.5, (9,): -4.0}
    scores = torch.from_numpy(logits)
    for processor in (
        SequenceBiasLogitsProcessor(bias),
        RepetitionPenaltyLogitsProcessor(1.4),
        SuppressTokensLogitsProcessor([3, 50]),
    ):
        scores = processor(ids, scores)
    batch = sampling_batch(500, temperature=1.0)
    batch.repetition_penalty = full(1.4, 500)
    batch.seen, batch.seen_start = ids.int().numpy().ravel(), np.arange(0, 6001, 12, dtype=np.int32)
    batch.biased = np.tile(np.array([7, 9, 3, 50], np.int32), 500)
    batch.bias = np.tile(np.array([2.5, -4.0, -np.inf, -np.inf], np.float32), 500)
    batch.biased_start = np.arange(0, 2001, 4, dtype=np.int32)
    same(probabilities(logits, batch), softmax(scores))


def sigma_cut(logits: npt.NDArray[np.float64], n: float) -> npt.NDArray[np.float64]:
    """Top-n-sigma (arXiv 2411.07641): logits more than n standard deviations below the greatest one become -inf."""
    cut = logits.copy()
    for row in cut:
        allowed = row[row > -np.inf]
        row[row < allowed.max() - n * allowed.std()] = -np.inf
    return cut


@pytest.mark.parametrize("n", [0.1, 0.5, 1.0, 3.0])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 1e3])
def test_top_n_sigma_is_the_papers(n: float, temperature: float) -> None:
    """The tokens are the same at every temperature; banned ones have no part in the deviation."""
    logits = logits_of(6)
    logits[::2, 5:90] = -np.inf
    batch = replace(sampling_batch(ROWS, temperature=temperature), top_n_sigma=full(n))
    shares = probabilities(logits, batch)
    expected = softmax(sigma_cut(logits.astype(np.float64), n) / np.float64(np.float32(temperature)))
    same(shares, expected)


def xtc(
    weights: npt.NDArray[np.float64], logits: Float, threshold: float, excluded: npt.NDArray[np.bool_]
) -> npt.NDArray[np.float64]:
    """Exclude top choices: of the tokens with ``threshold`` the last by probability and id stays, if there are two."""
    result = weights.copy()
    for row in np.flatnonzero(excluded):
        order = np.lexsort((np.arange(weights.shape[1]), -logits[row]))
        order = order[weights[row, order] > 0]
        top = order[weights[row, order] >= threshold * weights[row].sum()]
        if len(top) > 1:
            result[row, top[:-1]] = 0
    return result / result.sum(1, keepdims=True)


@pytest.mark.parametrize("threshold", [0.0, 0.05, 0.1, 0.3, 0.5, 0.6])
@pytest.mark.parametrize("ties", [False, True])
def test_xtc_excludes_all_top_choices_but_the_last(threshold: float, ties: bool) -> None:
    logits = np.round(logits_of(7)) if ties else logits_of(7)
    batch = sampling_batch(ROWS, temperature=1.5, top_k=30)
    before = probabilities(logits, batch)
    batch.xtc_probability, batch.xtc_threshold = full(1), full(threshold)
    shares = probabilities(logits, batch)
    same(shares, xtc(before, logits, np.float32(threshold), np.ones(ROWS, bool)))
    if threshold == 0.6:
        np.testing.assert_array_equal(shares, before)


def test_xtc_draws_its_chance_from_seed_and_counter_alone() -> None:
    """The chance is independent of the number that draws the token, and the same in any batch."""
    logits = np.tile(logits_of(8, 1), (ROWS, 1))
    batch = sampling_batch(ROWS, temperature=1.0)
    batch.seed, batch.counter = np.arange(ROWS, dtype=np.uint64) // 100, np.arange(ROWS, dtype=np.uint64) % 100
    whole = probabilities(logits, batch)
    drawn = cpu.RowSampler(1).sample(logits, batch.options())["tokens"]
    batch.xtc_probability, batch.xtc_threshold = full(0.3), full(0.05)
    kept_shares = probabilities(logits, batch)
    excluded = (kept_shares != whole).any(1)
    assert abs(excluded.mean() - 0.3) < 5 * math.sqrt(0.3 * 0.7 / ROWS)
    same(kept_shares, xtc(whole, logits, np.float32(0.05), excluded))
    # Rows that keep their top choices draw what they draw without XTC, whatever the chance was.
    now = cpu.RowSampler(2).sample(logits, batch.options())["tokens"]
    np.testing.assert_array_equal(now[~excluded], drawn[~excluded])
    likeliest = logits[0].argmax()
    shares = [(drawn[chosen] == likeliest).mean() for chosen in (excluded, ~excluded)]
    assert shares[0] == pytest.approx(shares[1], abs=0.06)
    assert not (now[excluded] == likeliest).any()
    rows = np.arange(7, 47)
    alone = SamplingBatch(**{name: array[rows] for name, array in batch.options().items()})
    np.testing.assert_array_equal(probabilities(logits[rows], alone), kept_shares[rows])


def test_dry_comes_after_the_penalties_and_sigma_before_the_cuts() -> None:
    rng, logits = np.random.default_rng(9), logits_of(9, 500)
    batch = sampling_batch(500, temperature=0.9, top_p=0.8)
    batch.repetition_penalty, batch.top_n_sigma = full(1.4, 500), full(1.2, 500)
    batch.presence_penalty = full(0.5, 500)
    batch.seen_start = batch.counted_start = batch.dry_start = np.arange(0, 2001, 4, dtype=np.int32)
    tokens = np.concatenate([rng.permutation(VOCAB)[:4] for _ in range(500)]).astype(np.int32)
    batch.seen = batch.counted = batch.dry = tokens
    batch.counts = np.ones(2000, np.int32)
    batch.dry_bias = -rng.choice([0.8, 1.4, 30.0], 2000).astype(np.float32)
    expected = logits.astype(np.float64)
    for row, row_tokens in enumerate(tokens.reshape(500, 4)):
        expected[row, row_tokens] = np.where(
            expected[row, row_tokens] > 0, expected[row, row_tokens] / 1.4, expected[row, row_tokens] * 1.4
        )
        expected[row, row_tokens] += -0.5 + batch.dry_bias[4 * row : 4 * row + 4]
    scores = torch.from_numpy(sigma_cut(expected, 1.2) / np.float64(np.float32(0.9)))
    same(probabilities(logits, batch), softmax(TopPLogitsWarper(0.8)(None, scores)))  # type: ignore[arg-type]


def test_finite_logits_stay_finite() -> None:
    logits = np.array([[3e38, -3e38, 1, -np.inf]], np.float32)
    batch = sampling_batch(1, temperature=0.0)
    batch.biased, batch.biased_start = np.arange(4, dtype=np.int32), np.array([0, 4], np.int32)
    batch.bias = np.array([3e38, -3e38, -3e38, 5], np.float32)
    assert cpu.RowSampler().sample(logits, batch.options())["tokens"].tolist() == [0]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"typical_p": full(0, 1)}, r"typical_p that is not in \(0, 1\]"),
        ({"frequency_penalty": full(np.inf, 1)}, "frequency_penalty that is not finite"),
        ({"presence_penalty": full(np.nan, 1)}, "presence_penalty that is not finite"),
        ({"top_n_sigma": full(np.nan, 1)}, "top_n_sigma that is not finite"),
        ({"xtc_probability": full(1.5, 1)}, r"xtc_probability that is not in \[0, 1\]"),
        ({"xtc_threshold": full(-0.5, 1)}, r"xtc_threshold that is not in \[0, 1\]"),
        ({"dry": np.array([1], np.int32), "dry_start": np.array([0, 1], np.int32)}, "dry, dry_bias and"),
        ({"biased": np.array([1], np.int32), "biased_start": np.array([0, 1], np.int32)}, "biased, bias and"),
        ({"counted": np.array([1], np.int32)}, "counted, counts and counted_start go together"),
        ({"allowed_start": np.array([0, 1], np.int32)}, "allowed and allowed_start go together"),
        (
            {"allowed": np.array([VOCAB], np.int32), "allowed_start": np.array([0, 1], np.int32)},
            f"allowed has token {VOCAB}",
        ),
        (
            {
                "biased": np.array([1], np.int32),
                "bias": np.array([np.nan], np.float32),
                "biased_start": np.array([0, 1], np.int32),
            },
            "bias that is NaN",
        ),
        ({"other_start": np.array([0, 1], np.int32)}, "no option other_start"),
    ],
)
def test_what_is_wrong_is_named(wrong: dict[str, Any], message: str) -> None:
    options = sampling_batch(1).options() | wrong
    with pytest.raises(ValueError, match=message):
        cpu.RowSampler().sample(logits_of(0, 1), options)
