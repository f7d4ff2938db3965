"""Reads generation_config.json: settings that the runtime supports become defaults; the others are reported.

Names are those of transformers (https://huggingface.co/docs/transformers/main_classes/text_generation).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from enginewright.runtime.requests.sampling import MOST_BAD_WORDS, SamplingParams
from enginewright.runtime.shared.contracts import Default
from enginewright.runtime.shared.errors import RequestError, SourceError, shown

_HINT = "Correct the field, or leave it out."


def _flag(value: object) -> Default | None:
    return value if isinstance(value, bool) else None


def _number(value: object) -> Default | None:
    whole = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if whole else None  # type: ignore[arg-type]


def _count(value: object) -> Default | None:
    number = _number(value)
    return int(number) if isinstance(number, float) and number.is_integer() else None


def _texts(value: object) -> Default | None:
    listed = [value] if isinstance(value, str) else value
    return list(listed) if isinstance(listed, list | tuple) and all(isinstance(one, str) for one in listed) else None


def _tokens(value: object) -> Default | None:
    if not isinstance(value, list | tuple):
        return None
    counts = [_count(one) for one in value]
    return [[one] for one in counts if isinstance(one, int)] if None not in counts else None


def _token_lists(value: object) -> Default | None:
    if not isinstance(value, list | tuple):
        return None
    lists = [[_count(token) for token in one] if isinstance(one, list | tuple) else [None] for one in value]
    return [[t for t in one if isinstance(t, int)] for one in lists] if all(None not in one for one in lists) else None


_USED: Mapping[str, tuple[str, Callable[[object], Default | None], str]] = {
    "do_sample": ("do_sample", _flag, "true or false"),
    "temperature": ("temperature", _number, "a number"),
    "top_k": ("top_k", _count, "a whole number"),
    "top_p": ("top_p", _number, "a number"),
    "min_p": ("min_p", _number, "a number"),
    "typical_p": ("typical_p", _number, "a number"),
    "repetition_penalty": ("repetition_penalty", _number, "a number"),
    "min_new_tokens": ("min_tokens", _count, "a whole number"),
    "stop_strings": ("stop", _texts, "a text, or a list of texts"),
    "bad_words_ids": ("bad_words", _token_lists, "a list of lists of tokens"),
    "suppress_tokens": ("bad_words", _tokens, "a list of tokens"),
}
"""transformers' name of a setting -> our name, the function that reads it, and the description of its values."""

_ELSEWHERE = frozenset(
    {
        *("eos_token_id", "bos_token_id"),  # fields of their own
        *("pad_token_id", "decoder_start_token_id", "transformers_version", "_from_model_config"),
        *("use_cache", "cache_implementation", "cache_config", "return_dict_in_generate", "output_scores"),
        *("output_logits", "output_attentions", "output_hidden_states", "num_return_sequences", "is_assistant"),
        *("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold"),
        *("assistant_early_exit", "assistant_lookbehind", "target_lookbehind", "prompt_lookup_num_tokens"),
        *(
            "max_matching_ngram_size",
            "prefill_chunk_size",
            "compile_config",
            "disable_compile",
            "remove_invalid_values",
        ),
        *("trust_remote_code", "max_length", "renormalize_logits", "low_memory"),
    }
)
"""Fields without effect on our answers. ``max_length`` counts the prompt too, but here the context ends an answer."""
_NEUTRAL_AT_ONE = frozenset(
    {*("num_beams", "num_beam_groups", "length_penalty", "encoder_repetition_penalty", "guidance_scale", "top_h")}
)
_ONLY_WITH_BEAMS = frozenset({"length_penalty", "early_stopping", "diversity_penalty", "num_beam_groups"})


def generation_defaults(generation: Mapping[str, Any], source: str) -> tuple[dict[str, Default], list[str]]:
    """Returns the defaults of requests from generation settings, by our names; and warnings of unsupported settings.

    ``source`` is the file, for messages. Raises SourceError for a value of a wrong type.
    """
    defaults: dict[str, Default] = {}
    warnings: list[str] = []
    for name, value in generation.items():
        if value is None or name in _ELSEWHERE:
            continue
        if name not in _USED:
            beams = generation.get("num_beams") in (None, 0, 1)
            neutral = not value or (name in _NEUTRAL_AT_ONE and value == 1) or (beams and name in _ONLY_WITH_BEAMS)
            if not neutral:
                warnings.append(f"{source}: {name} is {shown(value)}, which isn't followed: answers may be others")
            continue
        ours, read, kind = _USED[name]
        default = read(value)
        if default is None:
            raise SourceError(f"{source}: {name} is {shown(value)}, not {kind}", hint=_HINT)
        if ours == "bad_words" and isinstance(default, list):
            default = [*_listed(defaults.get(ours)), *default]
        if (problem := _problem(ours, default)) is not None:
            warnings.append(f"{source}: {name} isn't followed: {problem}")
        elif default != []:
            defaults[ours] = default
    return defaults, warnings


def _listed(default: Default | None) -> list[Any]:
    return list(default) if isinstance(default, list) else []


def _problem(name: str, default: Default) -> str | None:
    """Returns the reason why a request with this default would be refused; None if it is valid."""
    if name == "do_sample":
        return None
    if name == "bad_words" and len(_listed(default)) > MOST_BAD_WORDS:
        return f"it bans more than {MOST_BAD_WORDS:,} texts"
    try:
        SamplingParams(**{name: default})  # type: ignore[arg-type]  # __post_init__ checks every value
    except RequestError as e:
        return e.message
    return None


def token_ids(named: object, vocab_size: int, where: str) -> tuple[int, ...]:
    """Returns the tokens of a field of generation settings. Ids outside the vocabulary, such as -1, are left out.

    Args:
        named: the field's value: a token, or a list of tokens.
        vocab_size: the number of tokens in the vocabulary.
        where: the field's name and file, for messages.

    Raises SourceError if the value is anything else.
    """
    listed: Iterable[object] = named if isinstance(named, list | tuple) else [named]
    counts = []
    for one in listed:
        if one is None:
            continue
        if not isinstance(count := _count(one), int):
            raise SourceError(f"{where} is {shown(named)}, not a token, or a list of tokens", hint=_HINT)
        counts.append(count)
    return tuple(count for count in counts if 0 <= count < vocab_size)
