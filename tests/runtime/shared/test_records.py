"""Records read from JSON are checked, and the first wrong field is named with its whole path."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
import pytest

from enginewright.runtime.shared.errors import BundleError
from enginewright.runtime.shared.lowered_program import Affine
from enginewright.runtime.shared.records import Count, Positive, Record, Sha256, read


class Inner(Record, frozen=True, kw_only=True):
    size: Positive
    kind: Literal["a", "b"] = "a"
    offset: Affine | None = None

    def __post_init__(self) -> None:
        if self.size == 13:
            raise ValueError("13 isn't a size")


class Tagged(Record, frozen=True, kw_only=True, tag_field="op", tag="tagged"):
    value: float


class Outer(Record, frozen=True, kw_only=True):
    format_version: int = 1
    inner: Inner
    by_name: dict[str, Inner] = msgspec.field(default_factory=dict)
    hashes: dict[Sha256, Count] = msgspec.field(default_factory=dict)
    several: tuple[Inner, ...] = ()
    steps: tuple[Tagged, ...] = ()


GOOD: dict[str, Any] = {
    "inner": {"size": 2, "offset": {"T": 4, "1": 1}},
    "by_name": {"x": {"size": 1}, "y.z": {"size": 3, "kind": "b"}},
    "several": [{"size": 5}, {"size": 6}],
    "steps": [{"op": "tagged", "value": 1}],
}


def test_a_record_is_read_and_written() -> None:
    record = read(Outer, GOOD, "s")
    assert record.inner.offset == Affine(1, t=4) and record.by_name["y.z"].kind == "b"
    assert record.model_dump(mode="json", exclude_defaults=True, exclude_none=True) == GOOD
    assert read(Outer, record.model_dump(mode="json"), "s") == record
    assert record.model_dump(include={"format_version", "several"}, exclude={"several"}) == {"format_version": 1}
    assert record.model_dump()["several"] == (
        {"size": 5, "kind": "a", "offset": None},
        {"size": 6, "kind": "a", "offset": None},
    )
    changed = record.model_copy(update={"format_version": 7})
    assert (changed.format_version, changed.inner) == (7, record.inner) != (record.format_version, record.inner)
    with pytest.raises(AttributeError):
        record.format_version = 2  # type: ignore[misc]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"more": 1}, "s: more: there is no such field"),
        ({"inner": {}}, "s: inner.size: it is missing"),
        ({"inner": {"size": 1, "more": 2}}, "s: inner.more: there is no such field"),
        ({"inner": {"size": 0}}, "s: inner.size: Expected `int` >= 1"),
        ({"inner": {"size": True}}, "s: inner.size: Expected `int`, got `bool`"),
        ({"inner": {"size": 13}}, "s: inner: 13 isn't a size"),
        ({"inner": {"size": 1, "kind": "c"}}, "s: inner.kind: Invalid enum value 'c'"),
        ({"inner": {"size": 1, "offset": {"X": 1}}}, r"s: inner.offset: unknown symbols \['X'\]"),
        ({"inner": {"size": 1, "offset": {"T": True}}}, "s: inner.offset: coefficients must be integers"),
        ({"several": [{"size": 1}, {"size": "1"}]}, "s: several.1.size: Expected `int`, got `str`"),
        ({"by_name": {"x": {"size": 1}, "y.z": {"size": -1}}}, "s: by_name.y.z.size: "),
        ({"by_name": {"x": {"size": 1}, "y": {"kind": "a"}}}, "s: by_name.y.size: it is missing"),
        ({"by_name": {"x": {"size": 1}, "y": 3}}, "s: by_name.y: Expected `object`"),
        ({"hashes": {"0" * 64: 1, "xyz": 2}}, "s: hashes.xyz: "),
        ({"hashes": {"0" * 64 + "\n": 1}}, "s: hashes.0{64}\n: "),
        ({"steps": [{"op": "other", "value": 1}]}, "s: steps.0.op: Invalid value 'other'"),
    ],
)
def test_wrong_fields_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(BundleError, match=message):
        read(Outer, GOOD | change, "s")


@pytest.mark.parametrize("data", [[], 3, None, "x"])
def test_what_is_no_object(data: object) -> None:
    with pytest.raises(BundleError, match=r"^s: Expected `object`"):
        read(Outer, data, "s")
