"""The sections of a tensorrt-rtx target's manifest: its engines, and for the linear form also their inputs and
outputs.
"""

from collections.abc import Iterator

from enginewright.runtime.bundle.manifest import TargetManifest

from ..engines.section import TensorRtSection
from ..engines.section import made_with as made_with_tensorrt
from ..engines.segments import check_opened
from ..steps.linear_io import LinearIo
from ..steps.linear_io import made_with as made_with_onnx

__all__ = ["SECTIONS", "check_opened", "made_with"]

SECTIONS = {"io": LinearIo, "tensorrt": TensorRtSection}


def made_with(target: TargetManifest) -> Iterator[tuple[str, str]]:
    yield from made_with_onnx(target)
    yield from made_with_tensorrt(target)
