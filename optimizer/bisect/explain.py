"""The causes of a difference between two values: sentences from a comparison of the tensors, values and steps of both
runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher
from itertools import combinations, product

import numpy as np
import torch

from enginewright.passes.ir.calls import Call
from enginewright.passes.ir.value_name import ValueName
from enginewright.passes.ops.activation import ACTIVATIONS
from enginewright.runtime.shared.contracts import FloatArray
from enginewright.runtime.shared.lowered_program import LoweredProgram, Step

from .runs import Run, Tensor
from .tolerance import difference, lacks
from .values import Values

_SAME = 1e-6
"""The relative difference below which two tensors count as equal."""


def explain(
    name: ValueName,
    a: Run,
    values_a: Values,
    values_b: Values,
    tensors: Sequence[Tensor],
    neighbours: Sequence[Tensor],
    *,
    chance: bool,
) -> list[str]:
    """Returns sentences about the error in a value, the most specific first; an empty list if no cause is known.

    Args:
        name: the first value that differs.
        a: the run that is right.
        values_a, values_b: the values of both runs.
        tensors: the tensors of b that computed the value.
        neighbours: these tensors, and those of the modules that are fused with theirs.
        chance: True if the weights of b were rounded, and those of a weren't.
    """
    swapped = _swapped(a, neighbours, name.path)
    tensor_reasons = [
        _tensor_reason(a, t, neighbours, chance=chance) for t in tensors if not (swapped and t.role == "weight")
    ]
    reasons = [*swapped, *(reason for reason in tensor_reasons if reason is not None)]
    reasons += [f"B doesn't add the bias {tensor}" for tensor in missing_biases(a, tensors)]
    return reasons + value_reasons(name, a, values_a, values_b, known=bool(reasons))


def _twin(run: Run, tensor: Tensor, among: Sequence[Tensor]) -> Tensor | None:
    """Returns the tensor of ``run`` with the same module and role as ``tensor``; None if it has none.

    ``among``: all tensors of the other run. If several have that module and role, the one with the same index counts.
    """
    number = [t for t in among if (t.path, t.role) == (tensor.path, tensor.role)].index(tensor)
    theirs = [t for t in run.tensors(tensor.path) if t.role == tensor.role]
    return theirs[number] if number < len(theirs) else None


def _tensor_reason(a: Run, tensor: Tensor, among: Sequence[Tensor], *, chance: bool) -> str | None:
    twin = _twin(a, tensor, among)
    if twin is None:
        if tensor.role == "bias" and a.tensors(tensor.path):
            return f"A adds no bias there, B adds {tensor}"
        return None
    theirs, ours = twin.read(), tensor.read()
    if tensor.role == "bias" and theirs.any() != ours.any():
        if ours.any():
            return f"A adds no bias there, as it is all zeros; B adds {tensor}"
        return f"B doesn't add the bias {tensor}: it is all zeros"
    if theirs.shape != ours.shape:
        return f"{tensor} has shape {list(ours.shape)}, in A {list(theirs.shape)}"
    words = how_tensors_differ(theirs, ours, chance=chance)
    return None if words is None else f"{tensor} {words}"


def how_tensors_differ(a: FloatArray, b: FloatArray, *, chance: bool) -> str | None:
    """Describes the difference of tensor b from tensor a of the same shape; returns None if they are equal.

    Args:
        a, b: the tensors.
        chance: True if one of the two was rounded to fewer bits, so that small differences mean nothing.
    """
    power, apart = float(np.square(a, dtype=np.float64).sum()), float(np.linalg.norm(b - a))
    if apart <= _SAME * np.sqrt(power):
        return None
    if not np.isfinite(b).all():
        return "has values that are not finite"
    if not power:
        return "is all zeros in A, and not in B"
    if not b.any():
        return "is all zeros"
    scatter = apart / np.sqrt(power)
    gain = float((a.astype(np.float64) * b).sum() / power)
    left = float(np.linalg.norm(b - gain * a)) / np.sqrt(power)
    by_chance = 5 * scatter / np.sqrt(a.size) + scatter**2 if chance else 0.0
    if abs(gain - 1) > 2e-4 + by_chance and (chance or left < 0.2 * abs(gain - 1)):
        return f"is {gain:.4f} times what it is in A"
    if chance:
        return None
    rows_a, rows_b = a.reshape(-1, a.shape[-1]), b.reshape(-1, b.shape[-1])
    off = np.linalg.norm(rows_b - rows_a, axis=1) > _SAME * np.maximum(np.linalg.norm(rows_a, axis=1), 1e-30)
    where = np.flatnonzero(off)
    if a.ndim < 2 or len(where) == len(off):
        place = np.unravel_index(int(np.abs(b - a).argmax()), a.shape)
        values = f"{a[place]:.6g} in A, {b[place]:.6g} in B"
        return f"differs by {scatter:.2g} in all, most at {[int(i) for i in place]}: {values}"
    some = how_tensors_differ(rows_a[where], rows_b[where], chance=False)
    return f"differs in {len(where)} of {len(off)} rows, {_rows(where)}; there it {some}"


def _rows(rows: np.ndarray) -> str:
    first, last = int(rows[0]), int(rows[-1])
    if last - first + 1 == len(rows):
        return f"{first}:{last + 1}"
    return f"the first of them {first}"


def missing_biases(a: Run, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Returns the biases of the modules of a for which ``tensors`` of b have none."""
    roles: dict[str, set[str]] = {}
    for tensor in tensors:
        roles.setdefault(tensor.path, set()).add(tensor.role)
    without = [path for path, there in roles.items() if "bias" not in there]
    return [t for path in without for t in a.tensors(path) if t.role == "bias"]


