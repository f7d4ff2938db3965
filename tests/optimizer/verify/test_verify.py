from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from enginewright.optimizer.shared.export_records import Comparison
from enginewright.optimizer.verify.packed_run import plan_steps
from enginewright.optimizer.verify.random_tokens import check_logits, relative_tolerance
from enginewright.optimizer.verify.verify import SEEDS, _exact
from enginewright.plugins.shared.errors import VerificationError
from enginewright.runtime.bundle.reader import Bundle


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
    found = relative_tolerance(Bundle.open(tiny_bundle).program("cpu"))
    assert found == pytest.approx(8 * 2**-23 * terms**0.5)


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
