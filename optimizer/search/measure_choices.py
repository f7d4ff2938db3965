"""Measures the real KL of choices, as they would be exported, within limits of time and memory."""

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
"""The most work of all evaluations together, as parameters times tokens: some minutes on two cores."""

FEWEST_TOKENS = 64
"""The fewest tokens with which a unit is measured, for models of any size."""

_KEEP_BYTES = 1 << 30


def affordable_tokens(measurements: int, parameters: int) -> int:
    """Returns the number of tokens for each of ``measurements`` evaluations of a model with ``parameters`` parameters.

    An evaluation repeats half of the program on average. So parameters * tokens is half the number of its
    multiplications and additions.
    """
    return WORK // max(1, measurements * parameters)


def cache_bytes(memory_budget: int | None) -> int:
    """Returns the bytes of weights to cache while programs run, out of ``memory_budget`` bytes; None is no limit."""
    return _KEEP_BYTES if memory_budget is None else min(_KEEP_BYTES, memory_budget // 4)


def share_of(kl: float, error: float) -> float:
    """Returns the KL divided by the squared error. Small errors cost KL in proportion to their square, so other KLs are
    predicted by it.
    """
    return kl / max(error, torch.finfo(torch.float32).tiny)


@dataclass(frozen=True)
class _Checked:
    sequences: tuple[torch.Tensor, ...]
    reference: torch.Tensor


class Check:
    """Keeps the logits of the source, and compares choices with them on tokens that the search hasn't used.

    Args:
        program: the program before a choice is applied, in 32-bit floats; it isn't changed.
        passes: the passes that apply a choice.
        context: the context of the passes, with the folder for temporary files and the memory budget.
        kinds: the token ids of some sequences, [S] each, by the name of their kind.
        source: the program that KL is measured from; None for ``program``. It differs if the shape of the model was
            changed.
        most_rows: the most tokens of a kind whose logits are compared; None for all.
    """

    def __init__(
        self,
        program: Program,
        passes: Sequence[Pass],
        context: PassContext,
        kinds: Mapping[str, Sequence[torch.Tensor]],
        source: Program | None = None,
        most_rows: int | None = None,
    ) -> None:
        self._program, self._passes, self._context, self._most_rows = program, passes, context, most_rows
        self._cache = WeightCache(cache_bytes(context.memory_budget))
        self._kinds = {
            name: _Checked(tuple(sequences), self._logits(source or program, sequences))
            for name, sequences in kinds.items()
        }
        self._cache.clear()

    def measure_program(self) -> dict[str, float]:
        """Returns kind of tokens -> mean KL of the program without a choice.

        It is 0 unless the program's shape was changed.
        """
        return self._kl(self._program)

    def measure(self, context: PassContext) -> dict[str, float]:
        """Returns kind of tokens -> mean KL(source || changed), in nats per token, of the program after the passes.

        ``context``: the context of the passes, with the choice.
        """
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
        return FastEvaluation(program, self._cache).evaluate(packed_inputs(program, sequences, self._most_rows))[0]
