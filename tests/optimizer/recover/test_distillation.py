"""The loss is the divergence from the source, and hidden states are those of the same norms."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from enginewright.optimizer.capture import capture
from enginewright.optimizer.recipes.recipe import load_recipe
from enginewright.optimizer.recover.distillation import Teacher, divergence, loss_of, measure
from enginewright.optimizer.recover.hidden_states import HiddenStates
from enginewright.optimizer.recover.prepare import Prepared, prepare
from enginewright.runtime.shared.progress import silent
from tests.conftest import make_tiny_model


@pytest.fixture(scope="module")
def both() -> tuple[Any, Prepared]:
    model = make_tiny_model("Llama")
    return model, prepare(capture(model), load_recipe("f32"), (), scratch=None, progress=silent)


@pytest.mark.parametrize(("rows", "vocabulary"), [(3, 7), (10, 50)])
def test_divergence_is_kl_in_nats(rows: int, vocabulary: int) -> None:
    generator = torch.Generator().manual_seed(0)
    logits, source = torch.randn(2, rows, vocabulary, generator=generator).double()
    p, q = source.softmax(-1), logits.softmax(-1)
    expected = (p * (p.log() - q.log())).sum()
    assert float(divergence(logits, source, 1.0)) == pytest.approx(float(expected), rel=1e-9)
    assert float(divergence(source, source, 2.0)) == 0.0
    p, q = (source / 2).softmax(-1), (logits / 2).softmax(-1)
    expected = 4 * (p * (p.log() - q.log())).sum()
    assert float(divergence(logits, source, 2.0)) == pytest.approx(float(expected), rel=1e-9)


def test_an_unchanged_model_has_no_loss_and_a_changed_one_does(both: tuple[Any, Prepared]) -> None:
    model, prepared = both
    module, teacher = prepared.module, Teacher(model, 512, 1 << 30)
    tokens = [torch.arange(3, 3 + n) for n in (9, 14)]  # of different lengths: the source's are padded
    hidden = HiddenStates(module.program, teacher.model)
    assert float(loss_of(module, teacher, tokens, 1.0, hidden, 1.0).detach()) < 1e-6
    measured = measure(module, teacher, tokens, 7)
    assert measured.step == 7
    assert measured.kl < 1e-7
    assert measured.perplexity == pytest.approx(measured.source_perplexity, rel=1e-5)
    down = next(p for n, p in module.named_weights().items() if "layers.0.mlp.down_proj" in n)
    before = down.data.clone()
    down.data.mul_(1.5)
    plain = float(loss_of(module, teacher, tokens, 1.0).detach())
    with_hidden = float(loss_of(module, teacher, tokens, 1.0, hidden, 1.0).detach())
    down.data.copy_(before)
    # Norms before that layer's end see what they saw; two of the five come behind it.
    assert with_hidden > plain > 1e-4
