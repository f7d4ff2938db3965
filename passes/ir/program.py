"""The Program: a torch.fx graph of ATen and ``ew`` ops, its inputs, and lazy weights.

Differences to an ExportedProgram: weights are ``get_attr`` nodes that name an entry of the WeightStore. Step inputs are
the only placeholders. Every node has ``meta["val"]`` (a fake tensor with symbolic shape) and ``meta["where"]`` (module
paths).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import sympy
import torch
import torch.fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.node import Argument, Node, Target, map_arg

import enginewright.passes.ops  # noqa: F401  defines torch.ops.ew
from enginewright.runtime.shared.contracts import CacheGroup
from enginewright.runtime.shared.errors import PassError
from enginewright.runtime.shared.lowered_program import Affine
from enginewright.runtime.shared.step_schema import LOGITS

from .inference import Inferences
from .provenance import WHERE
from .weights import WeightExpr, WeightStore

SYMBOLS = ("T", "B", "R", "M", "P")
"""The symbolic sizes: T tokens, B requests, R sampled rows, M blocks in a request's table, P blocks in the pool."""


Compute = Callable[[Node, Sequence[Any], Mapping[str, Any]], Any]
"""Computes a call's value in place of its op, from the node and the values of its arguments (by position, by name)."""


class Program:
    """A model as a graph. Passes change it through these methods, which keep values and provenance consistent.

    Args:
        graph: a graph whose placeholders are step inputs (and, once lowered, caches), without an owning module.
        weights: the weights that ``get_attr`` nodes name.
        fake_mode: the mode of every ``meta["val"]``.
        symbols: sympy symbol -> one of SYMBOLS.

    Attributes:
        cache_groups: the layers with caches; () before attention is lowered, and for programs without caches.
        output_name: the name of the result: one of ``step_schema.OUTPUTS``.
    """

    def __init__(
        self,
        graph: torch.fx.Graph,
        weights: WeightStore,
        fake_mode: FakeTensorMode,
        symbols: Mapping[sympy.Symbol, str],
    ) -> None:
        self.graph = graph
        self.weights = weights
        self.fake_mode = fake_mode
        self.symbols = dict(symbols)
        self.cache_groups: tuple[CacheGroup, ...] = ()
        self.output_name = LOGITS
        # What has been inferred already: call -> what its result depends on.
        self.verified: dict[Node, tuple[object, ...]] = {}
        self._inferences = Inferences()
        self._expressions: dict[tuple[sympy.Expr, int], sympy.Expr] = {}

    # ---- reading

    @property
    def inputs(self) -> dict[str, Node]:
        """The placeholders by name, in order."""
        return {str(n.target): n for n in self.graph.nodes if n.op == "placeholder"}

    @property
    def output(self) -> Node:
        """The output node. Its first argument is the tuple of the results' nodes."""
        node: Node = next(n for n in reversed(self.graph.nodes) if n.op == "output")
        return node

    @property
    def logits(self) -> Node:
        """The node of the program's first result: logits [R, V], or what ``output_name`` names."""
        result = self.output.args[0]
        first = result[0] if isinstance(result, (tuple, list)) else result
        assert isinstance(first, Node)
        return first

    def nodes_of(self, *targets: Target) -> list[Node]:
        """Returns all calls of these ops, in order."""
        return [n for n in self.graph.nodes if n.op == "call_function" and n.target in targets]

    def value(self, node: Node) -> FakeTensor:
        """Returns the fake tensor of a node with one tensor result."""
        val = node.meta["val"]
        if not isinstance(val, FakeTensor):
            raise PassError(f"{node.name} has no single tensor value")
        return val

    def shape(self, node: Node) -> tuple[sympy.Expr, ...]:
        """Returns a node's shape as sympy expressions in T, B, R, M and P."""
        return tuple(self.expression(s) for s in self.value(node).shape)

    def expression(self, size: int | torch.SymInt) -> sympy.Expr:
        """Returns a size as an expression in T, B, R, M and P."""
        if isinstance(size, int):
            return sympy.Integer(size)
        shape_env = self.fake_mode.shape_env
        assert shape_env is not None
        expr = shape_env.simplify(size.node.expr)
        key = expr, len(self.symbols)  # passes add symbols, and none goes
        named = self._expressions.get(key)
        if named is None:
            names = {s: named_symbol(name) for s, name in self.symbols.items()}
            named = self._expressions[key] = sympy.sympify(expr).xreplace(names)
        return named

    def affine(self, size: int | torch.SymInt) -> Affine:
        """Returns a size as an affine function of T, B and R. Raises PassError if it isn't one."""
        return affine_of(self.expression(size))

    def weight_of(self, node: object) -> WeightExpr | None:
        """Returns the expression of the weight that a ``get_attr`` node names; None for any other argument."""
        if isinstance(node, Node) and node.op == "get_attr":
            return self.weights[str(node.target)]
        return None

    # ---- changing

    @contextmanager
    def inserting_before(self, node: Node) -> Iterator[None]:
        with self.graph.inserting_before(node):
            yield

    def call(self, target: Callable[..., Any], *args: Argument, where: tuple[str, ...], **kwargs: Argument) -> Node:
        """Adds a call of ``target`` at the insertion point, with its inferred fake value, and returns the node.

        ``where`` has the paths of the modules whose work the call does. Raises PassError if the op rejects the
        arguments.
        """
        node = self.graph.call_function(target, args, kwargs)
        node.meta[WHERE] = where
        try:
            node.meta["val"] = self.infer(node)
        except PassError:
            self.graph.erase_node(node)
            raise
        self.verified[node] = depends_on(node)  # until it, or what it reads, becomes another
        return node

    def infer(self, node: Node) -> Any:
        """Returns the fake value of a call, from the fake values of its arguments. Equal calls share one value."""
        return self._inferences.get(node.target, node.args, node.kwargs, self.symbols, lambda: self._infer(node))

    def _infer(self, node: Node) -> Any:
        fake = [map_arg(a, lambda n: n.meta["val"]) for a in node.args]
        fake_kw = {k: map_arg(v, lambda n: n.meta["val"]) for k, v in node.kwargs.items()}
        try:
            with self.fake_mode, torch.no_grad():
                return node.target(*fake, **fake_kw)  # type: ignore[operator]
        except (RuntimeError, TypeError, ValueError, IndexError) as e:
            raise PassError(f"{node.name}: {node.target} does not accept its arguments: {e}") from e

    def weight(self, name: str, expr: WeightExpr | None = None, *, where: tuple[str, ...] | None = None) -> Node:
        """Returns the ``get_attr`` node of the weight ``name``; if ``expr`` isn't None, it is first added as a weight.

        A weight has one node, after the placeholders. ``where`` has the module paths of a new node; None takes the
        module with whose path the name begins.
        """
        if expr is not None:
            name = self.weights.add(name, expr)
        nodes: list[Node] = [n for n in self.graph.nodes if n.op == "get_attr" and n.target == name]
        if nodes:
            return nodes[0]
        anchor = next(n for n in self.graph.nodes if n.op != "placeholder")
        with self.graph.inserting_before(anchor):
            node = self.graph.create_node("get_attr", name, (), {}, name=_identifier(name))
        stored = self.weights[name]
        with self.fake_mode:
            node.meta["val"] = torch.empty(stored.shape, dtype=stored.dtype)
        node.meta[WHERE] = (name.rpartition(".")[0],) if where is None else where
        return node

    def change_weight(self, node: Node, expr: WeightExpr) -> None:
        """Replaces the expression of a ``get_attr`` node's weight; the shape may change.

        Then the caller must infer the calls that read the weight again.
        """
        self.weights.change(str(node.target), expr)
        with self.fake_mode:
            node.meta["val"] = torch.empty(expr.shape, dtype=expr.dtype)

    def add_input(self, name: str, value: FakeTensor) -> Node:
        """Adds a placeholder, a step input or a cache, after the existing ones. ``value`` is its fake tensor."""
        if name in self.inputs:
            raise PassError(f"the program has an input {name} already")
        anchor = next(n for n in self.graph.nodes if n.op != "placeholder")
        with self.graph.inserting_before(anchor):
            node = self.graph.create_node("placeholder", name, (), {}, name=_identifier(name))
        node.meta["val"], node.meta[WHERE] = value, ("",)
        return node

    def replace(self, old: Node, new: Node) -> None:
        """Makes all users of ``old`` use ``new``, and removes ``old``. ``remove_dead_code`` removes arguments that are
        then unused.
        """
        old.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)
        if not old.users:
            self.graph.erase_node(old)

    def remove_dead_code(self) -> int:
        """Removes calls and weights that nothing reads. Returns the number of removed nodes."""
        removed = 0
        for node in reversed(list(self.graph.nodes)):
            if node.op in ("call_function", "get_attr") and not node.users:
                self.graph.erase_node(node)
                removed += 1
        self.weights.keep_only({str(n.target) for n in self.graph.nodes if n.op == "get_attr"})
        return removed

    def copy(self) -> Program:
        """Returns an independent copy, which shares the weight expressions, as they are immutable."""
        graph = torch.fx.Graph()
        mapping: dict[Node, Node] = {}
        for node in self.graph.nodes:
            mapping[node] = graph.node_copy(node, lambda n: mapping[n])
        other = Program(graph, self.weights.copy(), self.fake_mode, self.symbols)
        other.cache_groups, other.output_name = self.cache_groups, self.output_name
        other._inferences = self._inferences
        for node, (target, args, kwargs, values) in self.verified.items():
            if node in mapping and args == node.args and kwargs == node.kwargs:
                copy = mapping[node]
                other.verified[copy] = (target, copy.args, copy.kwargs, values)
        return other

    # ---- running

    def evaluate(
        self,
        inputs: Mapping[str, torch.Tensor],
        observe: Callable[[Node, Any], None] | None = None,
        compute: Compute | None = None,
        read: Callable[[str], torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """Runs the graph in torch with the references of the ``ew`` ops, reading each weight when it is used.

        Args:
            inputs: a tensor for each placeholder, by name.
            observe: called with every node and its value; None for no call.
            compute: called in place of a call's op; None runs the op.
            read: returns a weight by its name; None evaluates it at each use, so that memory holds one weight.

        Returns:
            the program's results; the first is the one that ``output_name`` names.
        """
        if missing := set(self.inputs) - set(inputs):
            raise PassError(f"inputs {sorted(missing)} are missing")
        weight = read or (lambda name: self.weights[name].evaluate())

        def value(node: Node) -> Any:
            return weight(str(node.target)) if node.op == "get_attr" else values[node]

        values: dict[Node, Any] = {}
        last_use: dict[Node, Node] = {a: n for n in self.graph.nodes for a in n.all_input_nodes}
        for node in self.graph.nodes:
            if node.op == "output":
                return tuple(map_arg(node.args[0], values.__getitem__))
            if node.op == "placeholder":
                values[node] = inputs[str(node.target)]
            elif node.op == "call_function":
                args = [map_arg(a, value) for a in node.args]
                kwargs = {k: map_arg(v, value) for k, v in node.kwargs.items()}
                with torch.no_grad():
                    values[node] = (compute or _call)(node, args, kwargs)
            if observe is not None and node in values:
                observe(node, values[node])
            for arg in node.all_input_nodes:
                if last_use[arg] is node:
                    values.pop(arg, None)
        raise PassError("the program has no output")


def _call(node: Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    assert callable(node.target)
    return node.target(*args, **kwargs)


def from_exported(
    exported: torch.export.ExportedProgram,
    weights: Mapping[str, WeightExpr],
    *,
    module_prefix: str,
    symbols: Mapping[sympy.Symbol, str],
) -> Program:
    """Returns a Program for the result of torch.export after ``run_decompositions``.

    Args:
        exported: the exported program. Its parameters, buffers and constants become weights, its user inputs
            placeholders.
        weights: an expression for each parameter, buffer and constant, by its name in the exported program without
            ``module_prefix``; shape and dtype must be equal.
        module_prefix: the prefix that the wrapper around the model adds to every module path, such as "model_.".
        symbols: the name (one of ``SYMBOLS``) of each sympy symbol in shapes.

    Raises:
        PassError: a weight is missing or has another shape or dtype; a node isn't a functional call.
    """
    signature = exported.graph_signature
    lifted = {
        **signature.inputs_to_parameters,
        **signature.inputs_to_buffers,
        **signature.inputs_to_lifted_tensor_constants,
    }
    store, graph, mapping = WeightStore(), torch.fx.Graph(), dict[Node, Node]()
    fake_mode = next(n.meta["val"].fake_mode for n in exported.graph.nodes if isinstance(n.meta.get("val"), FakeTensor))
    nodes = list(exported.graph.nodes)
    # Placeholders first, then weights, as Program.weight and Program.add_input keep it.
    for node in sorted(nodes, key=lambda n: 0 if n.op == "placeholder" and n.name not in lifted else 1):
        if node.op == "placeholder" and node.name in lifted:
            name = lifted[node.name].removeprefix(module_prefix)
            expr = weights.get(name)
            val = node.meta["val"]
            if expr is None:
                raise PassError(f"no source for the weight {name}")
            if expr.shape != tuple(val.shape) or expr.dtype != val.dtype:
                raise PassError(
                    f"weight {name}: the model has {val.dtype} {tuple(val.shape)}, its source {expr.dtype} {expr.shape}"
                )
            store.add(name, expr)
            copy = graph.create_node("get_attr", name, (), {}, name=_identifier(name))
            where: tuple[str, ...] = (name.rpartition(".")[0],)
        elif node.op in ("placeholder", "output", "call_function"):
            copy = graph.node_copy(node, lambda n: mapping[n])
            where = (module_path(node, module_prefix),)
        else:
            raise PassError(f"{node.name}: {node.op} can't be captured")
        copy.meta = {"val": node.meta.get("val"), WHERE: where}
        mapping[node] = copy
    return Program(graph, store, fake_mode, symbols)


def module_path(node: Node, prefix: str) -> str:
    """Returns the path of the innermost module in which a node was traced, without ``prefix``."""
    stack = node.meta.get("nn_module_stack") or {}
    paths = [entry[0] for entry in stack.values()]
    path: str = paths[-1] if paths else ""
    if path.startswith("_empty_nn_module_stack"):  # torch.export's mark for nodes outside of any module
        return ""
    return path.removeprefix(prefix).removeprefix(prefix.rstrip("."))


def cache_input(side: str, layer: int | str, *, ends: bool = False) -> str:
    """Returns the name of the input for a layer's cache: ``k_cache:LAYER``, or ``k_ends:LAYER`` for a second cache.

    Args:
        side: "k" or "v".
        layer: the layer's number.
        ends: True for the second cache, of the ends of requests (passes/attention/keep_ends.py).
    """
    return f"{side}_{'ends' if ends else 'cache'}:{layer}"


def named_symbol(name: str) -> sympy.Symbol:
    """Returns the sympy symbol for one of the names T, B, R, M and P."""
    return sympy.Symbol(name, positive=True, integer=True)


@lru_cache(maxsize=4096)  # sympy's polynomials are slow, and shapes repeat
def affine_of(expr: sympy.Expr) -> Affine:
    """Returns ``expr`` as an affine function of T, B and R. Raises PassError if it isn't one with integer
    coefficients.
    """
    t, b, r = (named_symbol(s) for s in ("T", "B", "R"))
    poly = sympy.Poly(expr, t, b, r) if expr.free_symbols <= {t, b, r} else None
    if poly is None or poly.total_degree() > 1 or not all(c.is_Integer for c in poly.coeffs()):
        raise PassError(f"the size {expr} is not affine in T, B and R")
    return Affine(*(int(poly.coeff_monomial(m)) for m in (1, t, b, r)))


def _identifier(name: str) -> str:
    return "".join(c if c.isalnum() else "_" for c in name)


def tensor_arguments(node: Node) -> Sequence[Node]:
    """Returns the argument nodes of a call that have tensor values (not sizes)."""
    return [n for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor)]


def has_tensors(node: Node) -> bool:
    """Returns True if a node's value is a tensor, or several tensors. Emitters skip other nodes: they read sizes from
    recorded shapes.
    """
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) or (isinstance(value, (tuple, list)) and len(value) > 0)


def depends_on(node: Node) -> tuple[object, ...]:
    """Returns everything that a call's verification depends on: its op, its arguments, and their and its own recorded
    values.

    If an equal tuple was verified before, the call hasn't changed.
    """
    values = tuple(n.meta["val"] for n in (node, *node.all_input_nodes))
    return (node.target, node.args, node.kwargs, values)
