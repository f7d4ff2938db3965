"""Sampling options of a step on their way to the GPU, and which kernels they ask for. Without torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt

from enginewright.plugins.shared.contracts import SAMPLING_OPTIONS, Int32Array, SamplingBatch
from enginewright.plugins.shared.errors import RequestError
from enginewright.plugins.triton.call import Call, DeviceArray, Operand
from enginewright.plugins.triton.sampling_calls import Drawing, SamplingMemory, sampling_calls

ALIGNED_WORDS = 4
"""Kernels are compiled for addresses at multiples of 16 bytes."""

SEEN_START = "seen_start"

LACKS = (
    *("typical_p", "frequency_penalty", "presence_penalty"),
    *("logit_bias", "allowed_token_ids", "bad_words", "min_tokens"),
)
"""Sampling parameters that no kernel knows yet."""

KERNEL_OPTIONS = {name: off for name, off in SAMPLING_OPTIONS.items() if name not in LACKS}
"""Those of ``contracts.SAMPLING_OPTIONS`` that kernels know."""

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
    return {name: rows * option_type(name).itemsize // 4 for name in KERNEL_OPTIONS} | {SEEN_START: rows + 1}


def option_arrays(address: int, places: Mapping[str, int], rows: int) -> dict[str, DeviceArray]:
    """The options as kernels take them, in an upload at ``address`` that has them at ``places``."""
    found = {}
    for name, words in option_words(rows).items():
        of = option_type(name)
        found[name] = DeviceArray(address + 4 * places[name], of, (4 * words // of.itemsize,))
    return found


def each_sampling_call(logits: Operand) -> Iterator[Call]:
    """What any step's sampling may launch, for logits [R, V] that needn't be there."""

    def new(shape: tuple[int, ...], of: str) -> DeviceArray:
        return DeviceArray(0, np.dtype(of), shape)

    rows, vocab = logits.shape
    memory = SamplingMemory(rows, vocab, new)
    options = option_arrays(0, places_of(option_words(rows))[0], rows) | {"seen": new((1,), "int32")}
    for flags in product((False, True), repeat=5):
        yield from sampling_calls(logits, options, memory, Drawing(*flags))


def write_options(staged: Int32Array, places: Mapping[str, int], sampling: SamplingBatch | None, rows: int) -> None:
    """Puts options of up to ``rows`` rows where ``places`` says; rows that there aren't take the greatest logit.

    Raises RequestError for a value out of range, as the cpu target's sampler does.
    """
    arrays = {} if sampling is None else sampling.options()
    for name, off in KERNEL_OPTIONS.items():
        whole = np.full(rows, off, option_type(name))
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


def chosen_rows(sampling: SamplingBatch, rows: npt.NDArray[np.int64]) -> SamplingBatch:
    """The options of some rows, in their order."""
    cut: dict[str, Any] = {
        name: None if (array := getattr(sampling, name)) is None else array[rows] for name in KERNEL_OPTIONS
    }
    if sampling.seen is not None and sampling.seen_start is not None:
        starts, ends = sampling.seen_start[rows], sampling.seen_start[rows + 1]
        lists = [sampling.seen[start:end] for start, end in zip(starts, ends, strict=True)]
        cut["seen"] = np.concatenate([np.empty(0, np.int32), *lists])
        cut["seen_start"] = np.concatenate([[0], np.cumsum(ends - starts)]).astype(np.int32)
    return SamplingBatch(**cut, logprobs=sampling.logprobs)


def option_type(name: str) -> np.dtype[Any]:
    """Of an option on the GPU."""
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
