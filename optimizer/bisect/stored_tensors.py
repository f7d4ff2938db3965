"""Compares the tensors that a bundle stores, bit for bit, with the tensors that it should have.

``compare_with_export`` compares them with the tensors that a repeated export would write: it evaluates and packs each
weight once more. Exports are equal byte by byte, also those with calibration. ``compare_bundles`` compares two bundles.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np
import numpy.typing as npt

from enginewright.passes.ir.calls import owner_of
from enginewright.passes.ir.provenance import layer_path
from enginewright.passes.lowering.lower_program import Lowering
from enginewright.plugins.emit.weights import source_rows, stored_chunks
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.bundle.weights import Array, SourceRows, stored_dtype, stored_shape, unpack
from enginewright.runtime.shared.errors import plural
from enginewright.runtime.shared.lowered_program import LoweredProgram
from enginewright.runtime.shared.progress import Progress, ProgressEvent

from .report import StoredTensors, TensorDifference
from .values import in_layers

_LISTED = 4
"""The most indices that are named one by one."""
_CLOSE = 0.2
"""The largest share of a difference that may remain if a common factor explains it."""


@dataclass(frozen=True)
class _Tensor:
    """A tensor of one run.

    Attributes:
        dtype, shape, layout: of the stored tensor, as weights/index.json has them.
        parts: the rows of source tensors that the tensor was made of.
        chunks: returns its stored elements, in order.
    """

    dtype: Any
    shape: tuple[int, ...]
    layout: Any
    parts: tuple[SourceRows, ...]
    chunks: Callable[[], Iterator[Array]]

    @property
    def format(self) -> str:
        return f"{self.dtype} {list(self.shape)} in {self.layout}"

    def read(self) -> Array:
        """Returns the values of the tensor, as rows."""
        raw = np.concatenate([_bytes(chunk) for chunk in self.chunks()])
        stored = raw.view(stored_dtype(self.dtype, self.layout))
        return unpack(
            stored.reshape(stored_shape(self.shape, self.layout, self.dtype)), self.shape, self.layout, self.dtype
        )


class _Side:
    """The tensors of one run that are compared.

    Attributes:
        tensors: by name.
        readers: the name of a weight -> the paths of the modules whose steps read it.
    """

    def __init__(self, tensors: dict[str, _Tensor], program: LoweredProgram) -> None:
        self.tensors = tensors
        self.readers = _readers(program)


def compare_with_export(
    lowering: Lowering, bundle: Bundle, target: str, layers: Collection[int] | None, progress: Progress
) -> StoredTensors:
    """Compares the tensors of a bundle (B) with those that a repeated export would write (A), in the program's order.

    Args:
        lowering: the lowered program that the repeated export makes, with its weights.
        bundle: the bundle that is examined.
        target: the target whose program's tensors are compared.
        layers: the numbers of the layers whose tensors are compared; None for all.
        progress: called with the stage "tensors".

    Raises:
        SourceError, BundleError, UnsupportedModelError: a tensor can't be read, or not be stored.
    """
    expected: dict[str, _Tensor] = {}
    for use in lowering.program.weights:
        expr = lowering.weights[use.name]
        chunks = partial(stored_chunks, use, expr)
        expected[use.name] = _Tensor(use.dtype, use.shape, use.layout, source_rows(expr), chunks)
    program = bundle.program(target)
    return _compare(_Side(expected, lowering.program), _Side(_of_bundle(bundle, program), program), layers, progress)


def compare_bundles(
    a: Bundle, target_a: str, b: Bundle, target_b: str, alike: bool, layers: Collection[int] | None, progress: Progress
) -> StoredTensors:
    """Compares the tensors of two bundles of one model.

    Args:
        a, target_a: the bundle that is right, and the target whose program's tensors are compared.
        b, target_b: the bundle that is examined, and its target.
        alike: True if the recipes give weights the same formats by the same method. Otherwise only the tensors that
            both store as rows of float32 are compared, such as norms and biases.
        layers, progress: as for ``compare_with_export``.
    """
    programs = a.program(target_a), b.program(target_b)
    tensors = [_of_bundle(bundle, program) for bundle, program in zip((a, b), programs, strict=True)]
    left_out: list[str] = []
    if a.path.resolve() == b.path.resolve():
        left_out, tensors = [name for name in tensors[0] if name in tensors[1]], [{}, {}]
    elif not alike:
        plain = [{n for n, t in of.items() if (t.dtype, t.layout) == ("f32", "rows")} for of in tensors]
        names = plain[0] & plain[1]
        left_out = [name for name in tensors[0] if name not in names]
        tensors = [{n: t for n, t in of.items() if n in names} for of in tensors]
    first, second = map(_Side, tensors, programs)
    return _compare(first, second, layers, progress, left_out)


def other_versions(bundle: Bundle) -> list[str]:
    """Returns a note on the libraries whose version isn't the one that made a bundle; an empty list without any."""
    other = []
    for name, there in bundle.manifest.toolchain.items():
        try:
            here = version(name)
        except PackageNotFoundError:
            continue  # a tool of a target, which isn't needed here
        if here != there:
            other.append(f"{name} {there} ({here} here)")
    return [f"the bundle was exported with {', '.join(other)}: tensors may differ for that alone"] if other else []


