"""The ``ew`` plugins of TensorRT, in its Python interface for plugins compiled ahead of time (``tensorrt.plugin``).

Such a plugin is one launch without scratch memory, with a fixed list of inputs. So there are these plugins, for caches
[P, K, Nkv, D]:

    ew::kv_write                           k, v, slots, k_cache, v_cache -> k_cache, v_cache (the same memory)
    ew::quantized_kv_write                 ... k_cache, v_cache, k_scales, v_scales -> those four (the same memory)
    ew::ordered_kv_write                   as ew::kv_write -> two numbers without meaning: see ordered_write.py
    ew::paged_attention                    q, k_cache, v_cache, block_table, q_start, kv_len, sinks, slopes -> out
    ew::quantized_paged_attention          q, k_cache, v_cache, k_scales, v_scales, block_table, ... -> out
    ew::paged_attention_parts              as ew::paged_attention -> parts [T,Nq,splits,Dv], lse [T,Nq,splits]
    ew::quantized_paged_attention_parts    as ew::quantized_paged_attention -> parts, lse (both float32)
    ew::combine_splits                     parts, lse -> out

They compute the ops of these names. Attention reads the write's result, so it runs after the write. The plugins with
parts and combine_splits are for steps with one token per request over long contexts. A model without sinks or slopes
passes any float32 [Nq], and False for has_sinks or has_slopes.

TensorRT's decorators need real annotations, not strings, so this file has no ``from __future__ import annotations``.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import cache, partial
from inspect import Parameter, Signature
from itertools import product
from typing import Any

import tensorrt as trt
import tensorrt.plugin as trtp

from enginewright.runtime.shared.dtypes import DTYPES
from enginewright.runtime.shared.errors import TargetError
from enginewright.runtime.shared.kv_formats import KV_FORMATS
from enginewright.runtime.shared.step_schema import ATTENTION_PORTS

from ..gpu.compile_ahead import CompiledKernel
from ..gpu.plugin_kernels import Launch, attention_launch, combine_launch, plugin_attention, write_launch
from ..gpu.specs import AttentionShape, KernelSpec, combine_spec, splits_of, write_spec
from ..gpu.tiles import CacheFormat, FloatType, gpu_of
from .ordered_write import writing_to_inputs

Desc = trtp.TensorDesc
Kernel = tuple[str, str, trtp.KernelLaunchParams, trtp.SymIntExprs]
Kernels = Callable[[KernelSpec], CompiledKernel]
"""A function that returns a compiled kernel: ``compile_kernel``, or ``read_kernel`` for a bundle's folder."""
Attention = Callable[[AttentionShape, int, int], tuple[CompiledKernel, ...]]
"""A function that returns candidates of attention kernels, such as ``read_attention`` for a bundle's folder.

Its arguments are the shape, the compute capability, and the keys of a split.
"""

_FLOATS: dict[trt.DataType, FloatType] = {
    trt.DataType.HALF: "f16",
    trt.DataType.BF16: "bf16",
    trt.DataType.FLOAT: "f32",
}
_CACHES: dict[trt.DataType, CacheFormat] = {
    getattr(trt.DataType, DTYPES[dtype].tensorrt): of.name for dtype, of in KV_FORMATS.items() if of.few_bits is None
}
_DATA_TYPES: dict[str, trt.DataType] = {name: of for of, name in _FLOATS.items()}


@dataclass
class _Registered:
    """The GPU and the kernels for which plugins are registered. TensorRT has one registry per process, and a name
    enters it only once.
    """

    capability: int
    kernels: Kernels
    attention: Attention


_REGISTERED: list[_Registered] = []


def register_plugins(capability: int, kernels: Kernels, attention: Attention | None = None) -> None:
    """Registers the plugins with TensorRT, for engines that are built afterwards. A further call replaces all three
    arguments.

    Args:
        capability: the compute capability of the GPU for which engines are built; 89 for 8.9.
        kernels: returns a kernel's machine code; TensorRT's build raises its errors.
        attention: returns candidates of attention kernels; None compiles them with ``kernels``.

    Raises:
        TargetError: the compute capability is unknown.
    """
    gpu_of(capability)
    if not _REGISTERED:
        _register_write(scaled=False)
        _register_write(scaled=True)
        _register_ordered_write()
        for scaled, in_parts in product((False, True), repeat=2):
            _register_attention(scaled, in_parts)
        _register_combine()
    attention = attention or cache(partial(plugin_attention, compiler=kernels))
    _REGISTERED[:] = [_Registered(capability, kernels, attention)]


def _called_with(
    parameters: Mapping[str, object], returns: object, function: Callable[[dict[str, Any]], object]
) -> Any:
    """Wraps ``function``, which gets values by name, as a plugin function with these parameters.

    TensorRT reads names and types from the signature, and passes inputs by position and attributes by position or name.
    """

    def called(*values: object, **attributes: object) -> object:
        return function(dict(zip(parameters, values, strict=False)) | attributes)

    kind = Parameter.POSITIONAL_OR_KEYWORD
    listed = [Parameter(name, kind, annotation=of) for name, of in parameters.items()]
    called.__signature__ = Signature(listed, return_annotation=returns)  # type: ignore[attr-defined]
    return called


