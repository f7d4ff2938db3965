"""The search for heads within an export: which tokens measure, and which ones check."""

from __future__ import annotations

import pytest

from enginewright.optimizer.capture import capture
from enginewright.optimizer.recipes.attention_section import AttentionSection
from enginewright.optimizer.recipes.recipe import Recipe
from enginewright.optimizer.search import kv_heads_for_export as for_export
from enginewright.optimizer.search.kv_heads_for_export import choose_heads_for_export
from enginewright.optimizer.shared.progress import silent
from enginewright.passes.framework.base import PassContext
from enginewright.plugins.shared.errors import RequestError
from tests.conftest import make_tiny_model
from tests.optimizer.search.formats_prepared import random_tokens

RECIPE = Recipe(name="mine", attention=AttentionSection(max_kl=0.1))


def test_layers_are_measured_with_one_half_and_checked_with_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    captured, tokens = capture(make_tiny_model("Llama")), random_tokens(20, 21, 22, 23)
    seen: list[tuple[object, ...]] = []
    monkeypatch.setattr(for_export, "choose_heads", lambda *given: seen.append(given))
    choose_heads_for_export(captured, RECIPE, PassContext(calibration=tuple(tokens)), silent)
    program, recipe, parameters, own, checks, context, _ = seen[0]
    assert (program, recipe, parameters) == (captured.program, RECIPE, captured.model_info.parameters)
    assert [len(s) for s in own] == [20, 22]  # type: ignore[attr-defined]
    assert [len(s) for s in checks[0].sequences] == [21, 23]  # type: ignore[index]
    assert [c.origin for c in checks][-1] == "random tokens"  # type: ignore[attr-defined]
    assert isinstance(context, PassContext) and len(context.calibration) == 4
    with pytest.raises(RequestError, match="there is only one"):
        choose_heads_for_export(captured, RECIPE, PassContext(calibration=tuple(tokens[:1])), silent)
