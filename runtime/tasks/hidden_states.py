"""``HiddenStates``: the inputs of chosen layers, for every token of a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from ..shared.contracts import FloatArray
from ..shared.errors import RequestError
from ..shared.step_schema import HIDDEN, layer_output, layers_of
from . import arguments
from .arguments import check_int
from .base import PromptTask
from .context import METHODS, Kind, TaskContext


class HiddenStates(PromptTask[FloatArray], frozen=True, tag="hidden_states"):
    """A task for the hidden states of every token of its prompt: [S] -> [layers, S, H] float32.

    Attributes:
        prompt: text or token ids.
        layers: numbers as in transformers' ``hidden_states``: 0 is the first layer's input, -1 the final norm's output.
    """

    layers: Any = (-1,)

    kinds: ClassVar[tuple[Kind, ...]] = tuple(METHODS)
    result_type: ClassVar[Any] = np.ndarray

    def outputs(self, context: TaskContext) -> Sequence[str]:
        """Returns the output name of each layer.

        Raises RequestError for a layer whose hidden state the program doesn't have.
        """
        if not (there := layers_of(HIDDEN, context.outputs)):
            raise RequestError(
                f"hidden_states: target {context.target!r} gives none",
                hint='Open its target "cpu", "cuda" or "tvm"; libraries of tvm give them if they were exported anew.',
            )
        layers = arguments.numbers("layers", self.layers, "Pass a list such as [0, -1].")
        count = max(context.layers, *there) + 1
        for layer in layers:
            check_int("layers", layer, -count, count - 1)
            if layer % count not in there:
                raise RequestError(
                    f"layers: hidden state {layer} isn't a value of this program: norm and rounding are one step",
                    hint=f"It has {', '.join(map(str, there))}.",
                )
        return [layer_output(HIDDEN, layer % count) for layer in layers]

    def reduce(self, *rows: FloatArray) -> FloatArray:
        """Returns the hidden states of the layers, [layers, S, H]."""
        return rows[0][np.newaxis] if len(rows) == 1 else np.stack(rows)
