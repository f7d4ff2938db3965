"""[onnx] of a recipe: what the onnx target has beside its standard file."""

from __future__ import annotations

from pydantic import StrictBool

from enginewright.plugins.shared.section import Section


class OnnxSection(Section):
    """Further files, which run on a CPU in the place of the standard one.

    Attributes:
        contrib: with onnxruntime's own operators.
        kernels: with products by the cpu target's kernels as well; preferred to ``contrib``.
    """

    contrib: StrictBool = False
    kernels: StrictBool = False
