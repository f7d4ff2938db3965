"""Tokens drawn by the kernels are those of the cpu target's sampler, from the same logits."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor

import pytest

from . import step_cases as cases


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("vocab", [300, 2500])  # of one piece, and of three
def test_tokens_are_those_of_the_sampler(vocab: int, seed: int, interpreter: ProcessPoolExecutor) -> None:
    for ours, expected in interpreter.submit(cases.drawn, vocab, seed).result():
        assert ours == expected
