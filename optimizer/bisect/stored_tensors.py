"""Compares the tensors that a bundle stores with those that it should have: bit for bit, whatever tokens are run.

What a bundle should have is what the repeated export would write (``compare_with_export``): each weight is evaluated
and packed once more, and thrown away. Exports are equal byte by byte, those with calibration as well. Of two bundles
(``compare_bundles``) the other one's tensors are read.
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

from enginewright.passes.ir.provenance import layer_path
from enginewright.passes.lowering.lower_program import Lowering
from enginewright.plugins.emit.weights import source_rows, stored_chunks
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.bundle.weights import Array, SourceRows, stored_dtype, stored_shape, unpack
from enginewright.runtime.shared.lowered_program import LoweredProgram
from enginewright.runtime.shared.progress import Progress, ProgressEvent

from .probes import owner_of
from .report import StoredTensors, TensorDifference
from .values import in_layers

_LISTED = 4
"""Indices that are named one by one."""
_CLOSE = 0.2
"""A common factor explains a difference if no more than this of it is left."""


@dataclass(frozen=True)
class _Tensor:
    """A tensor of one run: how it is stored, what of the source it is made of, and its stored elements in order."""

    dtype: Any
    shape: tuple[int, ...]
    layout: Any
    parts: tuple[SourceRows, ...]
    chunks: Callable[[], Iterator[Array]]

    @property
    def format(self) -> str:
        return f"{self.dtype} {list(self.shape)} in {self.layout}"

    def read(self) -> Array:
        """Its values, as rows."""
        raw = np.concatenate([_bytes(chunk) for chunk in self.chunks()])
        stored = raw.view(stored_dtype(self.dtype, self.layout))
        return unpack(
            stored.reshape(stored_shape(self.shape, self.layout, self.dtype)), self.shape, self.layout, self.dtype
        )


def compare_with_export(
    lowering: Lowering, bundle: Bundle, target: str, layers: Collection[int] | None, progress: Progress
) -> StoredTensors:
    """Compares a bundle's tensors (B) with those that the repeated export would write (A), in the order of its program.

    Args:
        lowering: of the program that the export makes.
        bundle, target: what is looked at.
        layers: only tensors of these; None: all.
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
    return _compare(expected, lowering.program, _of_bundle(bundle, program), program, layers, progress)


def compare_bundles(
    a: Bundle, target_a: str, b: Bundle, target_b: str, alike: bool, layers: Collection[int] | None, progress: Progress
) -> StoredTensors:
    """The tensors of two bundles of one model; see ``compare_with_export``.

    Args:
        alike: their recipes give weights the same formats, by the same method. Else only what no format touches is
            compared: tensors that both store as rows of float32, such as norms and biases.
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
    return _compare(tensors[0], programs[0], tensors[1], programs[1], layers, progress, left_out)


def other_versions(bundle: Bundle) -> list[str]:
    """A note on what made a bundle and is of another version here, if something is: its bytes may be others."""
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
    a: dict[str, _Tensor],
    program_a: LoweredProgram,
    b: dict[str, _Tensor],
    program_b: LoweredProgram,
    layers: Collection[int] | None,
    progress: Progress,
    left_out: Sequence[str] = (),
) -> StoredTensors:
    readers_a, readers_b = _readers(program_a), _readers(program_b)
    names = [
        name
        for name in dict.fromkeys((*a, *b))
        if layers is None or any(in_layers(path, layers) for path in (name, *readers_a.get(name, ())))
    ]
    differences: list[TensorDifference] = []
    compared = size = 0
    for done, name in enumerate(names, 1):
        progress(ProgressEvent("tensors", done, len(names), name))
        modules = readers_a.get(name) or readers_b.get(name) or [name.rpartition(".")[0]]
        ours, theirs = b.get(name), a.get(name)
        if theirs is None:
            assert ours is not None
            differences.append(_whole(name, modules, ours, "B reads it, and A has no such tensor"))
        elif ours is None or (readers_a.get(name) and not readers_b.get(name)):
            what = "the bias was dropped" if name.endswith("bias") else "it is missing"
            differences.append(_whole(name, modules, theirs, f"no step of B reads it: {what}"))
        elif (theirs.dtype, theirs.shape) != (ours.dtype, ours.shape):
            differences.append(_whole(name, modules, theirs, f"B stores {ours.format}, A {theirs.format}"))
        else:
            compared += 1
            size += sum(chunk.nbytes for chunk in ours.chunks())
            if theirs.layout != ours.layout or not _same_bytes(theirs.chunks(), ours.chunks()):
                differences += _differing(name, modules, theirs, ours)
    return StoredTensors(compared, size, differences, [n for n in left_out if layers is None or in_layers(n, layers)])


def _readers(program: LoweredProgram) -> dict[str, list[str]]:
    """weight -> the modules whose steps read it; of a step of several the one that the weight is named after."""
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
    """Returns True if two tensors, each read in pieces, have the same bytes. ``b`` comes in one piece."""
    whole = _bytes(next(b))
    at = 0
    for chunk in a:
        piece = _bytes(chunk)
        if not np.array_equal(piece, whole[at : at + piece.size]):
            return False
        at += piece.size
    return at == whole.size


def _whole(name: str, modules: Sequence[str], tensor: _Tensor, reason: str) -> TensorDifference:
    """A tensor of which there is nothing to compare."""
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
    """The differences of two tensors of the same shape and type; empty if only their layouts differ."""
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
    """The factor from a to b, if one explains the difference, and in words; values that differ, in one row."""
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
    """Along which experts, rows and columns values differ, where it isn't along all: "rows 64:96, column 3"."""
    names = {1: ["element"], 2: ["row", last], 3: ["expert", "row", last]}.get(differs.ndim, ["element"] * differs.ndim)
    axes = []
    for axis, name in enumerate(names):
        others = tuple(i for i in range(differs.ndim) if i != axis)
        at = np.flatnonzero(differs.any(axis=others))
        if len(at) < differs.shape[axis]:
            axes.append(f"{name}{'s' if len(at) > 1 else ''} {_indices(at, differs.shape[axis])}")
    return ", ".join(axes)


def _indices(at: npt.NDArray[np.intp], size: int) -> str:
    first, last = int(at[0]), int(at[-1])
    if len(at) > 1 and last - first + 1 == len(at):
        return f"{first}:{last + 1}"
    if len(at) <= _LISTED:
        return ", ".join(str(i) for i in at)
    return f"{first} .. {last}, {len(at):,} of {size:,}"


def _sources(parts: Sequence[SourceRows], shape: tuple[int, ...], differs: npt.NDArray[np.bool_] | None) -> list[str]:
    """The source's tensors that a tensor is made of, and their rows; only those that differ, if that is known."""
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
