"""The result of a bisection, as plain values."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

_JSON_KEYS = {"first_divergence": "parting", "value_name": "point", "values_compared": "points"}
"""Field -> the name under which ``--json`` prints it, which scripts know."""


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
    """A stored tensor that isn't equal to the tensor that should be stored.

    Attributes:
        name: the name of the tensor in the bundle.
        modules: the paths of the modules that read it.
        layer: the path of the layer; "" outside layers.
        sources: the source tensors, with their rows, of the values that differ.
        differing, values: the number of values that differ, and of all values.
        factor: the factor from A's values to B's, if a common one explains the difference; None otherwise.
        places: the experts, rows, columns or groups with values that differ; "" if some differ along all of each.
        reason: the difference in words.
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
"""The most source tensors that a line lists."""


@dataclass(frozen=True)
class StoredTensors:
    """The bitwise comparison of stored tensors.

    Attributes:
        compared, bytes: the number of tensors that were compared, and their bytes.
        differing: the tensors that differ.
        not_compared: the names of the tensors that weren't compared.
    """

    compared: int
    bytes: int
    differing: list[TensorDifference]
    not_compared: list[str]


@dataclass(frozen=True)
class SmallestFactor:
    """The smallest common factor on a linear's weights that would be found at every linear.

    Attributes:
        between: the kind of stages that were compared, such as "passes that round".
        factor: the factor.
        value_name: the least sensitive value, at which the factor has to be that large.
    """

    between: str
    factor: float
    value_name: str


@dataclass(frozen=True)
class BisectReport:
    """The result of a bisection.

    Attributes:
        a, b: the names of the two runs.
        sequences: the lengths of the sequences.
        layers: the numbers of the layers that were compared; None for all.
        values_compared: the number of values that were compared.
        tolerance: the relative error allowed where nothing is rounded to fewer bits.
        largest_error, largest_error_at: the largest error, and the value with it; None if a value differs.
        first_divergence: the first value that differs; None if all agree.
        tensors: the comparison of stored tensors; None if nothing is stored.
        not_covered: rows and experts that no token of the run used.
        smallest_factors: the errors of weights that the comparison could find.
        notes: further remarks.
        seconds: the duration.
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
        """True if no value and no stored tensor differs."""
        return self.first_divergence is None and not (self.tensors and self.tensors.differing)

    def to_json(self) -> dict[str, Any]:
        """Returns plain values for ``--json``."""
        fields = asdict(self, dict_factory=lambda pairs: {_JSON_KEYS.get(k, k): v for k, v in pairs})
        return {"agrees": self.agrees} | fields
