"""The measurements of searches: the real KL of a choice, as it would be emitted, within limits of time and memory."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from enginewright.passes.framework.base import Pass, PassContext
from enginewright.passes.framework.fast_evaluation import FastEvaluation, WeightCache
from enginewright.passes.framework.manager import PassManager
from enginewright.passes.framework.token_sequences import mean_kl, packed_inputs
from enginewright.passes.ir.program import Program

WORK = 1 << 43
"""Most parameters times tokens of all evaluations together: some minutes on two cores, however large the model."""

FEWEST_TOKENS = 64
"""Tokens that a unit is measured with at least, however large the model."""

_KEEP_BYTES = 1 << 30


def affordable_tokens(measurements: int, parameters: int) -> int:
    """The number of tokens that each of ``measurements`` evaluations can afford.

    On average half the program follows a unit; parameters * tokens is half its multiplications and additions.
    """
    return WORK // max(1, measurements * parameters)


def cache_bytes(memory_budget: int | None) -> int:
    """The bytes of weights to keep in memory while programs run, out of ``memory_budget`` bytes; None: no limit."""
    return _KEEP_BYTES if memory_budget is None else min(_KEEP_BYTES, memory_budget // 4)


def share_of(kl: float, error: float) -> float:
    """KL by squared error: small errors cost KL in proportion to their square. Others are predicted by it."""
    return kl / max(error, torch.finfo(torch.float32).tiny)


@dataclass(frozen=True)
class _Checked:
    sequences: tuple[torch.Tensor, ...]
    reference: torch.Tensor


class Check:
    """Holds what the source gives, and runs choices on tokens that the search didn't see.

    Args:
        program: before what is chosen is applied, in 32-bit floats; it is left as it is.
        passes: those that apply it.
        context: says the folder for temporary files and the memory budget.
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
        self._cache = WeightCache(cache_bytes(context.memory_budget))
        self._kinds = {
            name: _Checked(tuple(sequences), self._logits(source or program, sequences))
            for name, sequences in kinds.items()
        }
        self._cache.clear()

    def measure_program(self) -> dict[str, float]:
        """Mean KL of the program as it is: 0 but for what its shape costs, where that was changed."""
        return self._kl(self._program)

    def measure(self, context: PassContext) -> dict[str, float]:
        """Mean KL(source || changed) in nats a token, for each kind of tokens, of what the passes make."""
        program = self._program.copy()
        scratch = None if self._context.scratch is None else self._context.scratch / "check"
        if scratch is not None:
            scratch.mkdir()
        PassManager([p for p in self._passes if p.wanted(context)], replace(context, scratch=scratch)).run(program)
        kl = self._kl(program)
        if scratch is not None:
            shutil.rmtree(scratch)
        return kl

    def _kl(self, program: Program) -> dict[str, float]:
        kl_by_kind = {k: mean_kl(c.reference, self._logits(program, c.sequences)) for k, c in self._kinds.items()}
        self._cache.clear()
        return kl_by_kind

    def _logits(self, program: Program, sequences: Sequence[torch.Tensor]) -> torch.Tensor:
        return FastEvaluation(program, self._cache).evaluate(packed_inputs(program, sequences))[0]
