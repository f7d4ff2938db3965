"""The functions of recurrent layers are replaced while a model is traced, and refuse what no op means."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import Lfm2Config, Lfm2ForCausalLM
from transformers.models.lfm2 import modeling_lfm2

from enginewright.optimizer.capture.attention_interface import begin_forward, capturing, current_capture
from enginewright.optimizer.capture.recurrence_interface import (
    gated_delta_rule,
    replaced_recurrences,
    selective_scan,
    selective_scan_of_heads,
    short_convolution,
)
from enginewright.runtime.shared.errors import UnsupportedModelError


class Layer(torch.nn.Module):
    """Calls a function as a layer with a number does."""

    layer_idx = 3

    def forward(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        assert current_capture().recurrent_layer() == 3
        return function(*args, **kwargs)


def call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    layer = Layer()
    with capturing(layer) as capture:
        begin_forward(torch.tensor([0, 2, 5]), 5)
        result = layer(function, *args, **kwargs)
    assert capture.called == {3} and not capture.running
    return result


def test_names_are_replaced_and_restored() -> None:
    config = Lfm2Config(vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    model, original = Lfm2ForCausalLM(config), modeling_lfm2.causal_conv1d_fn
    with replaced_recurrences(model):
        assert modeling_lfm2.causal_conv1d_fn is short_convolution
    assert modeling_lfm2.causal_conv1d_fn is original


def test_requests_are_apart() -> None:
    """The first token of the second request sees nothing of the first one's."""
    x, weight = torch.randn(1, 4, 5), torch.randn(4, 3)
    result = call(short_convolution, x, weight, activation="silu")
    torch.testing.assert_close(result[0, :, 2], torch.nn.functional.silu(x[0, :, 2] * weight[:, 2]))


def test_both_scans_are_one_recurrence() -> None:
    """Mamba's function with rates that are one a channel is Mamba-2's with heads of one channel."""
    x, dt, rates = torch.randn(1, 4, 5), torch.rand(1, 4, 5), -torch.rand(4)
    b, c, skip, gate = torch.randn(1, 6, 5), torch.randn(1, 6, 5), torch.randn(4), torch.randn(1, 4, 5)
    one = call(selective_scan, x, dt, rates[:, None].expand(4, 6), b, c, skip, gate, delta_softplus=True)
    heads, groups = x.transpose(1, 2)[..., None], (value.transpose(1, 2)[:, :, None] for value in (b, c))
    two = call(selective_scan_of_heads, heads, dt.transpose(1, 2), rates, *groups, 0, skip, dt_softplus=True)
    torch.testing.assert_close(one, two[..., 0].transpose(1, 2) * torch.nn.functional.silu(gate))


@pytest.mark.parametrize(
    ("function", "shapes", "options", "named"),
    [
        (short_convolution, [(1, 4, 5), (4, 3)], {"activation": "mish"}, "'mish'"),
        (short_convolution, [(1, 4, 5), (4, 3)], {"initial_states": 1}, "initial_states"),
        (gated_delta_rule, [(1, 5, 2, 4)] * 3 + [(1, 5, 2)] * 2, {"initial_state": 1}, "initial_state"),
    ],
)
def test_what_no_op_means_is_refused(
    function: Callable[..., Any], shapes: list[tuple[int, ...]], options: dict[str, Any], named: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=named):
        call(function, *(torch.randn(shape) for shape in shapes), **options)