def _of_bundle(bundle: Bundle, program: LoweredProgram) -> dict[str, _Tensor]:
    def chunks(name: str) -> Iterator[Array]:
        yield bundle.weight(name)

    by_name = {}
    for use in program.weights:
        entry = bundle.tensor(use.name)
        by_name[use.name] = _Tensor(entry.dtype, entry.shape, entry.layout, entry.parts, partial(chunks, use.name))
    return by_name


def _compare(
    a: _Side, b: _Side, layers: Collection[int] | None, progress: Progress, left_out: Sequence[str] = ()
) -> StoredTensors:
    """Compares the tensors of two sides that concern some layers.

    Args:
        a: the side that is right.
        b: the side that is examined.
        layers: the numbers of the layers; None for all.
        progress: called with the stage "tensors".
        left_out: the names of tensors that aren't compared, for the result.
    """
    names = [
        name
        for name in dict.fromkeys((*a.tensors, *b.tensors))
        if any(in_layers(path, layers) for path in (name, *a.readers.get(name, ())))
    ]
    differences: list[TensorDifference] = []
    compared = size = 0
    for done, name in enumerate(names, 1):
        progress(ProgressEvent("tensors", done, len(names), name))
        modules = a.readers.get(name) or b.readers.get(name) or [name.rpartition(".")[0]]
        reason = _not_comparable(name, a, b)
        if reason is not None:
            differences.append(_whole(name, modules, a.tensors.get(name) or b.tensors[name], reason))
            continue
        theirs, ours = a.tensors[name], b.tensors[name]
        compared += 1
        size += sum(chunk.nbytes for chunk in ours.chunks())
        if theirs.layout != ours.layout or not _same_bytes(theirs.chunks(), ours.chunks()):
            differences += _differing(name, modules, theirs, ours)
    return StoredTensors(compared, size, differences, [name for name in left_out if in_layers(name, layers)])


def _not_comparable(name: str, a: _Side, b: _Side) -> str | None:
    """Returns the reason why the values of a tensor can't be compared; None if both sides have them in one format."""
    theirs, ours = a.tensors.get(name), b.tensors.get(name)
    if theirs is None:
        return "B reads it, and A has no such tensor"
    if ours is None or (a.readers.get(name) and not b.readers.get(name)):
        return f"no step of B reads it: {'the bias was dropped' if name.endswith('bias') else 'it is missing'}"
    if (theirs.dtype, theirs.shape) != (ours.dtype, ours.shape):
        return f"B stores {ours.format}, A {theirs.format}"
    return None


def _readers(program: LoweredProgram) -> dict[str, list[str]]:
    """Returns weight's name -> the paths of the modules whose steps read the weight.

    If one of the modules of a fused step has given the weight its name, the others aren't listed.
    """
    readers: dict[str, dict[str, None]] = defaultdict(dict)
    for step in program.steps:
        where = step.where.split(" + ") if step.where else []
        for operand in step.inputs:
            if operand.kind == "weight":
                owner = owner_of(where, operand.name)
                readers[operand.name].update(dict.fromkeys([owner] if owner else where or [""]))
    return {name: list(paths) for name, paths in readers.items()}


def _bytes(chunk: Array) -> npt.NDArray[np.uint8]:
    return np.ascontiguousarray(chunk).reshape(-1).view(np.uint8)


def _same_bytes(a: Iterator[Array], b: Iterator[Array]) -> bool:
    """Returns True if two tensors have the same bytes.

    Each iterator yields the pieces of a tensor; ``b`` has only one.
    """
    whole = _bytes(next(b))
    at = 0
    for chunk in a:
        piece = _bytes(chunk)
        if not np.array_equal(piece, whole[at : at + piece.size]):
            return False
        at += piece.size
    return at == whole.size


def _whole(name: str, modules: Sequence[str], tensor: _Tensor, reason: str) -> TensorDifference:
    """Returns the difference of a tensor if all of its values differ, or if they can't be compared.

    Args:
        name: the tensor.
        modules: the paths of the modules that read it.
        tensor: the tensor of one side.
        reason: the difference in words.
    """
    values = int(np.prod(tensor.shape))
    return TensorDifference(
        name=name,
        modules=list(modules),
        layer=layer_path(name),
        sources=_sources(tensor.parts, tensor.shape, None),
        differing=values,
        values=values,
        factor=None,
        places="",
        reason=reason,
    )


