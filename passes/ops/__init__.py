"""The ``ew`` ops: reference and fake of each. Importing this package defines them in torch.library."""

from __future__ import annotations

from .activation import ACTIVATIONS, gated_activation
from .attention import attention, paged_attention, request_of_token
from .cache import kv_write
from .dequantize import dequantize
from .embedding import embedding, take_rows
from .epilogue import LINEAR_ACTIVATIONS
from .experts import EXPERT_KINDS, expert_activation, grouped_linear, moe
from .fused import (
    add_layer_norm_quantize,
    add_rms_norm_quantize,
    layer_norm_quantize,
    rms_norm_quantize,
    rope_kv_write,
)
from .library import NAMESPACE, REFERENCES
from .linear import linear
from .norm import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from .quantization import quantize_activation, quantized_embedding, quantized_grouped_linear, quantized_linear
from .quantized_cache import quantized_kv_write, quantized_paged_attention
from .rope import rope, rope_table
from .routing import combine_experts, route_experts

__all__ = [
    "ACTIVATIONS",
    "EXPERT_KINDS",
    "LINEAR_ACTIVATIONS",
    "NAMESPACE",
    "REFERENCES",
    "add_layer_norm",
    "add_layer_norm_quantize",
    "add_rms_norm",
    "add_rms_norm_quantize",
    "attention",
    "combine_experts",
    "dequantize",
    "embedding",
    "expert_activation",
    "gated_activation",
    "grouped_linear",
    "kv_write",
    "layer_norm",
    "layer_norm_quantize",
    "linear",
    "moe",
    "paged_attention",
    "quantize_activation",
    "quantized_embedding",
    "quantized_grouped_linear",
    "quantized_kv_write",
    "quantized_linear",
    "quantized_paged_attention",
    "request_of_token",
    "rms_norm",
    "rms_norm_quantize",
    "rope",
    "rope_kv_write",
    "rope_table",
    "route_experts",
    "take_rows",
]
