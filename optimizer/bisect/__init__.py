"""Bisect: where two ways of computing a model part, by pass, layer, call and tensor."""

from .bisection import Given, Options, bisect
from .report import BisectReport, Parting, Place, SmallestFactor, StoredTensors, TensorDifference

__all__ = [
    "BisectReport",
    "Given",
    "Options",
    "Parting",
    "Place",
    "SmallestFactor",
    "StoredTensors",
    "TensorDifference",
    "bisect",
]
