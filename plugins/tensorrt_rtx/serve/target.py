"""How the tensorrt-rtx target is served."""

from __future__ import annotations

from enginewright.runtime.executors.target import ServedTarget

from ...engines.doctor import check_tensorrt
from ...engines.opening import OPENING

TARGET = ServedTarget(check_tensorrt("rtx"), OPENING, carries="TensorRT engines")
