"""The interface rejects other attentions, and recognises masks by their values."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from transformers.masking_utils import (
    and_masks,
    bidirectional_mask_function,
    causal_mask_function,
    chunked_causal_mask_function,
    or_masks,
    sliding_window_bidirectional_mask_function,
    sliding_window_causal_mask_function,
    sliding_window_overlay,
)

from enginewright.optimizer.capture.attention_interface import (
    AttentionMask,
    attention_function,
    begin_forward,
    capturing,
    known_mask,
    mask_function,
)
from enginewright.passes.ops.attention import attention
from enginewright.runtime.shared.errors import UnsupportedModelError


class Attention(torch.nn.Module):
    def __init__(self, layer_idx=0):
        super().__init__()
        self.layer_idx = layer_idx


class Decoder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.ModuleList([Attention(0), Attention(1)])


def call(layers=(0,), mask=None, whole_texts=False, **kwargs):
    model = Decoder()
    q, k, v = torch.randn(1, 4, 5, 8), torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 6)
    q_start = torch.tensor([0, 2, 5])
    with capturing(model, whole_texts=whole_texts) as capture:
        begin_forward(q_start, 5)
        for layer in layers:
            out, weights = attention_function(
                model.inner[layer], q, k, v, AttentionMask(0) if mask is None else mask, **kwargs
            )
    assert weights is None
    q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
    return out, (q, k, v, q_start), capture


@pytest.mark.parametrize(("window", "softcap", "scaling"), [(0, None, None), (2, 3.0, 0.7)])
def test_calls_ew_attention(window, softcap, scaling):
    sinks = torch.randn(4) if softcap else None
    out, packed, capture = call(
        layers=(1,),
        mask=AttentionMask(window),
        scaling=scaling,
        softcap=softcap,
        s_aux=sinks,
        sliding_window=window or None,
        position_ids=torch.arange(5),
        output_attentions=False,
        head_mask=None,
    )
    want = attention(*packed, 1, 8**-0.5 if scaling is None else scaling, window, softcap or 0.0, sinks)
    assert torch.equal(out, want[None])
    assert capture.layers == [1]


@pytest.mark.parametrize(
    ("kwargs", "named"),
    [
        ({"position_bias": torch.zeros(1)}, "position_bias"),
        ({"alibi": torch.zeros(1)}, "alibi"),
        ({"head_mask": torch.ones(4)}, "head_mask"),
        ({"dropout": 0.1}, "dropout"),
        ({"is_causal": False}, "is_causal"),
        ({"sliding_window": 4}, "sliding_window"),
    ],
)
def test_unknown_meaning_is_refused(kwargs, named):
    with pytest.raises(UnsupportedModelError, match=rf"inner\.0.*{named}"):
        call(**kwargs)


def test_own_masks_are_refused():
    with pytest.raises(UnsupportedModelError, match=r"inner\.0.*attention_mask"):
        call(mask=torch.zeros(1, 1, 5, 5))
    model = Decoder()
    with capturing(model), pytest.raises(UnsupportedModelError, match="no mask"):
        begin_forward(torch.tensor([0, 5]), 5)
        attention_function(model.inner[0], *torch.randn(3, 1, 2, 5, 8), None)


def test_a_layer_that_attends_again_gets_a_cache_of_its_own():
    assert call(layers=(0, 0, 1, 0))[2].layers == [0, 1, 2, 3]


@pytest.mark.parametrize("number", [None, -1])
def test_shared_attention_has_the_number_of_its_place(number):
    model = Decoder()
    model.config = LlamaConfig(num_hidden_layers=2)
    model.inner[1].layer_idx = number
    with capturing(model) as capture:
        begin_forward(torch.tensor([0, 5]), 5)
        for _ in range(2):
            attention_function(model.inner[1], *torch.randn(3, 1, 2, 5, 8), AttentionMask(0))
    assert capture.layers == [1, 2]


def test_a_layer_without_a_number_is_refused():
    with pytest.raises(UnsupportedModelError, match=r"Linear has no layer_idx"):
        model = Decoder()
        with capturing(model):
            begin_forward(torch.tensor([0, 5]), 5)
            attention_function(torch.nn.Linear(1, 1), *torch.randn(3, 1, 2, 5, 8), AttentionMask(0))


def test_slopes_are_passed_on():
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625])
    out, packed, _ = call(slopes=slopes)
    assert torch.equal(out[0], attention(*packed, 0, 8**-0.5, 0, 0.0, None, slopes))


def test_a_new_forward_pass_begins_anew():
    model = Decoder()
    with capturing(model) as capture:
        for _ in range(2):
            begin_forward(torch.tensor([0, 5]), 5)
            attention_function(model.inner[0], *torch.randn(3, 1, 2, 5, 8), AttentionMask(0))
    assert capture.layers == [0]


@pytest.mark.parametrize(
    ("mask", "windows", "expected"),
    [
        (causal_mask_function, [], AttentionMask(0)),
        (causal_mask_function, [8], AttentionMask(0)),
        (sliding_window_causal_mask_function(8), [8], AttentionMask(8)),
        (sliding_window_causal_mask_function(4096), [4096], AttentionMask(4096)),
        (sliding_window_causal_mask_function(8), [9], None),
        (sliding_window_causal_mask_function(8), [], None),
        (bidirectional_mask_function, [], AttentionMask(0, causal=False)),
        (sliding_window_bidirectional_mask_function(64), [64], AttentionMask(65, causal=False)),
        (lambda b, h, q, k: (q - k).abs() < 256, [511], AttentionMask(256, causal=False)),
        (lambda b, h, q, k: (q - k).abs() < 257, [512], AttentionMask(257, causal=False)),
        (sliding_window_bidirectional_mask_function(64), [62], None),
        (lambda b, h, q, k: (k - q < 8) & (q - k < 9), [8], None),
        (chunked_causal_mask_function(8192, torch.zeros(1, dtype=torch.long)), [], None),
        (or_masks(causal_mask_function, lambda b, h, q, k: (q < 4) & (k < 4)), [], None),
        (and_masks(causal_mask_function, sliding_window_overlay(5)), [5], AttentionMask(5)),
        (lambda b, h, q, k: k < q, [], None),
    ],
)
def test_masks_are_known_by_their_values(mask, windows, expected):
    assert known_mask(mask, longest=131072, windows=windows) == expected


def test_masks_of_another_kind_are_refused_by_name_where_they_are_used():
    assert mask_function(mask_function=sliding_window_causal_mask_function(8), local_size=8) == AttentionMask(8)
    other = mask_function(mask_function=chunked_causal_mask_function(8, torch.zeros(1, dtype=torch.long)))
    with pytest.raises(UnsupportedModelError, match=r"inner\.0: the mask .*and_mask.* is neither causal"):
        call(mask=other[:, :, :, :5])


def test_bidirectional_masks_are_for_whole_texts():
    mask = AttentionMask(3, causal=False)
    with pytest.raises(
        UnsupportedModelError, match=r"inner\.0: its mask is neither causal .*: a token sees those after"
    ):
        call(mask=mask)
    out, packed, _ = call(mask=mask, whole_texts=True, is_causal=False)
    assert torch.equal(out[0], attention(*packed, 0, 8**-0.5, 3, 0.0, None, causal=False))


def test_no_mask_is_bidirectional_where_the_module_says_so():
    model = Decoder()
    model.inner[0].is_causal = False
    q, k, v = torch.randn(3, 1, 2, 5, 8)
    with capturing(model, whole_texts=True):
        begin_forward(torch.tensor([0, 5]), 5)
        out, _ = attention_function(model.inner[0], q, k, v, None)
    packed = (x[0].transpose(0, 1) for x in (q, k, v))
    assert torch.equal(out[0], attention(*packed, torch.tensor([0, 5]), 0, 8**-0.5, 0, 0.0, None, causal=False))
