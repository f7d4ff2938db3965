"""[engines] exact: a request's bits are the same alone, in batches, and with its prompt in chunks.

Interpreted kernels show the order of tiles and sums. Only a GPU can show what its tensor cores do.
"""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest

from enginewright.runtime.shared.errors import EnginewrightError
from tests.plugins.cuda.serve import exact_cases
from tests.plugins.cuda.serve.test_executor_families import CASES
from tests.triton_interpreter import interpreter as interpreter


@pytest.mark.parametrize("case", CASES)
def test_families_have_the_same_bits_in_any_batch(case: str, interpreter: ProcessPoolExecutor) -> None:
    try:
        assert interpreter.submit(exact_cases.logits_of_batches, case).result() == []
    except EnginewrightError:
        pytest.skip("the target refuses it")


@pytest.mark.parametrize(
    ("case", "recipe", "floats", "cache"),
    [
        ("Llama", "f32", "bf16", None),
        ("Llama", "int8", "bf16", "int8"),
        ("Mixtral", "int4", "bf16", None),
        ("Llama", "fp8", "f16", "fp8"),
    ],
)
def test_formats_have_the_same_bits_in_any_batch(
    case: str, recipe: str, floats: Any, cache: str | None, interpreter: ProcessPoolExecutor
) -> None:
    found = interpreter.submit(exact_cases.logits_of_batches, case, (7, 64), recipe, floats, cache).result()
    assert found == []


@pytest.mark.soak
def test_every_number_of_requests_has_the_same_bits(interpreter: ProcessPoolExecutor) -> None:
    assert interpreter.submit(exact_cases.logits_of_batches, "Llama", range(1, 65)).result() == []


@pytest.mark.parametrize(
    ("case", "cache"),
    [
        pytest.param("Llama", None, marks=pytest.mark.matrix),
        pytest.param("Mistral", None, marks=pytest.mark.soak),
        pytest.param("Llama", "int8", marks=pytest.mark.soak),
    ],
)
def test_contexts_of_several_parts_have_the_same_bits(
    case: str, cache: str | None, interpreter: ProcessPoolExecutor
) -> None:
    assert interpreter.submit(exact_cases.long_logits, case, 561, cache).result()
