"""Sampling options of a step on their way to the GPU, and what comes back besides tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from enginewright.plugins.shared.contracts import (
    NO_TOKEN,
    SAMPLING_OPTIONS,
    Int32Array,
    SamplingBatch,
    StepOutput,
)
from enginewright.plugins.shared.errors import RequestError
from enginewright.plugins.triton.sampling_calls import Drawing

ALIGNED_WORDS = 4
"""Kernels are compiled for addresses at multiples of 16 bytes."""

SEEN_START = "seen_start"

_TYPES: Mapping[str, str] = {"top_k": "int32", "seed": "int64", "counter": "int64", SEEN_START: "int32"}
"""Of options, where they aren't float32, by torch's and numpy's name. Kernels take 64 bits with a sign, whose bits are
the same."""


def places_of(lengths: Mapping[str, int]) -> tuple[dict[str, int], int]:
    """Where arrays of so many words begin that are uploaded as one, at multiples of 16 bytes, and how many it has."""
    found, at = {}, 0
    for name, length in lengths.items():
        found[name] = at
        at += -(-length // ALIGNED_WORDS) * ALIGNED_WORDS
    return found, at


def option_words(rows: int) -> dict[str, int]:
    """Words of 32 bits that each option of so many rows takes; ``seen_start`` has one more row."""
    return {name: rows * _type(name).itemsize // 4 for name in SAMPLING_OPTIONS} | {SEEN_START: rows + 1}


def option_views(uploaded: Tensor, places: Mapping[str, int], rows: int) -> dict[str, Tensor]:
    """The options as kernels take them, in an upload that has them at ``places``."""
    return {
        name: uploaded.narrow(0, places[name], words).view(getattr(torch, _type(name).name))
        for name, words in option_words(rows).items()
    }


def write_options(staged: Int32Array, places: Mapping[str, int], sampling: SamplingBatch | None, rows: int) -> None:
    """Puts options of up to ``rows`` rows where ``places`` says; rows that there aren't take the greatest logit.

    Raises RequestError for a value out of range, as the cpu target's sampler does.
    """
    arrays = {} if sampling is None else sampling.options()
    for name, off in SAMPLING_OPTIONS.items():
        whole = np.full(rows, off, _type(name))
        if (array := arrays.get(name)) is not None:
            _check(name, array)
            whole[: len(array)] = array.view(whole.dtype)
        staged[places[name] : places[name] + whole.nbytes // 4] = whole.view(np.int32)
    starts = np.zeros(rows + 1, np.int32)
    if (given := arrays.get(SEEN_START)) is not None:
        starts[: len(given)] = given
        starts[len(given) :] = given[-1]
    staged[places[SEEN_START] : places[SEEN_START] + rows + 1] = starts


def drawing_of(sampling: SamplingBatch) -> Drawing:
    """What the rows ask for."""
    random = sampling.temperature > 0
    return Drawing(
        penalties=sampling.repetition_penalty is not None and sampling.seen is not None and len(sampling.seen) > 0,
        random=bool(random.any()),
        top_k=bool((sampling.top_k[random] > 0).any()),
        top_p=bool((sampling.top_p[random] < 1).any()),
        min_p=bool((sampling.min_p[random] > 0).any()),
    )


def some_rows(sampling: SamplingBatch, start: int, stop: int) -> SamplingBatch:
    """The options of rows start .. stop - 1; lists of seen tokens stay whole."""
    cut: dict[str, Any] = {
        name: None if (array := getattr(sampling, name)) is None else array[start:stop] for name in SAMPLING_OPTIONS
    }
    starts = None if sampling.seen_start is None else sampling.seen_start[start : stop + 1]
    return SamplingBatch(**cut, seen_start=starts, seen=sampling.seen, logprobs=sampling.logprobs)


def add_logprobs(output: StepOutput, logits: Tensor, tokens: Int32Array, count: int) -> None:
    """Logprobs of the tokens [R] and of the ``count`` most likely ones of each row."""
    logprobs = logits.log_softmax(-1)
    there = torch.from_numpy(tokens).to(logprobs.device)
    bad = there == NO_TOKEN
    own = logprobs.gather(1, there.clamp(min=0).long()[:, None])[:, 0].masked_fill(bad, float("nan"))
    values, ids = logprobs.sort(dim=-1, descending=True, stable=True)
    output.token_logprobs = own.cpu().numpy()
    output.top_ids = ids[:, :count].int().masked_fill(bad[:, None], NO_TOKEN).cpu().numpy()
    output.top_logprobs = values[:, :count].masked_fill(bad[:, None], float("nan")).cpu().numpy()


def _type(name: str) -> np.dtype[Any]:
    return np.dtype(_TYPES.get(name, "float32"))


_RANGES = {
    "temperature": (0, np.inf, "[0, inf)"),
    "top_k": (0, np.inf, "[0, inf)"),
    "top_p": (0, 1, "[0, 1]"),
    "min_p": (0, 1, "[0, 1]"),
    "repetition_penalty": (np.nextafter(np.float32(0), np.float32(1)), np.inf, "(0, inf)"),
}


def _check(name: str, array: npt.NDArray[Any]) -> None:
    if name not in _RANGES:
        return
    least, most, said = _RANGES[name]
    wrong = ~((array >= least) & (array <= most) & (array < np.inf))
    if wrong.any():
        raise RequestError(f"step: sampled row {int(wrong.argmax())} has a {name} that is not in {said}")
