"""Sampling parameters are checked by name, and a request's seed is a function of its prompt."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from enginewright.plugins.shared.errors import RequestError
from enginewright.runtime.requests.sampling import SamplingParams, sampling_batch, seed_of


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
    """As people pass them to vLLM."""
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


def test_a_repetition_penalty_brings_the_tokens_that_were_seen() -> None:
    rows = [(SamplingParams(repetition_penalty=1.5), 0, 0), (SamplingParams(), 0, 0)]
    batch = sampling_batch(rows, [[4, 2], []])
    options = batch.options()
    assert {name: options[name].tolist() for name in ("repetition_penalty", "seen_start", "seen")} == {
        "repetition_penalty": [1.5, 1.0],
        "seen_start": [0, 2, 2],
        "seen": [4, 2],
    }
    assert options["seen"].dtype == options["seen_start"].dtype == np.int32
    without = sampling_batch([(SamplingParams(), 0, 0)], [[1, 2, 3]])  # off for all: nothing is made or passed on
    assert without.seen is None and set(without.options()) == {
        *("temperature", "top_k", "top_p", "min_p", "seed", "counter")
    }
