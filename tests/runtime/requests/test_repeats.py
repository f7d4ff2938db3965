"""DRY beside its definition, written down without any cleverness, and with llama.cpp's edge cases."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from enginewright.runtime.requests.logit_rules import LogitRules, RowLists, sampling_batch
from enginewright.runtime.requests.repeats import Breakers, Repeats
from enginewright.runtime.requests.sampling import SamplingParams


def defined(params: SamplingParams, text: Sequence[int], breakers: Breakers) -> dict[int, float]:
    """The penalty of each token, by comparing every position with the text's end."""
    last = params.dry_penalty_last_n
    text = list(text if last == -1 else text[max(len(text) - last, 0) :])
    allowed, count = params.dry_allowed_length, len(text)
    limit = count  # tokens behind the last breaker
    for begin in reversed(range(count)):
        ends = [
            begin + len(tail)
            for tail in breakers.get(text[begin], ())
            if tuple(text[begin + 1 : begin + 1 + len(tail)]) == tail
        ]
        if ends:
            limit = count - 1 - max(ends)
            break
    if count <= allowed or limit < allowed:
        return {}
    longest: dict[int, int] = {}
    for end in range(1, count):  # text[:end] ends as the text does, by so many tokens
        same = 0
        while same < min(end, limit) and text[end - 1 - same] == text[-1 - same]:
            same += 1
        if same >= allowed and () not in breakers.get(text[end], ()):
            longest[text[end]] = max(same, longest.get(text[end], 0))
    base = float(np.float32(params.dry_base))
    most = int(88.7228391 / math.log(base)) if base > 1.000001 else 10**9
    return {
        token: min(params.dry_multiplier * base ** min(length - allowed, most), float(np.finfo(np.float32).max))
        for token, length in longest.items()
    }


def penalties(repeats: Repeats) -> dict[int, float]:
    tokens, values = repeats.biases()
    assert tokens.dtype == np.int32 and values.dtype == np.float32
    return dict(zip(tokens.tolist(), (-values).tolist(), strict=True))


@pytest.mark.parametrize("seed", range(40))
def test_penalties_are_those_of_the_definition(seed: int) -> None:
    """A text of few tokens, so that much is repeated; the same when it comes token by token and all at once."""
    rng = np.random.default_rng(seed)
    kinds = int(rng.integers(1, 6))
    breakers: Breakers = {}
    if seed % 3:
        heads = rng.integers(0, kinds + 1, rng.integers(1, 3)).tolist()
        tails = [tuple(rng.integers(0, kinds, rng.integers(0, 4)).tolist()) for _ in range(3)]
        breakers = {head: tuple(dict.fromkeys(tails[: rng.integers(1, 4)])) for head in heads}
    params = SamplingParams(
        dry_multiplier=float(rng.choice([0.5, 3.0])),
        dry_base=float(rng.choice([1.0, 1.1, 1.75, 40.0])),
        dry_allowed_length=int(rng.choice([0, 1, 2, 4])),
        dry_penalty_last_n=int(rng.choice([-1, -1, 1, 3, 17])),
    )
    text = rng.integers(0, kinds, 60).tolist()
    start = int(rng.integers(1, 40))
    repeats = Repeats.from_options(params, text[:start], breakers)
    assert repeats is not None
    for length in range(start, len(text) + 1):
        if length > start:
            repeats.push(text[length - 1])
        expected = defined(params, text[:length], breakers)
        assert penalties(repeats) == pytest.approx(expected, rel=1e-6)
        anew = Repeats(params, text[:length], breakers)
        assert penalties(anew) == penalties(repeats)


def test_the_published_example() -> None:
    """llama.cpp's comment: of a b c c b c y a b c, the next c would make a sequence of four."""
    a, b, c, y = range(4)
    text = [a, b, c, c, b, c, y, a, b, c]
    params = SamplingParams(dry_multiplier=1.0, dry_base=2.0, dry_allowed_length=1)
    assert penalties(Repeats(params, text, {})) == {c: 4.0, b: 1.0, y: 2.0}  # 3, 1 and 2 tokens repeated


def test_no_penalty_is_above_float32() -> None:
    params = SamplingParams(dry_multiplier=1e4, dry_base=1000.0)
    assert penalties(Repeats(params, [1] * 500, {})) == {1: float(np.finfo(np.float32).max)}


def test_off_is_no_rule() -> None:
    assert LogitRules.from_params(SamplingParams(dry_base=3.0), [1, 1, 1], [2]) is None
    assert Repeats.from_options(SamplingParams(dry_multiplier=1.0, dry_penalty_last_n=0), [1], {}) is None


def test_rules_after_a_draft_are_those_of_the_tokens_with_it() -> None:
    params = SamplingParams(dry_multiplier=1.0, dry_allowed_length=1, repetition_penalty=1.5)
    tokens = [5, 6, 7, 5, 6]
    rules = LogitRules.from_params(params, tokens, breakers={7: ((),)})
    assert rules is not None and rules.changing and rules.counting
    before = [array.tolist() for array in rules.repeats.biases()]  # type: ignore[union-attr]
    for length, ahead in enumerate(rules.ahead([5, 6, 6])):
        anew = Repeats(params, [*tokens, *[5, 6, 6][:length]], {7: ((),)})
        assert ahead.repeats is not None
        assert penalties(ahead.repeats) == penalties(anew)
    assert before == [array.tolist() for array in rules.repeats.biases()]  # type: ignore[union-attr]


def test_the_arrays_of_rows() -> None:
    params = [
        SamplingParams(dry_multiplier=1.0, dry_allowed_length=1),
        SamplingParams(),
        SamplingParams(xtc_probability=1),
    ]
    tokens = [4, 4, 4, 9]
    rules = [LogitRules.from_params(one, list(tokens)) for one in params]
    batch = sampling_batch([(one, 0, 0) for one in params], rules)
    assert not {"dry", "dry_start", "top_n_sigma"} & set(batch.options())  # 9 comes for the first time
    np.testing.assert_allclose(batch.options()["xtc_threshold"], 0.1)
    lists = RowLists(batch, rules)
    assert rules[0] is not None
    rules[0].push(4)
    lists.put(batch)
    options = {name: array.tolist() for name, array in batch.options().items()}
    assert (options["dry_start"], sorted(options["dry"]), options["dry_bias"]) == ([0, 2, 2, 2], [4, 9], [-1.0, -1.0])
