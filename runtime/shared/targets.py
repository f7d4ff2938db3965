"""The targets that are ours, and the package of each. Importing this imports nothing of them.

A target's package may have a module ``section`` with

    SECTIONS        key in the target's manifest -> the record that is read from it
    check_opened    (bundle, target) -> what else a ready target has that is checked when its bundle is opened; it is
                    kept in ``Bundle.opened``. Raises BundleError.
    ANY_SIZE        whether steps of all sizes are as good, or the target has its own: then it needs no program a bucket
    made_with       target's manifest -> what ran or must run it, and its version, for ``optimize sbom``
    described       (bundle, target) -> lines for ``optimize inspect``
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from types import ModuleType

from .records import Record

OWN = {
    "cpu": "enginewright.plugins.cpu",
    "onnx": "enginewright.plugins.onnx",
    "tensorrt-rtx": "enginewright.plugins.tensorrt_rtx",
    "tensorrt": "enginewright.plugins.tensorrt",
    "cuda": "enginewright.plugins.cuda",
    "stablehlo": "enginewright.plugins.stablehlo",
    "torch-tensorrt": "enginewright.plugins.torch_tensorrt",
    "tvm": "enginewright.plugins.tvm",
}
"""In the order in which they are shown."""


def part(target: str, name: str) -> ModuleType | None:
    """The module ``name`` of a target's package; None where the package has none, or the target isn't ours."""
    path = f"{OWN[target]}.{name}" if target in OWN else ""
    return importlib.import_module(path) if path and importlib.util.find_spec(path) is not None else None


def sections_of(target: str) -> Mapping[str, type[Record]] | None:
    """What a target's manifest may have besides what all have, by key; None where the target isn't ours."""
    if target not in OWN:
        return None
    module = part(target, "section")
    return {} if module is None else module.SECTIONS
