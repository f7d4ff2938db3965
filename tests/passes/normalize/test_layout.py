from __future__ import annotations

import pytest
import sympy

from enginewright.passes.ir.program import named_symbol
from enginewright.passes.normalize.layout import Laid, group_sizes
from tests.passes.small_programs import program_from

T = named_symbol("T")


def _sizes(*values: object) -> list[sympy.Expr]:
    return [sympy.sympify(v) for v in values]


@pytest.mark.parametrize(
    ("old", "new", "groups"),
    [
        ((T, 64), (T, 4, 16), [([0], [0]), ([1], [1, 2])]),
        ((T, 4, 16), (T, 64), [([0], [0]), ([1, 2], [1])]),
        ((T, 16), (T, 1, 16), [([0], [0, 1]), ([1], [2])]),
        ((T, 1, 16), (T, 16), [([0, 1], [0]), ([2], [1])]),
        ((T, 6), (T, 2, 3), [([0], [0]), ([1], [1, 2])]),
        ((T, 4, 6), (T, 6, 4), [([0], [0]), ([1, 2], [1, 2])]),
        ((T, 4, 6), (4 * T, 6), [([0, 1], [0]), ([2], [1])]),
        ((4, 6), (24,), [([0, 1], [0])]),
        ((T, 5), (T, 5), [([0], [0]), ([1], [1])]),
    ],
)
def test_groups(old: tuple[object, ...], new: tuple[object, ...], groups: object) -> None:
    assert group_sizes(_sizes(*old), _sizes(*new)) == groups


@pytest.mark.parametrize(("old", "new"), [((T, 4), (T, 5)), ((T,), (T, 2)), ((6, T), (4, T))])
def test_sizes_that_do_not_come_out_even(old: tuple[object, ...], new: tuple[object, ...]) -> None:
    assert group_sizes(_sizes(*old), _sizes(*new)) is None


def test_order_and_last_dimension() -> None:
    node = program_from(lambda m, i: i["ids"][:, None].expand(-1, 2) * 1.0).inputs["ids"]
    value = Laid(node, (None, 1, 0, 2))  # [1, N, T, D] of [T, N, D]
    assert value.order == [2, 1, 3]
    assert value.real == [1, 2, 3]
    assert value.last_is_last()
    assert not Laid(node, (None, 0, 2, 1)).last_is_last()
    assert not Laid(node, (0, 1, None)).last_is_last()
