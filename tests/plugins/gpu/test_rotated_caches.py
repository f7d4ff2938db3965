"""KV caches of rotated integers in Triton's interpreter against the references: k8v8, and k4v4 with its ends."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor

import pytest
import torch

from tests.plugins.gpu import rotated_cases as cases
from tests.plugins.gpu.rotated_cases import Case


@pytest.mark.parametrize(
    ("dtype", "cache", "heads", "size", "value_size"),
    [
        ("f32", "k8v8", 3, 64, 64),
        ("f32", "k4v4", 3, 64, 64),
        ("bf16", "k4v4", 1, 48, 12),  # 16 numbers are rotated at a time, and 4
        ("f32", "k4v4", 2, 4, 2),
    ],
)
def test_the_cache_holds_the_bits_of_the_reference(
    dtype: str, cache: str, heads: int, size: int, value_size: int, interpreter: ProcessPoolExecutor
) -> None:
    results = interpreter.submit(cases.write, dtype, cache, 9, heads, size, value_size).result()
    for want, got in zip(results[:4], results[4:], strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    "case",
    [
        Case((5,), (20,), "k8v8"),
        Case((5,), (0,)),
        Case((1, 1, 1), (700, 130, 255)),  # in two parts, in one run behind the first, at a run's end
        Case((70,), (350,), rows=32),  # tiles of 16 queries, of which one is in two runs of 128
        Case((70, 1, 3), (350, 600, 380), rows=256),  # a decode beside prompts, whose tiles are in two runs
        Case((40,), (500,), window=300, rows=64),
        Case((40, 1), (640, 640), sinks=True, softcap=5.0, dtype="bf16", size=48, value_size=12, rows=32),
        Case((40, 1), (640, 640), exact=True, rows=32),
    ],
    ids=str,
)
def test_attention_reads_each_key_in_its_format(case: Case, interpreter: ProcessPoolExecutor) -> None:
    """With bf16, queries and weights are rounded to 2^-9 of each, before sums in which they partly cancel."""
    got, want = interpreter.submit(cases.attend, case).result()
    bound = 2.0**-7 if case.dtype == "bf16" else 2e-6
    assert (got.float() - want).abs().max() <= bound * want.abs().max()
