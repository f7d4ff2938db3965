"""The real KL of an assignment: the quantized program, as it would be emitted, on tokens that the search didn't see."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from enginewright.passes.framework.base import Pass, PassContext
from enginewright.passes.framework.fast_evaluation import FastEvaluation, WeightCache
from enginewright.passes.framework.manager import PassManager
from enginewright.passes.framework.step_inputs import packed_inputs
from enginewright.passes.framework.weight_formats import WeightFormats
from enginewright.passes.ir.program import Program

from .format_sensitivity import cache_bytes, mean_kl


@dataclass(frozen=True)
class _Checked:
    sequences: tuple[torch.Tensor, ...]
    reference: torch.Tensor


class Check:
    """Holds what the source gives, and runs assignments.

    Args:
        program: before formats are chosen, in 32-bit floats; it is left as it is.
        passes: those that choose formats and make integers.
        context: for these passes, but for the formats.
        kinds: token ids of some sequences, [S] each, by the name of their kind.
        source: what KL is measured from, where that is not ``program``: the model before its shape was changed.
    """

    def __init__(
        self,
        program: Program,
        passes: Sequence[Pass],
        context: PassContext,
        kinds: Mapping[str, Sequence[torch.Tensor]],
        source: Program | None = None,
    ) -> None:
        self._program, self._passes, self._context = program, passes, context
        self._cache = WeightCache(cache_bytes(context.room))
        self._kinds = {
            name: _Checked(tuple(sequences), self._logits(source or program, sequences))
            for name, sequences in kinds.items()
        }
        self._cache.clear()

    def measure_program(self) -> dict[str, float]:
        """Mean KL of the program as it is: 0 but for what its shape costs, where that was changed."""
        return self._kl(self._program)

    def measure(self, formats: WeightFormats) -> dict[str, float]:
        """Mean KL(source || quantized) in nats a token, for each kind of tokens."""
        return self.measure_with(replace(self._context, formats=formats))

    def measure_with(self, context: PassContext) -> dict[str, float]:
        """The same of what the passes make in another context."""
        program = self._program.copy()
        scratch = None if self._context.scratch is None else self._context.scratch / "auto"
        if scratch is not None:
            scratch.mkdir()
        PassManager([p for p in self._passes if p.wanted(context)], replace(context, scratch=scratch)).run(program)
        found = self._kl(program)
        if scratch is not None:
            shutil.rmtree(scratch)
        return found

    def _kl(self, program: Program) -> dict[str, float]:
        found = {k: mean_kl(c.reference, self._logits(program, c.sequences)) for k, c in self._kinds.items()}
        self._cache.clear()
        return found

    def _logits(self, program: Program, sequences: Sequence[torch.Tensor]) -> torch.Tensor:
        return FastEvaluation(program, self._cache).evaluate(packed_inputs(program, sequences))[0]
