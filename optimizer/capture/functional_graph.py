"""Makes torch.export's training graph functional, as ``run_decompositions({})`` does, but much faster.

That call traces the whole graph again. In most decoders the only non-functional ops are a few that may return a view of
their argument, and the ``detach_`` of constants. These are replaced here by equivalent ops; any other graph goes to
``run_decompositions``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.node import Node

from enginewright.passes.ir.calls import bound_arguments

aten = torch.ops.aten

_CASTS = (aten.to.dtype, aten.to.device, aten.to.dtype_layout, aten.to.other, aten.type_as.default)
_FLATTENS = (aten.flatten.using_ints, aten.unflatten.int)
_DETACHES = (aten.detach_.default, aten.detach.default)

_OTHER_NAMES: dict[object, Callable[..., object]] = {
    aten.concat.default: aten.cat.default,
    aten.concatenate.default: aten.cat.default,
    aten.lift_fresh_copy.default: aten.clone.default,
}
"""Op -> the op with the same arguments and result. ``run_decompositions`` replaces the last one alone."""


def make_functional(exported: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """Returns ``exported`` with only functional ATen ops; its graph may be changed in place."""
    if any(_needs_retracing(n) for n in exported.graph.nodes):
        exported = exported.run_decompositions({})
    for node in list(exported.graph.nodes):  # type_as is left over by run_decompositions too
        if node.target in _OTHER_NAMES:
            node.target = _OTHER_NAMES[node.target]
        elif node.target in _CASTS:
            _replace_cast(exported.graph, node)
        elif node.target is aten.reshape.default:
            _replace_reshape(exported.graph, node, node.args[1])
        elif node.target in _FLATTENS:
            _replace_reshape(exported.graph, node, _known_shape(node))
        elif node.target is aten.chunk.default:
            _replace_chunk(exported.graph, node)
        elif node.target in _DETACHES:
            _replace(exported.graph, node, _source(node))
        elif node.target is aten.contiguous.default:
            _replace_contiguous(exported.graph, node)
    exported.graph.eliminate_dead_code()
    return exported


def _needs_retracing(node: Node) -> bool:
    if node.op in ("placeholder", "output") or node.target in (*_CASTS, aten.reshape.default, *_DETACHES):
        return False
    if node.target in _FLATTENS:
        return _known_shape(node).count(-1) > 1
    if node.target is aten.chunk.default:
        return not isinstance(_chunked(node)[0], int)
    if node.target is aten.contiguous.default:
        return bool(node.kwargs) or len(node.args) > 1
    if node.op != "call_function":
        return True  # a submodule: a part with autograd or autocast switched
    if not isinstance(node.target, torch._ops.OpOverload):
        return not (callable(node.target) and node.target.__module__ in ("_operator", "operator", "math"))
    schema = node.target._schema
    aliases = any(a.alias_info is not None for a in (*schema.arguments, *schema.returns))
    return schema.is_mutable or (aliases and _is_composite(node.target))


def _is_composite(op: torch._ops.OpOverload) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd")


def _known_shape(node: Node) -> list[int]:
    """Returns the shape of the node's value, with -1 for sizes that vary."""
    return [size if isinstance(size, int) else -1 for size in _value(node).shape]


def _chunked(node: Node) -> tuple[int | torch.SymInt, int, int]:
    """Returns the size, the number of chunks and the dimension of a call of ``chunk``."""
    arguments = bound_arguments(node)
    return _value(_source(node)).shape[arguments["dim"]], arguments["chunks"], arguments["dim"]


def _replace_chunk(graph: torch.fx.Graph, node: Node) -> None:
    size, chunks, dim = _chunked(node)
    assert isinstance(size, int)
    _call(graph, node, aten.split.Tensor, (_source(node), -(-size // chunks), dim), {})


def _replace_cast(graph: torch.fx.Graph, node: Node) -> None:
    source = _source(node)
    if _value(source).dtype == _value(node).dtype:
        _replace(graph, node, source)
    else:
        _call(graph, node, aten._to_copy.default, (source,), {"dtype": _value(node).dtype})


def _replace_contiguous(graph: torch.fx.Graph, node: Node) -> None:
    source = _source(node)
    if _value(source).is_contiguous():
        _replace(graph, node, source)
    else:
        _call(graph, node, aten.clone.default, (source,), {"memory_format": torch.contiguous_format})


def _replace_reshape(graph: torch.fx.Graph, node: Node, shape: object) -> None:
    source = _source(node)
    if not (_value(source).is_contiguous() or _is_view(_value(node), _value(source))):
        copy = graph.create_node(
            "call_function", aten.clone.default, (source,), {"memory_format": torch.contiguous_format}
        )
        node.prepend(copy)
        copy.meta = dict(node.meta)
        with _value(source).fake_mode:
            copy.meta["val"] = _value(source).clone(memory_format=torch.contiguous_format)
        source = copy
    _call(graph, node, aten.view.default, (source, shape), {})


def _is_view(value: FakeTensor, source: FakeTensor) -> bool:
    """Returns True if ``value`` shares the memory of ``source``."""
    return bool(value.untyped_storage()._cdata == source.untyped_storage()._cdata)


def _call(
    graph: torch.fx.Graph,
    node: Node,
    target: Callable[..., object],
    args: tuple[object, ...],
    kwargs: dict[str, object],
) -> None:
    with graph.inserting_before(node):
        new = graph.create_node("call_function", target, args, kwargs)  # type: ignore[arg-type]
    new.meta = dict(node.meta)
    _replace(graph, node, new)


def _replace(graph: torch.fx.Graph, node: Node, new: Node) -> None:
    node.replace_all_uses_with(new)
    graph.erase_node(node)


def _source(node: Node) -> Node:
    source = node.args[0]
    assert isinstance(source, Node)
    return source


def _value(node: Node) -> FakeTensor:
    value = node.meta["val"]
    assert isinstance(value, FakeTensor)
    return value
