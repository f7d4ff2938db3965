"""KL between logits: its definition, at two sizes, and nothing between equal ones."""

from __future__ import annotations

import pytest
import torch

from enginewright.passes.framework import divergence
from enginewright.passes.framework.divergence import mean_kl


@pytest.mark.parametrize(("rows", "vocabulary", "together"), [(3, 7, 1 << 22), (11, 50, 100)])
def test_the_mean_over_rows(rows: int, vocabulary: int, together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(divergence, "_ELEMENTS", together)  # two rows at a time
    generator = torch.Generator().manual_seed(rows)
    a, b = (torch.randn(rows, vocabulary, generator=generator) for _ in range(2))
    p, q = a.double().softmax(-1), b.double().softmax(-1)
    assert mean_kl(a, b) == pytest.approx(float((p * (p / q).log()).sum(-1).mean()), rel=1e-5)
    assert mean_kl(a, a) == 0
