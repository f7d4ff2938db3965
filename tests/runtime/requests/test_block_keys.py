"""Items of block keys: contents distinguish equal placeholders, and items have one order."""

from __future__ import annotations

import itertools
import random
from bisect import bisect_left

import pytest

from enginewright.runtime.requests.block_keys import Content, Item, Namespace, items_of, to_bytes, token_ids
from enginewright.runtime.requests.request import Generation
from enginewright.runtime.requests.request_options import RequestOptions
from enginewright.runtime.requests.sampling import SamplingParams

ITEMS: list[Item] = [4, 5, Content(5, b""), Content(5, b"a"), Content(5, b"b"), 6]


def test_items_have_one_order() -> None:
    for (i, one), (j, other) in itertools.product(enumerate(ITEMS), repeat=2):
        assert ((one,) < (other,)) == (i < j) and ((one,) > (other,)) == (i > j)
        assert ((one,) <= (other,)) == (i <= j) and ((one,) >= (other,)) == (i >= j)
        assert ((one,) == (other,)) == (i == j)
    shuffled = random.Random(1).sample(ITEMS, len(ITEMS))
    assert sorted(shuffled) == ITEMS  # type: ignore[type-var]
    assert bisect_left([(item, 1) for item in ITEMS], (Content(5, b"a"), 1)) == 3
    with pytest.raises(TypeError, match="isn't an item"):
        _ = Content(1, b"") < "text"


def test_no_other_items_have_the_same_bytes() -> None:
    several = [list(items) for n in range(4) for items in itertools.product(ITEMS, repeat=n)]
    assert len({tuple(to_bytes(items)) for items in several}) == len(several)
    assert to_bytes([1, 2]) == [b"\1\0\0\0\2\0\0\0"]
    assert token_ids(ITEMS) == [4, 5, 5, 5, 5, 6]


def test_a_request_has_the_items_of_its_contents() -> None:
    request = Generation(
        [1, 9, 9, 2], SamplingParams(), max_tokens=3, options=RequestOptions("t"), adapter="d", contents={2: b"x"}
    )
    assert request.items == [1, 9, Content(9, b"x"), 2] == items_of(request.tokens, {2: b"x"})
    assert request.namespace == Namespace("t", "d")
    request.tokens.append(7)
    assert request.items == [1, 9, Content(9, b"x"), 2, 7]
    assert request.branch().items == request.items and request.branch().namespace == request.namespace
    plain = Generation([1, 2], SamplingParams(), max_tokens=3)
    assert plain.items is plain.tokens and plain.namespace == Namespace("", "")
