"""Reads a live transformers model: a twin is built and traced, the model itself is never touched."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from enginewright.passes.ir.weights import Source, WeightExpr
from enginewright.runtime.shared.errors import UnsupportedModelError


def read_module_tensors(model: PreTrainedModel) -> dict[str, WeightExpr]:
    """Returns the model's parameters and saved buffers by reference; they mustn't change before the export ends."""
    origin = type(model).__name__
    return {name: _source(name, value, origin) for name, value in model.state_dict().items()}


def copy_computed_buffers(model: PreTrainedModel, twin: PreTrainedModel) -> None:
    """Copies buffers that the model computes itself, such as rotary frequencies, to the twin, in case a user changed
    them.

    Raises UnsupportedModelError naming a buffer that only one of the two has.
    """
    saved = set(model.state_dict())
    computed = {name: b for name, b in model.named_buffers() if name not in saved}
    for name, buffer in twin.named_buffers():
        if name in saved:
            continue
        if name not in computed or computed[name].shape != buffer.shape:
            raise UnsupportedModelError(f"{type(model).__name__}: buffer {name} is not what its configuration says")
        if buffer.device.type != "meta":
            buffer.data.copy_(computed[name])


def _source(name: str, value: torch.Tensor, origin: str) -> Source:
    return Source(name, tuple(value.shape), value.dtype, lambda: value.detach().cpu(), origin)
