"""Models that work for some numbers of tokens only are refused by the module that is why."""

from __future__ import annotations

import pytest
import torch

from enginewright.optimizer.capture.token_count import TokenCountError, watching


class Part(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function
        self.register_buffer("table", torch.randn(64, 8))

    def forward(self, x):
        return self.function(self, x)


class Model(torch.nn.Module):
    """Parts one after the other on x [1, T, 8]; only the function of the second one is of interest."""

    def __init__(self, function):
        super().__init__()
        self.embedding = torch.nn.Embedding(16, 8)
        self.layers = torch.nn.ModuleList([Part(lambda _, x: x * 2), Part(function), Part(lambda _, x: x + 1)])

    def forward(self, input_ids):
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x)
        return x


class Step(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids):
        return self.model(input_ids=ids[None])


def culprit(function):
    model = Model(function)
    with torch.no_grad(), watching(model, 4096) as watch:
        try:
            torch.export.export(
                Step(model),
                (torch.zeros(13, dtype=torch.long),),
                dynamic_shapes={"ids": {0: torch.export.Dim("T", min=1, max=4096)}},
                strict=False,
            )
        except (torch._dynamo.exc.UserError, TokenCountError):
            return watch.culprit()
    return watch.culprit()


def scan(_, x):
    state = torch.zeros(8)
    for i in range(x.shape[1]):
        state = state + x[0, i]
    return x + state


def chunks(_, x):
    tokens = x.shape[1]
    padded = torch.nn.functional.pad(x, (0, 0, 0, -tokens % 64))
    chunked = padded.view(1, -1, 64, 8) + torch.zeros(1, 1, 64, 8)
    state = torch.zeros(1, 64, 8)
    for i in range(chunked.shape[1]):
        state = state + chunked[:, i]
    return x + state[:, :1]


CASES = {
    "unrolled": (scan, "layers.1 fixes the number of tokens in a step"),
    "table": (lambda m, x: x + m.table[: x.shape[1]], "layers.1 assumes T <= 64"),
    "chunks": (chunks, "layers.1 assumes "),
}


@pytest.mark.parametrize("case", CASES)
def test_the_module_is_named(case):
    function, message = CASES[case]
    assert culprit(function).startswith(message)


def test_nothing_runs_behind_the_module_that_is_named():
    later = []
    model = Model(scan)
    model.layers[2].function = lambda _, x: later.append(x) or x
    with torch.no_grad(), watching(model, 4096) as watch, pytest.raises(TokenCountError, match=r"layers\.1 fixes"):
        torch.export.export(
            Step(model),
            (torch.zeros(13, dtype=torch.long),),
            dynamic_shapes={"ids": {0: torch.export.Dim("T", min=1, max=4096)}},
            strict=False,
        )
    assert not later
    assert watch.culprit().startswith("layers.1 ")


@pytest.mark.parametrize("function", [lambda _, x: x.softmax(-1), lambda m, x: x @ m.table.t() @ m.table])
def test_any_number_of_tokens_names_nobody(function):
    assert culprit(function) is None
    assert culprit(lambda _, x: x) is None


def test_hooks_are_removed():
    model = Model(lambda _, x: x)
    with watching(model, 4096):
        assert model.layers[0]._forward_hooks
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
