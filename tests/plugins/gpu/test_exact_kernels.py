"""Exact kernels: the bits of a row don't depend on the step. The interpreter shows the order of tiles and sums."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor

import pytest

from . import exact_cases as cases

ROUNDING = {"f32": 2e-6, "bf16": 2.0**-8}


@pytest.mark.parametrize(
    ("form", "dtype"),
    [("float", "bf16"), ("int8", "bf16"), ("uint4", "bf16"), ("fp8", "f32"), ("float", "f32"), ("int4", "f32")],
)
def test_products(form: str, dtype: str, interpreter: ProcessPoolExecutor) -> None:
    checks = interpreter.submit(cases.products, form, dtype).result()
    assert all(same for same, _ in checks)
    assert any(differs for _, differs in checks), "the tiles that depend on the number of rows have these bits, too"


@pytest.mark.parametrize("form", ["float", "int8", "uint4"])
def test_products_of_experts(form: str, interpreter: ProcessPoolExecutor) -> None:
    assert interpreter.submit(cases.grouped_products, form, "bf16").result()


@pytest.mark.parametrize("dtype", ROUNDING)
def test_sums_of_rows_and_of_experts(dtype: str, interpreter: ProcessPoolExecutor) -> None:
    assert max(interpreter.submit(cases.reductions, dtype).result()) <= ROUNDING["f32"]
    assert max(interpreter.submit(cases.combined_experts, dtype).result()) <= ROUNDING[dtype]


@pytest.mark.parametrize(
    ("length", "dtype", "cache", "rule"),
    [
        (1061, "bf16", "", {}),
        (600, "f32", "", {"sinks": True, "window": 70}),
        (530, "bf16", "int8", {"slopes": True}),
        (530, "bf16", "fp8", {"softcap": 20.0}),
        (40, "f32", "", {"sinks": True}),
        (530, "bf16", "int8", {"values_in_keys": True}),
        (530, "f32", "k8v8", {}),
        (660, "bf16", "k4v4", {"sinks": True}),  # its last 30 tokens are in two runs of 128
    ],
)
def test_attention(
    length: int, dtype: str, cache: str, rule: dict[str, object], interpreter: ProcessPoolExecutor
) -> None:
    assert interpreter.submit(cases.attention, length, dtype, cache, **rule).result()
