"""Runs a bundle on whole texts, for comparisons with its source or another bundle."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from enginewright.runtime.executors.base import Executor
from enginewright.runtime.shared.contracts import FloatArray, StepInput
from enginewright.runtime.shared.step_schema import CLASSES, POOLED, TYPES
from enginewright.runtime.text.tokenizer import Tokenizer

LONGEST = 128
"""The number of tokens to which texts of the package's file are cut."""

BATCH = 8
"""The number of texts of a step."""


def token_texts(lines: Sequence[str], tokenizer: Tokenizer, most: int) -> list[list[int]]:
    """Returns the tokens of each text that has some, cut to ``most`` tokens."""
    texts = [tokenizer.encode(line)[:most] for line in lines if line.strip()]
    return [ids for ids in texts if ids]


def run_texts(executor: Executor, texts: Sequence[Sequence[int]]) -> list[FloatArray]:
    """Returns the results of texts of token ids, computed in one step: [1, E] each, or [S, C] of S tokens."""
    counts = [len(text) for text in texts]
    tokens = sum(counts)
    of_texts = POOLED in executor.caps.outputs
    name = POOLED if of_texts else CLASSES
    step = StepInput.packed(
        ids=np.concatenate([np.asarray(text, np.int32) for text in texts]),
        counts=counts,
        kv_len=counts,
        tables={},
        groups=(),
        rows=np.cumsum(counts) - 1 if of_texts else np.arange(tokens),
        more={TYPES: np.zeros(tokens, np.int32)} if TYPES in executor.caps.ports else None,
        outputs=(name,),
    )
    values = executor.submit(step).result().outputs[name]
    return np.split(np.array(values), np.cumsum([1] * len(texts) if of_texts else counts)[:-1])
