"""Runs a program over calibration tokens once, up to the last call that a pass observes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx.node import Node

from enginewright.passes.framework.base import PassContext
from enginewright.passes.framework.evaluation_memory import evaluation_bytes
from enginewright.passes.framework.fast_evaluation import FastEvaluation, WeightCache
from enginewright.passes.framework.token_sequences import packed_inputs, spread
from enginewright.runtime.shared.errors import CapacityError

from ..ir.program import Program

Look = Callable[[Node, Sequence[Any]], Any]
"""A function of a call and its arguments' values that returns the call's value."""


def walk(program: Program, targets: Mapping[Node, Look], sequences: Sequence[torch.Tensor]) -> None:
    """Evaluates ``program`` call by call; where a target comes, it is looked at instead.

    What a target gives is what the calls behind it are given. Nothing behind the last target is computed.
    """
    fast = FastEvaluation(program, WeightCache(0))  # each weight is used once
    left = dict(targets)

    def compute(node: Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if not left:
            return None
        look = left.pop(node, None)
        return fast.compute(node, args, kwargs) if look is None else look(node, args)

    def read(name: str) -> torch.Tensor:
        if left:
            return fast.read(name)
        expr = program.weights[name]
        return torch.empty(expr.shape, dtype=expr.dtype, device="meta")

    program.evaluate(packed_inputs(program, sequences), compute=compute, read=read)


def calibration_tokens(
    program: Program, context: PassContext, who: str, working: Mapping[Node, int], most: int
) -> list[torch.Tensor]:
    """Calibration sequences, evenly spread: of about ``most`` tokens, and as many as there is room for.

    Args:
        who: the pass that wants them, for errors.
        working: bytes that looking at calls takes; the last of them is the last that is computed.

    Raises CapacityError if there is no room for a single one.
    """
    sequences = context.calibration
    total = sum(map(len, sequences))
    count = max(1, min(len(sequences), len(sequences) * most // total))
    lengths = sorted(map(len, sequences), reverse=True)
    if context.memory_budget is not None:
        until = list(working)[-1]

        def needed(count: int) -> int:
            return evaluation_bytes(program, sum(lengths[:count]), working, until=until)

        while count > 1 and needed(count) > context.memory_budget:
            count = count * 3 // 4
        if (least := needed(count)) > context.memory_budget:
            raise CapacityError(
                f"max_memory: the pass {who} takes {least:,} bytes, and there are {context.memory_budget:,} beside "
                "what the process has already",
                hint=f"Allow {least - context.memory_budget:,} bytes more.",
            )
    return spread(sequences, count)
