"""Emits products, caches and attention as calls of the cpu target's kernels, through XLA's custom calls
(``../kernels``).

Weights are in the kernels' panels. A slot of C positions is C / 32 consecutive blocks of the kernels; the shape [B*Nkv,
C, D] of such a cache only states its size. The module runs only on a CPU with the library of handlers.
"""

from __future__ import annotations

from collections.abc import Mapping

import onnx

from ...graphs.kernels import DOMAIN
from ..section import ATTENTION, LINEAR, ROTATE, WRITE_CACHE
from .graph import Cache, Call, Graph, Handler
from .module_text import Tensor
from .ops_model import rotation_table


def attends(model: onnx.ModelProto) -> bool:
    """Returns True if the kernels support all attention of a model: with a scale and a window, but without other
    options.
    """
    masks = {value.name for value in model.graph.input}
    written = {node.output[0]: node for node in model.graph.node if node.op_type == "TensorScatter"}
    for node in model.graph.node:
        known = node.op_type == "Attention" and node.input[3] in masks and [a.name for a in node.attribute] == ["scale"]
        for place, name in enumerate(node.input):
            if name in written and not (known and place in (1, 2)):
                return False
            if name.startswith("past_") and node.op_type != "TensorScatter":
                return False
    return bool(written)


def _linear(g: Graph, call: Call) -> Tensor:
    """Emits a call of a product's kernel. Its operands are x and the weight, then scales, offsets and bias, if there
    are any.
    """
    _, _, scales, offsets, bias = [*call.inputs, "", "", ""][:5]
    attributes: dict[str, int | float | str] = {
        name: value.decode() if isinstance(value, bytes) else value for name, value in call.attributes.items()
    }
    attributes |= {"offsets": int(bool(offsets)), "bias": int(bool(bias))}
    x = g.tensor(call.inputs[0])
    operands = [x, *(g.stored(name) for name in (call.inputs[1], scales, offsets) if name)]
    if bias:
        operands.append(g.tensor(bias))
    return g.text.custom_call(LINEAR, operands, (*x.shape[:-1], int(call.get("n"))), attributes)


def _write_cache(g: Graph, call: Call) -> Cache:
    text, cache = g.text, g.cache(call.inputs[0])
    update, index = (g.tensor(name) for name in call.inputs[1:])
    requests, heads, tokens, size = update.shape
    rows = text.reshape(text.transpose(update, (0, 2, 1, 3)), (requests * tokens, heads, size))
    attributes = _slots(g, heads) | {"size": size, "keys": int("_key_" in call.inputs[0])}
    return Cache(
        text.custom_call(WRITE_CACHE, [cache.rows, rows, index], cache.rows.shape, attributes, in_place=True),
        cache.shape,
    )


def _attention(g: Graph, call: Call) -> Tensor:
    text, q = g.text, g.tensor(call.inputs[0])
    keys, values = (g.cache(name) for name in call.inputs[1:3])
    requests, heads, tokens, size = q.shape
    width = values.shape[-1]
    rows = text.reshape(text.transpose(q, (0, 2, 1, 3)), (requests * tokens, heads, size))
    attributes = _slots(g, keys.shape[1]) | {
        "heads": heads,
        "size": size,
        "width": width,
        "window": g.window(call.inputs[3]),
    }
    operands = [rows, keys.rows, values.rows, g.places()]
    y = text.custom_call(
        ATTENTION, operands, (*rows.shape[:2], width), {**attributes, "scale": float(call.get("scale"))}
    )
    return text.transpose(text.reshape(y, (requests, tokens, heads, width)), (0, 2, 1, 3))


def _rotate(g: Graph, call: Call) -> Tensor:
    text, x = g.text, g.tensor(call.inputs[0])
    tokens, heads, _, size = x.shape
    attributes = {"heads": heads, "size": size, "interleaved": int(call.get("interleaved", 0))}
    operands = [text.reshape(x, (tokens, heads, size)), rotation_table(g, call)]
    return text.reshape(text.custom_call(ROTATE, operands, (tokens, heads, size), attributes), x.shape)


def _slots(g: Graph, kv_heads: int) -> dict[str, int | float | str]:
    s = g.sizes
    return {"requests": s.requests, "tokens": s.tokens, "places": s.places, "kv_heads": kv_heads}


PRODUCTS: Mapping[str, Handler] = {f"{DOMAIN}.Linear": _linear, "RotaryEmbedding": _rotate}
CACHES: Mapping[str, Handler] = {"TensorScatter": _write_cache, "Attention": _attention}
