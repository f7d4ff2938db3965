"""A Program as a torch module: the trained program is the exported one, rounding included."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx.node import Node, map_arg

from enginewright.passes.framework.fast_evaluation import QUANTIZED_WEIGHTS, decoded, finished_product
from enginewright.passes.framework.match import bound_arguments
from enginewright.passes.ir.prequantized import Codes
from enginewright.passes.ir.program import Program
from enginewright.passes.ir.quantized import QuantizedValues
from enginewright.passes.ir.recovered import Recovered, RecoveredWeights
from enginewright.passes.ir.weights import WeightExpr
from enginewright.passes.ops.library import NAMESPACE, REFERENCES
from enginewright.passes.ops.quantization import quantize_activation
from enginewright.runtime.shared.errors import PassError

from .differentiable import attention_of_sequences, recovered_in, rounded_to, set_unkept_to_zero, weight_value
from .straight_through import RoundedWeight, straight_through

aten, ew = torch.ops.aten, torch.ops.ew

Observe = Callable[[Node, Sequence[Any], Any], None]


class MovingWeights(RecoveredWeights):
    """The weights under training, each a parameter. ``LoadRecovered`` inserts them into the program to train.

    Attributes:
        parameters: name of a weight -> its parameter, available after the pass.
    """

    def __init__(self) -> None:
        self.parameters: dict[str, torch.nn.Parameter] = {}

    def replacing(self, weights: Mapping[str, WeightExpr]) -> dict[str, Recovered]:
        """Evaluates each weight once, and returns the expressions that replace them; they stay in memory as float32."""
        for name, expr in weights.items():
            if name not in self.parameters:
                value = expr.evaluate().detach().to(torch.float32, copy=True).contiguous()
                self.parameters[name] = torch.nn.Parameter(value)
        return {name: Recovered(expr, name, "", self._reader(name)) for name, expr in weights.items()}

    def _reader(self, name: str) -> Callable[[], torch.Tensor]:
        return lambda: self.parameters[name].detach()


class TrainableProgram(torch.nn.Module):
    """A program with gradients: its ops are their references, and its weights are rounded as they are stored, after
    each change.

    The integers are computed by the expressions that an export evaluates. So a forward pass computes with the weights
    that an export at that moment would store, bit for bit. Gradients pass straight through rounding.

    Args:
        program: a program with attention as captured. It is quantized if the trained weights are to be quantized.
        weights: the weights under training in the program.
    """

    def __init__(self, program: Program, weights: MovingWeights) -> None:
        super().__init__()
        self.program = program
        self.names = tuple(weights.parameters)
        self._index = {name: i for i, name in enumerate(self.names)}
        self.moving = torch.nn.ParameterList(weights.parameters.values())
        self._constants: dict[str, torch.Tensor] = {}
        self._rounded: dict[str, RoundedWeight] = {}
        set_unkept_to_zero((program.weights[name] for name in program.weights), self._leaf)
        self._last_use = {a: n for n in program.graph.nodes for a in n.all_input_nodes}

    def named_weights(self) -> dict[str, torch.nn.Parameter]:
        """Returns the parameters by the names of the weights in the program."""
        return dict(zip(self.names, self.moving, strict=True))

    def weights_moved(self) -> None:
        """Discards the rounded weights. It must be called after the parameters have changed."""
        self._rounded.clear()

    def codes(self) -> dict[str, Codes]:
        """Returns the integers, scales and offsets of each quantized weight that forward passes used since the last
        change, by the name of the integers in the program.
        """
        return {name: one.codes for name, one in self._rounded.items()}

    def forward(self, inputs: Mapping[str, torch.Tensor], observe: Observe | None = None) -> torch.Tensor:
        """Returns the program's logits [R, V].

        Args:
            inputs: a tensor for each placeholder, as ``packed_inputs`` returns them.
            observe: called with every call, the values of its arguments, and its value; None for no observer.
        """
        values: dict[Node, Any] = {}
        shared: dict[str, torch.Tensor] = {}

        def value(node: Node) -> Any:
            return self._weight(str(node.target), shared) if node.op == "get_attr" else values[node]

        for node in self.program.graph.nodes:
            if node.op == "output":
                break
            if node.op == "placeholder":
                values[node] = inputs[str(node.target)]
            elif node.op == "call_function":
                args = [map_arg(a, value) for a in node.args]
                kwargs = {k: map_arg(v, value) for k, v in node.kwargs.items()}
                values[node] = self._call(node, args, kwargs, shared)
                if observe is not None:
                    observe(node, args, values[node])
            for arg in node.all_input_nodes:
                if self._last_use[arg] is node and arg is not self.program.logits:
                    values.pop(arg, None)
        result: torch.Tensor = values[self.program.logits]
        return result

    def _weight(self, name: str, shared: dict[str, torch.Tensor]) -> Any:
        """Returns the value of a weight; None for parts of a quantized weight, which ``_quantized`` combines."""
        expr = self.program.weights[name]
        if expr.dtype in (torch.int8, torch.float16):
            return None
        if name in self._constants:
            return self._constants[name]
        if not any(recovered_in(expr)):
            return self._constants.setdefault(name, expr.evaluate())
        if name not in shared:
            shared[name] = weight_value(expr, self._leaf)
        return shared[name]

    def _leaf(self, leaf: Recovered) -> torch.Tensor:
        tensor: torch.Tensor = self.moving[self._index[leaf.name]]
        return tensor

    def _call(self, node: Node, args: Sequence[Any], kwargs: Mapping[str, Any], shared: dict[str, torch.Tensor]) -> Any:
        target: Any = node.target
        if target in QUANTIZED_WEIGHTS:
            names = bound_arguments(node)
            arguments = names | dict(zip(names, args, strict=False)) | dict(kwargs)
            return self._quantized(target, names, arguments, shared)
        if target is ew.quantize_activation.default:
            return _quantize(*args)
        if target is ew.attention.default:
            names = bound_arguments(node)
            return attention_of_sequences(names | dict(zip(names, args, strict=False)) | dict(kwargs))
        if target is aten._to_copy.default and _narrows(args[0], kwargs):
            return rounded_to(args[0], kwargs["dtype"])
        if getattr(target, "namespace", "") == NAMESPACE:
            return REFERENCES[target._schema.name.partition("::")[2]](*args, **kwargs)
        return target(*args, **kwargs)

    def _quantized(
        self, target: Any, names: Mapping[str, Any], given: Mapping[str, Any], shared: dict[str, torch.Tensor]
    ) -> torch.Tensor:
        """Computes a product with a quantized weight, or rows of a quantized table; ``names`` are the nodes that are
        arguments.
        """
        values, scales, offsets = (names.get(n) for n in QUANTIZED_WEIGHTS[target])
        weight = self._fake_quantized(values, scales, offsets, shared)
        if target is ew.quantized_embedding.default:
            return torch.nn.functional.embedding(given["ids"].long(), weight)
        return finished_product(target, given["values"], weight, given)  # floats, see ``_quantize``

    def _fake_quantized(self, values: Any, scales: Any, offsets: Any, shared: dict[str, torch.Tensor]) -> torch.Tensor:
        """Returns the values of a quantized weight as float32, with gradients to the weights that it is rounded from.
        The arguments are nodes; ``offsets`` may be None.
        """
        name = str(values.target)
        if name in shared:
            return shared[name]
        expr = self.program.weights[name]
        if not isinstance(expr, QuantizedValues):
            raise PassError(f"{expr.describe()}: training has no gradients for weights of this kind")
        exact = weight_value(expr.base, self._leaf)
        rounded = self._rounded.get(name)
        if rounded is None:
            parts = [self.program.weights[str(n.target)].evaluate() for n in (values, scales, offsets) if n is not None]
            rounded = self._rounded[name] = RoundedWeight.from_codes(exact.detach(), Codes(*parts), expr.format)
        shared[name] = straight_through(exact, rounded.value, rounded.beyond)
        return shared[name]


def _quantize(x: torch.Tensor, group_size: int) -> tuple[torch.Tensor, None, None]:
    """Rounds x as ``quantize_activation`` does, but returns floats in the place of integers, with gradients to
    ``x``.
    """
    values, scales, _ = quantize_activation(x.detach(), group_size)
    return straight_through(x, decoded(values, scales, group=group_size)), None, None


def _narrows(x: torch.Tensor, kwargs: Mapping[str, Any]) -> bool:
    dtype = kwargs.get("dtype")
    return dtype is not None and dtype.is_floating_point and dtype.itemsize < x.element_size()
