"""TrainableProgram: the program's own numbers, transformers' own gradients, and the exporter's own integers."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from enginewright.optimizer.capture import CapturedModel, capture
from enginewright.optimizer.recipes.recipe import Recipe, load_recipe
from enginewright.optimizer.recover.differentiable import recovered_in
from enginewright.optimizer.recover.prepare import Prepared, prepare
from enginewright.optimizer.recover.straight_through import RoundedWeight, straight_through
from enginewright.passes.framework.token_sequences import packed_inputs
from enginewright.passes.ir.prequantized import CodeFormat, Codes
from enginewright.passes.ir.quantized import QuantizedValues
from enginewright.runtime.shared.progress import silent
from tests.acceptance.tiny_configs import tiny_family
from tests.conftest import make_tiny_model

EXACT = 1e-5
"""Sums of some hundred float32 products in another order, relative to the largest of what is compared."""


@cache
def captured(family: str) -> tuple[Any, CapturedModel]:
    model = tiny_family(family) if family.islower() else make_tiny_model(family)
    return model, capture(model)


def prepared(family: str, recipe: Recipe) -> Prepared:
    return prepare(captured(family)[1], recipe, (), scratch=None, progress=silent)


def sequences(lengths: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, 250, (n,), generator=generator) for n in lengths]


def next_token_loss(logits: torch.Tensor, tokens: list[torch.Tensor]) -> torch.Tensor:
    rows = [r[:-1] for r in logits.split([len(t) for t in tokens])]
    return torch.nn.functional.cross_entropy(torch.cat(rows), torch.cat([t[1:] for t in tokens]))


def near(found: torch.Tensor, expected: torch.Tensor, tolerance: float = EXACT) -> bool:
    return float((found - expected).abs().max()) <= tolerance * float(expected.abs().max())


@pytest.mark.parametrize("family", ["Llama", "GPT2", "Gemma2", "mixtral"])
def test_logits_and_gradients_are_those_of_transformers(family: str) -> None:
    model = captured(family)[0]
    module = prepared(family, load_recipe("f32")).module
    for lengths in ((17, 17), (23, 9)):
        tokens = sequences(lengths)
        inputs = packed_inputs(module.program, tokens)
        logits = module(inputs)
        assert near(logits.detach(), module.program.evaluate(inputs)[0])
        expected = torch.cat([model(input_ids=t[None], use_cache=False).logits[0] for t in tokens])
        assert near(logits.detach(), expected.detach())
        model.zero_grad()
        module.zero_grad()
        next_token_loss(expected, tokens).backward()
        next_token_loss(logits, tokens).backward()
        parameters = dict(model.named_parameters(remove_duplicate=False))
        compared = 0
        bases = {e.name: e.base for n in module.program.weights for e in recovered_in(module.program.weights[n])}
        for name, parameter in module.named_weights().items():
            assert parameter.grad is not None, name
            parts = bases[name].parts()
            if len({p.source for p in parts}) == 1 and parts[0].source in parameters:
                there = parameters[parts[0].source].grad
                assert there is not None
                assert near(parameter.grad, there if parts[0].axis == 0 else there.t()), name
                compared += 1
        assert compared == len(module.names)


FORMATS = [
    {"storage": "bf16", "activation": "bf16"},
    {"storage": "int8", "activation": "int8"},
    {"storage": "int8", "group_size": 32, "activation": "int8", "activation_group_size": 32},
    {"storage": "int4", "group_size": 32, "activation": "int8", "activation_group_size": 32},
    {"storage": "int4", "group_size": 64, "zero_point": True, "activation": "int8", "activation_group_size": 64},
    {"storage": "int3", "group_size": 64, "zero_point": True, "activation": "int8", "activation_group_size": 64},
    {"storage": "int2", "group_size": 16, "activation": "int8", "activation_group_size": 16},
]


@pytest.mark.parametrize("wanted", FORMATS, ids=lambda f: "-".join(str(v) for v in f.values()))
def test_a_forward_pass_computes_with_what_would_be_exported(wanted: dict[str, Any]) -> None:
    weights = {"default": wanted, "rotate": wanted.get("group_size") == 64}
    module = prepared("Llama", Recipe.model_validate({"name": "q", "weights": weights})).module
    assert any("rotated(" in module.program.weights[n].describe() for n in module.program.weights) is weights["rotate"]
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    program, tokens = module.program, sequences((12, 20))
    inputs = packed_inputs(program, tokens)
    losses = []
    for _ in range(3):
        logits = module(inputs)
        # Rounding of activations: where a sum in another order tips one, it is off by a step of 1/127.
        assert near(logits.detach(), program.evaluate(inputs)[0], 0.02)
        losses.append(next_token_loss(logits, tokens))
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
        used = module.codes()
        module.weights_moved()
        assert not module.codes()
        assert all(parameter.grad is not None for parameter in module.parameters())
    assert losses[-1] < losses[0]
    module(inputs)
    moved = [n for n, codes in module.codes().items() if not torch.equal(codes.values, used[n].values)]
    values = [n for n in program.weights if isinstance(program.weights[n], QuantizedValues)]
    assert set(module.codes()) == set(values)
    assert not values or moved, "no integer changed in a step of training"
    for name, codes in module.codes().items():
        assert torch.equal(program.weights[name].evaluate(), codes.values)


def test_what_a_sparse_format_leaves_out_stays_out() -> None:
    sparse = {"storage": "int8", "group_size": 32, "activation": "int8", "activation_group_size": 32, "sparsity": "2:4"}
    weights = {"default": sparse, "sparsify": "magnitude"}
    module = prepared("Llama", Recipe.model_validate({"name": "s", "weights": weights})).module
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, weight_decay=0.1)
    left_out = {name: parameter == 0 for name, parameter in module.named_weights().items()}
    # What is looked up, and what gives the logits, is dense in any case.
    halved = {name for name, zero in left_out.items() if float(zero.float().mean()) == 0.5}
    assert halved == {n for n in left_out if "proj" in n}
    tokens = sequences((12, 20))
    inputs = packed_inputs(module.program, tokens)
    for _ in range(3):
        logits = module(inputs)
        assert near(logits.detach(), module.program.evaluate(inputs)[0], 0.02)
        optimizer.zero_grad()
        next_token_loss(logits, tokens).backward()
        optimizer.step()
        module.weights_moved()
    for name, parameter in module.named_weights().items():
        assert torch.equal(parameter == 0, left_out[name]), name


def test_gradients_that_lead_farther_out_of_range_are_cut_off() -> None:
    weight = torch.zeros(1, 32)
    weight[0, :4] = torch.tensor([-8.0, 9.0, 7.0, 3.2])  # the scale is 1: 9 saturates at 7
    codes = Codes(weight.round().clamp(-8, 7).to(torch.int8), torch.ones(1, 1, dtype=torch.half))
    rounded = RoundedWeight.from_codes(weight, codes, CodeFormat(4, 32))
    assert rounded.beyond is not None
    assert rounded.beyond.nonzero().tolist() == [[0, 1]]
    moving = weight.clone().requires_grad_()
    for sign, slope in ((-1.0, 0.0), (1.0, 1.0)):  # descent along a negative gradient would make it larger still
        moving.grad = None
        (straight_through(moving, rounded.value, rounded.beyond) * sign).sum().backward()
        assert moving.grad is not None
        assert moving.grad[0, 1] == slope
        assert moving.grad[0, 0] == sign
    inside = RoundedWeight.from_codes(
        weight[:, 2:3].expand(1, 32), Codes(torch.full((1, 32), 7, dtype=torch.int8), codes.scales), CodeFormat(4, 32)
    )
    assert inside.beyond is None


def test_a_group_that_vanished_may_come_back() -> None:
    weight = torch.full((1, 32), 1e-9)
    codes = Codes(torch.zeros(1, 32, dtype=torch.int8), torch.zeros(1, 1, dtype=torch.half))
    assert RoundedWeight.from_codes(weight, codes, CodeFormat(4, 32)).beyond is None
