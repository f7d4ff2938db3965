"""Writes the files of a target that runs lowered programs: its program, and the weights that the program reads."""

from __future__ import annotations

from dataclasses import replace

from enginewright.passes.lowering.lower_program import Lowering
from enginewright.runtime.bundle.reader import program_path
from enginewright.runtime.shared.lowered_program import Operand
from enginewright.runtime.shared.progress import Progress, ProgressEvent

from .bundle_writer import BundleWriter
from .weights import add_weight


def with_own_names(lowering: Lowering, target: str) -> Lowering:
    """Returns a lowering whose weights are named NAME.TARGET, since other targets may store them in other forms.

    Equal bytes are stored once, whatever their names.
    """

    def own(name: str) -> str:
        return f"{name}.{target}"

    def named(operand: Operand) -> Operand:
        return operand if operand.kind != "weight" else operand.model_copy(update={"name": own(operand.name)})

    program = lowering.program
    steps = tuple(step.model_copy(update={"inputs": tuple(map(named, step.inputs))}) for step in program.steps)
    uses = tuple(use.model_copy(update={"name": own(use.name)}) for use in program.weights)
    renamed = program.model_copy(update={"steps": steps, "weights": uses})
    return replace(lowering, program=renamed, weights={own(n): expr for n, expr in lowering.weights.items()})


def write_lowered(lowering: Lowering, target: str, writer: BundleWriter, progress: Progress) -> str:
    """Writes the weights and targets/TARGET/programs/decode.json, and returns the text of the latter.

    At most one weight is in memory at a time, or one expert if experts are stored separately.

    Args:
        lowering: a lowering with memory planned.
        target: the target's name.
        writer: the bundle being written.
        progress: called with the stage "emit", weight by weight.

    Raises:
        BundleError, CapacityError: a file can't be written.
    """
    uses = lowering.program.weights
    progress(ProgressEvent("emit", 0, len(uses)))
    for done, use in enumerate(uses, 1):
        add_weight(writer, use, lowering.weights[use.name], coded=True)
        progress(ProgressEvent("emit", done, len(uses), use.name))
    text = lowering.program.to_json()
    writer.write_text(program_path(target), text)
    return text
