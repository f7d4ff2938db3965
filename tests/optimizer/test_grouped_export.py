"""Fewer key/value heads from recipe to runtime: what is served, what the cache takes, numbers that are searched for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from enginewright.optimizer.bisect.replay import replay
from enginewright.optimizer.capture import capture
from enginewright.optimizer.export import export
from enginewright.optimizer.recipes.recipe import Recipe, load_recipe
from enginewright.optimizer.recipes.sections import BudgetSection, CalibrationSection
from enginewright.optimizer.report.document import read_report
from enginewright.optimizer.report.lines import kv_heads_lines
from enginewright.passes.framework.kv_options import KvHeadsOverride, KvOptions
from enginewright.passes.framework.token_sequences import packed_inputs
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.engine.llm import LLM
from enginewright.runtime.requests.sampling import SamplingParams
from enginewright.runtime.shared.errors import RecipeError, VerificationError
from enginewright.runtime.shared.progress import silent
from tests.conftest import make_tiny_model

BEFORE = 2 * 4 * (16 + 16) * 4
"""Bytes of a token in the source's cache: layers, heads, sizes of a key and a value, bytes of a float."""


def recipe(attention: KvOptions, weights: str = "f32", max_kl: float = 5.0) -> Recipe:
    small = CalibrationSection(tokens=256, sequence_length=32)
    update = {"name": "grouped", "attention": attention, "budget": BudgetSection(max_kl=max_kl), "calibration": small}
    return load_recipe(weights).model_copy(update=update)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return make_tiny_model("Llama", num_key_value_heads=4)


@pytest.mark.matrix
def test_a_quarter_of_the_heads_is_served_as_the_program_says(model: PreTrainedModel, tmp_path: Path) -> None:
    path, chosen = tmp_path / "grouped.bundle", recipe(KvOptions(kv_heads=1))
    report = export(model, path, recipe=chosen)
    (heads,) = report.kv_heads
    assert (heads.bytes_per_token_before, heads.bytes_per_token) == (BEFORE, BEFORE // 4)
    assert set(heads.heads.values()) == {(4, 1)} and heads.error is not None and 0 < heads.error < 1
    document = read_report(Bundle.open(path)).document
    assert document is not None
    assert kv_heads_lines(document)[0] == "256 bytes a token, 1,024 before (25%): 4 heads to 1 in 2 layers"
    assert "that costs a KL of" in kv_heads_lines(document)[1]

    captured = capture(model)
    stages = replay(model, captured, chosen, "cpu", calibration=None, scratch=tmp_path, progress=silent)
    prompts = [[5, 9, 200, 31, 7], [77, 3]]
    with LLM(path) as llm:
        info = llm.info()
        slots = info["kv_cache_tokens"]
        assert info["kv_cache_bytes"] / slots == BEFORE // 4  # what is really allocated
        outputs = llm.generate(prompts, SamplingParams(max_tokens=6, ignore_eos=True))
    for prompt, output in zip(prompts, outputs, strict=True):
        ids = list(prompt)
        for token in output.token_ids:
            logits = stages[-1].program.evaluate(packed_inputs(stages[-1].program, [torch.tensor(ids)]))[0]
            assert int(logits[-1].argmax()) == token
            ids.append(token)


def test_integers_go_on_top(model: PreTrainedModel, tmp_path: Path) -> None:
    section = KvOptions(kv_heads=2, method="mean", grouping="neighbours")
    report = export(model, tmp_path / "int8.bundle", recipe=recipe(section, "int8"))
    assert report.kv_heads[0].bytes_per_token == (BEFORE // 2) // 2
    assert report.quantization is not None and report.quantization.values > 0


def test_numbers_within_a_cache(model: PreTrainedModel, tmp_path: Path) -> None:
    path, section = tmp_path / "searched.bundle", KvOptions(max_cache_bytes_per_token=BEFORE * 5 // 8)
    report = export(model, path, recipe=recipe(section))
    (heads,) = report.kv_heads
    assert heads.bytes_per_token == BEFORE * 5 // 8 and heads.search is not None
    alone = {layer.where: {o.kv_heads: o.predicted_kl for o in layer.options} for layer in heads.search.layers}
    # One layer must give up three of its heads: that which costs less alone.
    cheapest = min(alone, key=lambda where: alone[where][1])
    assert heads.heads == {cheapest: (4, 1)}
    assert heads.search.chosen.measured_kl == max(heads.search.measured_kl.values())
    again = load_recipe(path / "report" / "recipe.toml")
    assert again.attention is not None
    assert again.attention.overrides == (KvHeadsOverride(layers=cheapest, kv_heads=1),)


def test_budgets_that_nothing_meets_leave_nothing(model: PreTrainedModel, tmp_path: Path) -> None:
    cases = (
        (KvOptions(max_kl=1e-7), VerificationError, r"within max_kl = 1e-07: the least that was found has a KL"),
        (
            KvOptions(max_cache_bytes_per_token=8),
            VerificationError,
            "each layer that can have it takes 256 bytes",
        ),
        (KvOptions(kv_heads=3), RecipeError, "does not divide its 4"),
    )
    for section, error, message in cases:
        with pytest.raises(error, match=message):
            export(model, tmp_path / "none.bundle", recipe=recipe(section))
        assert not list(tmp_path.iterdir())
