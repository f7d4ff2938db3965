"""docs/use/families.md is what exporting and running a tiny model of every family gives.

``pytest -m matrix tests/acceptance/test_families_table.py --update-golden`` writes the page anew.
"""

from __future__ import annotations

import fcntl
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from enginewright.optimizer.capture import CapturedModel, capture
from enginewright.optimizer.export import export
from enginewright.optimizer.recipes.recipe import load_recipe
from enginewright.optimizer.recipes.sections import BudgetSection
from enginewright.runtime.shared.errors import UnsupportedModelError, VerificationError

from .test_families import compare, saved
from .tiny_configs import WHOLES, NoTinyModelError, tiny_family, tiny_whole

_ORIGINAL = "requests within the context that is fixed at export (`--context`)"
_NO_IMAGES = "text alone: no images or sounds"

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    # Families of which another configuration fares otherwise than the first: its model type, and its fields.
    "phi3, LongRoPE": (
        "phi3",
        {
            "original_max_position_embeddings": 32,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "original_max_position_embeddings": 32,
                "short_factor": [1.0 + 0.05 * i for i in range(8)],
                "long_factor": [2.0 + 0.5 * i for i in range(8)],
            },
        },
    ),
    "llama, dynamic NTK": (
        "llama",
        {
            "max_position_embeddings": 32,
            "rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4},
        },
    ),
    "bert, as an encoder": ("bert", {"is_decoder": False}),
    "lfm2, without convolutions": ("lfm2", {"layer_types": ["full_attention"] * 2}),
}

LIMITS = {"phi3, LongRoPE": _ORIGINAL, "llama, dynamic NTK": _ORIGINAL, "fuyu": _NO_IMAGES, "emu3": _NO_IMAGES}
"""Notes on families that need something else."""

PARTS = {f"{family}, --part text": family for family in WHOLES}
"""Models that take images beside text, of which the text decoder is exported."""

FAMILIES = [*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *VARIANTS, *PARTS]

# KL bounds that the page states, in nats per token: of tiny random models, for which 8 bits are coarser than for
# trained ones. The first that is half again what was measured is stated, so that other kernels keep to it too.
_BOUNDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)

HEADING = """# Families

Every family of decoders that transformers has, and what becomes of it. This page is made by
`tests/acceptance/test_families_table.py`, which saves, exports and runs a tiny random model of each, and fails when
a row is out of date.

- **works**: a prefill and 8 decode steps through the CPU runtime in 32-bit floats are within 1e-4 of transformers'
  logits. The number is what `int8` stays below on random tokens: the mean KL divergence per token from the same model
  in 32-bit floats. (A tiny random model loses more than a trained one.)
- **refused**: `optimize export` ends with that message, and writes nothing.
- **not tried**: no tiny model can be built here.

Nothing in Enginewright knows a family by its name: another model works if its parts do.

A model that also takes images or sounds (`...ForConditionalGeneration`) is refused as a whole.
`optimize export --part text` takes its [text decoder](models.md#models-that-take-images-or-sounds), whose
family may have a row of its own: gemma3_text for Gemma 3, mistral for Mistral 3, llama for LLaVA. Rows with
`--part text` are of whole models, saved and exported so; they are compared with the whole, given text alone.

| family | result | int8: KL at most | why, or within which limit |
| --- | --- | --- | --- |
"""


def _row(family: str, folder: Path, stated: float | None) -> str:
    """The row of a family. ``stated`` is the KL bound that the page has now, kept where it holds."""
    model_type, overrides = VARIANTS.get(family, (family, {}))
    part = "text" if family in PARTS else None
    try:
        model = tiny_whole(PARTS[family]) if part else tiny_family(model_type, **overrides)
    except NoTinyModelError as e:
        return _cells(family, "not tried", "", _plain(str(e)))
    source = saved(model, folder / "saved")
    try:
        compare(model, folder / "exact.bundle", (21, 3), 8, "best", source=source, part=part)
    except UnsupportedModelError as e:
        return _cells(family, "refused", "", _plain(e.message))
    except VerificationError as e:  # its figures are left out: they are another processor's as well
        return _cells(family, "refused", "", _plain(e.message.partition(":")[0]))
    recipe = load_recipe("int8").model_copy(update={"budget": BudgetSection(max_kl=_BOUNDS[-1])})
    try:
        (verification,) = export(source, folder / "int8.bundle", recipe=recipe, part=part).verification
    except UnsupportedModelError as e:  # calibration
        return _cells(family, "works", "", f"int8: {_plain(e.message)}")
    kl = verification.random_tokens.kl_mean
    bound = stated if stated is not None and kl <= stated else next(b for b in _BOUNDS if 1.5 * kl <= b)
    return _cells(family, "works", f"{bound:g}", LIMITS.get(family, ""))


def _capture_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both exports of a family begin with copies of the same captured program: capturing is most of their time."""
    captures: list[CapturedModel] = []

    def once(source: Any, **given: Any) -> CapturedModel:
        if not captures:
            captures.append(capture(source, **given))
        return replace(captures[0], program=captures[0].program.copy())

    monkeypatch.setattr("enginewright.optimizer.export.stages.capture", once)


def _plain(message: str) -> str:
    """A message on one line of a table, without addresses and numbers of lines that a patch release moves."""
    first = " ".join(message.split())
    return re.sub(r"\.py:\d+ in ", ".py, ", first).replace("|", "\\|")[:300]


def _cells(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


def _rows(text: str) -> dict[str, str]:
    """The rows of the page by family."""
    lines = [line for line in text.splitlines() if line.startswith("| ") and not line.startswith(("| ---", "| family"))]
    return {line.split(" | ")[0].removeprefix("| "): line for line in lines}


@pytest.fixture(scope="session")
def page(repository: Path) -> Path:
    return repository / "docs" / "use" / "families.md"


@pytest.mark.matrix
@pytest.mark.parametrize("family", FAMILIES)
def test_row(
    family: str, page: Path, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    _capture_once(monkeypatch)
    torch.manual_seed(0)
    rows = _rows(page.read_text(encoding="utf-8")) if page.exists() else {}
    cells = rows.get(family, "").split(" | ")
    stated = float(cells[2]) if len(cells) > 2 and cells[2].strip() else None
    row = _row(family, tmp_path, stated)
    if request.config.getoption("--update-golden"):
        _update(page, family, row)
    else:
        assert rows.get(family) == row, (
            "docs/use/families.md is stale: run this file's tests with -m matrix --update-golden"
        )


def test_the_page_has_every_family_and_no_other(page: Path) -> None:
    assert list(_rows(page.read_text(encoding="utf-8"))) == sorted(FAMILIES)


def test_as_many_families_work_as_are_promised(page: Path) -> None:
    works = [r for r in _rows(page.read_text(encoding="utf-8")).values() if r.split(" | ")[1] == "works"]
    assert len(works) >= 110


def _update(page: Path, family: str, row: str) -> None:
    with open(page, "a+", encoding="utf-8") as file:  # workers wait for one another
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        rows = {f: r for f, r in _rows(file.read()).items() if f in FAMILIES} | {family: row}
        file.truncate(0)
        file.write(HEADING + "".join(rows[f] + "\n" for f in sorted(rows)))
