"""Predicts the memory of a recovery, and refuses one that doesn't fit before it begins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch

from enginewright.passes.ir.program import Program, named_symbol
from enginewright.runtime.shared.errors import CapacityError
from enginewright.runtime.shared.memory import format_bytes

_STATES = 4
"""The number of float32 values per parameter: the weight, its gradient, and AdamW's two moments."""

_LOGITS = 5
"""The number of tensors as large as the logits that are in memory together: those of both models, and those of the
loss.
"""


@dataclass(frozen=True)
class TrainingMemory:
    """The bytes that training needs: for weights with gradients and moments, for the source, and for activations."""

    weights: int
    source: int
    activations: int

    @property
    def total(self) -> int:
        return self.weights + self.source + self.activations

    @staticmethod
    def of(program: Program, parameters: int, source_parameters: int, tokens: int, length: int) -> TrainingMemory:
        """Returns the memory for training ``tokens`` tokens at a time, in sequences of ``length`` tokens.

        The results of calls are kept for their gradients.

        Args:
            program: the program under training.
            parameters, source_parameters: the number of parameters of the program and of the source.
        """
        sizes = {named_symbol(s): n for s, n in {"T": tokens, "R": tokens, "B": max(1, tokens // length)}.items()}

        def nbytes(value: object) -> int:
            tensors: Sequence[object] = value if isinstance(value, (tuple, list)) else (value,)
            total = 0
            for tensor in tensors:
                if isinstance(tensor, torch.Tensor):
                    shape = [int(program.expression(n).xreplace(sizes)) for n in tensor.shape]
                    total += prod(shape) * max(4, tensor.element_size())  # integers are floats while they are trained
            return total

        calls = [n for n in program.graph.nodes if n.op == "call_function"]
        activations = sum(nbytes(n.meta["val"]) for n in calls)
        activations += _LOGITS * nbytes(program.logits.meta["val"])
        return TrainingMemory(_STATES * 4 * parameters, 4 * source_parameters, activations)


def check_memory(needed: TrainingMemory, available: int) -> None:
    """Raises CapacityError with the figures if more memory is needed than is available."""
    if needed.total > available:
        weights, source, activations = map(format_bytes, (needed.weights, needed.source, needed.activations))
        raise CapacityError(
            f"recovery takes about {format_bytes(needed.total)} of memory, and {format_bytes(available)} are free: "
            f"{weights} for weights, gradients and the optimizer's state, {source} for the source, {activations} for "
            "activations",
            hint="Take a step's sequences in more parts (--accumulate), or shorter ones: activations get smaller.",
        )
