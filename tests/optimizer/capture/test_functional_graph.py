"""The quick way into functional form against torch's own."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from enginewright.optimizer.capture.functional_graph import make_functional


def targets(exported):
    """The tensor ops; run_decompositions writes the view of a copy as _unsafe_view, and -1 in shapes as a product."""
    names = (str(n.target).replace("_unsafe_view", "view") for n in exported.graph.nodes if n.op == "call_function")
    return Counter(n for n in names if n.startswith("aten.") and "sym_size" not in n)


class Casts(torch.nn.Module):
    def forward(self, x):  # [T, 8]
        y = x.to(torch.float32).to(torch.float64).transpose(0, 1).contiguous()
        return (y.reshape(4, 2, -1) + 1).float().reshape(8, -1).contiguous()


class Reshapes(torch.nn.Module):
    def forward(self, x):
        return (x * 2).transpose(0, 1).reshape(-1) + x.reshape(-1)


class Parts(torch.nn.Module):
    def forward(self, x):
        a, b, c = x.chunk(3, dim=-1)
        heads = x.unflatten(1, (2, -1)).transpose(1, 2)
        return heads.flatten(1) + (x * torch.tensor([2.0])).flatten().sum() + torch.cat((c, b, a), 1)


class Writes(torch.nn.Module):
    def forward(self, x):
        y = x.clone()
        y[:, 1:].add_(x[:, :-1])
        return y.chunk(2, dim=-1)[0] * 2


@pytest.mark.parametrize("rows", [5, 12])
@pytest.mark.parametrize(("module", "quick"), [(Casts(), True), (Reshapes(), True), (Parts(), True), (Writes(), False)])
def test_is_what_run_decompositions_gives(module, quick, rows, monkeypatch):
    x = torch.randn(rows, 8)
    shapes = {"x": {0: torch.export.Dim("T", min=2, max=1000)}}
    exported = torch.export.export(module, (x,), dynamic_shapes=shapes, strict=False)
    want = exported.run_decompositions({})
    retraced = []
    original = torch.export.ExportedProgram.run_decompositions
    monkeypatch.setattr(
        torch.export.ExportedProgram, "run_decompositions", lambda *a: retraced.append(1) or original(*a)
    )
    got = make_functional(exported)
    assert bool(retraced) is not quick
    assert targets(got) == targets(want)
    interpreted = torch.fx.Interpreter(got.graph_module).run(*got.constants.values(), x)[0]
    assert torch.equal(interpreted, module(x))
    schemas = [n.target._schema for n in got.graph.nodes if isinstance(n.target, torch._ops.OpOverload)]
    assert not any(s.is_mutable for s in schemas)


@pytest.mark.parametrize("join", [torch.concat, torch.concatenate])
@pytest.mark.parametrize("rows", [5, 12])
def test_what_run_decompositions_leaves_is_replaced(rows, join):
    class Module(torch.nn.Module):
        def forward(self, x):
            return join([x.chunk(2, dim=-1)[0].double().type_as(x), x], dim=1)

    x = torch.randn(rows, 8)
    shapes = {"x": {0: torch.export.Dim("T", min=2, max=1000)}}
    got = make_functional(torch.export.export(Module(), (x,), dynamic_shapes=shapes, strict=False))
    assert targets(got)["aten._to_copy.default"] == 2 and not targets(got)["aten.type_as.default"]
    assert targets(got)["aten.cat.default"] == 1 and not targets(got)[f"aten.{join.__name__}.default"]
    assert torch.equal(torch.fx.Interpreter(got.graph_module).run(x)[0], torch.cat([x[:, :4], x], 1))
