"""Builds networks whose attention is cut out, over TensorRT-RTX's library, which has no plugins and needs no GPU.

Imports nothing of TensorRT before ``use_rtx``: this is run in a process of its own, where ``tensorrt`` is tensorrt_rtx.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any


def use_rtx() -> None:
    """From now on ``import tensorrt`` gives tensorrt_rtx."""
    import tensorrt_rtx

    sys.modules["tensorrt"] = tensorrt_rtx


class CutAttention:
    """A cut through attention: its inputs become outputs of the network, and its results become inputs."""

    def __init__(self, trt: Any) -> None:
        self.trt = trt
        self.outputs: list[Any] = []
        self.inputs: list[Any] = []

    def write(self, b: Any) -> tuple[Any, Any]:
        self.outputs += [b.input(0), b.input(1)]
        return b.input(3), b.input(4)

    def attend(self, b: Any) -> Any:
        q, v_cache = b.input(0), b.input(2)
        self.outputs.append(q)
        shape = self.trt.Dims([-1, q.shape[1], v_cache.shape[3]])
        attended = b.network.add_input(f"attended_{len(self.inputs)}", q.dtype, shape)
        attended.set_dimension_name(0, "T")
        self.inputs.append(attended)
        return attended


def build(bundle: str) -> dict[str, Any]:
    """Each phase's engine of a bundle's tensorrt target, its names of layers, and its inputs' types."""
    import tensorrt as trt

    from enginewright.plugins.engines.section import TensorRtSection
    from enginewright.plugins.tensorrt.compile.build_network import add_profile, build_network
    from enginewright.plugins.tensorrt.compile.network import Network
    from enginewright.runtime.bundle.reader import Bundle

    opened = Bundle.open(bundle)
    section = opened.targets["tensorrt"].section(TensorRtSection)
    assert section is not None and section.paged is not None
    name = f"targets/tensorrt/{section.paged.network}"
    whole = Network.from_json((Path(bundle) / name).read_bytes(), source=name)
    description = whole.model_copy(update={"outputs": ("logits",)})
    outputs: dict[str, Any] = {}
    for profile in section.paged.profiles:
        builder = trt.Builder(trt.Logger(trt.Logger.ERROR))
        network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
        cut = CutAttention(trt)
        networks = build_network(network, description, opened.weight, cut)
        for tensor in cut.outputs:
            network.mark_output(tensor)
        config: Any = builder.create_builder_config()
        config.num_compute_capabilities = 1
        config.set_compute_capability(trt.ComputeCapability.SM89, 0)  # type: ignore[attr-defined]
        # The inputs that take the place of attention have sizes, too.
        inputs = dict(description.inputs)
        for tensor in cut.inputs:
            shape = ["T", int(tensor.shape[1]), int(tensor.shape[2])]
            inputs[tensor.name] = inputs["ids"].model_validate({"dtype": whole.dtype, "shape": shape})
        add_profile(builder, config, network, description.model_copy(update={"inputs": inputs}), profile)
        plan = builder.build_serialized_network(network, config)
        assert plan is not None and networks is not None
        outputs[profile.phase] = {
            "plan": bytes(plan),  # type: ignore[call-overload]
            "layers": [network.get_layer(i).name for i in range(network.num_layers)],
            "q": [str(t.dtype) for t in cut.outputs],
        }
    return outputs
