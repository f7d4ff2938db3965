"""Each operation, compiled and run by XLA, beside NumPy."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest

from enginewright.plugins.stablehlo.compile.module_text import ModuleText, Tensor
from enginewright.plugins.stablehlo.serve.pjrt_library import Pjrt
from enginewright.plugins.steps.host_arrays import in_place

pytest.importorskip("jaxlib", reason="jaxlib is not installed: pip install 'enginewright[stablehlo]'")

Array = npt.NDArray[np.generic]

X = np.arange(24, dtype=np.float32).reshape(2, 3, 4) - 11
I = np.asarray([2, 0], np.int64)


@pytest.fixture(scope="module")
def pjrt() -> Pjrt:
    return Pjrt("cpu", 1)


def computed(pjrt: Pjrt, make: Callable[..., Tensor], *given: Array) -> Array:
    text = ModuleText()
    kinds = {"float32": "f32", "int64": "i64", "bool": "i1"}
    arguments = [text.argument(array.shape, kinds[array.dtype.name]) for array in given]
    executable = pjrt.compile(text.finish([make(text, *arguments)]).encode(), "test")
    inputs = [in_place(array.copy()) for array in given]
    (output,) = pjrt.run(executable, [pjrt.view(array) for array in inputs])
    return pjrt.array(output).copy()


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda t, x, i: t.binary("add", x, t.reduce("add", x, [1], keep=True)), X + X.sum(1, keepdims=True)),
        (lambda t, x, i: t.reduce("maximum", x, [0, -1]), X.max((0, 2))),
        (lambda t, x, i: t.reduce("maximum", i, [0]), I.max()),
        (lambda t, x, i: t.convert(t.compare("GT", x, t.constant(np.float32(0))), "f32"), (X > 0).astype(np.float32)),
        (lambda t, x, i: t.transpose(x, [2, 0, 1]), X.transpose(2, 0, 1)),
        (lambda t, x, i: t.slice(x, 2, 1, 4, 2), X[:, :, 1:4:2]),
        (lambda t, x, i: t.concatenate([x, t.slice(x, 1, 0, 1)], 1), np.concatenate([X, X[:, :1]], 1)),
        (lambda t, x, i: t.pad(x, [0, 1, 2]), np.pad(X, ((0, 0), (0, 1), (0, 2)))),
        (lambda t, x, i: t.broadcast(t.slice(x, 0, 1, 2), (5, 3, 4)), np.broadcast_to(X[1:], (5, 3, 4))),
        (lambda t, x, i: t.broadcast(i, (3, 2)), np.broadcast_to(I, (3, 2))),
        (lambda t, x, i: t.take(x, i, 1), X[:, I]),
        (lambda t, x, i: t.take(x, t.broadcast(i, (3, 2)), 2), X[:, :, np.broadcast_to(I, (3, 2))]),
        (lambda t, x, i: t.dot(x, t.reshape(x, [2, -1, 4]), (2, 2), batching=1), X @ X.transpose(0, 2, 1)),
        (lambda t, x, i: t.dot(x, t.constant(np.eye(4, 2, dtype=np.float32)), (2, 0)), X[:, :, :2]),
        (lambda t, x, i: t.sort(x, t.iota((2, 3, 4), 2), 2)[0], X[:, :, ::-1]),
        (lambda t, x, i: t.sort(t.binary("multiply", x, t.constant(np.float32(0))), t.iota((2, 3, 4), 2), 2)[1],
         np.broadcast_to(np.arange(4), (2, 3, 4))),
        (lambda t, x, i: t.constant(np.asarray([[True, False], [True, True]])), np.asarray([[1, 0], [1, 1]], bool)),
        (lambda t, x, i: t.constant(np.asarray([1.5, -np.inf], np.float32)), np.asarray([1.5, -np.inf], np.float32)),
        (lambda t, x, i: t.constant(np.asarray([-3, 7], np.int64)), np.asarray([-3, 7])),
        (lambda t, x, i: t.select(t.convert(i, "i1"), t.iota((3, 2), 0), t.constant(np.int64(9))),
         np.where(I != 0, np.arange(3)[:, None], 9)),
    ],
)  # fmt: skip
def test_operations(pjrt: Pjrt, make: Callable[..., Tensor], expected: Array) -> None:
    outputs = computed(pjrt, make, X, I)
    assert outputs.dtype == expected.dtype and outputs.shape == expected.shape
    np.testing.assert_array_equal(outputs, expected)


def test_a_slice_goes_where_an_index_says(pjrt: Pjrt) -> None:
    def make(t: ModuleText, x: Tensor, i: Tensor) -> Tensor:
        zero = t.constant(np.int64(0))
        place = t.reshape(t.slice(i, 0, 0, 1), ())
        return t.dynamic_update_slice(x, t.slice(x, 2, 0, 1), [zero, zero, place])

    expected = X.copy()
    expected[:, :, 2] = X[:, :, 0]
    np.testing.assert_array_equal(computed(pjrt, make, X, I), expected)


def test_a_constant_is_there_once() -> None:
    text = ModuleText()
    assert text.constant(np.float32(2)) is text.constant(2.0, "f32")
    assert text.constant(np.float32(2)).name != text.constant(np.int64(2)).name
    assert text.finish([text.constant(np.float32(2))]).count("stablehlo.constant") == 2
