"""Compares source and bundle on random tokens, where any error of a rewrite shows in some logit."""

from __future__ import annotations

import numpy as np
import torch

from enginewright.optimizer.measure.distances import Divergence, Likelihood
from enginewright.optimizer.measure.source_runner import SourceRunner
from enginewright.optimizer.shared.export_records import Comparison
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.executors.base import Executor
from enginewright.runtime.shared.contracts import FloatArray, Int32Array, ModelInfo
from enginewright.runtime.shared.errors import VerificationError
from enginewright.runtime.shared.lowered_program import LoweredProgram

from .packed_run import plan_steps, run_packed

_EPSILON = float(np.finfo(np.float32).eps)
_MARGIN = 8.0


def relative_tolerance(program: LoweredProgram) -> float:
    """Returns the largest difference of logits that rounding explains, as a share of the largest logit.

    It is for two 32-bit evaluations with sums in different orders. Each product with a weight sums K rounded terms,
    whose errors add up as a random walk: eps sqrt(K) of a result's size. Along the whole program they add up again: eps
    sqrt(sum of K). Eight times this covers the largest of some millions of logits, and models that amplify errors.
    Measured differences are 2 to 20 % of it. A weight that is off by 1 % in one of the 210 linears of a model of 135M
    parameters is at least 4 times it.
    """
    terms = 0
    for step in program.steps:
        for operand in step.inputs:
            if operand.kind == "weight" and len(operand.shape) > 1 and step.op != "embedding":
                terms += operand.shape[-1].evaluate(1, 1, 1)
    return tolerance_of(terms)


def tolerance_of_target(bundle: Bundle, target: str) -> float:
    """Returns the `relative_tolerance` of a bundle's target, in any form."""
    sections = bundle.target(target).sections.values()
    terms = next((section.summed_products for section in sections if hasattr(section, "summed_products")), None)
    return relative_tolerance(bundle.program(target)) if terms is None else tolerance_of(terms)


def tolerance_of(terms: int) -> float:
    """Returns the `relative_tolerance` for ``terms`` products that are summed on the way to a logit."""
    return _MARGIN * _EPSILON * float(np.sqrt(terms))


def compare_random_tokens(runner: SourceRunner, executor: Executor, info: ModelInfo, seed: int) -> Comparison:
    """Compares two sequences of random tokens: run separately by the source, packed by the bundle with decode steps
    at the end.

    Raises VerificationError if logits aren't finite, or if the two have different shapes.
    """
    plan = plan_steps(info.context_length)
    ids, sequences = random_sequences(info, seed)
    # Tokens after the end of the shorter sequence don't change its logits, as the models are causal.
    expected = runner.logits(torch.from_numpy(ids).long())  # [2, S, V]
    divergence = Divergence(Likelihood(), Likelihood())
    for i, logits in enumerate(run_packed(executor, sequences, plan, seed)):
        reference = expected[i, : len(logits)]
        check_logits(logits, reference)
        divergence.add(logits, reference)
    return comparison(divergence)


def random_sequences(info: ModelInfo, seed: int) -> tuple[Int32Array, list[Int32Array]]:
    """Returns the tokens of `compare_random_tokens`: both sequences as the rows of an array [2, S], and each by
    itself.
    """
    lengths = plan_steps(info.context_length).lengths
    ids = np.random.default_rng(seed).integers(0, info.vocab_size, (2, max(lengths)), dtype=np.int32)
    return ids, [row[:length] for row, length in zip(ids, lengths, strict=True)]


def comparison(divergence: Divergence) -> Comparison:
    """Returns the figures of a divergence for the report."""
    return Comparison(
        tokens=divergence.tokens,
        max_logit_error=divergence.logit_difference,
        largest_logit=divergence.largest_logit,
        kl_mean=divergence.kl_mean,
        kl_max=divergence.kl_max,
        top1_agreement=divergence.top1_agreement,
        of_vectors=divergence.of_vectors,
    )


def check_logits(logits: FloatArray, reference: FloatArray) -> None:
    """Raises VerificationError if logits [n, V] can't be compared with the source's."""
    if logits.shape != reference.shape:
        raise VerificationError(
            f"the exported program gives {logits.shape[-1]} logits a token, the source {reference.shape[-1]}",
            hint="The model's vocab_size may not be the size of its output.",
        )
    for whose, values in (("the source", reference), ("the exported program", logits)):
        bad = int(values.size - np.count_nonzero(np.isfinite(values)))
        if bad:
            raise VerificationError(
                f"{whose} gives {bad:,} logits of {values.size:,} that are NaN or infinite",
                hint="The weights may be damaged, or too large for the recipe's number formats.",
            )
