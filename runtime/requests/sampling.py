"""How the next token is chosen, and when a text ends: what a caller says of it."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from numbers import Integral, Real
from typing import Any, Literal

import numpy as np

from enginewright.plugins.shared.errors import RequestError

MOST_LOGPROBS = 100
MOST_STOP = 128
MOST_BAD_WORDS = 1000
MOST_ANSWERS = 128
MOST_BEAMS = 32
MOST_PENALTY = 1e4
_NOT_WITH_BEAMS = (
    *("top_k", "top_p", "min_p", "typical_p", "repetition_penalty", "frequency_penalty", "presence_penalty"),
    *("logit_bias", "allowed_token_ids", "bad_words", "min_tokens", "stop", "best_of", "prompt_logprobs"),
)


class _Biases(dict[int, float]):
    """A mapping that nobody changes, so that parameters can be hashed."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are chosen, and when it ends. Greedy unless ``temperature`` is given: what the
    model's makers recommend is in ``LLM.default_params()``, and never applied silently. None for a field stands for its
    default, but for ``max_tokens``.

    Attributes:
        temperature: 0 takes the most probable token; else logits are divided by it, as 32-bit floats.
        top_k: only the k most probable tokens; 0 or -1 is off.
        top_p: only the most probable tokens that together have this probability; 1 is off.
        min_p: only tokens at least this times as probable as the most probable; 0 is off.
        typical_p: only tokens whose surprise is near what is expected, which together have this probability; 1 is off.
        repetition_penalty: the logits of tokens that the prompt or the answer has already are divided by it where they
            are above 0, and multiplied where they are below; 1 is off. As in transformers and vLLM.
        frequency_penalty: times how often the answer has a token is subtracted from its logit; 0 is off.
        presence_penalty: is subtracted from the logits of tokens that the answer has at all; 0 is off. Both as in
            OpenAI's API and vLLM; a value below 0 favours what is there.
        logit_bias: token -> what is added to its logit, before the penalties; -inf bans it.
        allowed_token_ids: the only tokens that may come; () is all.
        bad_words: texts, or lists of token ids, that may not come. Text is banned as it is tokenized at the beginning
            of a text and behind a space; a word that is tokenized otherwise may still come, as in vLLM.
        min_tokens: so many tokens come before one that ends the text can. A stop string ends it at any time.
        seed: of the random numbers, 0 <= seed < 2**64. None takes ``seed_of(prompt ids)``: one prompt with the same
            parameters gives the same tokens at every call. Pass different seeds to get different samples.
        max_tokens: most new tokens; cut where the model's context ends. None: as many as the context and the KV cache
            have room for.
        stop: a string, or several, that end the text. It is cut before the one that begins first, however the text is
            split into tokens; a few more tokens are computed where that one isn't complete before another.
        stop_token_ids: tokens that end the text, besides the model's own. Their text is left out.
        ignore_eos: the model's own end tokens do not end the text.
        logprobs: None reports none; 0 reports each new token's log-probability, and k also those of the k most probable
            tokens there.
        prompt_logprobs: the same for each token of the prompt but the first. The prompt is then computed anew.
        n: so many answers, each with the tokens that a request alone has with ``sample_seed(seed, i)`` as its seed.
        best_of: so many answers, of which the ``n`` with the greatest log-probability a token are given, best first.
        num_beams: with more than 1, a beam search for the ``n`` answers of the greatest score: the sum of their
            log-probabilities, divided by their length to the power of ``length_penalty``. As in transformers.
        length_penalty: above 0 favours longer answers of a beam search.
        early_stopping: when a beam search ends: True, as soon as there are ``num_beams`` answers; False, when a better
            one is unlikely; "never", when there can't be a better one.
        speculate: whether tokens may be computed ahead for this request, where the LLM does so; they are the same.

    Raises:
        RequestError: a value is out of range; names the field.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
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

    def __post_init__(self) -> None:
        for one in fields(self):
            if getattr(self, one.name) is None and one.name != "max_tokens":
                default = {} if one.default is MISSING else one.default
                object.__setattr__(self, one.name, default)
        for name in ("stop", "stop_token_ids", "allowed_token_ids", "bad_words"):
            value = getattr(self, name)
            listed = (value,) if isinstance(value, str) else value
            _check(name, value, _is_listing(listed), "a list; () for none")
            object.__setattr__(self, name, tuple(listed))
        if _is_int(self.top_k, -1, 0):
            object.__setattr__(self, "top_k", 0)
        most = float(np.finfo(np.float32).max)
        _check("temperature", self.temperature, _is_number(self.temperature, 0, most), "a number from 0 to 3.4e38")
        _check("top_k", self.top_k, _is_int(self.top_k, 0, 2**31), "an integer >= 0; 0 or -1 is off")
        _check("top_p", self.top_p, _is_number(self.top_p, 0, 1) and self.top_p > 0, "a number in (0, 1]")
        _check("min_p", self.min_p, _is_number(self.min_p, 0, 1), "a number in [0, 1]")
        penalty = self.repetition_penalty
        positive = _is_number(penalty, 0, most) and np.float32(penalty) > 0
        _check("repetition_penalty", penalty, bool(positive), "a number above 0, as a 32-bit float; 1 is off")
        _check("typical_p", self.typical_p, _is_number(self.typical_p, 0, 1) and self.typical_p > 0, "in (0, 1]")
        for name in ("frequency_penalty", "presence_penalty"):
            value = getattr(self, name)
            _check(
                name, value, _is_number(value, -MOST_PENALTY, MOST_PENALTY), f"from -{MOST_PENALTY} to {MOST_PENALTY}"
            )
        _check("seed", self.seed, self.seed is None or _is_int(self.seed, 0, 2**64), "None or in [0, 2**64)")
        _check("max_tokens", self.max_tokens, self.max_tokens is None or _is_int(self.max_tokens, 1), "None or >= 1")
        _check("stop", self.stop, all(isinstance(s, str) and s for s in self.stop), "strings that are not empty")
        many = len(self.stop)
        _check("stop", many, many <= MOST_STOP, f"{MOST_STOP} strings at most")
        for name in ("stop_token_ids", "allowed_token_ids"):
            ids = getattr(self, name)
            _check(name, ids, all(_is_int(i, 0) for i in ids), "token ids")
        _check("ignore_eos", self.ignore_eos, isinstance(self.ignore_eos, bool), "True or False")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            in_range = value is None or _is_int(value, 0, MOST_LOGPROBS + 1)
            _check(name, value, in_range, f"None or an integer from 0 to {MOST_LOGPROBS}")
        self._check_rules()
        self._check_answers()

    def _check_rules(self) -> None:
        bias = self.logit_bias
        _check("logit_bias", bias, isinstance(bias, Mapping), "a mapping of token ids to numbers")
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
        words = []
        for word in self.bad_words:
            listed = isinstance(word, str) or (_is_listing(word) and all(_is_int(i, 0) for i in word))
            _check("bad_words", word, listed and len(word) > 0, "texts or lists of token ids, none of them empty")
            words.append(word if isinstance(word, str) else tuple(word))
        object.__setattr__(self, "bad_words", tuple(words))
        _check("min_tokens", self.min_tokens, _is_int(self.min_tokens, 0), "an integer >= 0; 0 is off")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(f"min_tokens: {self.min_tokens} is more than max_tokens, {self.max_tokens}")

    def _check_answers(self) -> None:
        """Of n, best_of, the beam search and speculation, and what does not go together."""
        _check("speculate", self.speculate, isinstance(self.speculate, bool), "True or False")
        _check("n", self.n, _is_int(self.n, 1, MOST_ANSWERS + 1), f"an integer from 1 to {MOST_ANSWERS}")
        best_of = self.best_of
        enough = best_of is None or _is_int(best_of, self.n, MOST_ANSWERS + 1)
        _check("best_of", best_of, enough, f"None or from n, {self.n}, to {MOST_ANSWERS}")
        _check("num_beams", self.num_beams, _is_int(self.num_beams, 1, MOST_BEAMS + 1), f"from 1 to {MOST_BEAMS}")
        penalty = self.length_penalty
        _check("length_penalty", penalty, _is_number(penalty, -MOST_PENALTY, MOST_PENALTY), "a number; 0 is off")
        known = isinstance(self.early_stopping, bool) or (
            isinstance(self.early_stopping, str) and self.early_stopping == "never"
        )
        _check("early_stopping", self.early_stopping, known, 'True, False or "never"')
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
                    f"{name}: {getattr(self, name)!r} with num_beams = {self.num_beams}",
                    hint="A beam search takes the model's own log-probabilities; leave this out.",
                )

    @property
    def answers(self) -> int:
        """How many samples are drawn."""
        return self.n if self.best_of is None else self.best_of

    @classmethod
    def from_defaults(cls, defaults: Mapping[str, float | int | bool], **overrides: object) -> SamplingParams:
        """From a bundle's generation defaults (``do_sample`` false means greedy) and what the caller says."""
        fields: dict[str, object] = {k: v for k, v in defaults.items() if k == "repetition_penalty"}
        if defaults.get("do_sample", "temperature" in defaults):
            fields["temperature"] = 1.0
            fields |= {k: v for k, v in defaults.items() if k in ("temperature", "top_k", "top_p", "min_p")}
        return cls(**(fields | overrides))  # type: ignore[arg-type]  # __post_init__ checks every value


