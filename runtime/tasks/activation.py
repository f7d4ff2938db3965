"""The functions that turn a model's last numbers into scores, for one text at a time."""

from __future__ import annotations

import numpy as np

from ..shared.contracts import FloatArray, PoolingInfo


def activated(values: FloatArray, pooling: PoolingInfo, *, raw: bool = False) -> FloatArray:
    """Returns the scores of a text, or of its tokens: [C] or [S, C]. They depend on ``values`` alone.

    ``raw``: True returns the model's numbers without their function.
    """
    if raw or pooling.activation == "none":
        return values
    wide = values.astype(np.float64)
    with np.errstate(over="ignore"):
        if pooling.activation == "sigmoid":
            return (1 / (1 + np.exp(-wide))).astype(np.float32)
        powers = np.exp(wide - wide.max(-1, keepdims=True))
        return (powers / powers.sum(-1, keepdims=True)).astype(np.float32)
