"""The contrib variant: the same graph with onnxruntime's own operators (domain com.microsoft) where they are faster.

Attention becomes GroupQueryAttention, a residual with the norm after it SkipSimplifiedLayerNormalization or
SkipLayerNormalization, and SiLU QuickGelu. Other calls are as in the standard file. Weights are the same bytes of the
same blobs. Products of int4 stay DequantizeLinear and MatMul; onnxruntime converts them to MatMulNBits when it loads
the file, with the ``accuracy_level`` that is set here.

Some attributes have a default that runtimes interpret differently, so they are always set: the window (W tokens,
including the query's own), the scale, and ``smooth_softmax`` (off). After a step, a request has ``write_index + S``
tokens, with padding. So ``seqlens_k`` (one less) and the longest, ``total_sequence_length``, follow from the graph's
inputs, and no mask is needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from onnx import TensorProto, helper
from torch.fx.node import Node

from enginewright.passes.framework.match import bound_arguments
from enginewright.passes.framework.views import RESHAPES
from enginewright.passes.ir.program import Program
from enginewright.passes.ir.provenance import WHERE, join_where

from ..steps.linear_io import INPUT_IDS, WRITE_INDEX, AccuracyLevel, cache_names
from . import ops_attention, ops_ew
from .contrib_attention import GroupQuery, group_queries
from .contrib_layout import LayoutBuilder
from .graph import GraphBuilder, Value
from .weights import ExternalWeights

ew = torch.ops.ew

DOMAIN = "com.microsoft"

_F32 = torch.float32
_GROUPS = (16, 32, 64, 128, 256)
"""The group sizes that GatherBlockQuantized supports."""
_NORMS = {"RMSNormalization": "SkipSimplifiedLayerNormalization", "LayerNormalization": "SkipLayerNormalization"}


def accuracy_level(program: Program) -> AccuracyLevel:
    """Returns onnxruntime's accuracy level for a program: 4 if it has products with 4-bit weights and none has offsets,
    otherwise 1.

    In the program, activations are rounded to 8 bits in groups of the weight's size. Level 4 does the same (in groups
    of 32 if there is one scale per channel). With offsets, only one of the two sums of a product would be rounded,
    which is worse than rounding neither. Products of experts don't become MatMulNBits, and never round.
    """
    products = [bound_arguments(node) for node in program.nodes_of(ew.quantized_linear.default)]
    offsets = [a["weight_offsets"] is not None for a in products if a["weight_bits"] == 4]
    return 4 if offsets and not any(offsets) else 1


class ContribBuilder(LayoutBuilder):
    """Builds the contrib variant.

    Args:
        program, weights: the program and the writer of the standard file's weights, which are stored already.
        context: the most tokens of a request.
    """

    def __init__(self, program: Program, weights: ExternalWeights, context: int) -> None:
        super().__init__(program, weights)
        self.context = context
        self.attentions = group_queries(program)
        norms = {
            ew.add_rms_norm.default: self._norm_of_sum("RMSNormalization", ew.add_rms_norm.default),
            ew.add_layer_norm.default: self._norm_of_sum("LayerNormalization", ew.add_layer_norm.default),
            ew.gated_activation.default: self._gated_activation,
        }
        self.overrides = {
            **self.overrides,
            **{target: self.along_last(handler) for target, handler in norms.items()},
            ew.kv_write.default: self._kv_write,
            ew.paged_attention.default: self._paged_attention,
            **dict.fromkeys(RESHAPES, self._view_of_heads),
            ew.quantized_embedding.default: self._rows_of_4_bits,
        }
        self._results: dict[Node, str] = {}  # of GroupQueryAttention: [B, S, Nq D]

    @property
    def standard(self) -> tuple[str, ...]:
        """The attentions that keep standard operators, each with the reason."""
        rejected = ((node, a) for node, a in self.attentions.items() if isinstance(a, str))
        return tuple(f"{join_where(node.meta[WHERE])}: {reason}" for node, reason in rejected)

    # ---- attention

    def _kv_write(self, b: GraphBuilder, node: Node, a: Mapping[str, Any]) -> Value:
        attention = next((g for g in self.attentions.values() if isinstance(g, GroupQuery) and g.write is node), None)
        if attention is None:
            return ops_attention.HANDLERS[ew.kv_write.default](b, node, a)
        for past, present in (names := cache_names(attention.layer)):
            shape: list[str | int | None] = ["B", attention.counts[1], "C", attention.size]
            self.inputs[past] = helper.make_tensor_value_info(past, TensorProto.FLOAT, shape)
            self.outputs[present] = helper.make_tensor_value_info(present, TensorProto.FLOAT, shape)
        return tuple(present for _, present in names)

    def _paged_attention(self, b: GraphBuilder, node: Node, a: Mapping[str, Any]) -> Value:
        attention = self.attentions[node]
        if isinstance(attention, str):
            return ops_attention.HANDLERS[ew.paged_attention.default](b, node, a)
        if attention.packed is not None:
            inputs = [self._by_request(attention.packed, sum(attention.counts) * attention.size), "", ""]
        else:
            parts = zip((attention.q, attention.k, attention.v), attention.counts, strict=True)
            inputs = [self._by_request(part, count * attention.size) for part, count in parts]
        pasts, presents = zip(*cache_names(attention.layer), strict=True)
        inputs += [*pasts, *self.once("lengths", self._lengths).split()]
        inputs += self._tables(attention.table) if attention.table is not None else ["", ""]
        inputs += ["", "", "" if a["sinks"] is None else self.cast(a["sinks"], _F32)]
        while not inputs[-1]:
            inputs.pop()
        y, *_ = self.ops(
            "GroupQueryAttention",
            inputs,
            3,
            (f"GroupQueryAttention_{attention.layer}", *presents),
            domain=DOMAIN,
            num_heads=attention.counts[0],
            kv_num_heads=attention.counts[1],
            scale=float(a["scale"]),
            softcap=float(a["softcap"]),
            local_window_size=int(a["window"]) or -1,
            do_rotary=int(attention.table is not None),
            rotary_interleaved=int(attention.interleaved),
            smooth_softmax=0,
        )
        self._results[node] = y
        return self.reshape(y, -1, attention.counts[0], attention.size)

    def _view_of_heads(self, b: GraphBuilder, node: Node, a: Mapping[str, Any]) -> Value:
        """Emits a reshape. A merge of an attention's heads emits nothing, since GroupQueryAttention returns merged
        heads.
        """
        source = next(iter(a.values()))
        sizes = self.expressions(node)
        if source in self._results and len(sizes) == 2 and int(sizes[-1]) == self._width(source):
            return self.lie_by_request(node, self._results[source])
        return self.view(b, node, a)

    def _width(self, node: Node) -> int:
        """Returns the number of elements of all heads of a token. ``node`` is [T, heads, size]."""
        _, heads, size = self.expressions(node)
        return int(heads * size)

    def _by_request(self, node: Node, width: int) -> str:
        """Returns the tensor of a value [T, ..] in the layout [B, S, width], in which it may be already."""
        source = node.args[0] if node.target in RESHAPES else None
        if isinstance(source, Node) and source in self.by_request and int(self.expressions(source)[-1]) == width:
            node = source
        with self.taken_as_it_lies():
            x = self.cast(node, _F32)
        return x if node in self.by_request else self.in_requests(x, width)

    def _lengths(self) -> str:
        """Emits ``seqlens_k`` i32 [B] and ``total_sequence_length`` i32 [1]; returns their names, separated by a
        space.
        """
        tokens = self.op("Shape", INPUT_IDS, start=1, end=2)
        ends = self.op("Add", WRITE_INDEX, tokens)  # [B]
        last = self.op("Cast", self.op("Sub", ends, self.integers(1)), to=TensorProto.INT32)
        return f"{last} {self.op('Cast', self.op('ReduceMax', ends), to=TensorProto.INT32)}"

    def _tables(self, table: Node) -> list[str]:
        """Emits the cosines and sines of all positions, [C, F] each, which onnxruntime folds to constants; returns
        their names.
        """
        a = bound_arguments(table)

        def made(kind: str) -> str:
            zero, places, one = (self.constant(np.asarray(n, np.int64)) for n in (0, self.context + 1, 1))
            positions = self.once("places", lambda: self.op("Cast", self.op("Range", zero, places, one), to=1))
            columns = self.once("places of rows", lambda: self.op("Unsqueeze", positions, self.integers(1)))
            angles = self.once(("angles", table), lambda: self.op("Mul", columns, self.cast(a["inv_freq"], _F32)))
            values = self.op(kind, angles)
            return values if a["scale"] == 1 else self.op("Mul", values, self.number(a["scale"], _F32))

        return [self.once((kind, table), lambda kind=kind: made(kind)) for kind in ("Cos", "Sin")]  # type: ignore[misc]

    # ---- tables, norms and activations

    def _rows_of_4_bits(self, b: GraphBuilder, node: Node, a: Mapping[str, Any]) -> Value:
        """Emits a lookup in a 4-bit table without offsets by GatherBlockQuantized; other tables as in the standard
        file.

        The table's bytes are those of the standard file, with the type int4.
        """
        size, group = int(self.expressions(node)[-1]), int(a["group_size"])
        ids = str(a["ids"].target) == "ids"
        if a["bits"] != 4 or a["offsets"] is not None or group not in _GROUPS or size % group or not ids:
            return self.row_of_table(b, node, a)
        pairs = self.initializers[self.stored(str(a["table"].target), "rows", "i4 pairs")]
        numbers = TensorProto()
        numbers.CopyFrom(pairs)
        numbers.name, numbers.data_type = f"{pairs.name}.numbers", TensorProto.INT4
        numbers.dims[-1] = size
        self.initializers[numbers.name] = numbers
        scales = self.stored(str(a["scales"].target), "rows", "f32")
        rows = (numbers.name, INPUT_IDS, scales)
        rows_by_id = self.op(
            "GatherBlockQuantized", *rows, domain=DOMAIN, gather_axis=0, quantize_axis=1, block_size=group, bits=4
        )
        return self.lie_by_request(node, rows_by_id)

    def _norm_of_sum(self, kind: str, target: Any) -> Any:
        """Returns a handler that emits the operator ``kind`` for a norm of a sum, which also returns the sum.

        Terms that aren't matrices of the same shape are emitted as in the standard file, by the handler of ``target``.
        """

        def emit(b: GraphBuilder, node: Node, a: Mapping[str, Any]) -> Value:
            x, residual = (self.expressions(a[name]) for name in ("x", "residual"))
            if len(x) != 2 or x != residual:
                return ops_ew.HANDLERS[target](b, node, a)
            weight, size = a["weight"], int(x[-1])
            inputs = [self.cast(a["x"], _F32), self.cast(a["residual"], _F32)]
            inputs.append(self.constant(np.ones(size, np.float32)) if weight is None else self.cast(weight, _F32))
            if a.get("bias") is not None:
                inputs.append(self.cast(a["bias"], _F32))
            stem = f"{_NORMS[kind]}_{len(self.nodes)}"
            names = (f"{stem}:0", "", "", f"{stem}:1")
            results = self.ops(_NORMS[kind], inputs, 4, names, domain=DOMAIN, epsilon=float(a["eps"]))
            return (results[0], results[3])

        return emit

    def _gated_activation(self, b: GraphBuilder, node: Node, a: Mapping[str, Any]) -> Value:
        if a["kind"] != "silu":
            return ops_ew.HANDLERS[ew.gated_activation.default](b, node, a)
        width = int(self.expressions(node)[-1])
        gate, up = self.ops("Split", (self.cast(a["gate_up"], _F32), self.integers(width, width)), 2, axis=-1)
        return self.op("Mul", self.op("QuickGelu", gate, domain=DOMAIN, alpha=1.0), up)
