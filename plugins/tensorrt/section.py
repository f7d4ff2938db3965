"""The section of a tensorrt target's manifest."""

from ..engines.section import TensorRtSection, made_with
from ..engines.segments import check_opened

__all__ = ["SECTIONS", "check_opened", "made_with"]

SECTIONS = {"tensorrt": TensorRtSection}
