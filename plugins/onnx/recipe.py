"""The table [onnx] of a recipe."""

from __future__ import annotations

from typing import Literal

from pydantic import StrictBool

from enginewright.passes.formats.section import Section


class OnnxSection(Section):
    """The variants that are written in addition to the standard file. The runtime prefers them.

    Attributes:
        floats: adds a variant with activations, float weights and caches of 16 bits, for GPUs.
        contrib: adds a variant with onnxruntime's own operators, for CPUs.
        kernels: adds a variant that also computes products with the cpu target's kernels; preferred to ``contrib``.
    """

    floats: Literal["f16", "bf16"] | None = None
    contrib: StrictBool = False
    kernels: StrictBool = False


TABLE = OnnxSection
