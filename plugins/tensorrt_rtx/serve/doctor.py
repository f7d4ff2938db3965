"""Checks if a machine can run the tensorrt-rtx target."""

from __future__ import annotations

from ...engines.doctor import check_tensorrt, engine_of

check = check_tensorrt("rtx")
ENGINE = engine_of("rtx")
