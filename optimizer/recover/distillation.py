"""The distance of a trained program from its source: the loss, and the measurement on held-out tokens.

Hinton et al. 2015, https://arxiv.org/abs/1503.02531.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import PreTrainedModel

from enginewright.optimizer.measure.distances import Divergence, Likelihood
from enginewright.optimizer.measure.source_runner import SourceRunner
from enginewright.passes.framework.token_sequences import packed_inputs

from .hidden_states import HiddenStates
from .options import Measured
from .trainable import TrainableProgram

_TOKENS = 4096
"""The number of held-out tokens that both models compute at a time."""


class Teacher:
    """The source model, which transformers runs in 32-bit floats.

    Args:
        source: a Hugging Face folder, a GGUF file or a transformers model.
        context_length: tokens of the export's context.
        keep_bytes: the bytes of weights to keep in memory; see ``SourceRunner``.
    """

    def __init__(self, source: Path | PreTrainedModel, context_length: int, keep_bytes: int) -> None:
        self._runner = SourceRunner(source, context_length=context_length, keep_bytes=keep_bytes)

    @property
    def model(self) -> PreTrainedModel:
        """The transformers model that runs."""
        return self._runner.model

    def logits(self, sequences: Sequence[torch.Tensor]) -> torch.Tensor:
        """Returns the logits [T, V] after every token of some sequences [S], run one by one without gradients."""
        ids = torch.zeros((len(sequences), max(len(s) for s in sequences)), dtype=torch.long)
        for row, sequence in zip(ids, sequences, strict=True):
            row[: len(sequence)] = sequence  # what comes behind it doesn't reach back: these are causal models
        with torch.no_grad():
            logits = self._runner.model(input_ids=ids, use_cache=False).logits.float()
        return torch.cat([rows[: len(s)] for rows, s in zip(logits, sequences, strict=True)])


def divergence(logits: torch.Tensor, expected: torch.Tensor, temperature: float) -> torch.Tensor:
    """Returns the sum over rows of KL(expected || logits) in nats, times the square of the temperature.

    Both logits [T, V] are divided by the temperature first.
    """
    model = torch.log_softmax(logits / temperature, -1)
    source = torch.log_softmax(expected / temperature, -1)
    return torch.nn.functional.kl_div(model, source, reduction="sum", log_target=True) * temperature**2


def loss_of(
    module: TrainableProgram,
    teacher: Teacher,
    sequences: Sequence[torch.Tensor],
    temperature: float,
    hidden: HiddenStates | None = None,
    hidden_weight: float = 0.0,
) -> torch.Tensor:
    """Returns the loss of some sequences, summed over their tokens.

    Args:
        module: the program under training.
        teacher: the source.
        sequences: token ids, [S] each.
        temperature: of the distributions that are compared.
        hidden: the hidden states to compare; None for none.
        hidden_weight: the weight of hidden states in the loss.
    """
    inputs = packed_inputs(module.program, sequences)
    if hidden is None:
        return divergence(module(inputs), teacher.logits(sequences), temperature)
    with hidden.of_source(sequences):
        expected = teacher.logits(sequences)
    total = divergence(module(inputs, hidden.observe), expected, temperature)
    return total + hidden_weight * hidden.loss()


def measure(module: TrainableProgram, teacher: Teacher, sequences: Sequence[torch.Tensor], step: int) -> Measured:
    """Compares the program with the source (``teacher``) on held-out sequences, after ``step`` steps."""
    total = Divergence(Likelihood(), Likelihood())
    longest = max(len(s) for s in sequences)
    size = max(1, _TOKENS // longest)
    with torch.no_grad():
        for start in range(0, len(sequences), size):
            some = sequences[start : start + size]
            lengths = [len(s) for s in some]
            trained = module(packed_inputs(module.program, some)).split(lengths)
            source = teacher.logits(some).split(lengths)
            for ids, rows, expected in zip(some, trained, source, strict=True):
                total.add(rows[:-1].numpy(), expected[:-1].numpy(), ids[1:].tolist())
    return Measured(step, total.kl_mean, total.model.perplexity, total.reference.perplexity)
