"""From two sides that part to what is said of it: the calls, tensors and values at the first point."""

from __future__ import annotations

from collections.abc import Sequence

from .explain import explain, missing_biases
from .judge import Judge
from .points import Point, Values
from .region import region
from .report import Parting, Place
from .search import Comparison
from .sides import Calls, Side, Tensor

_SHOWN = 5
"""Other points that part, that are named."""


def describe_parting(
    stage: str,
    pass_name: str | None,
    a: Side,
    b: Calls,
    of_a: Values,
    of_b: Values,
    comparison: Comparison,
    judge: Judge,
    given: Values,
) -> Parting | None:
    """What to say of where two sides part; None if they don't.

    Args:
        stage, pass_name: what made b of a.
        a, b: the sides; b's calls are looked at.
        of_a, of_b: their values.
        comparison, judge: of these.
        given: the values that b went on with.
    """
    if not comparison.parting:
        return None
    point, found = comparison.parting[0]
    calls = region(b.calls, b.taps, point, given.keys())
    of_calls = [b.tensors_of(call) for call in calls]
    all_tensors = [tensor for of_call in of_calls for tensor in of_call]
    tensors = _concerned(point, of_calls)
    others = [str(other) for other, _ in comparison.parting[1:]]
    return Parting(
        stage=stage,
        pass_name=pass_name,
        a=a.name,
        b=b.name,
        layer=point.layer,
        module=point.path,
        point=str(point),
        calls=[b.describe(call) for call in calls],
        tensors=[
            *(f"{tensor}, which B doesn't add" for tensor in missing_biases(a, tensors)),
            *(str(tensor) for tensor in tensors),
        ],
        error=found.error,
        tolerance=judge.tolerance,
        gain=found.gain,
        largest=Place(found.token, found.column, found.a, found.b),
        reasons=explain(point, a, of_a, of_b, tensors, all_tensors, chance=judge.chance),
        others=others[:_SHOWN],
        others_count=len(others),
    )


def _concerned(point: Point, of_calls: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Of a fused product's tensors those of the point's own module; and those of what comes before it, as a norm that
    is fused with rounding."""
    found: list[Tensor] = []
    for tensors in of_calls:
        own = [tensor for tensor in tensors if tensor.path == point.path]
        found += own if own and point.what == "output" else tensors
    return found
