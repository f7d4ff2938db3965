from __future__ import annotations

import math

import pytest

from enginewright.optimizer.report.document import ReportDocument
from enginewright.optimizer.report.quality import quality_sentence

RANDOM = {"tokens": 82, "max_logit_error": 1.5, "largest_logit": 30.0, "kl_mean": 0.02, "kl_max": 0.1}
RANDOM |= {"top1_agreement": 0.9}
TEXT = RANDOM | {"tokens": 1533, "windows": 3, "windows_in_text": 18, "perplexity": 34.1, "source_perplexity": 33.9}
TEXT |= {"kl_mean": 0.0054, "top1_agreement": 0.9615}


def of(*entries: dict[str, object]) -> str | None:
    return quality_sentence(ReportDocument.model_validate({"verification": entries}))


def test_a_lossy_bundle_is_judged_by_its_text() -> None:
    assert of({"target": "cpu", "exact": False, "max_kl": 0.05, "random_tokens": RANDOM, "text": TEXT}) == (
        "The bundle picks the same token as the source in 96.2 % of 1,533 positions of a text; "
        "KL 0.0054 of 0.05 allowed: what the source would say is 0.54 % less likely here."
    )


def test_without_a_text_random_tokens_are_named() -> None:
    sentence = of({"target": "cpu", "exact": False, "max_kl": None, "random_tokens": RANDOM})
    assert sentence is not None
    assert "in 90.0 % of 82 positions of random tokens; KL 0.02: " in sentence


@pytest.mark.parametrize("kl", [0.001, 0.3])
def test_the_share_is_what_kl_means(kl: float) -> None:
    sentence = of({"target": "cpu", "exact": False, "random_tokens": RANDOM, "text": TEXT | {"kl_mean": kl}})
    assert sentence is not None
    assert f"is {100 * (1 - math.exp(-kl)):.2g} % less likely" in sentence


def test_an_exact_bundle_says_what_rounding_left() -> None:
    found = of({"target": "cpu", "exact": True, "tolerance": 0.01, "random_tokens": RANDOM | {"max_logit_error": 2e-4}})
    assert found == (
        "The bundle computes what the source does: logits differ by 0.0002 at most in 82 positions of random tokens, "
        "where rounding explains 0.01."
    )


def test_the_worst_of_several_targets_counts() -> None:
    exact = {"target": "cpu", "exact": True, "tolerance": 0.01, "random_tokens": RANDOM}
    good = {"target": "onnx", "exact": False, "random_tokens": RANDOM, "text": TEXT}
    bad = good | {"target": "far", "text": TEXT | {"kl_mean": 0.2}}
    sentence = of(exact, good, bad)
    assert sentence is not None
    assert "KL 0.2: " in sentence
    assert sentence.endswith(" (target far, the farthest of 3).")


def test_nothing_compared_says_nothing() -> None:
    assert of() is None
