"""Runs a bundle's program on two sequences packed together: a chunk, a chunk with a prompt, then decode steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from enginewright.runtime.executors.base import Executor
from enginewright.runtime.shared.contracts import FloatArray, Int32Array, StepInput
from enginewright.runtime.shared.step_schema import LOGITS

PROMPTS = (40, 26)
"""Prompt tokens of the two sequences.

The first prompt, and the second sequence's decode steps, extend into another KV block.
"""

CHUNK = 29
"""Tokens of the first prompt's first chunk. The rest of that prompt runs together with the second prompt."""

DECODES = 8
"""Number of decode steps, with one token of each sequence."""


@dataclass(frozen=True)
class Plan:
    """The plan of a packed run: for each step, the number of tokens of each of the two sequences."""

    steps: tuple[tuple[int, int], ...]

    @property
    def lengths(self) -> tuple[int, int]:
        return sum(a for a, _ in self.steps), sum(b for _, b in self.steps)


def plan_steps(context: int) -> Plan:
    """Returns the usual plan, or a shorter one that fits into a context of ``context`` tokens, which is at least 1."""
    decodes = min(DECODES, context // 2)
    first, second = (max(1, min(prompt, context - decodes)) for prompt in PROMPTS)
    chunk = min(CHUNK, first - 1)
    steps = [(chunk, 0)] if chunk else []
    return Plan((*steps, (first - chunk, second), *([(1, 1)] * decodes)))


def blocks_for(plan: Plan, block_size: int) -> int:
    """Returns the number of KV blocks of ``block_size`` tokens that the plan's two sequences need."""
    return 2 * -(-max(plan.lengths) // block_size)


def run_packed(executor: Executor, sequences: Sequence[Int32Array], plan: Plan, seed: int) -> list[FloatArray]:
    """Returns the logits after every token of both sequences, [S] -> [S, V] each.

    Args:
        executor: an executor with `blocks_for` blocks in each cache group.
        sequences: token ids of the two sequences.
        plan: the tokens of each step.
        seed: seed of the random order in which blocks are assigned. An executor without ragged steps gets one block for
            each sequence, the same in all groups.
    """
    sizes = {group.name: group.block_size for group in executor.cache_groups}
    generator = np.random.default_rng(seed)
    tables: dict[str, Int32Array] = {
        name: generator.permutation(blocks_for(plan, size)).astype(np.int32).reshape(2, -1)
        for name, size in sizes.items()
    }  # group -> [2, blocks]
    if not executor.caps.ragged:
        tables = dict.fromkeys(tables, next(iter(tables.values())))
    done = [0, 0]
    logits: list[list[FloatArray]] = [[], []]
    for counts in plan.steps:
        active = [i for i in range(2) if counts[i]]
        chunks = [range(done[i], done[i] + counts[i]) for i in active]
        ends = np.cumsum([len(c) for c in chunks])  # [B]
        output = executor.submit(
            StepInput.packed(
                ids=np.concatenate([sequences[i][c.start : c.stop] for i, c in zip(active, chunks, strict=True)]),
                counts=[len(c) for c in chunks],
                kv_len=[c.stop for c in chunks],
                tables={name: np.ascontiguousarray(table[active]) for name, table in tables.items()},
                groups=executor.cache_groups,
                rows=np.arange(ends[-1]),
                outputs=(LOGITS,),
            )
        ).result()
        assert output.logits is not None
        for i, rows in zip(active, np.split(output.logits, ends[:-1]), strict=True):
            logits[i].append(np.array(rows))
            done[i] += len(rows)
    return [np.concatenate(rows) for rows in logits]
