"""Converts a Program to StableHLO modules: first to a graph with KV caches in slots, then to a module for every
bucket.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import metadata

from onnx import TensorProto

from enginewright.passes.ir.program import Program
from enginewright.plugins.stablehlo.recipe import StableHloOptions
from enginewright.runtime.bundle.manifest import target_folder
from enginewright.runtime.shared.progress import Progress, ProgressEvent

from ...emit.bundle_writer import BundleWriter
from ...graphs.emit_model import graph_model, summed_products
from ...graphs.graph import GraphBuilder
from ...graphs.kernels import PanelProducts
from ...graphs.weights import ExternalWeights
from ...steps.linear_io import LOGITS, LinearCacheGroup
from ..section import (
    KERNELS,
    LINEAR,
    ROTATE,
    IreeSection,
    ModuleSection,
    StableHloSection,
)
from ..serve.pjrt_library import load_stablehlo
from . import kernels as our_kernels
from . import ops_model, ops_plain
from .graph import Graph, Handler
from .iree_files import compile_for_cuda, compile_for_level, compiler_version, device_name

NAME = "stablehlo"
VERSION = "1.9.0"
"""The version of StableHLO that modules are written for, of January 2025. Later versions promise to read it for five
years.
"""

HANDLERS: Mapping[str, Handler] = {**ops_plain.HANDLERS, **ops_model.HANDLERS}


def emit_modules(
    program: Program,
    modules: tuple[ModuleSection, ...],
    positions: int,
    writer: BundleWriter,
    progress: Progress,
    options: StableHloOptions = StableHloOptions(),
) -> StableHloSection:
    """Writes the modules into the target's folder, and the weights into the bundle. Returns the section for the
    manifest.

    Args:
        program: a program with attention in its paged form.
        modules: the sizes of the modules.
        positions: the number of positions of the model.
        writer: the bundle's writer.
        progress: called with the stages "emit", for each weight, and "modules".
        options: the target's options. With ``kernels``, linears and rotations call the cpu target's kernels. So do
            attention and cache writes, if the kernels support all of the model's attention.

    Raises:
        MissingDependencyError: jaxlib is missing or has another version; or IREE's compiler, if it is needed.
        TargetError: IREE's compiler can't compile a module.
        UnsupportedModelError: an op has no translation to standard ONNX operators, or from these to StableHLO. The
            message names the model's module.
        SourceError, BundleError, CapacityError: a weight can't be read, or a file not written.
    """
    stablehlo = load_stablehlo()
    iree = None
    if options.iree or options.iree_cuda:
        iree = IreeSection(version=compiler_version(), levels=options.iree, cuda=options.iree_cuda)
    progress(ProgressEvent("emit", 0, len(program.weights)))
    builder = GraphBuilder(program, ExternalWeights(writer, progress, len(program.weights), suffix=NAME), target=NAME)
    handlers = HANDLERS
    names: tuple[str, ...] = ()
    if options.kernels:
        builder.overrides = PanelProducts(builder).handlers
        handlers = {**handlers, **our_kernels.PRODUCTS}
    model = graph_model(builder)
    if options.kernels:
        by_kernel = our_kernels.attends(model)
        handlers = {**handlers, **our_kernels.CACHES} if by_kernel else handlers
        names = KERNELS if by_kernel else (LINEAR, ROTATE)
    folder = target_folder(NAME)
    for done, sizes in enumerate(modules):
        progress(ProgressEvent("modules", done, len(modules), sizes.name))
        text = Graph(model, sizes, positions).translate(model.graph.node, handlers)
        artifact: bytes = stablehlo.serialize_portable_artifact_str(text, VERSION)
        writer.write_bytes(f"{folder}/{sizes.file}", artifact)
        for level in options.iree:
            writer.write_bytes(f"{folder}/{sizes.compiled(level)}", compile_for_level(artifact, sizes.name, level))
        for capability in options.iree_cuda:
            file = sizes.compiled(device_name(capability))
            writer.write_bytes(f"{folder}/{file}", compile_for_cuda(artifact, sizes.name, capability))
    progress(ProgressEvent("modules", len(modules), len(modules)))
    return StableHloSection(
        version=VERSION,
        jaxlib=metadata.version("jaxlib"),
        modules=modules,
        caches=tuple(v.name.replace("present_", "past_") for v in model.graph.output if v.name != LOGITS),
        weights=tuple(t.name for t in model.graph.initializer if t.data_location == TensorProto.EXTERNAL),
        cache_groups=tuple(LinearCacheGroup.from_group(group) for group in program.cache_groups),
        summed_products=summed_products(program),
        kernels=names,
        iree=iree,
    )
