"""The section of an onnx target's manifest: the linear form of its steps."""

from ..steps.linear_io import LinearIo, made_with

__all__ = ["SECTIONS", "made_with"]

SECTIONS = {"io": LinearIo}
