"""The serving half of the torch-tensorrt target, which can't be served: only other programs run its file."""

from __future__ import annotations

from enginewright.runtime.executors.target import ServedTarget

TARGET = ServedTarget()
