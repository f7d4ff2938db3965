"""Drives the registered plugins as TensorRT's template classes do; run in the process of conftest.py.

TensorRT hands plugins its own symbolic sizes, which can't be made from Python. Here they are expressions over named
sizes, which show that a launch follows the shapes of a run, not those of the build.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

Sizes = dict[str, int]
KERNELS: dict[Any, Any] = {}
"""Specs that were asked for -> what was given, in order."""


@dataclass(frozen=True)
class Expression:
    """A size: constant, or computed from named ones."""

    value: Callable[[Sizes], int]
    fixed: bool

    def is_constant(self) -> bool:
        return self.fixed

    def get_constant_value(self) -> int:
        return self.value({})


class Builder:
    """Stands in for TensorRT's IExprBuilder."""

    def constant(self, value: int) -> Expression:
        return Expression(lambda sizes: value, fixed=True)

    def operation(self, kind: Any, first: Expression, second: Expression) -> Expression:
        import tensorrt as trt

        operations = {
            trt.DimensionOperation.SUM: lambda a, b: a + b,
            trt.DimensionOperation.SUB: lambda a, b: a - b,
            trt.DimensionOperation.PROD: lambda a, b: a * b,
            trt.DimensionOperation.FLOOR_DIV: lambda a, b: a // b,
            trt.DimensionOperation.CEIL_DIV: lambda a, b: -(-a // b),
        }
        apply = operations[kind]
        fixed = first.fixed and second.fixed
        return Expression(lambda sizes: apply(first.value(sizes), second.value(sizes)), fixed)


class Integers(dict[int, Any]):
    """Stands in for what TensorRT has a plugin put its integers into."""

    nbSymExprs = 0


@dataclass(frozen=True)
class Launched:
    """The launch that a plugin asks for at given sizes."""

    grid: tuple[int, int, int]
    block: int
    shared_memory: int
    integers: tuple[int, ...]
    outputs: list[tuple[list[int], str, int]]  # shape, type, and whose memory of the inputs it is, or -1
    types: list[list[str]]  # of inputs and outputs, in each combination that TensorRT may choose
    tactics: list[int]
    entry: str
    parameters: int  # of the PTX
    constants: dict[str, Any]


def find_packages_in(folder: str) -> None:
    sys.path.insert(0, folder)


def names() -> list[str]:
    """Registers the plugins, twice, and says which there are, with their inputs, attributes and outputs."""
    from tensorrt.plugin._lib import QDP_REGISTRY

    from enginewright.plugins.gpu.compile_ahead import compile_kernel
    from enginewright.plugins.tensorrt.paged_attention import register_plugins

    register_plugins(89, compile_kernel)
    register_plugins(90, compile_kernel)
    return [
        f"{name}({', '.join(d.input_tensor_names)}; {', '.join(d.input_attrs)}) -> {d.num_outputs}"
        + (", tactics" if d.autotune_func else "")
        for name, d in QDP_REGISTRY.items()
    ]


def unknown_gpu() -> None:
    from enginewright.plugins.tensorrt.paged_attention import register_plugins

    register_plugins(75, lambda spec: None)  # type: ignore[arg-type, return-value]


def launch(
    plugin: str,
    inputs: list[tuple[list[int | str], str]],
    attributes: dict[str, Any],
    sizes: list[Sizes],
    tactic: int = 1,
    capability: int = 90,
) -> list[Launched]:
    """The plugin's launch at each of ``sizes``.

    ``inputs``: (shape, TensorRT's name of the type); a dimension is a number, or a name in ``sizes``.
    """
    import tensorrt as trt
    from tensorrt.plugin._lib import QDP_REGISTRY
    from tensorrt.plugin._plugin_class import _TemplateAOTPlugin
    from tensorrt.plugin._tensor import SymInt32

    from enginewright.plugins.gpu.compile_ahead import CompiledKernel, compile_kernel
    from enginewright.plugins.tensorrt.paged_attention import register_plugins

    def kernels(spec: Any) -> CompiledKernel:
        if spec not in KERNELS:
            KERNELS[spec] = compile_kernel(spec)
        return KERNELS[spec]

    def dimension(of: int | str) -> Expression:
        return Expression(lambda s: s[of] if isinstance(of, str) else of, fixed=isinstance(of, int))

    def described(of: trt.DataType, rank: int) -> Any:
        desc = trt.DynamicPluginTensorDesc()
        inner = trt.PluginTensorDesc()
        inner.type, inner.format, inner.dims = of, trt.TensorFormat.LINEAR, trt.Dims([-1] * rank)
        desc.desc = inner
        return desc

    register_plugins(capability, kernels)
    d = QDP_REGISTRY[plugin]
    aot = _TemplateAOTPlugin(plugin.partition("::")[2], "ew", d.num_outputs)
    aot.init(
        d.register_func, attributes, d.aot_impl_attr_names, d.aot_impl_func, d.autotune_attr_names, d.autotune_func
    )
    types = [getattr(trt.DataType, of) for _, of in inputs]
    with (
        patch.object(trt, "IDimensionExpr", Expression),
        patch.object(trt, "DimsExprs", lambda rank: [None] * rank),
        patch.object(SymInt32, "__call__", lambda self: self._expr),
    ):
        # What TensorRT does, in its order.
        of_outputs = aot.get_output_data_types(types, [len(shape) for shape, _ in inputs])
        shapes = aot.get_output_shapes([[dimension(d) for d in shape] for shape, _ in inputs], [], Builder())
        ranks = [len(shape) for shape, _ in inputs] + [len(shape) for shape in shapes]
        descs = [described(of, rank) for of, rank in zip([*types, *of_outputs], ranks, strict=True)]
        aot.get_supported_format_combinations(descs, len(inputs))
        aot.configure_plugin(descs[: len(inputs)], descs[len(inputs) :])
        tactics = sorted(aot.get_valid_tactics())
        aot.set_tactic(tactic if tactics else 0)
        parameters, integers = SimpleNamespace(), Integers()
        aot.get_launch_params([], descs, len(inputs), parameters, integers, Builder())
        plain = [x.desc for x in descs]
        entry, ptx = aot.get_kernel(plain[: len(inputs)], plain[len(inputs) :])

    made_of = next(spec for spec, kernel in KERNELS.items() if kernel.ptx == ptx.decode().rstrip("\0"))
    return [
        Launched(
            grid=(parameters.grid_x.value(s), parameters.grid_y.value(s), parameters.grid_z.value(s)),
            block=parameters.block_x.value(s),
            shared_memory=parameters.shared_mem.value(s),
            integers=tuple(integers[i].value(s) for i in range(integers.nbSymExprs)),
            outputs=[
                ([size.value(s) for size in shape], of.name, aot.get_aliased_input(i))
                for i, (shape, of) in enumerate(zip(shapes, of_outputs, strict=True))
            ],
            types=[[of.name for of in c.types] for c in aot.supported_combs],
            tactics=tactics,
            entry=entry,
            parameters=len(re.findall(rf"\.param \.u[^\n]* {entry}_param_\d+", ptx.decode())),
            constants=dict(made_of.constants) | {"STAGES": made_of.stages},
        )
        for s in sizes
    ]
