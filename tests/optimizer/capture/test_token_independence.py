"""Which graphs are shown to keep tokens apart, and which are refused with op and module."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import conv1d

from enginewright.optimizer.capture.functional_graph import make_functional
from enginewright.optimizer.capture.token_independence import check_token_independence
from enginewright.passes.ir.program import from_exported
from enginewright.passes.ir.weights import Source
from enginewright.runtime.shared.errors import UnsupportedModelError

aten = torch.ops.aten


class Layer(torch.nn.Module):
    def __init__(self, function, width):
        super().__init__()
        self.function = function
        self.weight = torch.nn.Parameter(torch.randn(width, width))

    def forward(self, x):
        return self.function(x, self.weight)


class Wrapper(torch.nn.Module):
    def __init__(self, function, width):
        super().__init__()
        self.model_ = torch.nn.ModuleDict({"layer": Layer(function, width)})

    def forward(self, x, rows):
        return torch.ops.ew.take_rows(self.model_["layer"](x), rows)


def program_of(function, width):
    wrapper = Wrapper(function, width)
    T, R = torch.export.Dim("T", min=1, max=4096), torch.export.Dim("R", min=1, max=4096)
    with torch.no_grad():
        exported = torch.export.export(
            wrapper,
            (torch.randn(13, width), torch.zeros(5, dtype=torch.int32)),
            dynamic_shapes={"x": {0: T}, "rows": {0: R}},
            strict=False,
        )
        exported = make_functional(exported)
    sizes = {n.name: n.meta["val"].shape for n in exported.graph.nodes if n.op == "placeholder"}
    weights = {"layer.weight": Source("w", (width, width), torch.float32, lambda: wrapper.model_["layer"].weight)}
    symbols = {sizes["x"][0].node.expr: "T", sizes["rows"][0].node.expr: "R"}
    return from_exported(exported, weights, module_prefix="model_.", symbols=symbols)


def copied_into(x):
    new = x.new_empty(x.shape[0], 2 * x.shape[1])
    new[:, : x.shape[1]].copy_(x)
    new[:, x.shape[1] :].copy_(-x)
    return new[:, x.shape[1] // 2 : -(x.shape[1] // 2)]


APART = {
    "linear": lambda x, w: torch.nn.functional.linear(x, w),
    "norm": lambda x, w: torch.nn.functional.layer_norm(x, x.shape[-1:]) * w[0],
    "softmax": lambda x, w: x.softmax(-1) @ w,
    "heads": lambda x, w: (x @ w).view(1, x.shape[0], 2, -1).transpose(1, 2).transpose(1, 2).reshape(x.shape),
    "halves": lambda x, w: torch.cat((x.chunk(2, dim=-1)[1], x[:, : x.shape[1] // 2]), dim=-1) @ w,
    "reduced": lambda x, w: (x * x.mean(-1, keepdim=True) + x.pow(2).sum(1)[:, None]) @ w,
    "table": lambda x, w: w[x[:, 0].clamp(0, 1).long()] + x,
    "whole-slice": lambda x, w: x[:] @ w,
    "copied-into": lambda x, w: copied_into(x) @ w,
    # No rule knows these: they are tried out.
    "chosen-number": lambda x, w: torch.where(x > 0, x, 1.0) @ w,
    "complex": lambda x, w: torch.view_as_real(torch.view_as_complex(x.view(-1, x.shape[1] // 2, 2)) * 1j).flatten(1),
    "convolution-of-one": lambda x, w: conv1d(x.t()[None], w[:, :, None])[0].t(),
    "sums-of-products": lambda x, w: torch.einsum("th,th->t", x, x @ w)[:, None] * x,
}

MIXED = {
    "shift": lambda x, w: torch.nn.functional.pad(x, (0, 0, 1, 0))[:-1] @ w,
    "cumsum": lambda x, w: x.cumsum(0) @ w,
    "mean": lambda x, w: (x - x.mean(0, keepdim=True)) @ w,
    "softmax": lambda x, w: x.softmax(0) @ w,
    "flip": lambda x, w: x.flip(0) @ w,
    "gram": lambda x, w: (x @ x.t()) @ (x @ w),
    "convolution": lambda x, w: conv1d(x.t()[None], w[:, :, None].repeat(1, 1, 3), padding=1)[0].t(),
    "counted-positions": lambda x, w: (x + torch.arange(x.shape[0])[:, None]) @ w,
    "flattened": lambda x, w: x.view(-1).flip(0).view(x.shape) @ w,
    "norm-over-tokens": lambda x, w: torch.nn.functional.layer_norm(x.t()[None], [x.shape[1], x.shape[0]])[0].t() @ w,
    "gathered": lambda x, w: x[x[:, 0].clamp(0, 1).long()] @ w,
    "scaled-by-how-many": lambda x, w: (x / x.shape[0]) @ w,
    "first-token": lambda x, w: (x + x[0]) @ w,
    "rolled": lambda x, w: x.roll(1) @ w,
}


@pytest.mark.parametrize("width", [8, 12])
@pytest.mark.parametrize("name", APART)
def test_kept_apart(name, width):
    check_token_independence(program_of(APART[name], width))


@pytest.mark.parametrize("width", [8, 12])
def test_a_view_that_scrambles_tokens(width):
    """torch.export refuses such a view for most token counts, so the graph is made by hand."""
    program = program_of(APART["linear"], width)
    (take,) = program.nodes_of(torch.ops.ew.take_rows.default)
    result = take.args[0]
    with program.inserting_before(take):
        tokens = program.call(aten.sym_size.int, result, 0, where=("layer",))
        turned = program.call(aten.permute.default, result, [1, 0], where=("layer",))
        copy = program.call(aten.clone.default, turned, where=("layer",), memory_format=torch.contiguous_format)
        view = program.call(aten.view.default, copy, [tokens, width], where=("layer",))
    take.replace_input_with(result, view)
    with pytest.raises(UnsupportedModelError, match=r"^layer: aten\.view\.default takes tokens apart"):
        check_token_independence(program)


@pytest.mark.parametrize("width", [8, 12])
@pytest.mark.parametrize("name", MIXED)
def test_mixed(name, width):
    with pytest.raises(UnsupportedModelError, match=r"^layer: (aten|<built)"):
        check_token_independence(program_of(MIXED[name], width))
