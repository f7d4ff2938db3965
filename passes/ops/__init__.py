"""The ``ew`` ops: reference and fake of each. Importing this package defines them in torch.library.

An op's reference is ``REFERENCES[name]``; by its name it is imported from its family's module.
"""

from __future__ import annotations

from . import (
    activation,
    attention,
    cache,
    dequantize,
    embedding,
    experts,
    fused,
    linear,
    norm,
    pool,
    quantization,
    quantized_cache,
    recurrence,
    rope,
    routing,
)
from .library import NAMESPACE, REFERENCES

__all__ = [
    "NAMESPACE",
    "REFERENCES",
    "activation",
    "attention",
    "cache",
    "dequantize",
    "embedding",
    "experts",
    "fused",
    "linear",
    "norm",
    "pool",
    "quantization",
    "quantized_cache",
    "recurrence",
    "rope",
    "routing",
]
