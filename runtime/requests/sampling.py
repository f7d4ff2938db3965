"""Sampling parameters: how the next token is chosen, and when an answer ends."""

from __future__ import annotations

import hashlib
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from numbers import Integral, Real
from typing import Any, Literal

import numpy as np

from ..shared.contracts import Default
from ..shared.errors import RequestError, shown
from .names import plain_text
from .structured import StructuredOutputsParams
from .vllm_names import OF_SAMPLING, takes_vllm_names

MOST_LOGPROBS = 100
MOST_STOP = 128
MOST_STOP_TEXT = 4096
MOST_BAD_WORDS = 1000
MOST_BAD_TEXT = 1 << 15
"""The most characters, or token ids, of ``bad_words``: they are tokenized twice before the request is made."""
MOST_ANSWERS = 128
MOST_BEAMS = 32
MOST_PENALTY = 1e4
MOST_BREAKERS = 32
LONGEST_BREAKER = 40
"""The most bytes of a sequence breaker, as in llama.cpp."""
DEFAULTS_OF_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "typical_p")
DEFAULTS_ALWAYS = ("repetition_penalty", "min_tokens", "stop", "bad_words")
"""Options for which a bundle's defaults also apply to greedy answers."""
SEQUENCE_OPTIONS = (
    *("top_n_sigma", "xtc_probability", "xtc_threshold", "dry_multiplier", "dry_base"),
    *("dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers"),
)
"""The options of top-n-sigma, XTC and DRY. Protocols have them under the same names, which are llama.cpp's."""
_NOT_WITH_BEAMS = (
    *("top_k", "top_p", "min_p", "typical_p", "repetition_penalty", "frequency_penalty", "presence_penalty"),
    *("logit_bias", "allowed_token_ids", "bad_words", "min_tokens", "stop", "best_of", "prompt_logprobs"),
    *("top_n_sigma", "xtc_probability", "dry_multiplier"),
)


