"""The torch-tensorrt target isn't served here: other programs run its file."""

from __future__ import annotations

from enginewright.runtime.executors.target import ServedTarget

from .doctor import check_torch_tensorrt

TARGET = ServedTarget(check_torch_tensorrt)
