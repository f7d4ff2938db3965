"""Runs passes in order, and keeps a record of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from enginewright.passes.ir.program import Program

from .base import Pass, PassContext, PassRecord
from .verify_program import verify_program

AfterPass = Callable[[Program, PassRecord], None]


class PassManager:
    """Passes that run in the order of the list.

    Args:
        passes: the passes.
        context: passed to each pass.
        after_pass: called with the program after each pass, for progress and verification.
    """

    def __init__(
        self, passes: Sequence[Pass], context: PassContext | None = None, after_pass: AfterPass | None = None
    ) -> None:
        self.passes = list(passes)
        self.context = context or PassContext()
        self.after_pass = after_pass

    def run(self, program: Program) -> list[PassRecord]:
        """Runs the passes on ``program``, which is changed in place, and returns their records in order.

        Raises PassError naming the pass that failed.
        """
        verify_program(program)
        records = []
        for one in self.passes:
            record = one.run(program, self.context)
            records.append(record)
            if self.after_pass is not None:
                self.after_pass(program, record)
        return records
