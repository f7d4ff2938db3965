"""Evaluates a program once on calibration tokens, up to the last call that a pass observes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch.fx.node import Node

from enginewright.passes.framework.base import PassContext
from enginewright.passes.framework.evaluation_memory import evaluation_bytes
from enginewright.passes.framework.fast_evaluation import FastEvaluation, WeightCache, decoded
from enginewright.passes.framework.token_sequences import packed_inputs, spread
from enginewright.runtime.shared.errors import CapacityError

from ..formats.weight_format import WeightFormat
from ..ir.program import Program
from ..ops.quantization import quantize_activation

Look = Callable[[Node, Sequence[Any]], Any]
"""A function that computes a call in place of its op, from the call and the values of its arguments."""


def walk(
    program: Program, targets: Mapping[Node, Look], sequences: Sequence[torch.Tensor], unread: Collection[str] = ()
) -> None:
    """Evaluates a program call by call, up to the last target.

    Args:
        program: the program.
        targets: calls -> the functions that compute them in place of their ops.
        sequences: token ids, [S] each.
        unread: the names of weights that only targets read. Targets get tensors of their shape on the device "meta",
            without values.
    """
    fast = FastEvaluation(program, WeightCache(0))  # each weight is used once
    left = dict(targets)

    def compute(node: Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if not left:
            return None
        look = left.pop(node, None)
        return fast.compute(node, args, kwargs) if look is None else look(node, args)

    def read(name: str) -> torch.Tensor:
        if left and name not in unread:
            return fast.read(name)
        expr = program.weights[name]
        return torch.empty(expr.shape, dtype=expr.dtype, device="meta")

    program.evaluate(packed_inputs(program, sequences), compute=compute, read=read)


def calibration_tokens(
    program: Program, context: PassContext, who: str, working: Mapping[Node, int], most: int | None = None
) -> list[torch.Tensor]:
    """Returns evenly spaced calibration sequences, as many as fit into the memory budget.

    Args:
        program: the program to evaluate on them.
        context: has the sequences and the memory budget.
        who: the subject of the error message, such as "the pass wanda".
        working: calls -> the bytes that observing them needs, in the order of the program. The evaluation ends with the
            last one.
        most: the approximate number of tokens; None for all.

    Raises:
        CapacityError: there is no room for a single sequence.
    """
    sequences = context.calibration
    count = len(sequences)
    if most is not None:
        count = max(1, min(count, count * most // sum(map(len, sequences))))
    lengths = sorted(map(len, sequences), reverse=True)
    if context.memory_budget is not None:
        until = list(working)[-1]

        def needed(count: int) -> int:
            return evaluation_bytes(program, sum(lengths[:count]), working, until=until)

        while count > 1 and needed(count) > context.memory_budget:
            count = count * 3 // 4
        if (least := needed(count)) > context.memory_budget:
            raise CapacityError(
                f"max_memory: {who} takes {least:,} bytes, and there are {context.memory_budget:,} beside what the "
                "process has already",
                hint=f"Allow {least - context.memory_budget:,} bytes more, or take a recipe without calibration.",
            )
    return spread(sequences, count)


def as_multiplied(x: torch.Tensor, weight_format: WeightFormat) -> torch.Tensor:
    """Rounds inputs [.., K] as products with weights of this format do, and returns them as float32."""
    if weight_format.activation == "int8":
        group = weight_format.activation_group_size
        values, scales, _ = quantize_activation(x, group)
        return decoded(values, scales, group=group)
    return x.bfloat16().float() if weight_format.activation == "bf16" else x
