"""The C++ sampler: cuts against a plain numpy version, draws against exact probabilities, log probabilities, faults."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from enginewright.plugins.cpu.extension import cpu_extension as cpu
from enginewright.plugins.native.sampling import RowSampler
from enginewright.runtime.shared.contracts import NO_TOKEN, SamplingBatch
from tests.plugins.native.lowered_builder import sampling_batch

Float = npt.NDArray[np.float32]


def sample(logits: Float, batch: SamplingBatch, threads: int = 1) -> npt.NDArray[np.int32]:
    return cpu.RowSampler(threads).sample(logits, batch.options())["tokens"]


def distribution(
    logits: Float, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> npt.NDArray[np.float32]:
    batch = sampling_batch(1, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    return cpu.RowSampler().distribution(logits[None], batch.options())[0]


def reference(logits: Float, temperature: float, top_k: int, top_p: float, min_p: float) -> npt.NDArray[np.float64]:
    """The distribution that is sampled, by sorting everything in float64."""
    order = np.lexsort((np.arange(len(logits)), -logits))
    scaled = logits[order].astype(np.float64) / temperature
    weights = np.exp(scaled - scaled[0])
    if top_k:
        weights[top_k:] = 0
    before = np.cumsum(weights) - weights
    weights[(before >= top_p * weights.sum()) & (np.arange(len(logits)) > 0)] = 0
    weights[weights < min_p] = 0
    result = np.empty_like(weights)
    result[order] = weights / weights.sum()
    return result


@pytest.mark.parametrize("vocab", [1, 7, 1000, 49_153])
@pytest.mark.parametrize(
    "cut",
    [
        (0, 1.0, 0.0), (1, 1.0, 0.0), (5, 1.0, 0.0), (300, 1.0, 0.0), (10**6, 1.0, 0.0),
        (0, 0.0, 0.0), (0, 0.3, 0.0), (0, 0.9, 0.0), (0, 0.999, 0.0),
        (0, 1.0, 0.05), (0, 1.0, 1.0), (50, 0.8, 0.0), (50, 1.0, 0.1), (0, 0.95, 0.02), (40, 0.95, 0.02),
    ],
)  # fmt: skip
@pytest.mark.parametrize("temperature", [0.3, 1.0, 5.0])
def test_cuts(vocab: int, cut: tuple[int, float, float], temperature: float) -> None:
    logits = (4 * np.random.default_rng(vocab).standard_normal(vocab)).astype(np.float32)
    weights = distribution(logits, temperature, *cut)
    expected = reference(logits, temperature, *cut)
    # The weights are exp in float32, so a token on the edge of top_p or min_p may fall to either side: none does here.
    # Below exp(-87) they are 0.
    np.testing.assert_array_equal(weights > 0, expected > expected.max() * np.exp(-87))
    # exp(x) inherits the rounding of x in float32, which is up to 87 * 2^-24.
    np.testing.assert_allclose(weights / weights.sum(dtype=np.float64), expected, rtol=1e-5, atol=1e-37)


def test_equal_logits_are_cut_by_id() -> None:
    logits = np.array([1, 2, 2, 2, 0, 2], np.float32)
    assert np.flatnonzero(distribution(logits, 1.0, top_k=3)).tolist() == [1, 2, 3]
    assert np.flatnonzero(distribution(np.zeros(8, np.float32), 1.0, top_p=0.5)).tolist() == [
        0,
        1,
        2,
        3,
    ]
    assert np.flatnonzero(distribution(np.zeros(1000, np.float32), 1.0, top_k=700)).tolist() == [*range(700)]
    rows = np.stack([logits, logits[::-1]]).copy()
    assert sample(rows, sampling_batch(2, temperature=0)).tolist() == [1, 0]


def test_extreme_logits() -> None:
    logits = np.array([-np.inf, 3e38, -3e38, -np.inf], np.float32)
    np.testing.assert_array_equal(distribution(logits, 1e-30), [0, 1, 0, 0])
    assert sample(logits[None], sampling_batch(1)).tolist() == [1]
    np.testing.assert_array_equal(distribution(np.array([-np.inf, 0], np.float32), 1.0, top_k=1), [0, 1])


@pytest.mark.parametrize("vocab", [5, 2000])
@pytest.mark.parametrize("cut", [{}, {"top_k": 4}, {"top_p": 0.7}, {"min_p": 0.2}])
def test_draws_follow_the_distribution(vocab: int, cut: dict[str, float]) -> None:
    draws = 20_000
    logits = (1.5 * np.random.default_rng(vocab).standard_normal(vocab)).astype(np.float32)
    batch = sampling_batch(draws, temperature=0.8, seed=11, **cut)  # type: ignore[arg-type]
    batch.counter[:] = np.arange(draws)
    tokens = sample(np.broadcast_to(logits, (draws, vocab)).copy(), batch)
    probabilities = reference(
        logits, 0.8, int(cut.get("top_k", 0)), float(cut.get("top_p", 1)), float(cut.get("min_p", 0))
    )
    counts = np.bincount(tokens, minlength=vocab)
    assert counts[probabilities == 0].sum() == 0
    expected = probabilities * draws
    common = expected >= 10  # chi-square needs some counts in every cell; the rest is one cell
    observed = np.append(counts[common], counts[~common].sum())
    grouped = np.append(expected[common], expected[~common].sum())
    observed, grouped = observed[grouped > 0], grouped[grouped > 0]
    chi_square = ((observed - grouped) ** 2 / grouped).sum()
    freedom = len(grouped) - 1
    # Mean k, deviation sqrt(2k): six deviations with this fixed seed say that something is wrong.
    assert chi_square < freedom + 6 * np.sqrt(2 * freedom) + 1


@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_is_drawn_alike_in_any_company(threads: int) -> None:
    rng = np.random.default_rng(5)
    rows, vocab = 33, 700
    logits = rng.standard_normal((rows, vocab)).astype(np.float32)
    batch = SamplingBatch(
        temperature=rng.choice([0.0, 0.5, 1.3], rows).astype(np.float32),
        top_k=rng.choice([0, 3, 90], rows).astype(np.int32),
        top_p=rng.choice([1.0, 0.6], rows).astype(np.float32),
        min_p=rng.choice([0.0, 0.1], rows).astype(np.float32),
        seed=rng.integers(0, 2**64, rows, dtype=np.uint64),
        counter=rng.integers(0, 2**40, rows, dtype=np.uint64),
    )
    together = sample(logits, batch, threads)
    for row in range(rows):
        one = SamplingBatch(
            *(
                getattr(batch, name)[row : row + 1]
                for name in ("temperature", "top_k", "top_p", "min_p", "seed", "counter")
            )
        )
        assert sample(logits[row : row + 1], one)[0] == together[row]


def test_seed_and_counter_both_matter() -> None:
    logits = np.zeros((1, 1_000_000), np.float32)
    tokens = {
        int(sample(logits, sampling_batch(1, seed=seed, counter=counter))[0])
        for seed in (0, 1, 2**40)
        for counter in (0, 1, 2**40)
    }
    assert len(tokens) == 9


@pytest.mark.parametrize("vocab", [9, 3000])
def test_log_probabilities_are_of_the_unscaled_logits(vocab: int) -> None:
    logits = (3 * np.random.default_rng(1).standard_normal((4, vocab))).astype(np.float32)
    batch = sampling_batch(4, temperature=0.5, top_k=3, seed=3, logprobs=5)
    result = cpu.RowSampler().sample(logits, batch.options(), 5)
    wide = logits.astype(np.float64)
    expected = (
        wide - np.log(np.exp(wide - wide.max(-1, keepdims=True)).sum(-1, keepdims=True)) - wide.max(-1, keepdims=True)
    )
    assert result["top_ids"] is not None and result["top_logprobs"] is not None and result["token_logprobs"] is not None
    np.testing.assert_array_equal(result["top_ids"], np.argsort(-logits, axis=-1)[:, :5])
    # float32 results of size 10, from exp in float32 and a sum in float64.
    np.testing.assert_allclose(result["top_logprobs"], np.take_along_axis(expected, result["top_ids"], -1), atol=2e-6)
    tokens = result["tokens"][:, None]
    np.testing.assert_allclose(result["token_logprobs"], np.take_along_axis(expected, tokens, -1)[:, 0], atol=2e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("threads", [1, 3])
def test_a_row_that_cannot_be_sampled_changes_no_other(bad: float, temperature: float, threads: int) -> None:
    logits = np.random.default_rng(3).standard_normal((5, 300)).astype(np.float32)
    batch = sampling_batch(5, temperature=temperature, top_p=0.9, logprobs=2)
    expected = cpu.RowSampler().sample(logits, batch.options(), 2)
    logits[2, 7] = bad
    logits[4] = -np.inf
    results = cpu.RowSampler(threads).sample(logits, batch.options(), 2)
    assert results["tokens"][[2, 4]].tolist() == [NO_TOKEN, NO_TOKEN]
    for name, value in results.items():
        np.testing.assert_array_equal(value[[0, 1, 3]], expected[name][[0, 1, 3]], err_msg=name)  # type: ignore[index,literal-required]


@pytest.mark.parametrize("penalty", [1.3, 0.7, 1e-30, 3e38])
def test_repetition_penalty_is_that_of_transformers(penalty: float) -> None:
    """Bit for bit: the largest logit, and the weights that are drawn from."""
    import torch
    from transformers import RepetitionPenaltyLogitsProcessor

    rng = np.random.default_rng(9)
    rows, vocab = 40, 700
    logits = (3 * rng.standard_normal((rows, vocab))).astype(np.float32)
    logits[:, 5], logits[:, 6] = 0.0, -0.0
    logits[::3, 7] = -np.inf
    seen = [rng.integers(0, vocab, n).astype(np.int32) for n in rng.integers(1, 400, rows)]  # some twice
    seen[0][: len(seen[0]) // 2] = [5, 6, 7][:1] * (len(seen[0]) // 2)
    process = RepetitionPenaltyLogitsProcessor(penalty)
    expected = np.stack(
        [
            process(torch.tensor(ids[None].astype(np.int64)), torch.tensor(row[None]))[0].numpy()
            for ids, row in zip(seen, logits, strict=True)
        ]
    )
    expected = np.where(logits == -np.inf, logits, np.nan_to_num(expected))  # finite logits stay finite
    start = np.cumsum([0, *map(len, seen)]).astype(np.int32)
    for temperature in (0.0, 0.8):
        plain = sampling_batch(rows, temperature=temperature, seed=3, top_p=0.9)
        batch = replace(
            plain, repetition_penalty=np.full(rows, penalty, np.float32), seen_start=start, seen=np.concatenate(seen)
        )
        np.testing.assert_array_equal(sample(logits, batch), sample(expected, plain))
        for row in range(rows):  # alone, and with its tokens in another order
            alone = replace(
                sampling_batch(1, temperature=temperature, seed=3, top_p=0.9),
                repetition_penalty=np.full(1, penalty, np.float32),
                seen_start=np.array([0, len(seen[row])], np.int32),
                seen=seen[row][::-1].copy(),
            )
            assert sample(logits[row : row + 1], alone)[0] == sample(expected, plain)[row]
    np.testing.assert_array_equal(
        cpu.RowSampler().distribution(logits, batch.options()), cpu.RowSampler().distribution(expected, plain.options())
    )


def test_log_probabilities_are_of_the_logits_before_a_penalty() -> None:
    logits = np.array([[4.0, 3.0, 1.0]], np.float32)
    batch = replace(
        sampling_batch(1, temperature=0.0),
        repetition_penalty=np.array([2], np.float32),
        seen_start=np.array([0, 1], np.int32),
        seen=np.array([0], np.int32),
    )
    sampled, plain = (
        cpu.RowSampler().sample(logits, b.options(), 3) for b in (batch, sampling_batch(1, temperature=0.0))
    )
    assert (sampled["tokens"].tolist(), plain["tokens"].tolist()) == ([1], [0])
    for name in ("top_ids", "top_logprobs"):
        np.testing.assert_array_equal(sampled[name], plain[name])  # type: ignore[literal-required]
    assert sampled["token_logprobs"] is not None and sampled["top_logprobs"] is not None
    assert sampled["token_logprobs"][0] == sampled["top_logprobs"][0, 1]


def test_options_are_named() -> None:
    logits = np.zeros((2, 4), np.float32)
    good = sampling_batch(2).options()
    for change, message in (
        ({"top_q": good["top_p"]}, "there is no option top_q"),
        ({"top_p": good["seed"]}, "top_p has another type than float32"),
        ({"top_k": good["top_k"][:1]}, "top_k must have 2 entries, not 1"),
        ({"repetition_penalty": np.zeros(2, np.float32)}, "row 0 has a repetition_penalty that is not in"),
        ({"seen": good["top_k"]}, "seen and seen_start go together"),
        ({"seen": good["top_k"], "seen_start": np.array([0, 3, 2], np.int32)}, "never fall"),
        ({"seen": good["top_k"], "seen_start": np.array([1, 1, 2], np.int32)}, "begin with 0"),
        ({"seen": good["top_k"], "seen_start": np.array([0, 1, 3], np.int32)}, "seen must have 3 entries"),
        (
            {"seen": good["top_k"] + 4, "seen_start": np.array([0, 1, 2], np.int32)},
            r"token 4, which is not in \[0, 4\)",
        ),
        ({"seen": good["top_k"] - 1, "seen_start": np.array([0, 1, 2], np.int32)}, "token -1"),
    ):
        with pytest.raises(ValueError, match=message):
            cpu.RowSampler().sample(logits, good | change)  # type: ignore[operator]


def z_of_bias(draws: int, bias: float) -> tuple[float, float]:
    """The deviations by which draws are off: for a bias between odd and even token ids, and for any, by chi-square.

    ``bias``: what is drawn from has odd tokens so much more probable than they should be, and even ones less.
    """
    vocab, rows = 64, 20_000
    logits = (1.2 * np.random.default_rng(8).standard_normal(vocab)).astype(np.float32)
    odd = np.arange(vocab) % 2
    expected_shares = reference(logits, 0.8, 0, 1.0, 0.0)
    drawn = logits + 0.8 * np.log(np.where(odd, 1 + bias, 1 - bias)).astype(np.float32)
    counts = np.zeros(vocab, np.int64)
    for first in range(0, draws, rows):
        batch = sampling_batch(rows, temperature=0.8, seed=21)
        batch.counter[:] = np.arange(first, first + rows)
        counts += np.bincount(sample(np.broadcast_to(drawn, (rows, vocab)).copy(), batch, 2), minlength=vocab)
    total = counts.sum()
    share = expected_shares[odd == 1].sum()
    contrast = (counts[odd == 1].sum() - total * share) / np.sqrt(total * share * (1 - share))
    chi_square = ((counts - total * expected_shares) ** 2 / (total * expected_shares)).sum()
    return float(abs(contrast)), float((chi_square - (vocab - 1)) / np.sqrt(2 * (vocab - 1)))


def test_a_bias_of_one_percent_would_be_found() -> None:
    """5 deviations are one case in a million; a fixed seed is drawn from."""
    contrast, chi_square = z_of_bias(400_000, 0.0)
    assert contrast < 5 and chi_square < 5
    assert z_of_bias(400_000, 0.01)[0] > 5


@pytest.mark.soak
def test_a_million_draws_follow_the_distribution() -> None:
    contrast, chi_square = z_of_bias(1_000_000, 0.0)
    assert contrast < 4 and chi_square < 4
    contrast, chi_square = z_of_bias(1_000_000, 0.01)
    assert contrast > 5 and chi_square > 4


def test_a_scored_token_has_the_bits_of_a_drawn_one() -> None:
    """Whichever token of a row is asked for, its log-probability is what it would be if it had been drawn."""
    vocab = 300
    logits = np.random.default_rng(5).standard_normal((6, vocab)).astype(np.float32) * 4
    drawn = cpu.RowSampler().sample(logits, sampling_batch(6, temperature=1.5, seed=3, logprobs=2).options(), 2)
    scored = np.array([*drawn["tokens"][:4], -1, 0], np.int32)
    options = sampling_batch(6, temperature=0.0).options() | {"scored": scored}
    sampled = cpu.RowSampler().sample(logits, options, 2)
    np.testing.assert_array_equal(sampled["token_logprobs"][:4], drawn["token_logprobs"][:4])
    np.testing.assert_array_equal(sampled["top_logprobs"], drawn["top_logprobs"])
    greedy = cpu.RowSampler().sample(logits, sampling_batch(6, temperature=0.0).options(), 2)
    np.testing.assert_array_equal(sampled["tokens"], greedy["tokens"])
    assert sampled["token_logprobs"][4] == greedy["token_logprobs"][4]
    expected = logits[5].astype(np.float64)
    assert sampled["token_logprobs"][5] == pytest.approx(expected[0] - np.log(np.exp(expected).sum()), abs=4e-6)
    for wrong in (vocab, -2):
        with pytest.raises(ValueError, match="scored has token"):
            cpu.RowSampler().sample(logits, options | {"scored": np.full(6, wrong, np.int32)}, 2)


def test_tokens_that_were_drawn_elsewhere_have_the_same_bits() -> None:
    logits = np.random.default_rng(6).standard_normal((6, 300)).astype(np.float32) * 4
    batch, sampler = sampling_batch(6, temperature=1.5, seed=3, logprobs=2), RowSampler()
    sampled = sampler.sample(logits, batch)
    assert sampled.tokens is not None
    again = sampler.of_drawn(sampled.tokens, logits, batch, return_logits=False)
    for name in ("tokens", "token_logprobs", "top_ids", "top_logprobs"):
        np.testing.assert_array_equal(getattr(again, name), getattr(sampled, name))
