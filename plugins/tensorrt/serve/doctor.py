"""What the tensorrt target needs of a machine."""

from __future__ import annotations

from ...engines.doctor import check_tensorrt

check = check_tensorrt("tensorrt")
