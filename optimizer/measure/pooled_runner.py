"""Runs a pooled source model in transformers: its own ``forward``, then the pooling that sentence-transformers defines.

The computation shares no code with capture's steps or with passes: each text runs alone, in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch

from enginewright.optimizer.capture.build_pooled import build_pooled_source, find_pooled, pooled_context
from enginewright.optimizer.capture.gguf.pooling import AFTER
from enginewright.optimizer.capture.pooled_step import FUNCTIONS, modules_after
from enginewright.optimizer.recipes.sections import PoolingSection
from enginewright.passes.ir.weights import WeightExpr
from enginewright.runtime.shared.contracts import FloatArray, PooledTask
from enginewright.runtime.shared.errors import SourceError

from .lazy_weights import bring_weights_lazily, load_weights
from .source_runner import KEEP_BYTES, weight_bytes

_POOLINGS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "cls": lambda rows: rows[0],
    "last": lambda rows: rows[-1],
    "max": lambda rows: rows.max(0).values,
    "mean": lambda rows: rows.mean(0),
    "weighted": lambda rows: torch.arange(1.0, len(rows) + 1) @ rows / sum(range(1, len(rows) + 1)),
}
"""Kind of pooling -> the function that returns the vector [H] of a text with the hidden states [S, H]."""


class PooledRunner:
    """A source model that gives vectors, scores or classes.

    Args:
        folder: the model's folder or GGUF file.
        section: the recipe's [pooling].
        context_length: the longest text for which rotary frequencies are fixed; None takes what the files state.
        keep_bytes: the most bytes of a weight that is read once and kept; larger ones are read again.

    Attributes:
        task: the model's task.
        model: the transformers model.
        padding: the id of the token with which transformers pads; some models count positions without it.
        context_length: the most tokens of a text.

    Raises:
        SourceError, UnsupportedModelError: as for an export.
    """

    task: PooledTask

    def __init__(
        self,
        folder: Path,
        section: PoolingSection | None = None,
        *,
        context_length: int | None = None,
        keep_bytes: int = KEEP_BYTES,
    ) -> None:
        pooled = find_pooled(folder, section)
        if pooled is None:
            raise SourceError(f"{folder} is a model that generates text", hint="Pass the model of the bundle.")
        self._source, config = pooled
        self.task = self._source.task
        self.padding: int | None = getattr(config, "pad_token_id", None)
        self.model, weights = build_pooled_source(self._source, config, eager=True)
        self.context_length = pooled_context(self.model, self._source, context_length, None)
        self._after, self._functions = modules_after(self._source)
        for name, parameter in self._after.named_parameters():
            parameter.data = weights[f"{AFTER}.{name}"].evaluate()
        inside = {name: expr for name, expr in weights.items() if not name.startswith(f"{AFTER}.")}
        self._kept: Mapping[str, WeightExpr] = {}
        if weight_bytes(self.model) <= keep_bytes:
            load_weights(self.model, inside)
            self._kept = inside
        else:
            bring_weights_lazily(self.model, inside)

    def rows(self, tokens: Sequence[int]) -> FloatArray:
        """Returns the vector, score or classes of a text as [1, E], or the classes of each token as [S, C]."""
        ids = torch.tensor([list(tokens)])
        with torch.inference_mode():
            result = self.model(input_ids=ids, attention_mask=torch.ones_like(ids))
            if self._source.sentence.poolings:
                hidden = result.last_hidden_state[0]
                values = torch.cat([_POOLINGS[kind](hidden) for kind in self._source.sentence.poolings])[None]
                for module, function in zip(self._after, self._functions, strict=True):
                    values = FUNCTIONS[function](module(values))
            elif (answers := self._source.sentence.answers) is not None:
                yes, no = answers
                last = result.logits[:, -1]
                values = last[:, yes, None] - (0 if no is None else last[:, no, None])
            else:
                values = result.logits[0] if self.task == "token_classify" else result.logits
        rows: FloatArray = values.float().numpy()
        return rows

    def kept_weights(self) -> Iterator[tuple[WeightExpr, torch.Tensor]]:
        """Yields the expression and the value of each weight that is kept in memory."""
        for name, parameter in self.model.named_parameters():
            if name in self._kept:
                yield self._kept[name], parameter.data