def _register_write(scaled: bool) -> None:
    name, caches = "ew::kv_write", ["k_cache", "v_cache"]
    if scaled:
        name, caches = "ew::quantized_kv_write", [*caches, "k_scales", "v_scales"]
    inputs = dict.fromkeys(("k", "v", "slots", *caches), Desc)
    outputs: object = tuple[Desc, Desc, Desc, Desc] if scaled else tuple[Desc, Desc]
    given_back = _called_with(inputs, outputs, lambda given: tuple(given[cache].aliased() for cache in caches))
    kernel = _called_with(
        {**inputs, "outputs": outputs, "tactic": int},
        Kernel,
        lambda given: _write(given["k"], given["k_cache"], given["v_cache"]),
    )
    trtp.register(name, lazy_register=True)(given_back)
    trtp.aot_impl(name)(kernel)


def _register_ordered_write() -> None:
    inputs = dict.fromkeys(("k", "v", "slots", "k_cache", "v_cache"), Desc)
    outputs = tuple[Desc, Desc]

    def numbers(given: dict[str, Any]) -> tuple[Desc, ...]:
        return tuple(trtp.from_shape_expr((1,), trt.DataType.FLOAT) for _ in range(2))

    def kernel(given: dict[str, Any]) -> Kernel:
        return _write(given["k"], given["k_cache"], given["v_cache"], writing_to_inputs)

    trtp.register("ew::ordered_kv_write", lazy_register=True)(_called_with(inputs, outputs, numbers))
    called = _called_with({**inputs, "outputs": outputs, "tactic": int}, Kernel, kernel)
    trtp.aot_impl("ew::ordered_kv_write")(called)


@dataclass(frozen=True)
class _Attention:
    """A call of an attention plugin: all ``inputs`` in order, the inputs that are read here, and its attributes."""

    inputs: tuple[Desc, ...]
    q: Desc
    k_cache: Desc
    v_cache: Desc
    block_table: Desc
    scale: float
    window: int
    softcap: float
    has_sinks: bool
    has_slopes: bool
    split_keys: int = 0
    outputs: tuple[Desc, ...] = ()
    tactic: int = 0

    @property
    def shape(self) -> AttentionShape:
        return AttentionShape(
            heads=_fixed(self.q, 1, "heads"),
            kv_heads=_fixed(self.k_cache, 2, "key/value heads"),
            head_size=_fixed(self.q, 2, "a head's size"),
            value_size=_fixed(self.v_cache, 3, "a value head's size"),
            block_size=_fixed(self.k_cache, 1, "slots of a block"),
            dtype=_float(self.q),
            cache=_cache(self.k_cache),
            scale=self.scale,
            window=self.window,
            softcap=self.softcap,
            sinks=self.has_sinks,
            slopes=self.has_slopes,
        )


def _register_attention(scaled: bool, in_parts: bool) -> None:
    name = f"ew::{'quantized_' if scaled else ''}paged_attention{'_parts' if in_parts else ''}"
    scales = ("k_scales", "v_scales") if scaled else ()
    read = ("q", "k_cache", "v_cache", *scales, *ATTENTION_PORTS, "sinks", "slopes")
    options = {"scale": float, "window": int, "softcap": float, "has_sinks": bool, "has_slopes": bool}
    if in_parts:
        options["split_keys"] = int
    inputs: dict[str, object] = {**dict.fromkeys(read, Desc), **options}
    outputs = {"outputs": tuple[Desc, Desc] if in_parts else tuple[Desc]}

    def of_call(function: Callable[[_Attention], object]) -> Callable[[dict[str, Any]], object]:
        names = {field.name for field in fields(_Attention)}
        return lambda given: function(
            _Attention(tuple(given[i] for i in read), **{k: v for k, v in given.items() if k in names})
        )

    result, returned = (_parts, tuple[Desc, Desc]) if in_parts else (_result, Desc)
    trtp.register(name, lazy_register=True)(_called_with(inputs, returned, of_call(result)))
    combinations = list[trtp.AutoTuneCombination]
    trtp.autotune(name)(_called_with({**inputs, **outputs}, combinations, of_call(_tactics)))
    trtp.aot_impl(name)(_called_with({**inputs, **outputs, "tactic": int}, Kernel, of_call(_kernel)))


