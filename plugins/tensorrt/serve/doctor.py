"""Checks if a machine can run the tensorrt target."""

from __future__ import annotations

from ...engines.doctor import check_tensorrt, engine_of

check = check_tensorrt("tensorrt")
ENGINE = engine_of("tensorrt")
