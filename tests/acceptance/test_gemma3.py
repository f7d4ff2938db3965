"""A second real model: Gemma 3 270M from a file of K-quants, with sliding windows and a vocabulary of 262,144."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import enginewright as ew
from enginewright.optimizer.export import export
from enginewright.optimizer.export.report import ExportReport

from .test_invariance import run

pytestmark = pytest.mark.soak


@pytest.fixture(scope="module")
def exported(gemma3_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ExportReport]:
    bundle = tmp_path_factory.mktemp("gemma3") / "gemma3.bundle"
    return bundle, export(gemma3_gguf, bundle, recipe="int8", targets=("cpu",))


def test_int8_is_close_to_the_source(exported: tuple[Path, ExportReport]) -> None:
    _, report = exported
    (verification,) = report.verification
    assert verification.text is not None
    # Measured: 0.0037.
    assert verification.text.kl_mean < 0.008


def test_it_continues_a_text(exported: tuple[Path, ExportReport]) -> None:
    with ew.LLM(exported[0]) as llm:
        [result] = llm.generate("One, two, three, four,", ew.SamplingParams(max_tokens=4))
    assert result.text == " five, six,"


def test_tokens_are_the_same_in_a_batch_and_in_chunks_on_both_sides_of_the_window(
    exported: tuple[Path, ExportReport],
) -> None:
    rng = np.random.default_rng(4)
    texts = [rng.integers(3, 262_144, n).tolist() for n in (1, 33, 64, 530)]  # its windows are of 512
    alone = run(exported[0], texts, chunk=4096, together=False, threads=1)
    for chunk, together, threads in ((4096, True, 2), (100, True, 1)):
        other = run(exported[0], texts, chunk=chunk, together=together, threads=threads)
        for a, b in zip(alone, other, strict=True):
            assert a.tobytes() == b.tobytes()
