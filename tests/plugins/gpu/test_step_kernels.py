"""The kernels of a step's ops mean what the references mean, at two sizes or more of each."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor

import pytest

from . import step_cases as cases

ROUNDING = {"f32": 2e-6, "f16": 2.0**-11, "bf16": 2.0**-8}
"""The share of the largest value: f32 sums in another order, else one rounding of the result."""


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("of", [cases.norms, cases.rotations, cases.activations], ids=lambda f: f.__name__)
def test_small_ops(of, dtype: str, interpreter: ProcessPoolExecutor) -> None:  # type: ignore[no-untyped-def]
    assert max(interpreter.submit(of, dtype).result()) <= ROUNDING[dtype]


@pytest.mark.parametrize(("tokens", "count"), [(1, 0), (255, 1), (2100, 5000)])
def test_tokens_and_tables_are_placed(tokens: int, count: int, interpreter: ProcessPoolExecutor) -> None:
    assert interpreter.submit(cases.placed, tokens, count).result()


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("form", ["float", "int8", "int4", "uint4", "fp8"])
def test_products_and_tables(form: str, dtype: str, interpreter: ProcessPoolExecutor) -> None:
    """In groups that no step along K divides a weight is rounded to the type of x as well."""
    assert max(interpreter.submit(cases.products, form, dtype).result()) <= 2 * ROUNDING[dtype]


@pytest.mark.matrix
@pytest.mark.parametrize(("form", "dtype"), [("int8", "f32"), ("int4", "f32"), ("uint4", "bf16"), ("fp8", "bf16")])
def test_products_in_parts(form: str, dtype: str, interpreter: ProcessPoolExecutor) -> None:
    """Sums of parts are float32, so a part rounds nothing: as much off as products in one piece."""
    assert max(interpreter.submit(cases.split_products, form, dtype).result()) <= 2 * ROUNDING[dtype]


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
@pytest.mark.parametrize("form", ["int8", "int4", "uint4", "fp8"])
def test_weights_that_are_made_floats(form: str, dtype: str, interpreter: ProcessPoolExecutor) -> None:
    assert max(interpreter.submit(cases.unpacked_weights, form, dtype).result()) <= ROUNDING[dtype]


@pytest.mark.parametrize("form", ["float", "int8", "int4", "uint4", "fp8"])
def test_products_of_experts(form: str, interpreter: ProcessPoolExecutor) -> None:
    assert max(interpreter.submit(cases.grouped_products, form, "bf16").result()) <= ROUNDING["bf16"]
    assert max(interpreter.submit(cases.grouped_products, form, "f32").result()) <= ROUNDING["f32"]