def _swapped(a: Run, tensors: Sequence[Tensor], path: str) -> list[str]:
    """Returns a sentence if the module at ``path`` and another one of the same fused product have each other's
    weight.
    """
    weights = [t for t in tensors if t.role == "weight"]
    reasons = []
    for one, other in combinations(weights, 2):
        first, second = _twin(a, one, tensors), _twin(a, other, tensors)
        if first is None or second is None or one.path == other.path or path not in (one.path, other.path):
            continue
        ours, theirs = (one.read(), other.read()), (first.read(), second.read())
        if theirs[0].shape == theirs[1].shape and same(ours[0], theirs[1]) and same(ours[1], theirs[0]):
            reasons.append(f"{one} and {other} are swapped: each has the other's values")
    return reasons


_CLOSE = 0.1
"""The largest share of a difference that may remain unexplained by a cause."""

_LARGEST_HEAD = 256


def value_reasons(name: ValueName, a: Run, values_a: Values, values_b: Values, *, known: bool) -> list[str]:
    """Returns the causes of the difference of a value of B from that of A, as sentences.

    A common factor is reported only if no other cause is, and if no cause is ``known`` already.
    """
    theirs, ours = values_a[name], values_b[name]
    apart = float(np.linalg.norm(ours - theirs))
    if not np.isfinite(apart):
        return ["B's value has numbers that are not finite"]
    reasons = [*_bias(name, a, theirs, ours), *_swapped_values(name, values_a, ours, apart)]
    reasons += _activation(name, values_a, theirs, ours, apart)
    if name.what in ("query", "key"):
        reasons += _rotated(theirs, ours)
    gap = difference(theirs, ours)
    left = float(np.linalg.norm(ours - gap.gain * theirs))
    if not (reasons or known) and abs(gap.gain - 1) > 2e-4 and left < 0.5 * apart:
        reasons.append(f"B's value is {gap.gain:.4f} times A's")
    return reasons


def same(a: FloatArray, b: FloatArray) -> bool:
    """Returns True if two tensors are equal within the rounding to few bits."""
    return bool(np.linalg.norm(a - b) < 0.2 * np.linalg.norm(a))


def _bias(name: ValueName, a: Run, theirs: FloatArray, ours: FloatArray) -> Iterator[str]:
    if name.what != "output":
        return
    for tensor in a.tensors(name.path):
        if tensor.role == "bias":
            bias = tensor.read()
            if bias.shape == theirs.shape[1:] and lacks(theirs, ours, bias):
                yield f"for every token B's value is A's less the bias {tensor}: it was dropped"


def _swapped_values(name: ValueName, values_a: Values, ours: FloatArray, apart: float) -> Iterator[str]:
    family = name.path.rpartition(".")[0]
    for other, value in values_a.items():
        alike = other != name and other.what == name.what and other.path.rpartition(".")[0] == family
        if alike and value.shape == ours.shape and np.linalg.norm(ours - value) < _CLOSE * apart:
            yield f"B's value is A's {other}: the two are swapped"


def _activation(name: ValueName, values_a: Values, theirs: FloatArray, ours: FloatArray, apart: float) -> Iterator[str]:
    """Yields a sentence if act(up) * gate was computed instead of act(gate) * up.

    Args:
        name: the value that differs.
        values_a: the values of the right run.
        theirs, ours: the value of the right run, and of the examined one.
        apart: their relative difference.
    """
    family = name.path.rpartition(".")[0]
    outputs = [
        (other, value)
        for other, value in values_a.items()
        if other.what == "output" and other.path.rpartition(".")[0] == family and value.shape == theirs.shape
    ]
    if name.what != "input":
        return
    for kind, function in ACTIVATIONS.items():
        for one, gate in outputs:
            for other, up in outputs:
                if one is other:
                    continue
                right, wrong = (function(torch.from_numpy(x)).numpy() * y for x, y in ((gate, up), (up, gate)))
                size = np.linalg.norm(theirs)
                if np.linalg.norm(theirs - right) < 0.05 * size and np.linalg.norm(ours - wrong) < _CLOSE * apart:
                    yield f"{one.path} and {other.path} are swapped: B's value is {kind}({_end(other)}) * {_end(one)}"
                    return


