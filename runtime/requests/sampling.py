"""How the next token is chosen: ``SamplingParams``, and the arrays of a step's sampled rows."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import Any

import numpy as np

from enginewright.plugins.shared.contracts import Int32Array, SamplingBatch
from enginewright.plugins.shared.errors import RequestError

MOST_LOGPROBS = 100


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
        repetition_penalty: the logits of tokens that the prompt or the answer has already are divided by it where they
            are above 0, and multiplied where they are below, before all else; 1 is off. As in transformers and vLLM.
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

    Raises:
        RequestError: a value is out of range; names the field.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    max_tokens: int | None = 256
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            if getattr(self, field.name) is None and field.name != "max_tokens":
                object.__setattr__(self, field.name, field.default)
        for name in ("stop", "stop_token_ids"):
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
        _check("seed", self.seed, self.seed is None or _is_int(self.seed, 0, 2**64), "None or in [0, 2**64)")
        _check("max_tokens", self.max_tokens, self.max_tokens is None or _is_int(self.max_tokens, 1), "None or >= 1")
        _check("stop", self.stop, all(isinstance(s, str) and s for s in self.stop), "strings that are not empty")
        ids = self.stop_token_ids
        _check("stop_token_ids", ids, all(_is_int(i, 0) for i in ids), "token ids")
        _check("ignore_eos", self.ignore_eos, isinstance(self.ignore_eos, bool), "True or False")
        in_range = self.logprobs is None or _is_int(self.logprobs, 0, MOST_LOGPROBS + 1)
        _check("logprobs", self.logprobs, in_range, f"None or an integer from 0 to {MOST_LOGPROBS}")

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


def sampling_batch(
    rows: Sequence[tuple[SamplingParams, int, int]], seen: Sequence[Sequence[int]] = ()
) -> SamplingBatch:
    """The arrays [R] for rows of (parameters, seed, index of the new token in its request's output).

    ``seen`` has each row's tokens so far; it may be left out where no row has a repetition penalty.
    """
    wanted = [p.logprobs for p, _, _ in rows if p.logprobs is not None]
    batch = SamplingBatch(
        temperature=np.array([p.temperature for p, _, _ in rows], np.float32),
        top_k=np.array([p.top_k for p, _, _ in rows], np.int32),
        top_p=np.array([p.top_p for p, _, _ in rows], np.float32),
        min_p=np.array([p.min_p for p, _, _ in rows], np.float32),
        seed=np.array([seed for _, seed, _ in rows], np.uint64),
        counter=np.array([counter for _, _, counter in rows], np.uint64),
        logprobs=max(wanted, default=None),
    )
    if any(p.repetition_penalty != 1 for p, _, _ in rows):
        batch.repetition_penalty = np.array([p.repetition_penalty for p, _, _ in rows], np.float32)
        batch.seen_start, batch.seen = packed_tokens(seen)
    return batch


def packed_tokens(rows: Sequence[Sequence[int]]) -> tuple[Int32Array, Int32Array]:
    """``seen_start`` and ``seen`` of a ``SamplingBatch``."""
    start = np.zeros(len(rows) + 1, np.int32)
    np.cumsum([len(row) for row in rows], out=start[1:])
    return start, np.concatenate([np.asarray(row, np.int32) for row in rows])


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
