"""Bisect: the first pass, layer, call and tensor at which two runs of a model differ."""

from .bisection import bisect
from .report import BisectReport, FirstDivergence, Place, SmallestFactor, StoredTensors, TensorDifference
from .request import Given, Options

__all__ = [
    "BisectReport",
    "FirstDivergence",
    "Given",
    "Options",
    "Place",
    "SmallestFactor",
    "StoredTensors",
    "TensorDifference",
    "bisect",
]
