"""Compiles the kernels of attention and sampling that a program needs on NVIDIA GPUs into a bundle. It needs no GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch.fx.node import Node

from enginewright.passes.framework.base import describe_node
from enginewright.passes.framework.match import bound_arguments
from enginewright.passes.ir.program import Program
from enginewright.runtime.shared.errors import UnsupportedModelError
from enginewright.runtime.shared.progress import Progress, ProgressEvent
from enginewright.runtime.shared.threads import available_threads

from ..emit.bundle_writer import BundleWriter
from ..gpu.call import DeviceArray
from ..gpu.choose_tiles import compile_layer
from ..gpu.compile_ahead import files_of
from ..gpu.compile_workers import KernelCompiler
from ..gpu.plugin_kernels import plugin_kernels
from ..gpu.sampling import each_sampling_call
from ..gpu.specs import AttentionShape
from ..gpu.tiles import GPUS, SCALED_FORMATS, FloatType, gpu_of, number_of

ew = torch.ops.ew


@dataclass(frozen=True)
class LayerKernels:
    """The kernels for layers whose attention has the same shape, on GPUs of one compute capability.

    Attributes:
        layers: the layers.
        shape: the shape of their attention.
        capability: the compute capability; 89 for 8.9.
        write, prefill, decode, combine: the stems of the kernels' files.
    """

    layers: tuple[int, ...]
    shape: AttentionShape
    capability: int
    write: str
    prefill: tuple[str, ...]
    decode: tuple[str, ...]
    combine: str


def attention_shapes(program: Program, dtype: FloatType) -> dict[AttentionShape, tuple[int, ...]]:
    """Returns the shapes of a program's attention, each with its layers.

    Args:
        program: a program with attention in its paged form. Its cache groups are of 8 bits, or have the type of
            ``dtype``.
        dtype: the type that the target computes in.

    Raises:
        TargetError: no kernel supports a shape.
        UnsupportedModelError: no step writes the caches of an attention.
    """
    inputs = {node: name for name, node in program.inputs.items()}
    formats = {
        layer: SCALED_FORMATS.get(group.dtype, dtype) for group in program.cache_groups for layer in group.layers
    }
    shapes: dict[AttentionShape, list[int]] = {}
    for node in program.nodes_of(ew.paged_attention.default):
        arguments = bound_arguments(node)
        q, k, v = (program.value(arguments[name]) for name in ("q", "k_cache", "v_cache"))
        layer = _layer_of(node, arguments["k_cache"], inputs)
        shape = AttentionShape.from_shapes(
            q.shape,
            k.shape,
            v.shape,
            dtype=dtype,
            cache=formats[layer],
            scale=float(arguments["scale"]),
            window=int(arguments["window"]),
            softcap=float(arguments["softcap"]),
            sinks=arguments["sinks"] is not None,
            slopes=arguments["slopes"] is not None,
        )
        shapes.setdefault(shape, []).append(layer)
    return {shape: tuple(layers) for shape, layers in shapes.items()}


def _layer_of(node: Node, cache: Node, inputs: dict[Node, str]) -> int:
    """Returns the layer of an attention: the number in the name of its cache's input, ``k_cache:LAYER``.

    Raises UnsupportedModelError if the cache isn't the result of a write to such an input.
    """
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
    folder: str,
    writer: BundleWriter,
    progress: Progress,
    *,
    for_plugins: bool,
    large_tiles: bool = False,
) -> tuple[LayerKernels, ...]:
    """Compiles the kernels of ``program``'s attention, and writes them into the bundle's ``folder``.

    Args:
        program, dtype: see ``attention_shapes``.
        capabilities: the compute capabilities of the GPUs; 89 for 8.9.
        folder: a folder in the bundle, such as "targets/tensorrt/kernels".
        writer: the writer of the bundle.
        progress: called with the stage "kernels", for each shape and GPU.
        for_plugins: True if TensorRT launches the kernels as plugins. Then they use less shared memory.
        large_tiles: True for the usual shared memory also in plugins.

    Returns:
        the kernels of each shape and GPU.

    Raises:
        TargetError: a GPU is unknown (raised before compiling), or a shape doesn't fit a GPU.
        MissingDependencyError: Triton is missing.
    """
    for capability in capabilities:
        gpu_of(capability)
    shapes = attention_shapes(program, dtype)
    needed = [(shape, capability) for shape in shapes for capability in capabilities]
    make = partial(plugin_kernels, large_tiles=large_tiles) if for_plugins else compile_layer
    written: set[str] = set()
    layer_kernels = []
    with KernelCompiler(available_threads()) as compiler:  # shapes share writes, and what combines
        every = compiler.each(lambda need: make(*need, compiler=compiler.compile), needed)
        for done, ((shape, capability), kernels) in enumerate(zip(needed, every, strict=True), 1):
            for name, content in (file for kernel in kernels.all() for file in files_of(kernel).items()):
                if name not in written:
                    writer.write_bytes(f"{folder}/{name}", content)
                    written.add(name)
            layer_kernels.append(
                LayerKernels(
                    shapes[shape],
                    shape,
                    capability,
                    write=kernels.write.spec.stem,
                    prefill=tuple(kernel.spec.stem for kernel in kernels.prefill),
                    decode=tuple(kernel.spec.stem for kernel in kernels.decode),
                    combine=kernels.combine.spec.stem,
                )
            )
            progress(ProgressEvent("kernels", done, len(needed), f"sm_{capability}"))
    return tuple(layer_kernels)


def emit_sampling_kernels(
    program: Program, capabilities: Sequence[str], folder: str, writer: BundleWriter, progress: Progress
) -> None:
    """Compiles the kernels that draw tokens from float32 logits, once for each major compute capability.

    Args:
        capabilities: the compute capabilities of the GPUs, such as "8.9"; those without kernels are left out.
        program, folder, writer, progress: see ``emit_attention_kernels``.

    Raises:
        MissingDependencyError: Triton is missing.
    """
    vocab = int(program.value(program.logits).shape[-1])
    logits = DeviceArray(0, np.dtype(np.float32), (4, vocab))  # how many rows there are is nothing to a kernel
    known = sorted((number for name in capabilities if (number := number_of(name)) in GPUS), reverse=True)
    numbers = sorted({number // 10: number for number in known}.values())  # the least of each: it runs on the others
    specs = dict.fromkeys(call.spec(number) for number in numbers for call in each_sampling_call(logits))
    with KernelCompiler(available_threads()) as compiler:
        for done, kernel in enumerate(compiler.each(compiler.compile, specs), 1):
            for name, content in files_of(kernel).items():
                writer.write_bytes(f"{folder}/{name}", content)
            progress(
                ProgressEvent("kernels", done, len(specs), f"{kernel.spec.kernel} for sm_{kernel.spec.capability}")
            )
