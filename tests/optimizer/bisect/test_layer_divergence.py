"""The logit lens by layer: nothing between equal runs, and the layer that computes something else is the first."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from enginewright.optimizer.bisect.layer_divergence import layer_divergence
from enginewright.optimizer.bisect.runs import Run, Tensor
from enginewright.optimizer.bisect.source_run import SourceRun
from enginewright.optimizer.bisect.values import Values
from enginewright.passes.ir.value_name import LOGITS, ValueName
from enginewright.runtime.shared.progress import ProgressEvent
from tests.conftest import make_tiny_model

SEQUENCES = [torch.arange(5, 5 + n, dtype=torch.int32) for n in (9, 4)]


def run_of(family: str, scaled: int | None = None, layers: int = 3) -> SourceRun:
    model = make_tiny_model(family, **({"n_layer": layers} if family == "GPT2" else {"num_hidden_layers": layers}))
    if scaled is not None:
        blocks = model.base_model.h if family == "GPT2" else model.base_model.layers
        with torch.no_grad():
            next(p for n, p in blocks[scaled].named_parameters() if "down" in n or "mlp.c_proj.weight" in n).mul_(3)
    return SourceRun(model, family)


@pytest.mark.parametrize("family", ["Llama", "GPT2"])
@pytest.mark.parametrize("layer", [0, 1])
def test_what_a_layer_changes_shows_behind_it(family: str, layer: int) -> None:
    events: list[ProgressEvent] = []
    same = layer_divergence(run_of(family), run_of(family), SEQUENCES, events.append)
    assert [(event.stage, event.done, event.total) for event in events] == [("layers", n, 3) for n in range(4)]
    assert same is not None
    assert [(one.layer, one.kl_mean, one.kl_max) for one in same] == [(n, 0, 0) for n in (0, 1, 2, None)]
    rows = layer_divergence(run_of(family), run_of(family, scaled=layer), SEQUENCES)
    assert rows is not None
    assert [one.kl_mean > 1e-4 for one in rows] == [n > layer for n in range(4)]
    assert all(0 <= one.kl_mean <= one.kl_max for one in rows)


def test_the_lens_is_the_model_s_own_last_norm_and_head() -> None:
    """Without its last layer a model says what the lens reads in front of that layer."""
    whole, shorter = run_of("Llama", layers=3), run_of("Llama", layers=2)
    shorter.model.load_state_dict(
        {n: p for n, p in whole.model.state_dict().items() if n in shorter.model.state_dict()}
    )
    values = whole.values(SEQUENCES)
    last, stream = ValueName("model.norm", "input"), ValueName("model.layers.2.input_layernorm", "input")
    lens = whole.values(SEQUENCES, {last: values[stream]})[LOGITS]
    # The same operations in the same order: only the sums of a product of other shapes may differ.
    np.testing.assert_allclose(lens, shorter.values(SEQUENCES)[LOGITS], atol=1e-6)


class _Without:
    """A run that doesn't see the values of some modules, as where a fusion keeps them in registers."""

    def __init__(self, run: Run, hidden: str) -> None:
        self._run, self._hidden = run, hidden
        self.name, self.leaves, self.value_names = run.name, run.leaves, run.value_names

    def values(self, sequences: Sequence[torch.Tensor], given: Values | None = None) -> Values:
        values = self._run.values(sequences, given)
        return {name: value for name, value in values.items() if not name.path.startswith(self._hidden)}

    def tensors(self, path: str) -> list[Tensor]:
        return self._run.tensors(path)


def test_runs_that_have_no_such_values() -> None:
    whole = run_of("Llama")
    assert layer_divergence(whole, run_of("Llama", layers=2), SEQUENCES) is None
    assert layer_divergence(whole, _Without(run_of("Llama"), "nothing"), SEQUENCES) is not None
    for hidden in ("model.norm", "model.layers.1.", "lm_head", "model."):
        rows = layer_divergence(whole, _Without(run_of("Llama"), hidden), SEQUENCES)
        assert (rows is None) == (hidden != "lm_head"), hidden