def seed_of(prompt: Sequence[int]) -> int:
    """The seed of a request that names none: the first 8 bytes, little-endian, of BLAKE2b of its token ids as i32."""
    data = np.asarray(prompt, "<i4").tobytes()
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def sample_seed(seed: int, index: int) -> int:
    """The seed of sample ``index`` of a request: its own for the first; for others the first 8 bytes, little-endian, of
    BLAKE2b of both as u64."""
    if index == 0:
        return seed
    data = np.array([seed, index], "<u8").tobytes()
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def _is_number(value: Any, low: float, high: float) -> bool:
    number = isinstance(value, Real) and not isinstance(value, bool)
    return number and bool(low <= value <= high)  # NaN is not


def _is_listing(value: Any) -> bool:
    """Whether it can be gone through in an order that means something: no mapping, no bytes, no array of rank 0."""
    listing = isinstance(value, Iterable) and not isinstance(value, (Mapping, bytes, bytearray, memoryview))
    return listing and bool(getattr(value, "ndim", 1) == 1)


def _is_int(value: Any, low: int, end: float = math.inf) -> bool:
    integer = isinstance(value, Integral) and not isinstance(value, bool)
    return integer and bool(low <= value < end)


def _check(field: str, value: object, holds: bool, expected: str) -> None:
    if not holds:
        raise RequestError(f"{field}: {value!r} is out of range", hint=f"It must be {expected}.")