class _Biases(dict[int, float]):
    """A mapping that isn't changed, so that parameters can be hashed."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))


@dataclass(frozen=True)
class SamplingParams:
    """The parameters of one request: how tokens are chosen, and when the answer ends. By default each token is the most
    probable one.

    ``LLM.default_params()`` returns the values that the model's makers recommend; requests use them only if you pass
    them. None for a field means its default, except for ``max_tokens``.

    Attributes:
        temperature: the number by which logits are divided, in 32-bit floats; 0 takes the most probable token.
        top_k: keeps only the k most probable tokens; 0 or -1 is off.
        top_p: keeps the most probable tokens until their probabilities sum to this value; 1 is off.
        min_p: keeps only tokens with at least this share of the greatest probability; 0 is off.
        typical_p: keeps the tokens whose negative log-probability is closest to the entropy, until their probabilities
            sum to this value; 1 is off.
        top_n_sigma: keeps only tokens whose logit is at most n standard deviations below the greatest logit; 0 or -1 is
            off. Banned tokens don't count in the deviation (arXiv 2411.07641).
        xtc_probability: the chance that XTC ("exclude top choices") is used when a token is drawn; 0 is off. XTC isn't
            used with temperature 0.
        xtc_threshold: XTC excludes the tokens with at least this probability, except for the least probable of them.
            Above 0.5 XTC excludes nothing.
        repetition_penalty: for tokens that occur in the prompt or the answer, positive logits are divided by this
            value, and negative logits multiplied; 1 is off. As in transformers and vLLM.
        frequency_penalty: a token's logit is reduced by this value times the number of its occurrences in the answer; 0
            is off. As in OpenAI's API and vLLM; a negative value favours repeated tokens.
        presence_penalty: the logits of tokens that occur in the answer are reduced by this value; otherwise as
            ``frequency_penalty``.
        dry_multiplier: DRY, as in llama.cpp, penalizes a token that would continue a repeated sequence of n tokens. The
            token's logit is reduced by ``dry_multiplier * dry_base ** (n - dry_allowed_length)``; 0 is off.
        dry_base: the base in the formula of ``dry_multiplier``; 1 or more.
        dry_allowed_length: the length of the shortest repeated sequence that is penalized.
        dry_penalty_last_n: the number of last tokens that DRY considers; -1 is all, 0 is off.
        dry_sequence_breakers: texts that end a repeated sequence; at most 32 texts of 40 bytes each.
        logit_bias: a mapping of tokens to values that are added to their logits, before the penalties; -inf bans a
            token.
        allowed_token_ids: the only allowed tokens; () allows all.
        bad_words: banned texts, or lists of token ids. Two tokenizations of a banned text are banned: those at the
            beginning of a text, and after a space. Others may still occur, as in vLLM. All together may have at most
            32,768 characters or ids.
        min_tokens: end tokens are banned before the answer has this number of tokens. A stop string can end the answer
            earlier.
        seed: seed of the random numbers, 0 <= seed < 2**64. None computes it from the prompt, so the same prompt and
            parameters give the same tokens at every call. Pass different seeds to get different samples.
        max_tokens: the most new tokens, within the model's context. None allows as many as fit into the context and the
            KV cache.
        stop: a string, or several, that end the text. The text is cut before the string that begins first, even if
            another string is complete earlier, so a few more tokens may be computed. At most 128 strings, of 4,096
            characters together.
        stop_token_ids: tokens that end the text, in addition to the model's end tokens. The text doesn't include them.
        ignore_eos: True if the model's end tokens don't end the text.
        logprobs: the number k of most probable tokens whose log-probabilities are returned for each new token, in
            addition to the new token's own. None returns no log-probabilities.
        prompt_logprobs: as ``logprobs``, for each prompt token except the first. The prompt is then computed without
            the prefix cache.
        n: the number of answers. Answer i has the tokens of a single request with the seed ``sample_seed(seed, i)``.
        best_of: the number of answers that are computed; the ``n`` answers with the greatest mean log-probability are
            returned, best first.
        num_beams: the number of beams; more than 1 runs a beam search for the ``n`` answers with the greatest score. A
            score is the sum of an answer's log-probabilities, divided by its length to the power of
            ``length_penalty``. As in transformers.
        length_penalty: above 0 favours longer answers of a beam search.
        early_stopping: when a beam search ends. True: as soon as there are ``num_beams`` answers. False: when a better
            answer is unlikely. "never": when a better answer is impossible.
        speculate: False computes no proposed tokens for this request; the answer is the same.
        skip_special_tokens: True leaves special tokens such as ``<|im_end|>`` out of the text. False includes them,
            except for the one that ends the answer.
        include_stop_str_in_output: True if the text includes the stop string or token that ended the text.
        detokenize: False produces no text; stop strings can't be used then.
        structured_outputs: a ``StructuredOutputsParams`` with the form of the answer, such as a JSON schema. End tokens
            end such an answer even with ``ignore_eos``. It needs ``enginewright[structured]``.

    vLLM's other fields are accepted if no result depends on them, or if their value changes nothing.

    Raises:
        RequestError: a value is out of range, or a field is unknown; the message names the field.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    top_n_sigma: float = 0.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1
    dry_sequence_breakers: Sequence[str] = ("\n", ":", '"', "*")
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: Sequence[int] = ()
    bad_words: Sequence[str | Sequence[int]] = ()
    min_tokens: int = 0
    seed: int | None = None
    max_tokens: int | None = 256
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    n: int = 1
    best_of: int | None = None
    num_beams: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    speculate: bool = True
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    detokenize: bool = True
    structured_outputs: StructuredOutputsParams | Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        self._take_values()
        for name, (fits, expected) in _FIELDS.items():
            value = getattr(self, name)
            _check(name, value, fits(value), expected)
        check_seed(self.seed)
        self._check_texts()
        object.__setattr__(self, "structured_outputs", StructuredOutputsParams.checked(self.structured_outputs))
        self._check_rules()
        self._check_answers()

    def _take_values(self) -> None:
        """Replaces each field's value by one of a built-in type: None by the default, and -1 by 0 where both
        are off.
        """
        for one in fields(self):
            value = getattr(self, one.name)
            if value is None and one.name != "max_tokens":
                value = {} if one.default is MISSING else one.default
            object.__setattr__(self, one.name, _plain(value))
        for name in ("stop", "stop_token_ids", "allowed_token_ids", "bad_words", "dry_sequence_breakers"):
            value = getattr(self, name)
            listed = (value,) if isinstance(value, str) else value
            _check(name, value, _is_listing(listed), "a list; () for none")
            items = tuple(listed)
            object.__setattr__(self, name, items if _are_ints(items) else tuple(map(_plain, items)))
        if _is_int(self.top_k, -1, 0):
            object.__setattr__(self, "top_k", 0)
        if _is_number(self.top_n_sigma, -1, -1):
            object.__setattr__(self, "top_n_sigma", 0.0)

    def _check_texts(self) -> None:
        """Raises RequestError if stop strings or sequence breakers are too many or too long."""
        for name, most in (("stop", MOST_STOP), ("dry_sequence_breakers", MOST_BREAKERS)):
            many = len(getattr(self, name))
            _check(name, many, many <= most, f"{most} strings at most")
        long = sum(map(len, self.stop))
        _check("stop", long, long <= MOST_STOP_TEXT, f"strings of {MOST_STOP_TEXT} characters together at most")
        for one in self.dry_sequence_breakers:
            short = len(one.encode()) <= LONGEST_BREAKER
            _check("dry_sequence_breakers", one, short, f"strings of {LONGEST_BREAKER} bytes at most")
        if self.stop and not self.detokenize:
            raise RequestError(
                "stop: strings are looked for in the text, and detokenize=False makes none", hint="Use stop_token_ids."
            )

    def _check_rules(self) -> None:
        """Checks the tokens of logit_bias and bad_words, and min_tokens against max_tokens. Raises RequestError."""
        bias = {_plain(token): _plain(value) for token, value in self.logit_bias.items()}
        for token, value in bias.items():
            number = _is_number(value, -MOST_PENALTY, MOST_PENALTY) or value == -math.inf
            _check(
                "logit_bias",
                {token: value},
                _is_int(token, 0) and number,
                f"-inf or from -{MOST_PENALTY} to {MOST_PENALTY}",
            )
        object.__setattr__(self, "logit_bias", _Biases(bias))
        many = len(self.bad_words)
        _check("bad_words", many, many <= MOST_BAD_WORDS, f"{MOST_BAD_WORDS} at most")
        words, long = [], 0
        for word in self.bad_words:
            plain = word if isinstance(word, str) or not _is_listing(word) else tuple(map(_plain, word))
            listed = plain_text(plain) or (isinstance(plain, tuple) and plain and all(_is_int(i, 0) for i in plain))
            _check("bad_words", word, bool(listed), "texts or lists of token ids, none of them empty")
            long += len(plain)
            words.append(plain)
        _check("bad_words", long, long <= MOST_BAD_TEXT, f"{MOST_BAD_TEXT} characters or tokens together at most")
        object.__setattr__(self, "bad_words", tuple(words))
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(f"min_tokens: {self.min_tokens} is more than max_tokens, {self.max_tokens}")

    def _check_answers(self) -> None:
        """Checks ``best_of``, the fields that exclude a beam search, and that several answers aren't greedy.

        Raises RequestError.
        """
        best_of = self.best_of
        enough = best_of is None or _is_int(best_of, self.n, MOST_ANSWERS + 1)
        _check("best_of", best_of, enough, f"None or from n, {self.n}, to {MOST_ANSWERS}")
        if self.num_beams > 1:
            self._check_beams()
        elif self.answers > 1 and self.temperature == 0:
            raise RequestError(
                f"{'n' if self.n > 1 else 'best_of'}: {self.answers} answers of a greedy request are the same one",
                hint="Give a temperature above 0, or num_beams.",
            )

    def _check_beams(self) -> None:
        if self.n > self.num_beams:
            raise RequestError(
                f"n: {self.n} answers of num_beams = {self.num_beams}", hint="Use as many beams, or more."
            )
        plain = SamplingParams()
        for name in ("temperature", *_NOT_WITH_BEAMS):
            if getattr(self, name) != getattr(plain, name):
                raise RequestError(
                    f"{name}: {shown(getattr(self, name))} with num_beams = {self.num_beams}",
                    hint="A beam search takes the model's own log-probabilities; leave this out.",
                )

    @property
    def answers(self) -> int:
        """The number of answers that are computed: ``best_of``, or else ``n``."""
        return self.n if self.best_of is None else self.best_of

    def updated(self, **values: Any) -> SamplingParams:
        """Returns a copy with other values of some fields. They aren't checked, so they must not come from a
        caller.
        """
        copy = object.__new__(type(self))
        copy.__dict__.update(self.__dict__ | values)
        return copy

    @classmethod
    def restored(cls, values: Mapping[str, Any]) -> SamplingParams:
        """Returns parameters from the plain values of all fields, as a socket transfers them. The sender has checked
        them.
        """
        fields: dict[str, Any] = {k: tuple(value) if isinstance(value, list) else value for k, value in values.items()}
        fields["bad_words"] = tuple(tuple(w) if isinstance(w, list) else w for w in fields["bad_words"])
        fields["logit_bias"] = _Biases(fields["logit_bias"])
        if fields["structured_outputs"] is not None:
            fields["structured_outputs"] = StructuredOutputsParams.restored(fields["structured_outputs"])
        copy = object.__new__(cls)
        copy.__dict__.update(fields)
        return copy

    @classmethod
    def from_defaults(cls, defaults: Mapping[str, Default], **overrides: object) -> SamplingParams:
        """Returns parameters from a bundle's generation defaults and the caller's values; ``do_sample`` false means
        greedy.
        """
        fields: dict[str, object] = {k: v for k, v in defaults.items() if k in DEFAULTS_ALWAYS}
        if defaults.get("do_sample", "temperature" in defaults):
            fields["temperature"] = 1.0
            fields |= {k: v for k, v in defaults.items() if k in DEFAULTS_OF_SAMPLING}
        return cls(**fitting_defaults(fields, overrides))


