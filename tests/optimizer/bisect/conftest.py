"""Fixtures of bisect's tests: captures and programs of a recipe, which take seconds, are made once."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from enginewright.optimizer.bisect import bisection
from enginewright.optimizer.bisect.replay import Stage, replay
from enginewright.optimizer.capture import CapturedModel, capture
from enginewright.optimizer.recipes.recipe import Recipe, load_recipe
from enginewright.runtime.shared.progress import silent
from tests.optimizer.bisect.planting import Bundles, write_bundle
from tests.passes.captured import tiny


@dataclass
class Made:
    """Captures by model, and stages by model and recipe. Nobody changes them."""

    captures: dict[int, CapturedModel] = field(default_factory=dict)
    stages: dict[tuple[int, str], list[Stage]] = field(default_factory=dict)

    def capture(self, source: Any, **options: Any) -> CapturedModel:
        """Captures a source; a model object is captured once."""
        if not isinstance(source, PreTrainedModel):
            return capture(source, **options)
        if id(source) not in self.captures:
            self.captures[id(source)] = capture(source, **options)
        captured = self.captures[id(source)]
        return replace(captured, program=captured.program.copy())

    def replay(self, source: Any, captured: CapturedModel, recipe: Recipe, *args: Any, **options: Any) -> list[Stage]:
        """Replays as ``replay`` does, once."""
        key = id(source), recipe.name
        if key not in self.stages:
            self.stages[key] = replay(source, captured, recipe, *args, **options)
        return self.stages[key]


@pytest.fixture(scope="session")
def made() -> Made:
    return Made()


@pytest.fixture
def captured_once(monkeypatch: pytest.MonkeyPatch, made: Made) -> None:
    """Models are captured once for all tests; each gets a program of its own."""
    monkeypatch.setattr(bisection, "capture", made.capture)


@pytest.fixture
def replayed_once(captured_once: None, monkeypatch: pytest.MonkeyPatch, made: Made) -> None:
    """And go through the passes of a recipe once."""
    monkeypatch.setattr(bisection, "replay", made.replay)


@pytest.fixture(scope="session")
def bundles(tmp_path_factory: pytest.TempPathFactory, made: Made) -> Bundles:
    """``Bundles`` as an export writes them, but without its comparisons with the source."""
    folder = tmp_path_factory.mktemp("bundles")

    def make(family: str, recipe: str) -> Path:
        path = folder / f"{family}-{recipe}"
        if not path.exists():
            model, chosen = tiny(family)[0], load_recipe(recipe.removesuffix("-unscaled"))
            if recipe.endswith("-unscaled"):
                unscaled = chosen.weights.model_copy(update={"smooth": False})
                chosen = chosen.model_copy(update={"name": recipe, "weights": unscaled})
            captured = made.capture(model)
            stages = made.replay(model, captured, chosen, "cpu", calibration=None, scratch=folder, progress=silent)
            write_bundle(captured, chosen, stages[-1].program, path)
        return path

    return make
