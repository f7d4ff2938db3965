"""Logits of exact steps for the same tokens in several batches; run where Triton interprets its kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from enginewright.plugins.cuda.serve.ops import HANDLERS
from enginewright.plugins.gpu.jit_launcher import JitLauncher, products_in_order
from tests.passes import small_programs
from tests.passes.small_programs import random_sequences
from tests.plugins.cuda.serve import cuda_cases as cases

BLOCKS = 160


@products_in_order()
def logits_of_batches(
    case: str, requests: Sequence[int] = (7, 64), recipe: str = "f32", floats: Any = "f32", cache: str | None = None
) -> list[str]:
    """Compares the logits of a request of 37 tokens, three of them decoded, alone and in batches.

    Returns the differences in words. In batches its prompt is cut into chunks, beside other prompts
    and decodes. The bits of the others' last tokens are compared between batches, too.

    Args:
        case: the family's case.
        requests: the number of requests of each batch.
        recipe, floats, cache: as for ``cuda_cases.differences``.
    """
    program, context = cases.program_of(case, recipe, cache)
    lowering = cases.lowered(program, context, floats)
    most = max(requests)
    mine, *others = random_sequences((37, *([9, 6, 5] + [2] * most)[: most - 1]), 250)
    steps = cases.steps_of(lowering, 256, blocks=BLOCKS, requests=64, exact=True)

    def run(schedule: Sequence[dict[str, list[int]]], seed: int) -> dict[tuple[str, int], np.ndarray]:
        """The logits after a request's first n tokens, by its name and n."""
        stepper = small_programs.steps_of(lowering.program.cache_groups, BLOCKS, seed)
        logits_after, counts = {}, dict[str, int]()
        for chunks in schedule:
            logits = steps.start(cases.step_input(stepper.step(chunks))).result().logits
            assert logits is not None
            for row, (name, chunk) in enumerate(chunks.items()):
                counts[name] = counts.get(name, 0) + len(chunk)
                logits_after[name, counts[name]] = logits[row]
        return logits_after

    alone = run([{"mine": mine[:34]}, *({"mine": mine[n : n + 1]} for n in (34, 35, 36))], 1)
    seen, problems = dict(alone), list[str]()
    for number in requests:
        first, last = ({str(i): part(of) for i, of in enumerate(others[: number - 1])} for part in (_but_last, _last))
        some = dict(list(first.items())[: number // 2])
        rest = {name: of for name, of in first.items() if name not in some}
        batch = run(
            [
                {"mine": mine[:11], **some},
                {**rest, "mine": mine[11:33]},
                {**dict(list(last.items())[: number // 3]), "mine": mine[33:34]},
                {"mine": mine[34:35], **dict(list(last.items())[number // 3 :])},
                {"mine": mine[35:36]},
                {"mine": mine[36:37]},
            ],
            number,
        )
        for key, logits in batch.items():
            if not np.array_equal(seen.setdefault(key, logits), logits):
                problems.append(f"{number} requests: {key[0]} after {key[1]} tokens")
    assert sum(key in seen for key in alone) == 4 and all(np.isfinite(logits).all() for logits in seen.values())
    return problems


def _but_last(tokens: list[int]) -> list[int]:
    return tokens[:-1]


def _last(tokens: list[int]) -> list[int]:
    return tokens[-1:]


@products_in_order()
def long_logits(case: str, length: int, cache: str | None = None) -> bool:
    """Says whether a request of ``length`` tokens has the same bits in chunks of 128 alone, and of 70 beside others."""
    program, context = cases.program_of(case, cache=cache)
    lowering = cases.lowered(program, context, "f32")
    mine, short = random_sequences((length, 40), 250)

    def run(chunk: int, beside: bool) -> list[np.ndarray]:
        steps = cases.steps_of(lowering, 256, blocks=48, exact=True)
        stepper = small_programs.steps_of(lowering.program.cache_groups, 48)
        ends = [*range(chunk, length - 2, chunk), length - 2, length - 1, length]
        logits_after = []
        for number, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
            other = {"short": short[number : number + 1]} if beside and number < len(short) else {}
            logits = steps.start(cases.step_input(stepper.step({**other, "mine": mine[start:end]}))).result().logits
            assert logits is not None
            logits_after.append(logits[-1])
        return logits_after[-3:]

    return all(map(np.array_equal, run(128, False), run(70, True)))


def functions_by_place(functions: Mapping[str, int]) -> list[str]:
    """Names the elementwise functions that give an element other bits in a small step than in a large one, or where it
    lies in memory with gaps; ``functions``: the number of operands of each."""
    binder: Any = SimpleNamespace(launch=JitLauncher().bind)
    values, by_place = torch.randn(3, 599).exp(), []

    def computed(fn: str, operands: Sequence[torch.Tensor]) -> torch.Tensor:
        step: Any = SimpleNamespace(attrs={"fn": fn})
        out = torch.full(operands[0].shape, float("nan"))
        for work in HANDLERS["elementwise"](binder, step, list(operands), [out]):
            work()
        return out

    for fn, count in functions.items():
        whole = computed(fn, list(values[:count]))
        parts = [computed(fn, list(part)) for part in values[:count].split(3, dim=1)]
        gaps = computed(fn, list(values.unsqueeze(2).repeat(1, 1, 2)[:count, :, 0]))
        if not (torch.equal(torch.cat(parts), whole) and torch.equal(gaps, whole)):
            by_place.append(fn)
    return by_place
