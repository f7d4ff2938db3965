"""What a bisection found, as plain values."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Place:
    """Where two values are farthest apart: the number of the token in the run, the column, and both values."""

    token: int
    column: int
    a: float
    b: float


@dataclass(frozen=True)
class Parting:
    """Where the two sides part first.

    Attributes:
        stage: what did it: "capture", "the pass fuse_qkv", "emission, stored weights or kernels"; "" where there are no
            stages, as between two bundles.
        pass_name: the pass, if it was one.
        a, b: what is compared there; the two sides themselves, or a program before and after a pass.
        layer: path of the layer; "" outside of layers.
        module: path of the module.
        point: what of it, in words.
        calls: the nodes or steps of b that the value was computed by, from values that agree.
        tensors: what these computed with, and which rows of which source tensors that is.
        error, tolerance: relative, of the worst column.
        gain: what a's value is multiplied by to be nearest to b's.
        largest: where the values are farthest apart.
        reasons: what is wrong, as far as can be told.
        others: the points that part besides, each by itself, the first ones; and how many there are.
    """

    stage: str
    pass_name: str | None
    a: str
    b: str
    layer: str
    module: str
    point: str
    calls: list[str]
    tensors: list[str]
    error: float
    tolerance: float
    gain: float
    largest: Place
    reasons: list[str]
    others: list[str]
    others_count: int


@dataclass(frozen=True)
class BisectReport:
    """The outcome. ``parting`` is None if the sides agree; then ``largest_error`` is what is between them, and where.

    ``sequences``: the lengths of what was run. ``tolerance``: what was allowed where nothing is rounded to fewer bits.
    """

    a: str
    b: str
    sequences: list[int]
    points: int
    tolerance: float
    largest_error: float | None
    largest_error_at: str | None
    parting: Parting | None
    notes: list[str]
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """As plain values for ``--json``."""
        return asdict(self)
