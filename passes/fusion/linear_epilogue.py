"""The common part of fusions into a linear's epilogue: the linears that have one, and their copies with another
epilogue.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx.node import Node, Target

from enginewright.passes.framework.match import Match, bound_arguments

from ..ir.program import Program

ew = torch.ops.ew

PLAIN_LINEARS: tuple[Target, ...] = (ew.linear.default, ew.quantized_linear.default)
"""The linears whose epilogue can add a residual."""
LINEARS: tuple[Target, ...] = (*PLAIN_LINEARS, ew.grouped_linear.default, ew.quantized_grouped_linear.default)
"""The linears whose epilogue can apply an activation."""
_EPILOGUE: dict[str, object] = {"activation": "", "residual": None}
"""The arguments of a linear that define its epilogue -> their values without an epilogue."""


def linear_of(match: Match) -> Node:
    """Returns the linear that a match has bound."""
    return next(n for n in match.covered if n.target in LINEARS)


def why_no_epilogue(program: Program, linear: Node) -> str | None:
    """Returns the reason why a linear can't get an epilogue; None if it can."""
    if len(linear.users) > 1:
        return "the linear's result is used elsewhere"
    if bound_arguments(linear).get("residual") is not None:
        return "the linear adds a residual already"
    value = program.value(linear)
    return None if value.dtype == torch.float32 else f"the linear's result is {value.dtype}"


def with_epilogue(program: Program, linear: Node, where: tuple[str, ...], **changes: Any) -> Node:
    """Adds a copy of a linear with other values for ``activation`` or ``residual``, and returns it.

    ``where`` has the module paths of the copy.
    """
    arguments = bound_arguments(linear) | changes
    positional = [value for name, value in arguments.items() if name not in _EPILOGUE]
    named = {
        name: arguments[name] for name, nothing in _EPILOGUE.items() if name in arguments and arguments[name] != nothing
    }
    assert callable(linear.target)
    return program.call(linear.target, *positional, where=where, **named)
