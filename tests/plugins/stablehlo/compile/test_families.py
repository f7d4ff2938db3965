"""Every family that the cpu target runs, tiny and random, as StableHLO modules on XLA's CPU: transformers' logits.

A ragged prefill, a second one behind it, and decode steps; the caches hold numbers that nobody may see.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from enginewright.plugins.stablehlo.section import KERNELS
from enginewright.plugins.stablehlo.serve.executor import stablehlo_section
from enginewright.plugins.steps.x86_levels import LevelName
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.shared.errors import UnsupportedModelError
from tests.acceptance.tiny_configs import tiny_family
from tests.families import working_families
from tests.plugins.graphs.linear_session import lowered_family, reference_logits, run_plan
from tests.plugins.stablehlo.compile.module_session import ModuleSession, write_bundle

pytest.importorskip("jaxlib", reason="jaxlib is not installed: pip install 'enginewright[stablehlo]'")

TOLERANCE = 1e-4
"""Two orders of summation in 32-bit floats over 2 to 4 layers; see the docs for what was measured."""

SAMPLE = ("gemma2", "gpt_oss", "deepseek_v3")
"""Softcaps, windows and a tied table; sinks, experts with limits and biases; value heads of a size of their own, a
router with groups, and interleaved rotations."""

REFUSED: dict[str, str] = {}
"""Families of which an operator isn't there, with what the error says."""


def check_family(
    family: str, folder: Path, kernels: Literal["enginewright"] | None = None, iree: bool = False
) -> float:
    """The largest difference from transformers' logits."""
    folder.mkdir(exist_ok=True)
    program = lowered_family(family)
    if family in REFUSED:
        with pytest.raises(UnsupportedModelError, match=REFUSED[family]):
            write_bundle(program, folder / "b")
        return 0.0
    levels: tuple[LevelName, ...] = ("v3",) if iree else ()
    session = ModuleSession(write_bundle(program, folder / "b", kernels, levels), provider="iree" if iree else "cpu")
    expected = reference_logits(tiny_family(family))
    logits = run_plan(session)  # type: ignore[arg-type]
    assert session.slots.in_place
    largest = max(float(np.abs(logits[slot] - expected[slot]).max()) for slot in expected)
    assert largest < TOLERANCE
    return largest


@pytest.mark.matrix
@pytest.mark.parametrize("family", SAMPLE)
def test_families(family: str, tmp_path: Path) -> None:
    check_family(family, tmp_path)


@pytest.mark.matrix
@pytest.mark.parametrize("family", [*SAMPLE, "llama", "mistral"])
def test_families_by_our_kernels(family: str, tmp_path: Path) -> None:
    """Attention with a softcap or with sinks stays XLA's; with a window, or values of another size, it is ours."""
    check_family(family, tmp_path, "enginewright")
    section = stablehlo_section(Bundle.open(tmp_path / "b", trust="code"), "stablehlo")
    assert section.kernels == (KERNELS[:2] if family in ("gemma2", "gpt_oss") else KERNELS)


def needs_iree() -> None:
    for part, package in (("runtime", "iree-base-runtime"), ("compiler", "iree-base-compiler")):
        pytest.importorskip(f"iree.{part}", reason=f"{package} is not installed: pip install 'enginewright[iree]'")


@pytest.mark.matrix
def test_a_family_by_iree(tmp_path: Path) -> None:
    needs_iree()
    check_family("gpt_oss", tmp_path, iree=True)


@pytest.mark.soak
@pytest.mark.parametrize("family", working_families(recurrent=False))
def test_every_family(family: str, tmp_path: Path) -> None:
    plain = check_family(family, tmp_path / "plain")
    ours = check_family(family, tmp_path / "ours", "enginewright")
    print(f"\n{family}: {plain:.1e}, by our kernels {ours:.1e}")


@pytest.mark.soak
@pytest.mark.parametrize("family", working_families(recurrent=False))
def test_every_family_by_iree(family: str, tmp_path: Path) -> None:
    needs_iree()
    print(f"\n{family}: {check_family(family, tmp_path, iree=True):.1e}")
