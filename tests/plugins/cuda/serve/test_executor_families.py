"""Families' steps by interpreted kernels, beside what their programs mean; the table of benchmarks/notes/cuda.md.

``pytest -n 0 -m "" tests/plugins/cuda/serve/test_executor_families.py --update-golden`` writes the table anew.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from enginewright.runtime.shared.errors import EnginewrightError
from tests.acceptance.test_families import MORE_FAMILIES
from tests.acceptance.test_families_experts import EXPERT_FAMILIES
from tests.conftest import TINY_FAMILIES
from tests.families import RECURRENT
from tests.plugins.cuda.serve import cuda_cases as cases
from tests.triton_interpreter import interpreter as interpreter

CASES = [*TINY_FAMILIES, *MORE_FAMILIES, *EXPERT_FAMILIES, *sorted(RECURRENT)]

BOUNDS = (1e-6, 2e-6, 3e-6, 5e-6, 1e-5)
"""The bounds that the page states, as shares of the largest logit, if all is float32 and sums are in another order. The
first one that is at least 1.5 times the measured error is stated, so that other processors keep to it too.
"""

_TABLE = re.compile(r"(?<=<!-- table: test_executor_families.py -->\n\n)(.*?)(?=\n<!-- end of table -->)", re.DOTALL)
_HEADING = "| case | the largest difference, as a share of the largest logit |\n| --- | --- |\n"


def stated(page: str) -> dict[str, str]:
    """Case -> the second cell of its row."""
    match = _TABLE.search(page)
    assert match is not None
    return dict(re.findall(r"^\| (.+?) \| (.+?) \|$", match[1].removeprefix(_HEADING), re.MULTILINE))


@pytest.fixture(scope="module")
def rows(repository: Path, request: pytest.FixtureRequest) -> Iterator[dict[str, str]]:
    """The page's, which are written anew where that is asked for."""
    path = repository / "benchmarks/notes/cuda.md"
    page = path.read_text(encoding="utf-8")
    table = stated(page)
    yield table
    if request.config.getoption("update_golden"):
        lines = "".join(f"| {case} | {table[case]} |\n" for case in CASES if case in table)
        path.write_text(_TABLE.sub(lambda _: _HEADING + lines, page), encoding="utf-8")


@pytest.mark.parametrize("case", CASES)
def test_a_family_s_row(
    case: str, rows: dict[str, str], interpreter: ProcessPoolExecutor, request: pytest.FixtureRequest
) -> None:
    try:
        worst = max(error / largest for error, largest in interpreter.submit(cases.differences, case).result())
    except EnginewrightError as e:
        result, within = f"refused: {e.message}", f"refused: {e.message}" == rows.get(case)
    else:
        assert worst <= BOUNDS[-1]
        bound = re.fullmatch(r"at most (\S+)", rows.get(case, ""))
        within = bound is not None and worst <= float(bound[1])
        result = f"at most {next((b for b in BOUNDS if 1.5 * worst <= b), BOUNDS[-1]):.0e}"
    if request.config.getoption("update_golden") and not within:
        rows[case] = result
    assert within or rows.get(case) == result, f"{case}: {result}"


def test_the_page_has_every_case(rows: dict[str, str]) -> None:
    assert list(rows) == CASES
