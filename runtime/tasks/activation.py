"""The functions that turn a model's last numbers into scores, for one text at a time."""

from __future__ import annotations

import numpy as np

from ..shared.contracts import FloatArray, PoolingInfo


def activated(values: FloatArray, pooling: PoolingInfo, *, raw: bool = False) -> FloatArray:
    """Applies the model's function, such as softmax, to the numbers of a text or of its tokens: [C] or [S, C], as
    float32.

    ``raw``: True returns the numbers unchanged. The result depends on ``values`` alone, so its bits are the same in any
    batch.
    """
    if raw or pooling.activation == "none":
        return values
    wide = values.astype(np.float64)
    with np.errstate(over="ignore"):
        if pooling.activation == "sigmoid":
            scores = 1 / (1 + np.exp(-wide))
        else:
            powers = np.exp(wide - wide.max(-1, keepdims=True))
            scores = powers / powers.sum(-1, keepdims=True)
    return np.asarray(scores, np.float32)
