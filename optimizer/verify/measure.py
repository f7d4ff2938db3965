"""Measures a program against its source: the differences of the logits on the same tokens."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import torch
from torch.fx.node import Node, Target

from enginewright.optimizer.capture.model_source import AnySource
from enginewright.optimizer.measure.distances import divergence_of
from enginewright.optimizer.measure.pooled_runner import PooledRunner
from enginewright.optimizer.measure.source_runner import SourceRunner
from enginewright.optimizer.measure.text_metrics import comparable
from enginewright.optimizer.shared.export_records import Measurement
from enginewright.passes.framework.fast_evaluation import FastEvaluation, WeightCache
from enginewright.passes.framework.token_sequences import packed_inputs
from enginewright.passes.ir.program import Program
from enginewright.runtime.shared.contracts import FloatArray, PooledTask
from enginewright.runtime.shared.progress import Progress, silent
from enginewright.runtime.shared.step_schema import POOLED

from .measuring_tokens import MeasuringTokens
from .random_tokens import check_logits, comparison, tolerance_of

aten, ew = torch.ops.aten, torch.ops.ew

_PRODUCTS: dict[Target, int] = {
    aten.mm.default: 0,
    aten.bmm.default: 0,
    aten.matmul.default: 0,
    aten.linear.default: 0,
    aten.addmm.default: 1,
    ew.linear.default: 0,
    ew.grouped_linear.default: 0,
    ew.quantized_linear.default: 0,
    ew.quantized_grouped_linear.default: 0,
}
"""Op that multiplies with a weight -> the index of its argument that is multiplied, [.., K]."""


@dataclass(frozen=True)
class Measured:
    """One measurement of a program.

    Attributes:
        figures: the figures for the report.
        errors: the largest error of a logit in each sequence.
        logits: logits of the program, [S, V] for each sequence.
    """

    figures: Measurement
    errors: tuple[float, ...]
    logits: tuple[FloatArray, ...]


@dataclass(frozen=True)
class SourceLogits:
    """Sequences of tokens, and the source's logits after each token: [S, V] for each sequence.

    A model that computes whole texts has its results in the place of logits: [1, E] for a text, [S, C] for its tokens.
    ``task`` is that of the model; None for a language model.
    """

    tokens: MeasuringTokens
    logits: tuple[FloatArray, ...]
    task: PooledTask | None = None

    @staticmethod
    def of(
        source: AnySource,
        context_length: int,
        tokens: MeasuringTokens,
        keep_bytes: int,
        cache: WeightCache,
        progress: Progress = silent,
    ) -> SourceLogits:
        """Runs the source on ``tokens``, and returns its logits.

        Args:
            source: a Hugging Face directory or a GGUF file, with its adapters, or a transformers model.
            context_length: maximum tokens of a request in the export.
            tokens: the sequences to run.
            keep_bytes: if the weights have at most this many bytes, they are read once and stay in ``cache``.
            cache: gets the weights that were read, because the captured program needs the same ones.
            progress: called with the stage "measure" after each module that has weights.

        Raises the errors of `SourceRunner`.
        """
        ids = torch.zeros((len(tokens.sequences), tokens.length), dtype=torch.long)
        for row, sequence in zip(ids, tokens.sequences, strict=True):
            row[: len(sequence)] = sequence  # what comes behind it doesn't reach back: these are causal models
        runner = SourceRunner(source, context_length=context_length, keep_bytes=keep_bytes)
        logits = runner.logits(ids, progress, f"the source on {tokens.origin}")
        for expr, value in runner.kept_weights():
            cache.offer(expr, value)
        return SourceLogits(tokens, tuple(r[: len(s)] for r, s in zip(logits, tokens.sequences, strict=True)))

    @staticmethod
    def of_pooled(runner: PooledRunner, tokens: MeasuringTokens, cache: WeightCache) -> SourceLogits:
        """Runs the source, an encoder, on each sequence, and stores its rows for comparisons with programs."""
        rows = tuple(runner.rows(sequence.tolist()) for sequence in tokens.sequences)
        for expr, value in runner.kept_weights():
            cache.offer(expr, value)
        return SourceLogits(tokens, rows, runner.task)

    def measure(
        self, program: Program, cache: WeightCache, length: int, ran: Callable[[int], None] | None = None
    ) -> Measured:
        """Runs ``program`` on the first ``length`` tokens of each sequence; on all tokens if it computes whole texts.

        ``ran`` is called after each of the program's calls, with the number of calls so far.

        Raises VerificationError if logits are not finite, or not as many as the source's.
        """
        start = time.perf_counter()
        cache.forget_all_but(program)
        sequences = [s if self.task else s[:length] for s in self.tokens.sequences]
        rows = evaluate(program, sequences, cache, ran)
        divergence = divergence_of(self.task)
        errors = []
        for ids, logits, reference in zip(sequences, rows, self.logits, strict=True):
            expected = reference[: len(ids)]
            check_logits(logits, expected)
            following = ids[1:].tolist()
            if self.task:
                divergence.add(*comparable(logits, expected))
            else:
                if following:
                    divergence.add(logits[:-1], expected[:-1], following)
                divergence.add(logits[-1:], expected[-1:])
            errors.append(float(np.abs(logits - expected).max()))
        figures = Measurement(
            **asdict(comparison(divergence)),
            perplexity=divergence.model.perplexity if divergence.model.tokens else None,
            source_perplexity=divergence.reference.perplexity if divergence.reference.tokens else None,
            seconds=round(time.perf_counter() - start, 4),
        )
        return Measured(figures, tuple(errors), tuple(rows))


def evaluate(
    program: Program,
    sequences: Sequence[torch.Tensor],
    cache: WeightCache,
    ran: Callable[[int], None] | None = None,
) -> list[FloatArray]:
    """Returns the program's logits after every token: float32 [S, V] for each sequence [S]; [1, E] for a pooled one.

    ``ran`` is called after each of the program's calls, with the number of calls so far.
    """
    count = itertools.count(1)

    def observe(node: Node, value: object) -> None:
        if ran is not None and node.op == "call_function":
            ran(next(count))

    logits = FastEvaluation(program, cache).evaluate(packed_inputs(program, sequences), observe)[0]
    counts = [1 if program.output_name == POOLED else len(s) for s in sequences]
    return [part.float().numpy() for part in logits.split(counts)]


def relative_tolerance_of(program: Program) -> float:
    """Returns the ``relative_tolerance`` (random_tokens.py) of a program that isn't lowered yet.

    Several products of the same values are parallel on the way to a logit, and count once.
    """
    terms: dict[Node, int] = {}
    for node in program.graph.nodes:
        if node.target in _PRODUCTS:
            x = node.args[_PRODUCTS[node.target]]
            terms[x] = int(x.meta["val"].shape[-1])
        elif node.target is ew.moe.default:
            hidden, inner = program.value(node.args[5]).shape[1:]  # down [E, H, I]
            terms[node] = int(hidden) + int(inner)
    return tolerance_of(sum(terms.values()))
