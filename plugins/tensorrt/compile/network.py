"""The file network.json: the network from which a target's engines are built, without weights. It doesn't need torch.

Calls are operators of ONNX opset 24 by their names, with ONNX's meaning, and two of our own:

    ew.kv_write          k [T,Nkv,D], v [T,Nkv,Dv], slots [T], k_cache, v_cache -> the caches, in place
    ew.paged_attention   q [T,Nq,D], k_cache, v_cache, block_table, q_start, kv_len, sinks, slopes -> [T,Nq,Dv]

or, over caches of 8 bits with 32-bit scales [P,K,Nkv] each,

    ew.quantized_kv_write         ... k_cache, v_cache, k_scales, v_scales -> those four, in place
    ew.quantized_paged_attention  q, k_cache, v_cache, k_scales, v_scales, block_table, ... -> [T,Nq,Dv]

All operands of an operator have the same type, as TensorRT's strongly typed networks require; casts are explicit calls.
Norms compute in 32 bits for any input type.
"""

from __future__ import annotations

import json
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from enginewright.runtime.shared.errors import BundleError
from enginewright.runtime.shared.records import parse_versioned

FORMAT_VERSION = 1
OPSET = 24
"""The version of ONNX's operators."""

KV_WRITE, PAGED_ATTENTION = "ew.kv_write", "ew.paged_attention"
QUANTIZED_KV_WRITE, QUANTIZED_PAGED_ATTENTION = "ew.quantized_kv_write", "ew.quantized_paged_attention"

FloatDtype = Literal["f32", "f16", "bf16"]
Dtype = Literal["f32", "f16", "bf16", "i64", "i32", "i8", "i4", "fp8", "bool"]
Attribute = int | float | str | tuple[int, ...]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class NetworkInput(_Model):
    """A step input. Sizes are numbers, or named by the letters of a profile; "B + 1" is one more than B."""

    dtype: Dtype
    shape: tuple[int | Literal["T", "B", "B + 1", "R", "M", "P"], ...]


class Constant(_Model):
    """A small constant, with its elements in order."""

    dtype: Dtype
    shape: tuple[int, ...]
    values: tuple[int | float, ...]


class Weight(_Model):
    """A tensor of the bundle's weights. ``tensor`` is its name in weights/index.json, where its layout is."""

    tensor: str
    dtype: Dtype
    shape: tuple[int, ...]


class Call(_Model):
    """A call of an operator.

    Attributes:
        op: the operator.
        name: the call's own name, which begins with its module path.
        inputs: the names of its inputs; "" for one that is left out.
        outputs: the names of its results.
        attributes: its attributes.
    """

    op: str
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...] = Field(min_length=1)
    attributes: dict[str, Attribute] = Field(default_factory=dict)


class Network(_Model):
    """A whole network. ``dtype`` is the type of activations and caches; ``outputs`` has the names of the results."""

    format_version: int = FORMAT_VERSION
    opset: int = OPSET
    dtype: FloatDtype
    inputs: dict[str, NetworkInput]
    outputs: tuple[str, ...]
    constants: dict[str, Constant]
    weights: dict[str, Weight]
    calls: tuple[Call, ...]

    def to_json(self) -> str:
        """Returns the network as JSON. Equal networks give equal bytes."""
        return json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":")) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes, *, source: str) -> Network:
        """Parses a network. Raises BundleError naming ``source`` and the invalid field, or a value that no call
        computes.
        """
        again = "Export the bundle again."
        data = parse_versioned(text, FORMAT_VERSION, source)
        try:
            network = cls.model_validate(data)
        except ValidationError as e:
            first = e.errors()[0]
            where = ".".join(str(p) for p in first["loc"])
            raise BundleError(f"{source}: {where}: {first['msg']}", hint=again) from e
        if problem := network._problem():
            raise BundleError(f"{source}: {problem}", hint=again)
        return network

    def _problem(self) -> str | None:
        """Returns a text on the first value that is read before it is computed, or that is computed twice; None if
        there is none.
        """
        known = {"", *self.inputs, *self.constants, *self.weights}
        for i, call in enumerate(self.calls):
            if unknown := [name for name in call.inputs if name not in known]:
                return f"calls.{i}: {call.op} reads {unknown[0]!r}, which nothing before it gives"
            if again := [name for name in call.outputs if name in known]:
                return f"calls.{i}: {call.op} gives {again[0]!r}, which is there before"
            known.update(call.outputs)
        if unknown := [name for name in self.outputs if name not in known]:
            return f"outputs: nothing gives {unknown[0]!r}"
        return None
