"""The section of a tensorrt target's manifest."""

from ..engines.section import TensorRtSection, made_with
from ..engines.segments import check_opened

__all__ = ["ANY_SIZE", "SECTIONS", "check_opened", "made_with"]

SECTIONS = {"tensorrt": TensorRtSection}
ANY_SIZE = True
