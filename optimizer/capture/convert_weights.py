"""Maps checkpoint tensors to parameters by transformers' conversion mapping, lazily.

transformers renames tensors when it loads a checkpoint, and builds some parameters from several tensors, for example a
stack from separate experts. Each model has a list of renamings and converters for this. This module interprets the
list: a converter's operations become weight expressions, and nothing is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers import core_model_loading as loading
from transformers.conversion_mapping import get_model_conversion_mapping

from enginewright.passes.ir.stacked_weights import Stack, SwapAxes
from enginewright.passes.ir.weights import Apply, Concat, Slice, Transpose, WeightExpr
from enginewright.runtime.shared.errors import PassError, SourceError, UnsupportedModelError

aten = torch.ops.aten

Collected = dict[str, list[WeightExpr]]
"""Pattern of a converter -> the tensors that match it. There are several until they are stacked or concatenated."""


@dataclass
class _Conversion:
    """The tensors that one converter needs to make one or several parameters.

    Attributes:
        converter: transformers' converter.
        collected: its tensors.
        names: the names of these tensors in the checkpoint, by pattern.
    """

    converter: loading.WeightConverter
    collected: Collected = field(default_factory=dict)
    names: dict[str, list[str]] = field(default_factory=dict)  # the same by their names in the checkpoint


@dataclass(frozen=True)
class _Context:
    model: PreTrainedModel
    target: str  # the first parameter that is made
    sources: Sequence[str]  # the converter's patterns
    targets: Sequence[str]


def by_model_names(
    model: PreTrainedModel, tensors: Mapping[str, WeightExpr], *, source: str = "the checkpoint"
) -> dict[str, WeightExpr]:
    """Returns a checkpoint's tensors by their names in ``model``, joined where transformers joins several.

    Tensors that the model doesn't have keep their names. ``source`` is for messages.

    Raises:
        SourceError: two tensors map to one parameter, or one of several tensors of a parameter is missing.
        UnsupportedModelError: transformers' mapping has an unknown operation; names it.
    """
    transforms = get_model_conversion_mapping(model)
    renamings = [t for t in transforms if isinstance(t, loading.WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, loading.WeightConverter)]
    of_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
    state, prefix = model.state_dict(), model.base_model_prefix
    renamed_tensors: dict[str, WeightExpr] = {}
    origins: dict[str, str] = {}
    conversions: dict[str, _Conversion] = {}
    for name in sorted(tensors, key=loading.dot_natural_key):
        renamed, pattern = loading.rename_source_key(name, renamings, converters, prefix, state)
        if renamed not in state and name in state:
            renamed, pattern = name, None
        if pattern is not None and renamed in state:
            conversion = conversions.setdefault(renamed, _Conversion(of_pattern[pattern]))
            conversion.collected.setdefault(pattern, []).append(tensors[name])
            conversion.names.setdefault(pattern, []).append(name)
            continue
        model_name = renamed if pattern is None else name
        if model_name in renamed_tensors:
            raise _taken_twice(source, model_name, origins[model_name], name)
        renamed_tensors[model_name], origins[model_name] = tensors[name], name
    for target, conversion in conversions.items():
        for model_name, expr in _convert(model, target, conversion, source).items():
            if model_name in renamed_tensors:
                raise _taken_twice(source, model_name, origins[model_name], next(iter(conversion.names.values()))[0])
            renamed_tensors[model_name], origins[model_name] = expr, target
    return renamed_tensors


def _convert(model: PreTrainedModel, target: str, conversion: _Conversion, source: str) -> dict[str, WeightExpr]:
    converter = conversion.converter
    _check_complete(conversion, target, source)
    context = _Context(model, target, converter.source_patterns, converter.target_patterns)
    collected = conversion.collected
    for operation in converter.operations:
        handler = _OPERATIONS.get(type(operation))
        if handler is None:
            raise UnsupportedModelError(
                f"{source}: transformers makes {target} of {conversion.names[next(iter(conversion.names))][0]} by "
                f"{type(operation).__name__}, which can't be read",
                hint="Load the checkpoint with transformers and export the model object.",
            )
        try:
            collected = handler(operation, collected, context)
        except PassError as e:
            first = next(iter(conversion.names.values()))[0]
            raise SourceError(f"{source}: tensors {first}, ... don't make {target}: {e.message}") from e
    # Operations name what they make by patterns of targets: the part of the full name that differs between them.
    matched = next((pattern for pattern in collected if pattern in target), None)
    if matched is None or any(len(exprs) != 1 for exprs in collected.values()):
        raise UnsupportedModelError(f"{source}: transformers' conversion to {target} can't be followed")
    before, _, after = target.partition(matched)
    return {f"{before}{pattern}{after}": exprs[0] for pattern, exprs in collected.items()}


def _check_complete(conversion: _Conversion, target: str, source: str) -> None:
    """Raises SourceError naming a tensor that is missing among numbered ones, or a pattern without any."""
    lengths = {len(names) for names in conversion.names.values()}
    for names in conversion.names.values():
        split = [name.split(".") for name in names]
        numbered = [i for i, part in enumerate(split[0]) if part.isdigit() and len({s[i] for s in split}) == len(split)]
        if len(names) < 2 or not numbered:
            continue
        numbers = {int(s[numbered[0]]) for s in split}
        if missing := sorted(set(range(max(numbers) + 1)) - numbers):
            absent = ".".join([*split[0][: numbered[0]], str(missing[0]), *split[0][numbered[0] + 1 :]])
            raise SourceError(f"{source}: tensor {absent} is missing", hint="The checkpoint is incomplete.")
    if len(lengths) > 1 or set(conversion.names) != set(conversion.converter.source_patterns):
        counts = ", ".join(f"{len(conversion.names.get(p, []))} of {p}" for p in conversion.converter.source_patterns)
        raise SourceError(f"{source}: {target} is made of {counts}", hint="The checkpoint is incomplete.")


def _taken_twice(source: str, target: str, first: str, second: str) -> SourceError:
    return SourceError(
        f"{source}: tensors {first} and {second} are both {target}", hint="The checkpoint mixes two formats."
    )


def _only(collected: Collected) -> tuple[str, WeightExpr]:
    [(pattern, exprs)] = collected.items()
    [expr] = exprs
    return pattern, expr


def _stack(operation: loading.MergeModulelist, collected: Collected, context: _Context) -> Collected:
    one = len(collected) == 1 and len(context.targets) == 1
    return {
        context.targets[0] if one else pattern: [Stack(tuple(exprs), operation.dim)]
        for pattern, exprs in collected.items()
    }


def _concatenate(operation: loading.Concatenate, collected: Collected, context: _Context) -> Collected:
    exprs = tuple(e for pattern in context.sources for e in collected.get(pattern, ()))
    return {context.targets[0]: [Concat(exprs, operation.dim % len(exprs[0].shape))]}


def _pieces(expr: WeightExpr, dim: int, sizes: Iterable[int], names: Iterable[str]) -> Collected:
    pieces: Collected = {}
    at, axis = 0, dim % len(expr.shape)
    for name, size in zip(names, sizes, strict=True):
        pieces[name] = [Slice(expr, axis, at, at + size)]
        at += size
    return pieces


def _chunk(operation: loading.Chunk, collected: Collected, context: _Context) -> Collected:
    _, expr = _only(collected)
    names = operation.get_target_patterns(list(context.targets), config=context.model.config)
    size, left = divmod(expr.shape[operation.dim], len(names))
    if left:
        raise PassError(f"{expr.shape} has no {len(names)} equal parts along axis {operation.dim}")
    return _pieces(expr, operation.dim, [size] * len(names), names)


def _split(operation: loading.Split, collected: Collected, context: _Context) -> Collected:
    _, expr = _only(collected)
    state = context.model.state_dict()
    names = [context.target.replace(context.targets[0], t) for t in context.targets]
    sizes = [state[name].shape[operation.dim] for name in names]
    return _pieces(expr, operation.dim, sizes, context.targets)


def _transpose(operation: loading.Transpose, collected: Collected, context: _Context) -> Collected:
    pattern, expr = _only(collected)
    name = context.targets[0] if len(context.targets) == 1 else pattern
    shape = context.model.state_dict()[context.target].shape if operation.check_dims else None
    if shape is not None and expr.shape == tuple(shape):
        return {name: [expr]}
    rank = len(expr.shape)
    first, second = sorted((operation.dim0 % rank, operation.dim1 % rank))
    return {name: [Transpose(expr) if rank == 2 else SwapAxes(expr, first, second)]}


def _interleave(operation: loading.Interleave, collected: Collected, context: _Context) -> Collected:
    """Converts an axis with interleaved halves to one half after the other; or the reverse, as the operation says."""
    _, expr = _only(collected)
    axis, shape = operation.dim % len(expr.shape), expr.shape
    pair = [2, shape[axis] // 2] if operation.inverse else [shape[axis] // 2, 2]
    apart = (*shape[:axis], *pair, *shape[axis + 1 :])
    turned = (*shape[:axis], *reversed(pair), *shape[axis + 1 :])
    view = Apply(aten.reshape.default, (expr, apart), (), apart, expr.dtype)
    swapped = SwapAxes(view, axis, axis + 1)
    assert swapped.shape == turned
    return {context.targets[0]: [Apply(aten.reshape.default, (swapped, shape), (), shape, expr.dtype)]}


_OPERATIONS: Mapping[type, Callable[[Any, Collected, _Context], Collected]] = {
    loading.MergeModulelist: _stack,
    loading.Concatenate: _concatenate,
    loading.Chunk: _chunk,
    loading.Split: _split,
    loading.Transpose: _transpose,
    loading.Interleave: _interleave,
}
