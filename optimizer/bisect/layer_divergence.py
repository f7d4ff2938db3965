"""The divergence of two runs after each layer: KL of the next tokens that each layer's input predicts.

It is the logit lens (nostalgebraist 2020, "interpreting GPT: the logit lens"; Belrose et al. 2023, arXiv:2303.08112):
the input of a layer, the residual stream, goes through the model's last norm and output projection. Each run uses its
own norm and projection, so a change of basis that its weights contain makes no difference. The distributions differ
from the layer on that computes something else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from enginewright.optimizer.measure.distances import Divergence, Likelihood
from enginewright.passes.ir.value_name import LOGITS, ValueName
from enginewright.runtime.shared.contracts import FloatArray
from enginewright.runtime.shared.progress import Progress, ProgressEvent, silent

from .runs import Run
from .values import Values, layer_number

_NORMED = 0.1
"""The largest change of logits, when the input is doubled, with which it counts as the input of a norm.

A norm's logits then change by its epsilon alone; those of a product double.
"""


@dataclass(frozen=True)
class LayerDivergence:
    """The difference of the next tokens that the input of one layer predicts in two runs.

    Attributes:
        layer: the number of the layer; None for the logits.
        kl_mean, kl_max: KL(reference || other) in nats: the mean over the tokens, and the largest value.
    """

    layer: int | None
    kl_mean: float
    kl_max: float


def layer_divergence(
    reference: Run, other: Run, sequences: Sequence[torch.Tensor], progress: Progress = silent
) -> list[LayerDivergence] | None:
    """Returns the divergence of the input of each layer, in the order of layers, and last that of the logits.

    A run computes the sequences twice, and once more for each of its layers.

    Args:
        reference, other: two runs of one model.
        sequences: token ids, int32 [S] each.
        progress: called with the stage "layers" before each layer and after the last.

    Returns:
        None if the layers of the two runs differ, or a run can't record the input of a layer or of the last norm.
    """
    recorded = []
    for run in (reference, other):
        values = run.values(sequences)
        places = _places(values)
        if places is None:
            return None
        streams, last = places
        doubled = run.values(sequences, {last: 2 * values[last]})[LOGITS]
        if np.abs(doubled - values[LOGITS]).max() > _NORMED * np.abs(values[LOGITS]).max():
            return None  # it isn't a norm, which takes any size: without one the lens would show sizes alone
        recorded.append((run, values[LOGITS], {layer: values[name] for layer, name in streams.items()}, last))
    if recorded[0][2].keys() != recorded[1][2].keys():
        return None
    rows = []
    for index, layer in enumerate(recorded[0][2]):
        progress(ProgressEvent("layers", index, len(recorded[0][2]), f"layer {layer}"))
        lenses = [run.values(sequences, {last: streams[layer]})[LOGITS] for run, _, streams, last in recorded]
        rows.append(_divergence(layer, lenses[0], lenses[1]))
    progress(ProgressEvent("layers", len(rows), len(rows), ""))
    return [*rows, _divergence(None, recorded[0][1], recorded[1][1])]


def _places(values: Values) -> tuple[dict[int, ValueName], ValueName] | None:
    """Returns layer's number -> name of the layer's input, and the name of the input of the last norm; None if one
    is missing.
    """
    streams: dict[int, ValueName] = {}
    last: ValueName | None = None
    for name in values:  # in the order of execution
        if name.what != "input":
            continue
        number = layer_number(name.path)
        if number is not None:
            streams.setdefault(number, name)
        elif streams and last is None:
            last = name
    if last is None or LOGITS not in values or sorted(streams) != list(range(len(streams))):
        return None
    if any(values[name].shape != values[last].shape for name in streams.values()):
        return None
    return dict(sorted(streams.items())), last


def _divergence(layer: int | None, reference: FloatArray, other: FloatArray) -> LayerDivergence:
    total = Divergence(Likelihood(), Likelihood())
    total.add(other, reference)
    return LayerDivergence(layer, total.kl_mean, total.kl_max)
