"""[onnx] of a recipe: what the onnx target has beside its standard file."""

from __future__ import annotations

from pydantic import StrictBool

from .sections import Section


class OnnxSection(Section):
    """``contrib``: a second file with onnxruntime's own operators, which is what runs on a CPU then."""

    contrib: StrictBool = False
