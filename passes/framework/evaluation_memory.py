"""Computes the memory of running a program over some tokens, from its shapes."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import torch
from torch.fx.node import Node

from enginewright.passes.ir.program import Program, named_symbol, tensor_arguments
from enginewright.runtime.shared.contracts import KV_BLOCK_SIZE

_TEMPORARIES = 2
"""The memory of an op's temporaries, as a multiple of the op's result or of its largest argument, whichever is larger.

References are plain torch, so an op may make several temporaries.
"""


def evaluation_bytes(
    program: Program, tokens: int, working: Mapping[Node, int] | None = None, until: Node | None = None
) -> int:
    """Returns the peak bytes of ``Program.evaluate`` on whole sequences: activations, and the weights of the running
    call.

    Args:
        program: the program.
        tokens: the total number of tokens of all sequences. If the program returns logits, it returns them for each
            token.
        working: for some calls, the bytes that they need in addition to their arguments and results. Other calls get an
            estimate.
        until: the last call that runs; its result isn't counted. None if all calls run.
    """
    blocks = -(-tokens // KV_BLOCK_SIZE)
    sizes = {named_symbol(s): n for s, n in {"T": tokens, "R": tokens, "B": 1, "M": blocks, "P": blocks}.items()}

    def size(node: Node) -> int:
        if node.op == "placeholder" and node.target not in ("ids", "positions"):
            return 0  # caches hold nothing, and tables are small
        value = node.meta["val"]
        tensors = value if isinstance(value, (tuple, list)) else (value,)
        return sum(
            prod(int(program.expression(n).xreplace(sizes)) for n in t.shape) * t.element_size()
            for t in tensors
            if isinstance(t, torch.Tensor)
        )

    last_use = {a: n for n in program.graph.nodes for a in n.all_input_nodes}
    live: dict[Node, int] = {}
    most = 0
    for node in program.graph.nodes:
        if node.op == "placeholder":
            live[node] = size(node)
        elif node.op == "call_function":
            # What an index takes out of a tuple is the tuple's; the tuple goes with its last index.
            result_bytes = 0 if tuple_element(node) or node is until else size(node)
            extra = None if working is None else working.get(node)
            if extra is None:
                arguments = tensor_arguments(node)
                weights = sum(size(a) for a in arguments if a.op == "get_attr")
                values = max((size(a) for a in arguments if a.op != "get_attr"), default=0)
                extra = (0 if tuple_element(node) else _TEMPORARIES * max(result_bytes, values)) + 2 * weights
            most = max(most, sum(live.values()) + result_bytes + extra)
            if node is until:
                break
            live[node] = result_bytes
        for used in node.all_input_nodes:
            if last_use[used] is node:
                live.pop(used, None)
    return most


def tuple_element(node: Node) -> bool:
    """Returns True if a call is a ``getitem``, which takes one result out of a tuple."""
    return getattr(node.target, "__name__", "") == "getitem"