SamplingParams.__init__ = takes_vllm_names(OF_SAMPLING)(SamplingParams.__init__)  # type: ignore[method-assign]


def fitting_defaults(defaults: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the caller's fields and those defaults that are compatible with them.

    A beam search drops the defaults that it doesn't allow, and a default ``min_tokens`` is limited to ``max_tokens``.
    """
    fields = {**defaults, **overrides}
    beams, most = fields.get("num_beams"), fields.get("max_tokens")
    if isinstance(beams, int) and beams > 1:
        fields = {k: v for k, v in fields.items() if k in overrides or k not in (*_NOT_WITH_BEAMS, "temperature")}
    if "min_tokens" not in overrides and isinstance(most, int) and fields.get("min_tokens", 0) > most:
        fields["min_tokens"] = most
    return fields


@dataclass(frozen=True)
class BeamSearchParams:
    """vLLM's parameters for ``LLM.beam_search``; ``SamplingParams(num_beams=...)`` has more options.

    Attributes:
        beam_width: the number of sequences that the search extends and returns.
        max_tokens: the most new tokens of a sequence.
        ignore_eos: True if the model's end tokens don't end a sequence.
        temperature: must be 0, because a beam search draws no random tokens.
        length_penalty: above 0 favours longer sequences.
        include_stop_str_in_output: ignored; a sequence's tokens and text always have the end token.
        structured_outputs: the form of a sequence, a ``StructuredOutputsParams``.

    Raises:
        RequestError: a value is out of range; the message names the field.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    structured_outputs: StructuredOutputsParams | Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        _check("beam_width", self.beam_width, _is_int(self.beam_width, 1, MOST_BEAMS + 1), f"from 1 to {MOST_BEAMS}")
        _check("max_tokens", self.max_tokens, _is_int(self.max_tokens, 1), ">= 1")
        _check("temperature", self.temperature, _is_number(self.temperature, 0, 0), "0: a beam search draws nothing")
        self.sampling()

    def sampling(self) -> SamplingParams:
        """Returns the parameters of the search's request. As in vLLM, it ends when no better sequence is possible."""
        return SamplingParams(
            n=self.beam_width,
            num_beams=self.beam_width,
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
            length_penalty=self.length_penalty,
            early_stopping="never",
            logprobs=2 * self.beam_width,
            detokenize=False,
            structured_outputs=self.structured_outputs,
        )


def check_seed(seed: Any) -> int:
    """Returns a seed as an int, 0 for None. Raises RequestError if it is invalid."""
    _check("seed", seed, seed is None or _is_int(seed, 0, 2**64), "None or in [0, 2**64)")
    return int(seed or 0)


def seed_of(prompt: Sequence[int], seed: int = 0) -> int:
    """Returns the seed of a request without its own seed: the first 8 bytes (little-endian) of BLAKE2b of the ids as
    i32.

    Args:
        prompt: the token ids of the prompt.
        seed: the seed of the ``LLM``. If it isn't 0, it is the key of the hash, as u64.
    """
    data = np.asarray(prompt, "<i4").tobytes()
    key = seed.to_bytes(8, "little") if seed else b""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8, key=key).digest(), "little")


