"""Generation settings are used where the runtime has the option, reported where it hasn't, and refused if damaged."""

from __future__ import annotations

from typing import Any

import pytest

from enginewright.optimizer.capture.generation_settings import generation_defaults, token_ids
from enginewright.runtime.requests.sampling import SamplingParams
from enginewright.runtime.shared.errors import SourceError


def test_settings_become_defaults_of_requests() -> None:
    settings: dict[str, Any] = {
        **{"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.05, "typical_p": 0.9},
        **{"repetition_penalty": 1.1, "min_new_tokens": 2, "stop_strings": ["END", "\n\n"]},
        **{"bad_words_ids": [[5, 6], [7]], "suppress_tokens": [9, 10.0]},
    }
    defaults, warnings = generation_defaults(settings, "generation_config.json")
    assert not warnings
    params = SamplingParams.from_defaults(defaults)
    assert (params.temperature, params.top_k, params.top_p, params.min_p, params.typical_p) == (
        0.6,
        20,
        0.95,
        0.05,
        0.9,
    )
    assert (params.repetition_penalty, params.min_tokens) == (1.1, 2)
    assert params.stop == ("END", "\n\n")
    assert [list(word) for word in params.bad_words] == [[5, 6], [7], [9], [10]]
    assert SamplingParams.from_defaults(defaults, max_tokens=1).min_tokens == 1
    assert SamplingParams.from_defaults(defaults, num_beams=2).stop == ()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("no_repeat_ngram_size", 3),
        ("begin_suppress_tokens", [220, 50256]),
        ("forced_bos_token_id", 5),
        ("forced_eos_token_id", 5),
        ("forced_decoder_ids", [[1, 2]]),
        ("num_beams", 4),
        ("max_new_tokens", 64),
        ("penalty_alpha", 0.6),
        ("encoder_repetition_penalty", 1.5),
        ("epsilon_cutoff", 0.1),
        ("eta_cutoff", 0.1),
        ("guidance_scale", 1.5),
        ("sequence_bias", [[[1], -10.0]]),
        ("exponential_decay_length_penalty", [10, 1.2]),
        ("force_words_ids", [[1]]),
        ("watermarking_config", {"bias": 2.5}),
        ("min_length", 10),
        ("an_option_of_tomorrow", "x"),
        ("top_p", 1.5),
        ("temperature", -1.0),
        ("suppress_tokens", list(range(1001))),
    ],
)
def test_what_is_not_followed_is_reported(name: str, value: Any) -> None:
    defaults, [warning] = generation_defaults({name: value}, "generation_config.json")
    assert not defaults
    assert warning.startswith(f"generation_config.json: {name} is") and "followed" in warning


def test_what_asks_for_nothing_is_no_news() -> None:
    settings: dict[str, Any] = {
        **{"no_repeat_ngram_size": 0, "num_beams": 1, "length_penalty": 1.0, "begin_suppress_tokens": None},
        **{"bad_words_ids": [], "guidance_scale": None, "transformers_version": "4.1", "eos_token_id": 2, "top_k": 0},
        **{"early_stopping": False, "penalty_alpha": None, "max_length": 4096, "suppress_tokens": []},
    }
    assert generation_defaults(settings, "x") == ({"top_k": 0}, [])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", "hot"),
        ("temperature", float("nan")),
        ("temperature", True),
        ("top_k", 1.5),
        ("top_k", float("inf")),
        ("do_sample", "yes"),
        ("stop_strings", [1]),
        ("stop_strings", {"a": 1}),
        ("bad_words_ids", [1, 2]),
        ("bad_words_ids", [["x"]]),
        ("suppress_tokens", "all"),
        ("min_new_tokens", []),
    ],
)
def test_values_of_another_type_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(SourceError, match=rf"generation_config\.json: {name} is .*, not "):
        generation_defaults({name: value}, "generation_config.json")


def test_tokens_that_end_a_text() -> None:
    assert token_ids([2, 5.0, None, -1, 300], 256, "x") == (2, 5)
    assert token_ids(None, 256, "x") == ()
    for odd in ("</s>", True, 1.5, float("nan"), [[1]], {"id": 1}, [None, "2"]):
        with pytest.raises(SourceError, match=r"generation_config\.json: eos_token_id is .* not a token"):
            token_ids(odd, 256, "generation_config.json: eos_token_id")