def _register_combine() -> None:
    @trtp.register("ew::combine_splits", lazy_register=True)
    def combine_splits(parts: Desc, lse: Desc, dtype: str) -> Desc:
        tokens, heads, size = (parts.shape_expr[i] for i in (0, 1, 3))
        return trtp.from_shape_expr((tokens, heads, size), _DATA_TYPES[dtype])

    @trtp.aot_impl("ew::combine_splits")
    def combine_splits_kernel(parts: Desc, lse: Desc, dtype: str, outputs: tuple[Desc], tactic: int) -> Kernel:
        heads, size = _fixed(parts, 1, "heads"), _fixed(parts, 3, "a head's size")
        # Of a layer the kernel depends on no more than these.
        shape = AttentionShape(1, 1, size, size, 1, _float(outputs[0]), _float(outputs[0]), 1.0)
        now = _REGISTERED[0]
        kernel = now.kernels(combine_spec(shape, now.capability))
        return _launch(kernel, combine_launch(kernel, heads, parts.shape_expr[0], parts.shape_expr[2]))


def _result(a: _Attention) -> Desc:
    return trtp.from_shape_expr((a.q.shape_expr[0], a.q.shape_expr[1], a.v_cache.shape_expr[3]), a.q.dtype)


def _parts(a: _Attention) -> tuple[Desc, Desc]:
    # TensorRT first asks for types alone, with sizes that say nothing of themselves: they may be computed with only.
    splits = splits_of(a.block_table.shape_expr[1], a.v_cache.shape_expr[1], a.split_keys)
    tokens, heads = a.q.shape_expr[0], a.q.shape_expr[1]
    parts = trtp.from_shape_expr((tokens, heads, splits, a.v_cache.shape_expr[3]), trt.DataType.FLOAT)
    return parts, trtp.from_shape_expr((tokens, heads, splits), trt.DataType.FLOAT)


def _tactics(a: _Attention) -> list[trtp.AutoTuneCombination]:
    """Returns the types of the network's attention, with one tactic (from 1 on) for each candidate kernel."""
    now = _REGISTERED[0]
    kernels = now.attention(a.shape, now.capability, a.split_keys)
    names = {trt.DataType.HALF: "FP16", trt.DataType.FLOAT: "FP32"}
    types = ", ".join(names.get(desc.dtype, desc.dtype.name) for desc in (*a.inputs, *a.outputs))
    return [trtp.AutoTuneCombination(types, "LINEAR", range(1, len(kernels) + 1))]


def _kernel(a: _Attention) -> Kernel:
    now, shape = _REGISTERED[0], a.shape
    kernels = now.attention(shape, now.capability, a.split_keys)
    kernel = kernels[max(a.tactic - 1, 0)]  # 0 is TensorRT's own number for "the only one"
    requests, blocks = a.block_table.shape_expr[0], a.block_table.shape_expr[1]
    sizes = a.q.shape_expr[0], requests, blocks, a.k_cache.shape_expr[0]
    return _launch(kernel, attention_launch(kernel, shape, *sizes))


def _write(
    k: Desc,
    k_cache: Desc,
    v_cache: Desc,
    changed: Callable[[CompiledKernel], CompiledKernel] = lambda kernel: kernel,
) -> Kernel:
    kv_heads, size = _fixed(k, 1, "key/value heads"), _fixed(k, 2, "a head's size")
    value_size, block_size = _fixed(v_cache, 3, "a value head's size"), _fixed(k_cache, 1, "slots of a block")
    # The number of query heads, the scale and the rest are nothing to a write.
    shape = AttentionShape(kv_heads, kv_heads, size, value_size, block_size, _float(k), _cache(k_cache), 1.0)
    now = _REGISTERED[0]
    kernel = changed(now.kernels(write_spec(shape, now.capability)))
    return _launch(kernel, write_launch(kernel, shape, k.shape_expr[0], k_cache.shape_expr[0]))


def _launch(kernel: CompiledKernel, launch: Launch[trtp.ShapeExpr]) -> Kernel:
    parameters = trtp.KernelLaunchParams()
    parameters.grid_x, parameters.grid_y, parameters.grid_z = launch.grid
    parameters.block_x = launch.threads
    parameters.shared_mem = launch.shared_memory
    integers = trtp.SymIntExprs(len(launch.integers))
    for i, value in enumerate(launch.integers):
        integers[i] = trtp.SymInt32(value)
    return kernel.entry, kernel.ptx, parameters, integers


def _fixed(desc: Desc, index: int, what: str) -> int:
    size = desc.shape_expr[index]
    if not size.is_constant:
        raise TargetError(
            f"paged attention in TensorRT: {what} vary from run to run (dimension {index} of an input)",
            hint="Only tokens, requests, blocks of a table and blocks of the pool may have a range in a profile.",
        )
    return size.constant_value()


def _float(desc: Desc) -> FloatType:
    if desc.dtype not in _FLOATS:
        raise TargetError(f"paged attention in TensorRT: {desc.dtype} isn't a float type that kernels have", hint=_HINT)
    return _FLOATS[desc.dtype]


def _cache(desc: Desc) -> CacheFormat:
    if desc.dtype not in _CACHES:
        raise TargetError(f"paged attention in TensorRT: there is no cache of {desc.dtype}", hint=_HINT)
    return _CACHES[desc.dtype]


_HINT = "Use HALF, BF16 or FLOAT, and for a cache also INT8 or FP8."
