"""Every family that the cpu target runs, tiny and random, as StableHLO modules on XLA's CPU: transformers' logits.

A ragged prefill, a second one behind it, and decode steps; the caches hold numbers that nobody may see.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from enginewright.plugins.shared.errors import UnsupportedModelError
from tests.acceptance.tiny_configs import tiny_family
from tests.conftest import REPOSITORY
from tests.optimizer.emit.onnx.linear_session import lowered_family, reference_logits, run_plan
from tests.optimizer.emit.stablehlo.module_session import ModuleSession, write_bundle

pytest.importorskip("jaxlib", reason="jaxlib is not installed: pip install 'enginewright[stablehlo]'")

TOLERANCE = 1e-4
"""Two orders of summation in 32-bit floats over 2 to 4 layers; see the docs for what was measured."""

SAMPLE = ("gemma2", "gpt_oss", "deepseek_v3")
"""Softcaps, windows and a tied table; sinks, experts with limits and biases; value heads of a size of their own, a
router with groups, and interleaved rotations."""

REFUSED: dict[str, str] = {}
"""Families of which an operator isn't there, with what the error says."""


def check_family(family: str, folder: Path) -> float:
    """The largest difference from transformers' logits."""
    program = lowered_family(family)
    if family in REFUSED:
        with pytest.raises(UnsupportedModelError, match=REFUSED[family]):
            write_bundle(program, folder / "b")
        return 0.0
    session = ModuleSession(write_bundle(program, folder / "b"))
    expected = reference_logits(tiny_family(family))
    found = run_plan(session)  # type: ignore[arg-type]
    assert session.slots.in_place
    largest = max(float(np.abs(found[slot] - expected[slot]).max()) for slot in expected)
    assert largest < TOLERANCE
    return largest


@pytest.mark.matrix
@pytest.mark.parametrize("family", SAMPLE)
def test_families(family: str, tmp_path: Path) -> None:
    check_family(family, tmp_path)


def _families() -> list[str]:
    """Those that docs/use/families.md says the cpu target runs."""
    rows = (REPOSITORY / "docs/use/families.md").read_text().splitlines()
    return [row.split("|")[1].strip() for row in rows if "| works |" in row and "," not in row.split("|")[1]]


@pytest.mark.soak
@pytest.mark.parametrize("family", _families())
def test_every_family(family: str, tmp_path: Path) -> None:
    print(f"\n{family}: {check_family(family, tmp_path):.1e}")