def sample_seed(seed: int, index: int) -> int:
    """Returns the seed of answer ``index`` of a request whose seed is ``seed``.

    That is ``seed`` for the first, and for others the first 8 bytes (little-endian) of BLAKE2b of both numbers as u64.
    """
    if index == 0:
        return seed
    data = np.array([seed, index], "<u8").tobytes()
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def _plain(value: Any) -> Any:
    """Returns a number or string as a built-in type, without the methods of a caller's subclass; other values
    unchanged.
    """
    if isinstance(value, bool) or value is None:
        return value
    try:
        if isinstance(value, Integral):
            return int.__int__(operator.index(value))
        if isinstance(value, Real):
            return float.__add__(float(value), 0.0)
    except (OverflowError, TypeError, ValueError):  # it is refused where it is checked
        return value
    return str.__str__(value) if isinstance(value, str) else value


def _is_number(value: Any, low: float, high: float) -> bool:
    number = isinstance(value, Real) and not isinstance(value, bool)
    return number and bool(low <= value <= high)  # NaN is not


def _is_listing(value: Any) -> bool:
    """Returns True for an iterable with a defined order: no mapping, no bytes, no array of rank 0."""
    listing = isinstance(value, Iterable) and not isinstance(value, (Mapping, bytes, bytearray, memoryview))
    return listing and bool(getattr(value, "ndim", 1) == 1)


