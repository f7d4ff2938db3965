"""The torch-tensorrt target isn't served here: other programs run its file."""

from __future__ import annotations

from enginewright.runtime.executors.target import ServedTarget

TARGET = ServedTarget()
