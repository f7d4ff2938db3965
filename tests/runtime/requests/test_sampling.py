"""Sampling parameters are checked by name, and a request's seed is a function of its prompt."""

from __future__ import annotations

import copy
import math
import pickle
import re
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from enginewright.runtime.requests.logit_rules import sampling_batch
from enginewright.runtime.requests.sampling import SamplingParams, sample_seed, seed_of
from enginewright.runtime.shared.errors import RequestError


def test_greedy_unless_told_otherwise() -> None:
    params = SamplingParams()
    assert (params.temperature, params.seed, params.stop) == (0, None, ())


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("temperature", [-0.1, float("nan"), float("inf"), 3.5e38, 10**400, "hot", True]),
        ("top_k", [-2, 1.5, 2**31, True]),
        ("top_p", [0, -0.1, 1.1, float("nan")]),
        ("min_p", [-0.1, 1.1, "0"]),
        ("top_n_sigma", [-0.5, -2, math.inf, "1", True]),
        ("xtc_probability", [-0.1, 1.1, "0"]),
        ("xtc_threshold", [-0.1, 1.1]),
        ("dry_multiplier", [-1, 1e5, math.nan]),
        ("dry_base", [0.9, math.inf]),
        ("dry_allowed_length", [-1, 1.5, 2**31]),
        ("dry_penalty_last_n", [-2, 0.5]),
        ("dry_sequence_breakers", ["", [""], [3], ["a"] * 33, ["é" * 21], 5]),
        ("seed", [-1, 2**64, 1.0, True]),
        ("max_tokens", [0, -5, 1.0]),
        ("stop", [("",), ("a", ""), (1,), 5, b"ab", {"a": 1}]),
        ("stop_token_ids", [(-1,), ("a",), 5, np.array(1), {3: 4}, b"ab", [True], "ab", np.array([[1]])]),
        ("ignore_eos", [1, "no"]),
        ("logprobs", [-1, 101, True, "2"]),
        ("repetition_penalty", [0, -1, 1e-60, float("nan"), float("inf"), True, "1"]),
    ],
)
def test_values_out_of_range_name_their_field(field: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(RequestError, match=f"^{field}: "):
            SamplingParams(**{field: value})


def test_none_is_the_default_and_minus_one_is_off() -> None:
    """People pass them so to vLLM."""
    names = [field.name for field in fields(SamplingParams) if field.name != "max_tokens"]
    assert SamplingParams(**dict.fromkeys(names)) == SamplingParams()
    assert SamplingParams(top_k=-1) == SamplingParams(top_k=0)
    assert SamplingParams(max_tokens=None).max_tokens is None


def test_values_at_the_edge() -> None:
    SamplingParams(temperature=0, top_k=0, top_p=1, min_p=0, seed=0, max_tokens=1, logprobs=0)
    SamplingParams(repetition_penalty=1e-30, logprobs=None)
    SamplingParams(temperature=3.4e38, top_k=0)
    SamplingParams(temperature=100, top_k=2**31 - 1, top_p=1e-9, min_p=1, seed=2**64 - 1, logprobs=100)


def test_numbers_of_numpy_are_numbers() -> None:
    params = SamplingParams(temperature=np.float32(0.5), seed=np.uint64(2**64 - 1), stop_token_ids=np.array([3]))
    batch = sampling_batch([(params, params.seed or 0, 0)])
    assert (batch.temperature.tolist(), batch.seed.tolist()) == ([0.5], [2**64 - 1])


def test_one_stop_string_or_several() -> None:
    assert SamplingParams(stop="ab").stop == ("ab",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")


def test_defaults_of_a_bundle() -> None:
    defaults = {"do_sample": True, "temperature": 0.6, "top_k": 20, "repetition_penalty": 1.1}
    assert SamplingParams.from_defaults(defaults) == SamplingParams(temperature=0.6, top_k=20, repetition_penalty=1.1)
    assert SamplingParams.from_defaults(defaults, top_k=3, max_tokens=9).top_k == 3
    assert SamplingParams.from_defaults({"do_sample": True}).temperature == 1
    assert SamplingParams.from_defaults({"do_sample": False, "temperature": 0.6}).temperature == 0
    assert SamplingParams.from_defaults({"temperature": 0.6}).temperature == 0.6
    assert SamplingParams.from_defaults({}) == SamplingParams()
    assert SamplingParams.from_defaults({"repetition_penalty": 1.3}) == SamplingParams(
        repetition_penalty=1.3
    )  # greedy too
    assert SamplingParams.from_defaults({"repetition_penalty": 1.3}, repetition_penalty=1.0) == SamplingParams()


def test_the_seed_is_a_fixed_function_of_the_prompt() -> None:
    assert seed_of([1, 2, 3]) == seed_of(np.array([1, 2, 3]).tolist()) == 11402386789778234582
    assert len({seed_of(p) for p in ([1], [2], [1, 2], [2, 1], [])}) == 5


def test_the_arrays_of_rows() -> None:
    one = SamplingParams(temperature=0.5, top_k=3, top_p=0.9, min_p=0.1, logprobs=2)
    batch = sampling_batch([(one, 2**64 - 1, 7), (SamplingParams(), 0, 0)])
    assert batch.temperature.dtype == batch.top_p.dtype == batch.min_p.dtype == np.float32
    assert batch.top_k.dtype == np.int32
    assert batch.seed.dtype == batch.counter.dtype == np.uint64
    assert batch.seed.tolist() == [2**64 - 1, 0]
    assert batch.counter.tolist() == [7, 0]
    assert batch.top_k.tolist() == [3, 0]
    assert batch.logprobs == 2
    assert sampling_batch([(SamplingParams(), 0, 0)]).logprobs is None
    assert sampling_batch([(SamplingParams(), 0, 0), (SamplingParams(logprobs=0), 0, 0)]).logprobs == 0


def test_samples_have_seeds_of_their_own() -> None:
    assert sample_seed(7, 0) == 7
    assert sample_seed(7, 1) == 14818979533484651488
    assert len({sample_seed(seed, i) for seed in (0, 7, 2**64 - 1) for i in range(50)}) == 150


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"frequency_penalty": math.nan}, "frequency_penalty: nan is out of range"),
        ({"presence_penalty": 1e5}, "presence_penalty: 100000.0 is out of range"),
        ({"typical_p": 0}, "typical_p: 0 is out of range"),
        ({"logit_bias": {"1": 2.0}}, "logit_bias: {'1': 2.0} is out of range"),
        ({"logit_bias": {1: math.nan}}, "logit_bias: {1: nan}"),
        ({"logit_bias": {1: math.inf}}, "logit_bias: {1: inf}"),
        ({"logit_bias": [1]}, "logit_bias: [1] is out of range"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids: (-1,)"),
        ({"bad_words": "word"}, None),
        ({"bad_words": [""]}, "bad_words: '' is out of range"),
        ({"bad_words": [[]]}, "bad_words: [] is out of range"),
        ({"bad_words": [[1.5]]}, "bad_words: [1.5]"),
        ({"bad_words": ["a"] * 1001}, "bad_words: 1001 is"),
        ({"stop": ["a"] * 10_000}, "stop: 10000 is"),
        ({"min_tokens": -1}, "min_tokens: -1"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens: 9 is more than max_tokens, 8"),
        ({"prompt_logprobs": 101}, "prompt_logprobs: 101"),
        ({"n": 0}, "n: 0 is out of range"),
        ({"n": 2}, "n: 2 answers of a greedy request are the same one"),
        ({"best_of": 3}, "best_of: 3 answers of a greedy request"),
        ({"n": 3, "best_of": 2, "temperature": 1.0}, "best_of: 2 is out of range"),
        ({"num_beams": 33}, "num_beams: 33"),
        ({"num_beams": 2, "n": 3}, "n: 3 answers of num_beams = 2"),
        ({"num_beams": 2, "temperature": 0.5}, "temperature: 0.5 with num_beams = 2"),
        ({"num_beams": 2, "stop": "a"}, "stop: ('a',) with num_beams = 2"),
        ({"num_beams": 2, "logit_bias": {1: 1.0}}, "logit_bias: "),
        ({"length_penalty": math.nan}, "length_penalty: nan"),
        ({"early_stopping": "soon"}, "early_stopping: 'soon'"),
        ({"early_stopping": 1}, "early_stopping: 1 "),
    ],
)
def test_what_is_out_of_range_or_contradicts_itself_is_named(wrong: dict[str, Any], said: str | None) -> None:
    if said is None:  # a text is one word
        assert SamplingParams(**wrong).bad_words == ("word",)
        return
    with pytest.raises(RequestError, match="^" + re.escape(said)):
        SamplingParams(**wrong)


def test_parameters_can_be_copied_and_compared() -> None:
    params = SamplingParams(logit_bias={3: 1.0, 4: -math.inf}, bad_words=["a", [1, 2]], n=2, temperature=1.0)
    assert params == replace(params, logit_bias={4: -math.inf, 3: 1}) == copy.deepcopy(params)
    assert params.bad_words == ("a", (1, 2))
    assert hash(params) == hash(copy.copy(params))
    assert SamplingParams(logit_bias=None, bad_words=None, n=None, best_of=None) == SamplingParams()  # type: ignore[arg-type]
    assert pickle.loads(pickle.dumps(params)) == params
