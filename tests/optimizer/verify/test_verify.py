from __future__ import annotations

import importlib
from pathlib import Path

import numpy as np
import pytest

from enginewright.optimizer.recipes.recipe import load_recipe
from enginewright.optimizer.shared.export_records import Comparison, TextComparison
from enginewright.optimizer.verify.packed_run import plan_steps
from enginewright.optimizer.verify.random_tokens import check_logits, relative_tolerance
from enginewright.optimizer.verify.verify import SEEDS, _exact, lossy_hint, verify
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.shared.errors import VerificationError
from enginewright.runtime.shared.progress import silent


def comparison(error: float) -> Comparison:
    return Comparison(
        tokens=82, max_logit_error=error, largest_logit=10.0, kl_mean=error**2, kl_max=error, top1_agreement=1.0
    )


def test_a_difference_counts_if_all_tokens_show_it() -> None:
    errors = iter([0.5, 2e-4, 0.0])
    assert _exact(lambda _: comparison(next(errors)), 1e-4, "cpu") == (SEEDS[1], comparison(2e-4), 1e-3)
    assert next(errors) == 0.0  # no more was drawn than needed


def test_the_first_difference_is_told() -> None:
    errors = iter([0.25, 2e-3, 0.5])
    with pytest.raises(VerificationError, match=r"off by 0\.25, where rounding explains 0\.001 \(logits reach 10, KL"):
        _exact(lambda _: comparison(next(errors)), 1e-4, "cpu")


def test_the_tolerance_grows_with_what_is_summed(tiny_bundle: Path) -> None:
    """A tiny Llama: per layer qkv, o, gate and up of K = 64 and down of 128; the head 64. Table and norms don't sum."""
    terms = 2 * (64 + 64 + 64 + 128) + 64
    tolerance = relative_tolerance(Bundle.open(tiny_bundle).program("cpu"))
    assert tolerance == pytest.approx(8 * 2**-23 * terms**0.5)


@pytest.mark.parametrize("vocabulary", [7, 300])
def test_logits_that_cannot_be_compared(vocabulary: int) -> None:
    good = np.zeros((3, vocabulary), np.float32)
    bad = good.copy()
    bad[1, 2:4] = np.nan, np.inf
    check_logits(good, good)
    with pytest.raises(VerificationError, match=r"^the exported program gives 2 logits of .* NaN or infinite"):
        check_logits(bad, good)
    with pytest.raises(VerificationError, match=r"^the source gives 2 logits of .* NaN or infinite"):
        check_logits(good, bad)
    with pytest.raises(VerificationError, match=rf"gives {vocabulary} logits a token, the source {vocabulary + 1}"):
        check_logits(good, np.zeros((3, vocabulary + 1), np.float32))


def test_seeds_draw_other_tokens() -> None:
    drawn = [np.random.default_rng(seed).integers(0, 259, max(plan_steps(512).lengths)).tolist() for seed in SEEDS]
    assert len({tuple(d) for d in drawn}) == len(SEEDS)


def _costs(kl: float, kind: type[Comparison] = Comparison, **more: object) -> Comparison:
    figures = {"tokens": 82, "max_logit_error": 1.0, "largest_logit": 10.0, "kl_max": kl, "top1_agreement": 0.5}
    return kind(**{**figures, "kl_mean": kl, **more})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("random", "text", "wrong"),
    [
        (0.3, 0.04, None),  # as of Gemma 3 270M in int4: random tokens cost 5 times what a text does
        (0.6, 0.04, r"KL 0.6 .* random tokens, and the recipe's max_kl is 0.05, of which 10 times as much is allowed"),
        (0.01, 0.06, r"KL 0.06 nats a token on the text, and the recipe's max_kl is 0.05 \(top-1"),
        (0.06, None, r"KL 0.06 nats a token on random tokens, and the recipe's max_kl is 0.05 \(top-1"),
        (0.04, None, None),
    ],
)
def test_a_recipe_is_judged_by_a_text_where_there_is_one(
    random: float,
    text: float | None,
    wrong: str | None,
    tiny_bundle: Path,
    tiny_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = importlib.import_module("enginewright.optimizer.verify.verify")
    monkeypatch.setattr(module, "compare_random_tokens", lambda *given: _costs(random))
    of_text = {
        "text": "t",
        "window": 8,
        "windows": 1,
        "windows_in_text": 1,
        "perplexity": 2.0,
        "source_perplexity": 2.0,
    }
    monkeypatch.setattr(module, "compare_text", lambda *given: _costs(text or 0.0, TextComparison, **of_text))
    if text is None:
        monkeypatch.setattr(module, "why_no_text", lambda *given: "the model has no tokenizer")
    if wrong is None:
        report = verify(Bundle.open(tiny_bundle), tiny_folder, load_recipe("int8"), "cpu", silent)
        assert report.random_tokens.kl_mean == random
        return
    with pytest.raises(VerificationError, match=wrong) as error:
        verify(Bundle.open(tiny_bundle), tiny_folder, load_recipe("int8"), "cpu", silent)
    assert "--recipe bf16" in str(error.value.hint)


@pytest.mark.parametrize(
    ("recipe", "instead"),
    [
        ("int4", "int4-awq or int4-gptq, as small and closer to the source, or int8"),
        ("int4-gptq", "--recipe int8;"),
        ("int8", "--recipe bf16;"),
        ("auto", "optimize recipes"),
        ("bf16", "optimize recipes"),
    ],
)
def test_a_recipe_that_loses_less_is_named(recipe: str, instead: str) -> None:
    hint = lossy_hint(load_recipe(recipe))
    assert instead in hint and "max_kl in [budget]" in hint
