"""A toy executor of a model that computes texts whole. A text's numbers are a checksum of its tokens and their types;
they come out wrong if a text is divided, or gets the row of another text."""

from __future__ import annotations

import zlib
from dataclasses import replace
from itertools import pairwise
from typing import ClassVar

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import models, normalizers, pre_tokenizers, processors

from enginewright.runtime.bundle.tokenizer_files import TokenizerFiles
from enginewright.runtime.executors.base import Deferred
from enginewright.runtime.shared.contracts import ExecutorCaps, ModelInfo, PoolingInfo, StepInput, StepOutput
from enginewright.runtime.shared.step_schema import CLASSES, POOLED, TYPES
from enginewright.runtime.text.tokenizer import Tokenizer

WORDS = [*"abcdefghijklmnopqrstuvwxyz", *(f"##{c}" for c in "abcdefghijklmnopqrstuvwxyz"), *"0123456789.,:?!"]
VOCABULARY = {word: i for i, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS])}
CLS, SEP = VOCABULARY["[CLS]"], VOCABULARY["[SEP]"]


def bert_tokenizer() -> tokenizers.Tokenizer:
    """Returns the library's tokenizer of BERT, with the letters as its words."""
    tokenizer = tokenizers.Tokenizer(models.WordPiece(VOCABULARY, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.add_special_tokens(["[PAD]", "[UNK]", "[CLS]", "[SEP]"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)],
    )
    return tokenizer


def text_tokenizer() -> Tokenizer:
    """Returns ``bert_tokenizer`` as a bundle has it."""
    return Tokenizer(TokenizerFiles(bert_tokenizer().to_str(), None, {}))


def text_model(pooling: PoolingInfo, context: int = 64) -> ModelInfo:
    """Returns the facts about a model with these numbers."""
    return ModelInfo(
        name="toy encoder",
        architecture="ToyModel",
        vocab_size=len(VOCABULARY),
        context_length=context,
        pooling=pooling,
    )


def numbers(ids: NDArray[np.int32], types: NDArray[np.int32], count: int) -> NDArray[np.float32]:
    """Returns a text's ``count`` numbers, [count]."""
    seed = zlib.crc32(types.tobytes(), zlib.crc32(ids.tobytes()))
    return np.random.default_rng(seed).standard_normal(count).astype(np.float32)


class PooledToy:
    """Runs steps of whole texts.

    Attributes:
        steps: the steps so far.
        poison: a token that makes the numbers of its text NaN.
    """

    cache_groups = ()
    blocks: ClassVar[dict[str, int]] = {}

    def __init__(self, dimensions: int = 8, *, caps: ExecutorCaps = ExecutorCaps()) -> None:
        self.caps = replace(caps, ports=(TYPES,), outputs=(POOLED, CLASSES))
        self.dimensions = dimensions
        self.steps: list[StepInput] = []
        self.poison: int | None = None

    def submit(self, step: StepInput) -> Deferred:
        return Deferred(self.run, step)

    def describe(self) -> dict[str, str | int]:
        return {"target": "toy"}

    def close(self) -> None:
        """Has nothing to close."""

    def run(self, step: StepInput) -> StepOutput:
        assert step.sampling is None, "no token is drawn"
        assert len(step.ids) == step.q_start[-1] <= self.caps.max_tokens
        np.testing.assert_array_equal(step.kv_len, step.counts, "a text is computed whole")
        self.steps.append(step)
        types = step.arrays[TYPES]
        outputs = {}
        texts = [slice(first, end) for first, end in pairwise(step.q_start.tolist())]
        if POOLED in step.outputs:
            outputs[POOLED] = np.stack([self._of(step.ids[text], types[text]) for text in texts])
        if CLASSES in step.outputs:
            classes = np.concatenate([self._of_tokens(step.ids[text], types[text]) for text in texts])
            outputs[CLASSES] = classes[step.rows]
        return StepOutput(None, outputs)

    def _of(self, ids: NDArray[np.int32], types: NDArray[np.int32]) -> NDArray[np.float32]:
        values = numbers(ids, types, self.dimensions)
        return values if self.poison not in ids else np.full_like(values, np.nan)

    def _of_tokens(self, ids: NDArray[np.int32], types: NDArray[np.int32]) -> NDArray[np.float32]:
        """Returns numbers for each token, which depend on all tokens: [S, count]."""
        return np.stack([self._of(np.roll(ids, -i), types) for i in range(len(ids))])
