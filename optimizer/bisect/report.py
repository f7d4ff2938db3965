"""The result of a bisection, as plain values."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

_JSON_KEYS = {"first_divergence": "parting", "value_name": "point", "values_compared": "points"}
"""Fields that ``--json`` prints under the name that scripts know."""


@dataclass(frozen=True)
class Place:
    """The place where two values are farthest apart: the token's number in the run, the column, and both values."""

    token: int
    column: int
    a: float
    b: float


@dataclass(frozen=True)
class FirstDivergence:
    """The first difference of two runs.

    Attributes:
        stage: the stage that causes it: "capture", "the pass fuse_qkv", "emission, stored weights or kernels"; ""
            between two bundles, which have no stages.
        pass_name: the pass that causes it; None if the stage isn't a pass.
        a, b: the names of what is compared there: the two runs, or a program before and after a pass.
        layer: path of the layer; "" outside layers.
        module: path of the module.
        value_name: the module's value that differs, in words.
        calls: b's nodes or steps that computed the value from values that agree.
        tensors: the weights of these calls, with the rows of the source tensors that they were made of.
        error, tolerance: relative error of the worst column, and the largest one allowed.
        gain: the factor that brings a's value closest to b's.
        largest: the place where the values are farthest apart.
        reasons: the causes, as far as they are known.
        others, others_count: the first of the further values that differ on their own, and the number of all of them.
    """

    stage: str
    pass_name: str | None
    a: str
    b: str
    layer: str
    module: str
    value_name: str
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
class TensorDifference:
    """A stored tensor that is not what it should be.

    Attributes:
        name: in the bundle.
        modules: whose tensor it is.
        layer: path of the layer; "" outside of layers.
        sources: the source's tensors that the values which differ are made of, and their rows.
        differing, values: how many values differ, of how many.
        factor: what A's values are multiplied by to give B's, where that explains the difference.
        places: the experts, rows, columns or groups that differ; "" if some do along all of each.
        reason: all of it in words.
    """

    name: str
    modules: list[str]
    layer: str
    sources: list[str]
    differing: int
    values: int
    factor: float | None
    places: str
    reason: str

    def __str__(self) -> str:
        origins = ", ".join(self.sources[:_SHOWN]) + (", ..." if len(self.sources) > _SHOWN else "")
        return f"{self.name} (of {origins}): {self.reason}" if origins else f"{self.name}: {self.reason}"


_SHOWN = 4
"""Sources that are named in a line."""


@dataclass(frozen=True)
class StoredTensors:
    """Tensors that were compared bit for bit: how many, of how many bytes, those that differ, and those left out."""

    compared: int
    bytes: int
    differing: list[TensorDifference]
    not_compared: list[str]


@dataclass(frozen=True)
class SmallestFactor:
    """The smallest factor on a linear's weights that comparing values finds at every linear; ``value_name`` is the
    least sensitive value.

    ``between``: of what is compared, such as "passes that round".
    """

    between: str
    factor: float
    value_name: str


@dataclass(frozen=True)
class BisectReport:
    """The outcome. If all values agree ``first_divergence`` is None, and ``largest_error`` says how closely and where.

    Attributes:
        a, b: what was compared.
        sequences: the lengths of what was run.
        layers: what the comparison was restricted to; None: nothing.
        values_compared: how many.
        tolerance: what was allowed where nothing is rounded to fewer bits.
        largest_error, largest_error_at: see above.
        first_divergence: where values first differ.
        tensors: the stored tensors, compared with what they should be; None where nothing is stored.
        not_covered: rows and experts that no token of the run has used.
        smallest_factors: what comparing values can detect.
        notes: what else to know.
        seconds: that it took.
    """

    a: str
    b: str
    sequences: list[int]
    layers: list[int] | None
    values_compared: int
    tolerance: float
    largest_error: float | None
    largest_error_at: str | None
    first_divergence: FirstDivergence | None
    tensors: StoredTensors | None
    not_covered: list[str]
    smallest_factors: list[SmallestFactor]
    notes: list[str]
    seconds: float

    @property
    def agrees(self) -> bool:
        """Returns True if no value and no stored tensor differs."""
        return self.first_divergence is None and not (self.tensors and self.tensors.differing)

    def to_json(self) -> dict[str, Any]:
        """Makes plain values for ``--json``."""
        fields = asdict(self, dict_factory=lambda pairs: {_JSON_KEYS.get(k, k): v for k, v in pairs})
        return {"agrees": self.agrees} | fields