def _differing(name: str, modules: Sequence[str], a: _Tensor, b: _Tensor) -> list[TensorDifference]:
    """Returns the difference of two tensors of one shape and type; an empty list if only their layouts differ."""
    first, second = np.ascontiguousarray(a.read()), np.ascontiguousarray(b.read())
    bits = np.dtype(f"u{first.dtype.itemsize}")
    differs = first.view(bits) != second.view(bits)
    count = int(np.count_nonzero(differs))
    if not count:
        if a.layout != b.layout:
            return []
        reason = "the values are the same; padding bytes after them differ"
        return [_whole(name, modules, a, reason)]
    places = _places(differs, "group" if a.dtype == "f16" else "column")
    factor, how = _how(first[differs].astype(np.float64), second[differs].astype(np.float64))
    if factor is None and not how:
        apart = np.abs(second.astype(np.float64) - first.astype(np.float64))
        at = np.unravel_index(int(apart.argmax()), apart.shape)
        how = f"most at {[int(i) for i in at]}: A {float(first[at]):.6g}, B {float(second[at]):.6g}"
    share = "all" if count == differs.size else f"{count:,} of {differs.size:,}"
    where = f" ({places})" if places else ""
    return [
        TensorDifference(
            name=name,
            modules=list(modules),
            layer=layer_path(name),
            sources=_sources(a.parts, a.shape, differs),
            differing=count,
            values=int(differs.size),
            factor=factor,
            places=places,
            reason=f"{share} values differ{where}; {how}",
        )
    ]


def _how(a: npt.NDArray[np.float64], b: npt.NDArray[np.float64]) -> tuple[float | None, str]:
    """Returns the factor from a to b, if a common one explains the difference, and the difference in words.

    ``a`` and ``b`` [N] are the values that differ.
    """
    if not np.isfinite(b).all():
        return None, "B has numbers that are not finite"
    if not a.any():
        return None, "A is all zeros there, and B is not"
    if not b.any():
        return None, "B is all zeros there"
    gain = float((a * b).sum() / np.square(a).sum())
    if np.linalg.norm(b - gain * a) < _CLOSE * np.linalg.norm(b - a):
        return gain, f"there B is {gain:.4f} times A"
    return None, ""


def _places(differs: npt.NDArray[np.bool_], last: str) -> str:
    """Returns the experts, rows and columns of the values that differ, such as "rows 64:96, column 3".

    An axis along which all of them differ is left out. ``last`` is the name of the last axis.
    """
    names = {1: ["element"], 2: ["row", last], 3: ["expert", "row", last]}.get(differs.ndim, ["element"] * differs.ndim)
    axes = []
    for axis, name in enumerate(names):
        others = tuple(i for i in range(differs.ndim) if i != axis)
        at = np.flatnonzero(differs.any(axis=others))
        if len(at) < differs.shape[axis]:
            axes.append(f"{plural(name, len(at))} {_indices(at, differs.shape[axis])}")
    return ", ".join(axes)


def _indices(at: npt.NDArray[np.intp], size: int) -> str:
    first, last = int(at[0]), int(at[-1])
    if len(at) > 1 and last - first + 1 == len(at):
        return f"{first}:{last + 1}"
    if len(at) <= _LISTED:
        return ", ".join(str(i) for i in at)
    return f"{first} .. {last}, {len(at):,} of {size:,}"


def _sources(parts: Sequence[SourceRows], shape: tuple[int, ...], differs: npt.NDArray[np.bool_] | None) -> list[str]:
    """Returns the source tensors that a tensor was made of, with their rows, such as "q_proj.weight[0:64]".

    Args:
        parts: the rows of source tensors, in order.
        shape: of the tensor.
        differs: True for each value that differs, of that shape: only rows with such values are named. None for all.
    """
    sizes = [part.size for part in parts]
    rows = None
    if differs is not None:
        for lead in range(1, min(len(shape), 2) + 1):  # of experts that the source has one by one, the rows of each
            if sum(sizes) == int(np.prod(shape[:lead])):
                rows = np.logical_or.reduce(differs.reshape(sum(sizes), -1), axis=1)
                break
    ranges, at = [], 0
    for part, size in zip(parts, sizes, strict=True):
        differing = None if rows is None else np.flatnonzero(rows[at : at + size])
        at += size
        first, last = part.rows
        if differing is not None and size == last - first:
            if not len(differing):
                continue
            first, last = part.rows[0] + int(differing[0]), part.rows[0] + int(differing[-1]) + 1
        ranges.append(f"{part.source}[{first}:{last}]")
    return ranges
