"""Tokens drawn by the kernels are those of the cpu target's sampler, from the same logits."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from dataclasses import fields
from itertools import product

import numpy as np
import pytest

from enginewright.plugins.gpu.call import DeviceArray
from enginewright.plugins.gpu.sampling import (
    each_sampling_call,
    option_arrays,
    option_words,
    places_of,
)
from enginewright.plugins.gpu.sampling_calls import Drawing, SamplingMemory, sampling_calls

from . import step_cases as cases


@pytest.mark.parametrize("vocab", [300, 2500])
def test_a_bundle_has_the_kernels_of_any_rows(vocab: int) -> None:
    logits = DeviceArray(0, np.dtype(np.float32), (4, vocab))
    carried = {call.spec(90) for call in each_sampling_call(logits)}
    memory = SamplingMemory(4, vocab, lambda shape, of: DeviceArray(0, np.dtype(of), shape))
    options = option_arrays(0, places_of(option_words(4))[0], 4)
    options["lists"] = DeviceArray(0, np.dtype(np.int32), (9,))
    for flags in product((False, True), repeat=len(fields(Drawing))):
        needed = {call.spec(90) for call in sampling_calls(logits, options, memory, Drawing(*flags))}
        assert needed <= carried
    assert sum(spec.kernel in ("edit", "mask", "spread", "nearest") for spec in carried) == 4


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("vocab", [300, 2500])  # of one piece, and of three
def test_tokens_are_those_of_the_sampler(vocab: int, seed: int, interpreter: ProcessPoolExecutor) -> None:
    for ours, expected in interpreter.submit(cases.drawn, vocab, seed).result():
        assert ours == expected


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("vocab", [300, 2500])
def test_lists_and_typical_tokens(vocab: int, seed: int, interpreter: ProcessPoolExecutor) -> None:
    for ours, expected in interpreter.submit(cases.drawn_with_lists, vocab, seed).result():
        assert ours == expected
        assert expected[1:3] == [-1, -1]  # a NaN, an infinity


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("vocab", [300, 2500])
def test_masks_of_forms(vocab: int, seed: int, interpreter: ProcessPoolExecutor) -> None:
    for ours, expected in interpreter.submit(cases.drawn_with_masks, vocab, seed).result():
        assert ours == expected
        assert (expected[2], expected[5]) == (-1, -1)  # a NaN; no token is allowed


@pytest.mark.matrix
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("vocab", [300, 2500])
def test_typical_tokens(vocab: int, seed: int, interpreter: ProcessPoolExecutor) -> None:
    for ours, expected in interpreter.submit(cases.typical, vocab, seed).result():
        assert ours == expected
