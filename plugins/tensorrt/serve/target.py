"""Opens the tensorrt target for serving."""

from __future__ import annotations

from enginewright.runtime.executors.target import ServedTarget

from ...engines.opening import OPENING

TARGET = ServedTarget(OPENING, carries="TensorRT engines and compiled kernels")
