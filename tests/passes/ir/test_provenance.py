from __future__ import annotations

import pytest
import torch.fx

from enginewright.passes.ir.provenance import WHERE, Part, join_where, layer_path, op_and_where, where_of


def _node(graph: torch.fx.Graph, *where: str) -> torch.fx.Node:
    node = graph.placeholder("x")
    node.meta[WHERE] = where
    return node


def test_where_of_names_each_path_once_in_order() -> None:
    graph = torch.fx.Graph()
    nodes = [_node(graph, "b", "a"), _node(graph, "a", "c"), _node(graph)]
    assert where_of(nodes) == ("b", "a", "c")
    assert where_of([]) == ()
    assert join_where(where_of(nodes)) == "b + a + c"


def test_a_call_is_told_by_its_op_and_its_modules() -> None:
    graph = torch.fx.Graph()
    node = graph.call_function(torch.ops.aten.sum.default, (_node(graph),))
    for where, text in (("a.b", "c"), "a.b + c"), ((), "the model's top level"):
        node.meta[WHERE] = where
        assert op_and_where(node) == f"aten.sum at {text}"


def test_a_node_without_provenance_adds_nothing() -> None:
    graph = torch.fx.Graph()
    bare = graph.placeholder("x")
    assert where_of([bare, _node(graph, "a")]) == ("a",)


def test_parts_are_ordered_and_readable() -> None:
    parts = [Part("b", 0, 2), Part("a", 4, 6), Part("a", 0, 4)]
    assert sorted(parts) == [Part("a", 0, 4), Part("a", 4, 6), Part("b", 0, 2)]
    assert [str(p) for p in parts] == ["b[0:2]", "a[4:6]", "a[0:4]"]


@pytest.mark.parametrize(
    ("path", "layer"),
    [
        ("model.layers.3.mlp.down_proj", "model.layers.3"),
        ("h.11", "h.11"),
        ("model.layers.3.experts.7.w1", "model.layers.3"),  # the first number
        ("model.layer3.mlp", ""),  # a name with a digit isn't a number
        ("lm_head", ""),
        ("", ""),
    ],
)
def test_the_layer_of_a_path(path: str, layer: str) -> None:
    assert layer_path(path) == layer