def _are_ints(values: tuple[Any, ...]) -> bool:
    """Returns True if all values are of type int. There is no Python loop: the values may be a whole vocabulary."""
    return set(map(type, values)) == {int}


def _is_int(value: Any, low: int, end: float = math.inf) -> bool:
    integer = isinstance(value, Integral) and not isinstance(value, bool)
    return integer and bool(low <= value < min(end, 1 << 64))


def _check(field: str, value: object, holds: bool, expected: str) -> None:
    if not holds:
        raise RequestError(f"{field}: {shown(value)} is out of range", hint=f"It must be {expected}.")


def _is_positive(value: Any, high: float) -> bool:
    """Returns True for a number that is above 0 as a 32-bit float, and at most ``high``."""
    return _is_number(value, 0, high) and bool(np.float32(value) > 0)


def _are_token_ids(values: tuple[Any, ...]) -> bool:
    plain = _are_ints(values) and min(values) >= 0 and max(values) < 1 << 64
    return plain or all(_is_int(value, 0) for value in values)


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool)


def _is_penalty(value: Any) -> bool:
    return _is_number(value, -MOST_PENALTY, MOST_PENALTY)


def _is_count_of_logprobs(value: Any) -> bool:
    return value is None or _is_int(value, 0, MOST_LOGPROBS + 1)


