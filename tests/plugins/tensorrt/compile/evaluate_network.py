"""The meaning of a network description, op by op: ONNX's reference evaluator, and ``passes/ops`` for our own two."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from enginewright.plugins.tensorrt.compile.network import Network
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.bundle.weights import unpack

DOMAIN = "ew"
ELEMENTS = {
    "f32": TensorProto.FLOAT,
    "f16": TensorProto.FLOAT16,
    "i64": TensorProto.INT64,
    "i32": TensorProto.INT32,
    "i8": TensorProto.INT8,
    "i4": TensorProto.INT4,
    "bool": TensorProto.BOOL,
}


class KvWrite(OpRun):
    op_domain = DOMAIN

    def _run(self, k: Any, v: Any, slots: Any, k_cache: Any, v_cache: Any) -> tuple[Any, Any]:  # type: ignore[override]
        caches = [torch.from_numpy(cache.astype(np.float32)) for cache in (k_cache, v_cache)]
        new = [torch.from_numpy(np.asarray(x, np.float32)) for x in (k, v)]
        k_written, v_written = torch.ops.ew.kv_write(*caches, *new, torch.from_numpy(slots))
        return k_written.numpy().astype(k_cache.dtype), v_written.numpy().astype(v_cache.dtype)


class PagedAttention(OpRun):
    op_domain = DOMAIN

    def _run(  # type: ignore[override]
        self,
        q: Any,
        k_cache: Any,
        v_cache: Any,
        table: Any,
        q_start: Any,
        kv_len: Any,
        sinks: Any = None,
        slopes: Any = None,
        scale: Any = None,
        window: Any = None,
        softcap: Any = None,
    ) -> tuple[Any]:
        floats = [torch.from_numpy(np.asarray(x, np.float32)) for x in (q, k_cache, v_cache)]
        ids = [torch.from_numpy(x) for x in (table, q_start, kv_len)]
        optional = [None if x is None else torch.from_numpy(np.asarray(x, np.float32)) for x in (sinks, slopes)]
        y = torch.ops.ew.paged_attention(*floats, *ids, scale, window, softcap, *optional)
        return (y.numpy().astype(q.dtype),)


def evaluator(network: Network, bundle: Bundle) -> ReferenceEvaluator:
    """Runs the description; its feeds and results are numpy's."""
    names = {"ew.kv_write": "KvWrite", "ew.paged_attention": "PagedAttention"}
    nodes = [
        helper.make_node(
            names.get(call.op, call.op),
            list(call.inputs),
            list(call.outputs),
            name=call.name,
            domain=DOMAIN if call.op in names else "",
            **{k: ELEMENTS[str(v)] if k == "to" else v for k, v in call.attributes.items()},
        )
        for call in network.calls
    ]
    tensors = []
    for name, constant in network.constants.items():
        values = np.asarray(constant.values).reshape(constant.shape)
        dtype = helper.tensor_dtype_to_np_dtype(ELEMENTS[constant.dtype])
        tensors.append(numpy_helper.from_array(values.astype(dtype), name))
    for name, weight in network.weights.items():
        entry = bundle.tensor(weight.tensor)
        values = unpack(bundle.weight(weight.tensor), entry.shape, entry.layout, entry.dtype)
        tensors.append(helper.make_tensor(name, ELEMENTS[weight.dtype], weight.shape, values.reshape(-1)))
    inputs = [helper.make_tensor_value_info(n, ELEMENTS[i.dtype], None) for n, i in network.inputs.items()]
    outputs = [helper.make_tensor_value_info(n, TensorProto.UNDEFINED, None) for n in network.outputs]
    graph = helper.make_graph(nodes, "step", inputs, outputs, tensors)
    opsets = [helper.make_opsetid("", network.opset), helper.make_opsetid(DOMAIN, 1)]
    model = helper.make_model(graph, ir_version=12, opset_imports=opsets)
    return ReferenceEvaluator(model, new_ops=[KvWrite, PagedAttention])
