"""The attention kernels that a program needs on NVIDIA GPUs, compiled into a bundle without one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.fx.node import Node

from enginewright.optimizer.shared.progress import Progress, ProgressEvent
from enginewright.passes.framework.base import describe_node
from enginewright.passes.framework.match import bound_arguments
from enginewright.passes.ir.program import Program
from enginewright.plugins.shared.errors import UnsupportedModelError
from enginewright.plugins.tensorrt.kernels import layer_specs
from enginewright.plugins.triton.compile_ahead import compile_kernel, files_of
from enginewright.plugins.triton.specs import AttentionShape
from enginewright.plugins.triton.tiles import CacheFormat, FloatType

from .bundle_writer import BundleWriter

ew = torch.ops.ew


@dataclass(frozen=True)
class LayerKernels:
    """``layers``, whose attention has one shape, on GPUs of one ``capability``: the stems of their kernels' files.

    In the order of ``layer_specs``: the write, those for prefill and for decoding to choose among, what combines parts.
    """

    layers: tuple[int, ...]
    shape: AttentionShape
    capability: int
    stems: tuple[str, ...]


def attention_shapes(program: Program, dtype: FloatType, cache: CacheFormat) -> dict[AttentionShape, tuple[int, ...]]:
    """The shapes of a program's attention, each with its layers.

    Args:
        program: with attention in its paged form.
        dtype, cache: what the target computes in, and keeps keys and values in.

    Raises:
        TargetError: a shape that no kernel has.
        UnsupportedModelError: an attention whose caches no step writes.
    """
    inputs = {node: name for name, node in program.inputs.items()}
    shapes: dict[AttentionShape, list[int]] = {}
    for node in program.nodes_of(ew.paged_attention.default):
        arguments = bound_arguments(node)
        q, k, v = (program.value(arguments[name]) for name in ("q", "k_cache", "v_cache"))
        shape = AttentionShape(
            heads=int(q.shape[1]),
            kv_heads=int(k.shape[2]),
            head_size=int(q.shape[2]),
            value_size=int(v.shape[3]),
            block_size=int(k.shape[1]),
            dtype=dtype,
            cache=cache,
            scale=float(arguments["scale"]),
            window=int(arguments["window"]),
            softcap=float(arguments["softcap"]),
            sinks=arguments["sinks"] is not None,
            slopes=arguments["slopes"] is not None,
        )
        shapes.setdefault(shape, []).append(_layer_of(node, arguments["k_cache"], inputs))
    return {shape: tuple(layers) for shape, layers in shapes.items()}


def _layer_of(node: Node, cache: Node, inputs: dict[Node, str]) -> int:
    """The number in the name of the input (``k_cache:LAYER``) that was written, and then attended to."""
    write = cache.args[0] if cache.args else None
    written = bound_arguments(write).get("k_cache") if isinstance(write, Node) else None
    name = inputs.get(written, "") if isinstance(written, Node) else ""
    if not name.startswith("k_cache:"):
        raise UnsupportedModelError(
            f"{describe_node(node)} attends to a cache that this step doesn't write",
            hint="Export a program whose attention was lowered by lower_attention.",
        )
    return int(name.partition(":")[2])


def emit_attention_kernels(
    program: Program,
    capabilities: Sequence[int],
    dtype: FloatType,
    cache: CacheFormat,
    folder: str,
    writer: BundleWriter,
    progress: Progress,
) -> tuple[LayerKernels, ...]:
    """Compiles what TensorRT's plugins launch for ``program``, and writes it into the bundle's ``folder``.

    Args:
        program, dtype, cache: as ``attention_shapes`` has them.
        capabilities: of the GPUs; 89 for 8.9.
        folder: in the bundle, such as "targets/tensorrt/kernels".
        progress: called with the stage "kernels", one by one.

    Raises:
        TargetError: a GPU that isn't known, or a shape that doesn't fit it; before anything is compiled.
        MissingDependencyError: without Triton.
    """
    shapes = attention_shapes(program, dtype, cache)
    needed = [(shape, c, layer_specs(shape, c)) for shape in shapes for c in capabilities]
    specs = list(dict.fromkeys(spec for _, _, of_layer in needed for spec in of_layer))
    for done, spec in enumerate(specs, 1):
        for name, content in files_of(compile_kernel(spec)).items():
            writer.write_bytes(f"{folder}/{name}", content)
        progress(ProgressEvent("kernels", done, len(specs), f"{spec.kernel} for sm_{spec.capability}"))
    return tuple(
        LayerKernels(shapes[shape], shape, c, tuple(s.stem for s in of_layer)) for shape, c, of_layer in needed
    )