def _end(name: ValueName) -> str:
    return name.path.rpartition(".")[2]


def _rotated(theirs: FloatArray, ours: FloatArray) -> Iterator[str]:
    """Yields a sentence if values differ by a rotation that is the same for every token, because positions are shifted.

    In a head of D values, the first D, D/2 or D/4 are rotated. Pairs are (i, i + half of them), or neighbours. The
    first pair rotates by one radian per position.
    """
    tokens, width = theirs.shape
    sizes = [size for size in range(min(width, _LARGEST_HEAD), 3, -1) if width % size == 0 and size % 2 == 0]
    for size, share, paired in product(sizes, (1, 2, 4), (True, False)):
        if size % (2 * share):
            continue
        heads = [x.reshape(tokens, -1, size)[..., : size // share] for x in (theirs, ours)]
        a, b = (_pairs(x, halves=paired) for x in heads)
        # Keys that are stored in bf16 have lengths that differ by 2^-8.
        if not np.allclose(np.abs(a), np.abs(b), rtol=1e-2, atol=1e-2 * float(np.abs(a).max())):
            continue
        angle = np.angle((b * a.conj()).sum((0, 1)))  # [pairs]
        left, apart = np.linalg.norm(b - a * np.exp(1j * angle)), np.linalg.norm(b - a)
        if left < _CLOSE * apart and apart > 0.99 * np.linalg.norm(ours - theirs):
            yield (
                f"B's value is A's, turned by the same for every token: the first pair of a head by {angle[0]:+.3f} "
                f"radians, so the position that rope has is off by {angle[0]:+.3g}"
            )
            return


def _pairs(x: FloatArray, *, halves: bool) -> np.ndarray:
    """Returns the pairs of a head's values as complex numbers: [T, N, D] -> [T, N, D/2]."""
    half = x.shape[-1] // 2
    first, second = (x[..., :half], x[..., half:]) if halves else (x[..., 0::2], x[..., 1::2])
    return np.asarray(first + 1j * second)


_MOST = 0.1
"""The largest share of differing steps that counts as an error. If more differ, another version lowered the program."""


def program_reasons(lowered: LoweredProgram, stored: LoweredProgram, calls: Sequence[Call]) -> list[str]:
    """Returns the differences between some steps of a stored program and of the program that the export makes.

    Args:
        lowered: the program that the export makes.
        stored: the stored program.
        calls: the steps of the stored program to compare.

    Returns:
        sentences; none if the steps agree, or if more than a tenth of all steps differ: another version lowered it
            then.
    """
    ours, theirs = ([repr(step) for step in program.steps] for program in (stored, lowered))
    matcher = SequenceMatcher(None, theirs, ours, autojunk=False)
    changes = [change for change in matcher.get_opcodes() if change[0] != "equal"]
    if sum(max(b - a, d - c) for _, a, b, c, d in changes) > _MOST * len(ours) + 1:
        return []
    concerned = {call.key for call in calls}
    reasons = []
    for _, start, stop, first, last in changes:
        if not concerned.intersection(range(first, max(last, first + 1))):
            continue
        if stop - start == last - first:
            pairs = zip(range(first, last), lowered.steps[start:stop], stored.steps[first:last], strict=True)
            reasons += [_changed(index, right, wrong) for index, right, wrong in pairs if index in concerned]
        else:
            reasons.append(
                f"B's program has {_steps(stored.steps[first:last])} at step {first}, where the recipe makes "
                f"{_steps(lowered.steps[start:stop])}"
            )
    return reasons


def _changed(index: int, right: Step, wrong: Step) -> str:
    if right.op != wrong.op:
        return f"step {index} of B is {wrong.op}, where the recipe makes {right.op}"
    for key in sorted({*right.attrs, *wrong.attrs}):
        if (a := right.attrs.get(key)) != (b := wrong.attrs.get(key)):
            return f"step {index} of B has {key} {b}, where the recipe makes {a}"
    names = [[o.name for o in step.inputs] for step in (right, wrong)]
    if names[0] != names[1]:
        return f"step {index} of B reads {', '.join(names[1])}, where the recipe makes {', '.join(names[0])}"
    return f"step {index} of B reads or writes other places than the recipe makes"


def _steps(steps: Sequence[Step]) -> str:
    return " and ".join(step.op for step in steps) or "nothing"
