"""Packs the sampling options of a step for the GPU, and decides which kernels they need. It doesn't need torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from enginewright.runtime.shared.contracts import (
    SAMPLING_LISTS,
    SAMPLING_OPTIONS,
    Int32Array,
    SamplingBatch,
    StepMasks,
)
from enginewright.runtime.shared.errors import RequestError

from .call import Call, DeviceArray, Operand
from .sampling_calls import Drawing, SamplingMemory, sampling_calls
from .specs import SamplingKernel

ALIGNED_WORDS = 4
"""The alignment of arrays in 4-byte words: kernels are compiled for addresses at multiples of 16 bytes."""

_CARRIED_LATER: Mapping[SamplingKernel, tuple[str, ...]] = {
    "edit": (
        *("frequency_penalty", "presence_penalty", "logit_bias"),
        *("allowed_token_ids", "bad_words", "min_tokens", "dry_multiplier"),
    ),
    "mask": (),  # without it, executors get lists of the tokens that masks allow
    "spread": ("typical_p",),
    "nearest": ("typical_p",),
}
"""Kernels that older bundles don't have -> the sampling parameters that need them."""

_NO_KERNELS = ("top_n_sigma", "xtc_probability")
"""Sampling parameters for which there are no kernels at all."""

_TYPES: Mapping[str, str] = {
    **{"top_k": "int32", "seed": "int64", "counter": "int64"},
    **dict.fromkeys((*SAMPLING_LISTS, "mask_rows"), "int32"),
}
"""The types of options that aren't float32, by their names in torch and numpy. Unsigned 64-bit numbers are passed as
signed ones with the same bits.
"""


def missing_kernels(folder: Path, capability: int) -> tuple[SamplingKernel, ...]:
    """Returns the sampling kernels that a bundle's folder doesn't have for a GPU, because an older version made it.

    ``capability`` is 89 for compute capability 8.9.
    """
    return tuple(kernel for kernel in _CARRIED_LATER if not any(folder.glob(f"{kernel}-sm{capability}-*.json")))


def lacks_of(missing: Iterable[SamplingKernel]) -> tuple[str, ...]:
    """Returns the sampling parameters that can't be used without the kernels ``missing``, and those that no kernel
    supports.
    """
    return tuple(dict.fromkeys([*(name for kernel in missing for name in _CARRIED_LATER[kernel]), *_NO_KERNELS]))


