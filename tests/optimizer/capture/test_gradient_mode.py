from __future__ import annotations

import inspect

import torch

from enginewright.optimizer.capture.gradient_mode import without_gradient_mode


class Plain(torch.nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            z = x.cos()
        with torch.enable_grad():
            return z * y


class Hidden(Plain):
    forward = without_gradient_mode(Plain.forward)


def calls(module: torch.nn.Module) -> list[str]:
    x = torch.ones(3, requires_grad=True)
    graph = torch.export.export(module, (x, x), strict=False).graph
    return [str(node.target) for node in graph.nodes if node.op == "call_function"]


def test_changes_of_the_gradient_mode_are_no_calls_of_an_exported_graph() -> None:
    assert any("set_grad_enabled" in call for call in calls(Plain()))
    assert calls(Hidden()) == ["aten.cos.default", "aten.mul.Tensor"]
    assert inspect.signature(Hidden.forward) == inspect.signature(Plain.forward)


def test_the_mode_is_as_the_caller_has_it() -> None:
    x = torch.ones(3, requires_grad=True)
    assert Hidden()(x, x).requires_grad
    with torch.no_grad():
        assert not Hidden()(x, x).requires_grad
    assert torch.is_grad_enabled()
