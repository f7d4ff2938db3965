"""Builds the engines of a bundle's tensorrt target by TensorRT, on a machine that has it and a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import cast

import numpy as np
import numpy.typing as npt
import tensorrt as trt

from enginewright.runtime.bundle.manifest import target_folder
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.shared.errors import TargetError

from ...emit.engine_report import BuiltPlan
from ...gpu.compile_ahead import read_attention, read_kernel
from ...steps.paged_section import KERNELS_FOLDER, LOGITS, PagedProfile, PagedSection
from ..paged_attention import register_plugins
from .attention_layers import PluginAttention
from .build_network import AttentionLayers, add_profile, build_network
from .network import Network
from .network_builder import NetworkBuilder, WeightBytes


class ErrorLog(trt.ILogger):
    """Collects TensorRT's error messages for our errors."""

    def __init__(self) -> None:
        trt.ILogger.__init__(self)
        self.errors: list[str] = []

    def log(self, severity: trt.ILogger.Severity, msg: str) -> None:
        """Stores a message if it is an error. TensorRT calls this."""
        if severity in (trt.ILogger.Severity.ERROR, trt.ILogger.Severity.INTERNAL_ERROR):
            self.errors.append(" ".join(msg.split()))

    def said(self) -> str:
        """Returns the latest error messages; "" if there are none."""
        return "; ".join(self.errors[-2:])


def weights_of(bundle: Bundle) -> WeightBytes:
    """Returns a function from the name of a weight in the bundle to the mapped weight."""

    def read(name: str) -> npt.NDArray[np.generic]:
        return bundle.weight(name)

    return read


def build_engines(bundle: Bundle, target: str, paged: PagedSection, capability: int) -> Iterator[BuiltPlan]:
    """Yields the serialized engine of each profile. Each is loaded once as a test.

    Args:
        bundle: a bundle with intact files.
        target: the target's name.
        paged: the section of its manifest.
        capability: the compute capability of this machine's GPU; 89 for 8.9.

    Raises:
        TargetError: TensorRT rejects a layer or its own engine; the message has the layer and TensorRT's error.
        BundleError: the description, or a kernel, is damaged.
    """
    folder = target_folder(target)
    source = f"{folder}/{paged.network}"
    description = Network.from_json(bundle.read_bytes(source), source=str(bundle.path / source))
    kernels = bundle.path / folder / KERNELS_FOLDER
    if paged.caches == "ordered":  # they are inputs, and no outputs
        description = description.model_copy(update={"outputs": (LOGITS,)})
    read = partial(read_attention, kernels, clamp=True)
    register_plugins(capability, lambda spec: read_kernel(kernels, spec.stem), read)
    log = ErrorLog()  # TensorRT keeps the first one it is given, for the whole process
    for profile in paged.profiles:
        attention = PluginAttention(profile.phase, paged.split_keys, paged.caches)
        plan = build_engine(description, weights_of(bundle), attention, profile, log)
        yield BuiltPlan(profile.phase, plan, scratch_bytes(plan, profile, log))


def build_engine(
    description: Network, weights: WeightBytes, attention: AttentionLayers, profile: PagedProfile, log: ErrorLog
) -> bytes:
    """Builds the engine of one profile, and returns it serialized. Raises TargetError with TensorRT's error."""
    builder = trt.Builder(log)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    layers: NetworkBuilder = build_network(network, description, weights, attention)
    config = builder.create_builder_config()
    config.set_preview_feature(trt.PreviewFeature.ALIASED_PLUGIN_IO_10_03, True)
    add_profile(builder, config, network, description, profile)
    plan = builder.build_serialized_network(network, config)
    del layers  # the weights were read while it lived
    if plan is None:
        raise TargetError(
            f"the engine for {profile.phase}: TensorRT can't build it: {log.said() or 'it gives no reason'}",
            hint="Please report it, with the model's configuration and the version of TensorRT.",
        )
    return bytes(cast(bytes, plan))  # a buffer, which the stubs don't say


def scratch_bytes(plan: bytes, profile: PagedProfile, log: ErrorLog) -> int:
    """Returns the GPU memory that an engine needs while it runs. Raises TargetError if TensorRT can't load it."""
    engine = trt.Runtime(log).deserialize_cuda_engine(plan)
    if engine is None:
        raise TargetError(
            f"the engine for {profile.phase}: TensorRT can't load what it built: {log.said() or 'it gives no reason'}",
            hint="Is the GPU's memory free? Else please report it, with the version of TensorRT.",
        )
    return int(engine.device_memory_size_v2)