def places_of(lengths: Mapping[str, int]) -> tuple[dict[str, int], int]:
    """Assigns to each array its start in one upload of all, in 4-byte words. Returns the starts, and the upload's
    length.

    Starts are multiples of 16 bytes. ``lengths`` has the arrays' lengths in words.
    """
    starts, at = {}, 0
    for name, length in lengths.items():
        starts[name] = at
        at += -(-length // ALIGNED_WORDS) * ALIGNED_WORDS
    return starts, at


def option_words(rows: int) -> dict[str, int]:
    """Returns option -> the length of its array in 4-byte words, for a step with ``rows`` rows of logits.

    An option of type int64 has two words for each row. An option that is a list for each row, such as ``seen_start``,
    has the starts of these lists here, which are ``rows`` + 1 words; the lists are in another array.
    """
    words = {name: rows * option_type(name).itemsize // 4 for name in (*SAMPLING_OPTIONS, "mask_rows")}
    return words | dict.fromkeys(SAMPLING_LISTS, rows + 1)


def option_arrays(address: int, places: Mapping[str, int], rows: int) -> dict[str, DeviceArray]:
    """Returns the options as arrays for kernels, in an upload at ``address`` in which ``places`` has their starts."""
    arrays = {}
    for name, words in option_words(rows).items():
        of = option_type(name)
        arrays[name] = DeviceArray(address + 4 * places[name], of, (4 * words // of.itemsize,))
    return arrays


def each_sampling_call(logits: Operand) -> Iterator[Call]:
    """Yields a call of every kernel that sampling may launch, to compile them. The memory of the logits [R, V] needn't
    exist.
    """

    def new(shape: tuple[int, ...], of: str) -> DeviceArray:
        return DeviceArray(0, np.dtype(of), shape)

    rows, vocab = logits.shape
    memory = SamplingMemory(rows, vocab, new)
    options = option_arrays(0, places_of(option_words(rows))[0], rows) | {"lists": new((1,), "int32")}
    for flags in product((False, True), repeat=5):
        yield from sampling_calls(logits, options, memory, Drawing(*flags))
    # Each of the other three launches one kernel of its own; their further kernels are those of penalties.
    yield from sampling_calls(
        logits, options, memory, Drawing(True, True, True, True, True, edits=True, typical=True, masks=True)
    )


def write_options(staged: Int32Array, places: Mapping[str, int], sampling: SamplingBatch | None, rows: int) -> None:
    """Writes the options of ``rows`` rows to ``staged``, at the starts ``places``. Rows without options are greedy.

    Raises RequestError for a value that is out of range, as the cpu target's sampler does.
    """
    check_options(sampling)
    arrays = {} if sampling is None else sampling.options()
    for name, off in SAMPLING_OPTIONS.items():
        whole = np.full(rows, off, option_type(name))
        if (array := arrays.get(name)) is not None:
            whole[: len(array)] = array.view(whole.dtype)
        staged[places[name] : places[name] + whole.nbytes // 4] = whole.view(np.int32)
    begins = _begins(arrays)
    for name in SAMPLING_LISTS:
        starts = np.zeros(rows + 1, np.int32)
        if (offsets := arrays.get(name)) is not None:
            starts[: len(offsets)] = offsets + begins[name]
            starts[len(offsets) :] = starts[len(offsets) - 1]
        staged[places[name] : places[name] + rows + 1] = starts
    mask_rows = np.full(rows, -1, np.int32)
    if sampling is not None and sampling.masks is not None:
        has_mask = sampling.masks.rows >= 0
        mask_rows[np.flatnonzero(has_mask)] = np.arange(has_mask.sum())
    staged[places["mask_rows"] : places["mask_rows"] + rows] = mask_rows


def write_masks(staged: Int32Array, masks: StepMasks) -> int:
    """Waits for the masks of a step, and writes those of its rows to ``staged``, in the order of the rows.

    Returns the number of 4-byte words that were written.
    """
    masks.wait()
    of_rows, words = masks.rows[masks.rows >= 0], masks.bits.shape[1]
    to = staged[: len(of_rows) * words].reshape(len(of_rows), words)
    np.take(masks.bits.view(np.int32), of_rows, axis=0, out=to, mode="clip")  # by default numpy makes a copy first
    return to.size


def packed_lists(sampling: SamplingBatch) -> tuple[Int32Array, int]:
    """Returns all lists of tokens of a step as one array, and the number of words that kernels need for it (see
    logit_kernels.py).
    """
    arrays = sampling.options()
    lists_of_tokens = [arrays[name].view(np.int32) for names in _LISTS.values() for name in names if name in arrays]
    lists = np.concatenate([np.empty(0, np.int32), *lists_of_tokens])
    return lists, len(lists) + len(arrays.get("seen", ()))  # behind the seen ones is room for their logits


_LISTS = {name: SAMPLING_LISTS[name] for name in sorted(SAMPLING_LISTS, key="seen_start".__eq__)}
"""The lists in the order in which they are packed. Tokens that occurred come last, since the memory after them isn't
uploaded.
"""


def _begins(arrays: Mapping[str, npt.NDArray[Any]]) -> dict[str, int]:
    """Returns the start of each list's tokens in the packed array."""
    starts, at = {}, 0
    for start, names in _LISTS.items():
        starts[start] = at
        at += sum(len(arrays.get(name, ())) for name in names)
    return starts


def drawing_of(sampling: SamplingBatch) -> Drawing:
    """Returns which sampling options the rows use."""
    random = sampling.temperature > 0
    return Drawing(
        penalties=sampling.repetition_penalty is not None and sampling.seen is not None and len(sampling.seen) > 0,
        random=bool(random.any()),
        top_k=bool((sampling.top_k[random] > 0).any()),
        top_p=bool((sampling.top_p[random] < 1).any()),
        min_p=bool((sampling.min_p[random] > 0).any()),
        edits=any(
            array is not None and len(array)
            for array in (sampling.counted, sampling.biased, sampling.allowed, sampling.dry)
        ),
        typical=sampling.typical_p is not None and bool((sampling.typical_p[random] < 1).any()),
        dry=sampling.dry is not None and len(sampling.dry) > 0,
        masks=sampling.masks is not None and bool((sampling.masks.rows >= 0).any()),
    )


def chosen_rows(sampling: SamplingBatch, rows: npt.NDArray[np.int64]) -> SamplingBatch:
    """Returns the options of the rows with these indices, in this order; ``sampling`` itself if these are all of its
    rows.
    """
    if np.array_equal(rows, np.arange(len(sampling.temperature))):
        return sampling
    cut: dict[str, Any] = {
        name: None if (array := getattr(sampling, name)) is None else array[rows] for name in SAMPLING_OPTIONS
    }
    for start, names in SAMPLING_LISTS.items():
        if (bounds := getattr(sampling, start)) is None:
            continue
        begins, ends = bounds[rows], bounds[rows + 1]
        cut[start] = np.concatenate([[0], np.cumsum(ends - begins)]).astype(np.int32)
        for name in names:
            whole = getattr(sampling, name)
            cut[name] = np.concatenate([whole[:0], *(whole[i:j] for i, j in zip(begins, ends, strict=True))])
    for name in ("scored", "top_allowed"):
        cut[name] = None if (array := getattr(sampling, name)) is None else array[rows]
    masks = None if sampling.masks is None else sampling.masks.chosen(rows)
    return SamplingBatch(**cut, masks=masks, logprobs=sampling.logprobs)


def option_type(name: str) -> np.dtype[Any]:
    """Returns the type of an option's array on the GPU."""
    return np.dtype(_TYPES.get(name, "float32"))


_FINITE = (-np.finfo(np.float32).max, np.finfo(np.float32).max)
_ABOVE_0 = np.nextafter(np.float32(0), np.float32(1))
_RANGES = {
    "temperature": (0, np.inf, "[0, inf)"),
    "top_k": (0, np.inf, "[0, inf)"),
    "top_p": (0, 1, "[0, 1]"),
    "min_p": (0, 1, "[0, 1]"),
    "typical_p": (_ABOVE_0, 1, "(0, 1]"),
    "repetition_penalty": (_ABOVE_0, np.inf, "(0, inf)"),
    "frequency_penalty": (*_FINITE, "(-inf, inf)"),
    "presence_penalty": (*_FINITE, "(-inf, inf)"),
    "top_n_sigma": (*_FINITE, "(-inf, inf)"),
    "xtc_probability": (0, 1, "[0, 1]"),
    "xtc_threshold": (0, 1, "[0, 1]"),
}


def check_options(sampling: SamplingBatch | None) -> None:
    """Raises RequestError for an option that is out of range, as the cpu target's sampler does."""
    if sampling is None:
        return
    arrays = sampling.options()
    for name in SAMPLING_OPTIONS:
        if (array := arrays.get(name)) is not None:
            _check(name, array)
    for name, start in (("bias", "biased_start"), ("dry_bias", "dry_start")):
        if (values := arrays.get(name)) is not None and (wrong := ~(values < np.inf)).any():
            row = int(np.searchsorted(arrays[start], wrong.argmax(), side="right")) - 1
            raise RequestError(f"step: sampled row {row} has a {name} that is NaN or +infinity")


def _check(name: str, array: npt.NDArray[Any]) -> None:
    if name not in _RANGES:
        return
    least, most, range_text = _RANGES[name]
    wrong = ~((array >= least) & (array <= most) & (array < np.inf))
    if wrong.any():
        raise RequestError(f"step: sampled row {int(wrong.argmax())} has a {name} that is not in {range_text}")
