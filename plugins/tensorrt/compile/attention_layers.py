"""Adds a network's attention as our TensorRT plugins (``plugins/tensorrt``), which must be registered."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import tensorrt as trt
import tensorrt.plugin as trtp

from .network import QUANTIZED_KV_WRITE, QUANTIZED_PAGED_ATTENTION
from .network_builder import NetworkBuilder


@dataclass(frozen=True)
class PluginAttention:
    """The attention of ``build_network``, made of our plugins.

    ``prefill`` computes attention in one launch. Steps of ``decode``, with one token per request, divide contexts into
    splits of ``split_keys`` keys and combine their results.
    """

    phase: Literal["decode", "prefill"]
    split_keys: int
    caches: Literal["aliased", "ordered"] = "aliased"
    _numbers: dict[str, trt.ITensor] = field(default_factory=dict)  # of ordered writes, by the caches they give

    def write(self, b: NetworkBuilder) -> tuple[trt.ITensor, ...]:
        """Adds the write of the step's keys and values. Returns the caches and their scales, in the same memory.

        They are outputs that are declared as aliases of the inputs. With ``ordered`` writes, they are the inputs
        themselves, and attention gets two outputs of the write instead of sinks and slopes, so that it runs after the
        write.
        """
        if self.caches == "ordered":
            if _scaled(b):
                raise b.refused("ordered writes have no form for caches of 8 bits")
            layer = b.add(b.network.add_plugin(trtp.op.ew.ordered_kv_write(*(b.input(i) for i in range(5))), aot=True))
            assert b.call is not None
            self._numbers.update({name: layer.get_output(i) for i, name in enumerate(b.call.outputs)})
            return b.input(3), b.input(4)
        create, count = (trtp.op.ew.quantized_kv_write, 4) if _scaled(b) else (trtp.op.ew.kv_write, 2)
        layer = b.add(b.network.add_plugin(create(*(b.input(i) for i in range(3 + count))), aot=True))
        return tuple(layer.get_output(i) for i in range(count))

    def attend(self, b: NetworkBuilder) -> trt.ITensor:
        """Adds attention, and returns its result [T, Nq, Dv], in the type of the queries."""
        q = b.input(0)
        # Who has no sinks passes something of their type.
        unused = self._numbers.get(b.operand(1)) or b.constant(np.zeros(q.shape[1], np.float32))
        last = 8 if _scaled(b) else 6  # caches, their scales, table, and bounds come before it
        sinks, slopes = (b.input(i) if b.operand(i) else unused for i in (last, last + 1))
        if self.caches == "ordered" and b.operand(last) and b.operand(last + 1):
            raise b.refused("with sinks and slopes the tensorrt target can't put attention behind an ordered write")
        inputs = (*(b.input(i) for i in range(last)), sinks, slopes)
        fixed = {
            "scale": b.number("scale"),
            "window": b.attribute("window"),
            "softcap": b.number("softcap"),
            "has_sinks": bool(b.operand(last)),
            "has_slopes": bool(b.operand(last + 1)),
        }
        if self.phase == "prefill":
            attend = trtp.op.ew.quantized_paged_attention if _scaled(b) else trtp.op.ew.paged_attention
            return b.out(b.network.add_plugin(attend(*inputs, **fixed), aot=True))
        attend = trtp.op.ew.quantized_paged_attention_parts if _scaled(b) else trtp.op.ew.paged_attention_parts
        split = attend(*inputs, **fixed, split_keys=self.split_keys)
        parts = b.add(b.network.add_plugin(split, aot=True))
        combine = trtp.op.ew.combine_splits(parts.get_output(0), parts.get_output(1), dtype=b.description.dtype)
        return b.out(b.network.add_plugin(combine, aot=True))


def _scaled(b: NetworkBuilder) -> bool:
    """Returns True if the caches of the builder's call have 8 bits."""
    assert b.call is not None
    return b.call.op in (QUANTIZED_KV_WRITE, QUANTIZED_PAGED_ATTENTION)
