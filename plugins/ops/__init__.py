"""The ``ew`` ops: schema, fake and reference of each. Importing this package defines them in torch.library."""

from __future__ import annotations

from .activation import ACTIVATIONS, gated_activation
from .attention import attention, paged_attention, request_of_token
from .cache import kv_write
from .embedding import embedding
from .library import NAMESPACE, REFERENCES
from .linear import linear
from .norm import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from .rope import rope, rope_table
from .rows import take_rows

__all__ = [
    "ACTIVATIONS",
    "NAMESPACE",
    "REFERENCES",
    "add_layer_norm",
    "add_rms_norm",
    "attention",
    "embedding",
    "gated_activation",
    "kv_write",
    "layer_norm",
    "linear",
    "paged_attention",
    "request_of_token",
    "rms_norm",
    "rope",
    "rope_table",
    "take_rows",
]
