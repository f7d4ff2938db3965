"""The schedules of products' loops, which ``optimize tune`` searches. They don't change any bit of a result.

A record applies to all products in a program with one op, type and shape, whatever their epilogue is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated

import msgspec
from msgspec import Meta

from enginewright.runtime.shared.errors import BundleError
from enginewright.runtime.shared.lowered_program import LoweredProgram, Step, WeightUse
from enginewright.runtime.shared.records import Record

TUNED = ("linear", "quantized_linear")
"""Ops that have records. Those of experts have none, because their rows depend on the tokens of a step."""

Small = Annotated[int, Meta(ge=1, le=64)]


class Schedule(Record, frozen=True, kw_only=True):
    """The schedule of a product's loops.

    Attributes:
        rows: the most rows of the block of sums in registers; also limited by the level.
        row_block: the rows of x that stay in the second-level cache during a pass over panels.
        groups: the most groups of panels; each group runs on one thread, neighbouring ones on the same.
        streams: the most panels that a block of few rows reads at a time, to use the memory's bandwidth.
        unroll: the number of unrolled steps along K.
    """

    rows: Small = 64
    row_block: Annotated[int, Meta(ge=1, le=4096)] = 96
    groups: Annotated[int, Meta(ge=1, le=1024)] = 64
    streams: Small = 4
    unroll: Small = 1


OWN = Schedule()
"""The schedule of a product without a record."""

Schedules = Mapping[str, Schedule]
NONE: Schedules = {}


def product_of(step: Step, uses: Mapping[str, WeightUse]) -> str:
    """Returns the name of a step's product in records, such as "linear f32 960x576"; "" if the step isn't a product."""
    if step.op not in TUNED:
        return ""
    use = next(uses[operand.name] for operand in step.inputs if operand.kind == "weight")
    return f"{step.op} {use.dtype} {'x'.join(map(str, use.shape))}"


def products_of(program: LoweredProgram) -> dict[str, int]:
    """Returns the names of a program's products -> the index of the first step of each."""
    uses = {use.name: use for use in program.weights}
    first_steps: dict[str, int] = {}
    for index, step in enumerate(program.steps):
        if name := product_of(step, uses):
            first_steps.setdefault(name, index)
    return first_steps


def to_json(schedules: Schedules) -> str:
    """Returns records as JSON. The same records give the same bytes."""
    content = {name: schedule.model_dump(mode="json") for name, schedule in schedules.items()}
    return json.dumps(content, sort_keys=True, indent=1) + "\n"


def from_json(text: str | bytes, source: str) -> dict[str, Schedule]:
    """Parses records. Raises BundleError naming ``source`` if the text isn't valid."""
    try:
        return {str(name): Schedule.model_validate(value) for name, value in json.loads(text).items()}
    except (ValueError, AttributeError, msgspec.ValidationError) as e:
        raise BundleError(
            f"{source}: not records of optimize tune --target tvm: {e}", hint="Tune again without --records."
        ) from e