def _are_texts(values: tuple[Any, ...]) -> bool:
    return all(plain_text(value) for value in values)


def _is_share(value: Any) -> bool:
    return _is_number(value, 0, 1)


_MOST_FLOAT = float(np.finfo(np.float32).max)
_LOGPROBS = _is_count_of_logprobs, f"None or an integer from 0 to {MOST_LOGPROBS}"
_PENALTY = _is_penalty, f"from -{MOST_PENALTY} to {MOST_PENALTY}"
_SHARE = _is_share, "a number in [0, 1]"
_TEXTS = _are_texts, "strings that are not empty"
_TOKEN_IDS = _are_token_ids, "token ids"
_BOOL = _is_bool, "True or False"
_FIELDS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "temperature": (lambda value: _is_number(value, 0, _MOST_FLOAT), "a number from 0 to 3.4e38"),
    "top_k": (lambda value: _is_int(value, 0, 2**31), "an integer >= 0; 0 or -1 is off"),
    "top_p": (lambda value: _is_number(value, 0, 1) and value > 0, "a number in (0, 1]"),
    "min_p": _SHARE,
    "repetition_penalty": (
        lambda value: _is_positive(value, _MOST_FLOAT),
        "a number above 0, as a 32-bit float; 1 is off",
    ),
    "typical_p": (lambda value: _is_positive(value, 1), "in (0, 1], as a 32-bit float"),
    "frequency_penalty": _PENALTY,
    "presence_penalty": _PENALTY,
    "top_n_sigma": (lambda value: _is_number(value, 0, _MOST_FLOAT), "a number from 0 to 3.4e38; 0 or -1 is off"),
    "xtc_probability": _SHARE,
    "xtc_threshold": _SHARE,
    "dry_multiplier": (lambda value: _is_number(value, 0, MOST_PENALTY), f"from 0 to {MOST_PENALTY}"),
    "dry_base": (lambda value: _is_number(value, 1, _MOST_FLOAT), "a number from 1 to 3.4e38"),
    "dry_allowed_length": (lambda value: _is_int(value, 0, 2**31), "an integer >= 0"),
    "dry_penalty_last_n": (lambda value: _is_int(value, -1, 2**31), "an integer >= -1; -1 is all, 0 is off"),
    "dry_sequence_breakers": _TEXTS,
    "max_tokens": (lambda value: value is None or _is_int(value, 1), "None or >= 1"),
    "stop": _TEXTS,
    "stop_token_ids": _TOKEN_IDS,
    "allowed_token_ids": _TOKEN_IDS,
    "ignore_eos": _BOOL,
    "skip_special_tokens": _BOOL,
    "include_stop_str_in_output": _BOOL,
    "detokenize": _BOOL,
    "logprobs": _LOGPROBS,
    "prompt_logprobs": _LOGPROBS,
    "logit_bias": (lambda value: isinstance(value, Mapping), "a mapping of token ids to numbers"),
    "min_tokens": (lambda value: _is_int(value, 0), "an integer >= 0; 0 is off"),
    "speculate": _BOOL,
    "n": (lambda value: _is_int(value, 1, MOST_ANSWERS + 1), f"an integer from 1 to {MOST_ANSWERS}"),
    "num_beams": (lambda value: _is_int(value, 1, MOST_BEAMS + 1), f"from 1 to {MOST_BEAMS}"),
    "length_penalty": (_is_penalty, "a number; 0 is off"),
    "early_stopping": (
        lambda value: isinstance(value, bool) or (isinstance(value, str) and value == "never"),
        'True, False or "never"',
    ),
}
"""Field -> (function that returns True for its valid values, description of these values)."""
