"""Runs a lowered program with the references of the ew ops, in the memory that was planned for it.

Every operand is a strided view of the arena, so buffers that overlap while both are alive give wrong numbers. The arena
starts as NaN. What the kernels expect of operands is asserted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from enginewright.passes.ops.activation import gated_activation
from enginewright.passes.ops.attention import attention, paged_attention
from enginewright.passes.ops.cache import kv_write
from enginewright.passes.ops.dequantize import dequantize
from enginewright.passes.ops.embedding import embedding, take_rows
from enginewright.passes.ops.experts import grouped_linear
from enginewright.passes.ops.library import REFERENCES
from enginewright.passes.ops.linear import linear
from enginewright.passes.ops.norm import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from enginewright.passes.ops.pool import pool
from enginewright.passes.ops.quantization import (
    quantize_activation,
    quantized_embedding,
    quantized_grouped_linear,
    quantized_linear,
)
from enginewright.passes.ops.rope import rope, rope_table
from enginewright.passes.ops.routing import combine_experts, route_experts
from enginewright.runtime.bundle.weights import pack, unpack
from enginewright.runtime.shared.dtypes import BYTES_PER_ELEMENT, Dtype
from enginewright.runtime.shared.lowered_program import LoweredProgram, Operand, Step
from enginewright.runtime.shared.panel_layouts import Layout

ELEMENTWISE = {
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "cast": lambda x: x.float(),
    "logical_not": lambda x: (x == 0).float(),
    **{fn: lambda x, y, fn=fn: getattr(torch, fn)(x, y).float() for fn in ("lt", "le", "gt", "ge", "eq", "ne")},
    "logical_and": lambda x, y: torch.logical_and(x, y).float(),
    "logical_or": lambda x, y: torch.logical_or(x, y).float(),
}
"""Functions that torch calls otherwise, or has no f32 result for."""
ANY_STRIDES = ("elementwise", "copy")
DTYPES = {
    "f32": torch.float32,
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "i32": torch.int32,
    "i8": torch.int8,
}
"""The types of buffers."""
NARROW = (torch.bfloat16, torch.float16, torch.int8)
ROW_MULTIPLE = {"bf16": 2, "i8": 4}
"""Rows of these types begin at multiples of 32 bits."""


def stored(weight: torch.Tensor, layout: Layout, dtype: Dtype) -> torch.Tensor:
    """A weight as a bundle holds it; bf16 in panels as its bits."""
    if weight.dtype in (*NARROW, torch.float8_e4m3fn):
        value = weight.contiguous()
    else:
        value = weight.int() if not weight.is_floating_point() and weight.dtype is not torch.bool else weight.float()
    if layout == "rows":
        return value.contiguous()
    bits = value.view(torch.int16) if value.dtype == torch.bfloat16 else value
    bits = bits.view(torch.uint8) if dtype == "fp8" else bits
    return torch.from_numpy(pack(bits.contiguous().numpy(), layout, dtype))


class Interpreter:
    """One program with its weights (see ``stored``) and caches of ``blocks`` blocks."""

    def __init__(self, program: LoweredProgram, weights: Mapping[str, torch.Tensor], blocks: int = 24) -> None:
        self.program, self.weights = program, weights
        self.uses = {w.name: w for w in program.weights}
        self.caches: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        for g in program.cache_groups:
            for layer in g.layers:
                sizes = (g.key_head_size, g.value_head_size)
                k, v = (torch.full((blocks, g.block_size, g.kv_heads, s), float("nan")) for s in sizes)
                self.caches[f"{g.name}/{layer}"] = (k, v)
        self.dtypes = {f"{g.name}/{layer}": g.dtype for g in program.cache_groups for layer in g.layers}

    def run(self, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The result, such as logits [R, V], for step inputs (any integer type)."""
        sizes = (len(inputs["ids"]), len(inputs["kv_len"]), len(inputs["rows"]))
        self.inputs = {k: v.to(torch.int32) for k, v in inputs.items()}
        self.sizes = sizes
        arena_bytes = self.program.arena_bytes.evaluate(*sizes)
        assert arena_bytes % 64 == 0
        self.arena = torch.from_numpy(np.full(arena_bytes // 4, np.nan, np.float32))
        self.places = {b.name: (b.offset.evaluate(*sizes), b.size.evaluate(*sizes)) for b in self.program.buffers}
        for step in self.program.steps:
            self._step(step)
        (result,) = self.program.outputs.values()
        return self._read(result).clone()

    def _evaluate(self, values: Any) -> list[int]:
        return [v.evaluate(*self.sizes) for v in values]

    def _read(self, operand: Operand) -> torch.Tensor:
        shape, strides = self._evaluate(operand.shape), self._evaluate(operand.strides)
        offset = operand.offset.evaluate(*self.sizes)
        if operand.kind == "weight":
            return self._weight(operand, shape, strides, offset)
        if operand.kind == "input":
            value = self.inputs[operand.name]
            if operand.name.startswith("block_table:"):
                return value
            assert (shape, strides, offset) == ([len(value)], [1], 0), f"{operand} is not the whole input"
            return torch.as_strided(value, shape, strides, offset)
        place, size = self.places[operand.name]
        last = offset + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
        width = BYTES_PER_ELEMENT[operand.dtype]
        assert 0 in shape or width * last < size, f"{operand} lies outside of its buffer"
        assert place % 64 == 0
        if (multiple := ROW_MULTIPLE.get(operand.dtype, 1)) > 1:
            assert offset % multiple == 0
            assert all(s % multiple == 0 and s >= shape[-1] for s in strides[:-1]), f"{operand}: rows are not padded"
        memory = self.arena.view(DTYPES[operand.dtype])
        return torch.as_strided(memory, shape, strides, place // width + offset)

    def _weight(self, operand: Operand, shape: list[int], strides: list[int], offset: int) -> torch.Tensor:
        use, value = self.uses[operand.name], self.weights[operand.name]
        assert use.dtype == operand.dtype
        if use.layout != "rows":
            assert tuple(shape) == use.shape and offset == 0
            whole = torch.from_numpy(unpack(value.numpy(), tuple(shape), use.layout, use.dtype).copy())
            if use.dtype == "fp8":
                return whole.view(torch.float8_e4m3fn)
            return whole.view(torch.bfloat16) if use.dtype == "bf16" else whole
        return torch.as_strided(value, shape, strides, offset)

    def _step(self, step: Step) -> None:
        operands = [*step.inputs, *step.outputs]
        for operand in operands:
            assert len(operand.shape) <= 4
            if step.op not in ANY_STRIDES and operand.kind in ("buffer", "input"):
                is_reduced = step.op == "reduce" and operand in step.outputs
                assert is_reduced or self._evaluate(operand.strides)[-1] == 1, f"{step.op}: {operand}"
        cache = [o.name for o in step.inputs if o.kind == "cache"]
        arguments = [self._read(o) for o in step.inputs if o.kind != "cache"]
        results = self._compute(step, arguments, cache[0] if cache else "")
        for operand, result in zip(step.outputs, results, strict=True):
            out = self._read(operand)
            assert out.shape == result.shape, f"{step.op}: {out.shape} {result.shape}"
            assert out.dtype == result.dtype, f"{step.op}: {out.dtype} {result.dtype}"
            out.copy_(result)

    def _integers(
        self, step: Step, x: list[torch.Tensor], first: int
    ) -> tuple[int, list[torch.Tensor | None], list[torch.Tensor]]:
        """Bits; values, scales and offsets of the weight that begins there among a step's inputs; what follows."""
        shifted = bool(step.attrs.get("has_offsets", False))
        uses = [self.uses[o.name] for o in step.inputs[first : first + 2 + shifted]]
        kinds = {"i8": (8, "panel32x4"), "u4" if shifted else "i4": (4, "panel32x8")}
        bits, layout = kinds[uses[0].dtype]
        assert [(u.dtype, u.layout) for u in uses] == [(uses[0].dtype, layout), *[("f16", "panel32")] * (1 + shifted)]
        weight: list[torch.Tensor | None] = [*x[first : first + 2], x[first + 2] if shifted else None]
        return bits, weight, x[first + 2 + shifted :]

    def _compute(self, step: Step, x: list[torch.Tensor], cache: str) -> tuple[torch.Tensor, ...]:
        a: dict[str, Any] = dict(step.attrs)
        match step.op:
            case "embedding" if x[1].dtype == torch.float8_e4m3fn:
                return (embedding(x[0], dequantize(x[1], x[2], a["group_size"])),)
            case "embedding":
                return (embedding(x[0], x[1]),)
            case "linear":
                assert x[0].dim() == 2
                packed = {torch.float32: "panel32", torch.bfloat16: "panel32x2"}
                if x[1].dtype == torch.float8_e4m3fn:
                    x[1:3] = [dequantize(x[1], x[2], a["weight_group"])]
                assert self.uses[step.inputs[1].name].layout == packed[x[1].dtype]
                residual = x.pop() if a.get("has_residual") else None
                return (linear(x[0], x[1], x[2] if len(x) > 2 else None, a.get("activation", ""), residual),)
            case "cast_bf16":
                assert x[0].dim() == 2
                return (x[0].bfloat16(),)
            case "quantize_activation":
                assert x[0].dim() == 2
                return quantize_activation(x[0], a["group_size"])
            case "quantized_linear" | "quantized_grouped_linear":
                first = 3 if step.op == "quantized_linear" else 4
                assert [o.dim() for o in x[:3]] == [2, 2, 2]
                bits, weight, rest = self._integers(step, x, first)
                residual = {"residual": rest.pop()} if a.get("has_residual") else {}
                assert len(rest) == a["has_bias"]
                fn = quantized_linear if step.op == "quantized_linear" else quantized_grouped_linear
                bias = rest[0] if a["has_bias"] else None
                groups = a["weight_group"], a["activation_group"]
                return (fn(*x[:first], *weight, bias, bits, *groups, a.get("activation", ""), **residual),)
            case "quantized_embedding":
                bits, weight, rest = self._integers(step, x, 1)
                assert not rest
                return (quantized_embedding(x[0], *weight, bits, a["group_size"]),)
            case "rms_norm" | "add_rms_norm":
                fn = rms_norm if step.op == "rms_norm" else add_rms_norm
                tensors = 1 if step.op == "rms_norm" else 2
                return _tuple(fn(*x[:tensors], x[tensors] if a["has_weight"] else None, a["eps"]))
            case "layer_norm" | "add_layer_norm":
                fn = layer_norm if step.op == "layer_norm" else add_layer_norm
                rest = x[1 if step.op == "layer_norm" else 2 :]
                weight = rest.pop(0) if a["has_weight"] else None
                bias = rest.pop(0) if a["has_bias"] else None
                tensors = x[: 1 if step.op == "layer_norm" else 2]
                return _tuple(fn(*tensors, weight, bias, a["eps"]))
            case "rms_norm_quantize" | "add_rms_norm_quantize":
                assert x[0].dim() == 2
                tensors = 1 if step.op == "rms_norm_quantize" else 2
                weight = x[tensors] if a["has_weight"] else None
                return tuple(REFERENCES[step.op](*x[:tensors], weight, a["eps"], a["group_size"]))
            case "layer_norm_quantize" | "add_layer_norm_quantize":
                assert x[0].dim() == 2
                tensors = 1 if step.op == "layer_norm_quantize" else 2
                rest = x[tensors:]
                weight = rest.pop(0) if a["has_weight"] else None
                bias = rest.pop(0) if a["has_bias"] else None
                return tuple(REFERENCES[step.op](*x[:tensors], weight, bias, a["eps"], a["group_size"]))
            case "rope_kv_write":
                q, k, v, table, slots = x
                written = REFERENCES[step.op](
                    *self.caches[cache], q, k, v, table, slots, a["interleaved"], self.dtypes[cache]
                )
                self.caches[cache] = written[1:]
                return (written[0],)
            case "rope_table":
                return (rope_table(x[0], x[1], a["scale"]),)
            case "rope":
                return (rope(x[0], x[1], a["interleaved"]),)
            case "gated_activation":
                return (gated_activation(torch.cat(x, -1), a["kind"]),)
            case "kv_write":
                self.caches[cache] = kv_write(*self.caches[cache], x[0], x[1], x[2], self.dtypes[cache])
                return ()
            case "paged_attention":
                q, table, q_start, kv_len, *sinks = x
                k, v = self.caches[cache]
                scale, window, softcap = a["scale"], a["window"], a["softcap"]
                assert len(sinks) == a.get("has_sinks", False)
                sink = sinks[0] if sinks else None
                return (paged_attention(q, k, v, table, q_start, kv_len, scale, window, softcap, sink),)
            case "attention":
                q, k, v, q_start, *more = x
                there = [name for name in ("sinks", "slopes", "biases") if a.get(f"has_{name}")]
                optional = {"sinks": None} | dict(zip(there, more, strict=True))
                scale, window, softcap = a["scale"], a["window"], a["softcap"]
                return (attention(q, k, v, q_start, 0, scale, window, softcap, causal=a["causal"], **optional),)
            case "pool":
                return (pool(*x, a["kind"]),)
            case "route_experts":
                return route_experts(x[0], a["experts"])
            case "grouped_linear":
                assert x[0].dim() == 2 and x[1].dtype == torch.int32
                packed = {torch.float32: "panel32", torch.bfloat16: "panel32x2"}
                if x[2].dtype == torch.float8_e4m3fn:
                    x[2:4] = [dequantize(x[2], x[3], a["weight_group"])]
                assert self.uses[step.inputs[2].name].layout == packed[x[2].dtype]
                return (grouped_linear(x[0], x[1], x[2], x[3] if len(x) > 3 else None, a.get("activation", "")),)
            case "combine_experts":
                return (combine_experts(*x),)
            case "top_k":
                # Stable: of equal values the first, as the kernel takes them.
                values, indices = x[0].sort(dim=-1, descending=True, stable=True)
                return values[..., : a["k"]], indices[..., : a["k"]].int()
            case "gather":
                return (x[0].gather(-1, x[1].long()),)
            case "scatter":
                return (x[0].scatter(-1, x[1].long(), a["value"]),)
            case "take_rows":
                assert x[0].dtype == torch.float32
                return (take_rows(x[0], x[1]),)
            case "copy":
                return (x[0].clone(),)
            case "reduce":
                kinds = {"sum": torch.sum, "mean": torch.mean, "max": torch.amax}
                return (kinds[a["kind"]](x[0], dim=-1, keepdim=True),)
            case "elementwise":
                return (_elementwise(a, x),)
            case _:
                raise AssertionError(f"unknown op {step.op}")


def _elementwise(a: dict[str, Any], x: list[torch.Tensor]) -> torch.Tensor:
    fn = a["fn"]
    if fn == "where":
        return torch.where(x[0] != 0, x[1], x[2])
    if "scalar" in a:
        number = torch.tensor(a["scalar"], dtype=x[0].dtype)
        x = [number, x[0]] if a["scalar_first"] else [x[0], number]
    result: torch.Tensor = (ELEMENTWISE[fn] if fn in ELEMENTWISE else getattr(torch, fn))(*x)
    return result


def _tuple(value: Any) -> tuple[torch.Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)
