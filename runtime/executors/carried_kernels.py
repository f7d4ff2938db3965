"""Kernels that a bundle carries: code that was compiled ahead, read by the name of what it is for."""

from __future__ import annotations

import json
from pathlib import Path

from enginewright.plugins.shared.errors import BundleError
from enginewright.plugins.triton.compile_ahead import CompiledKernel
from enginewright.plugins.triton.specs import KernelSpec
from enginewright.runtime.bundle.regular_file import MOST_JSON_BYTES, MOST_TEXT_BYTES, read_regular


def read_by_stem(folder: Path, stem: str) -> CompiledKernel:
    """A kernel of a bundle. Raises BundleError where it is missing, damaged, or isn't what its name says."""
    path = folder / f"{stem}.json"
    try:
        said = json.loads(read_regular(path, most=MOST_JSON_BYTES))
        spec = KernelSpec(
            kernel=said["kernel"],
            capability=said["capability"],
            arguments=tuple((name, of) for name, of in said["arguments"]),
            constants=tuple(said["constants"].items()),
            aligned=tuple(said["aligned"]),
            warps=said["warps"],
            stages=said["stages"],
            unaligned=tuple(said.get("unaligned", ())),
        )
        cubin = read_regular(path.with_suffix(".cubin"), most=MOST_TEXT_BYTES)
        measures = (said["shared_memory"], said["compiler"], said.get("registers", 0), said.get("stack", 0))
        kernel = CompiledKernel(spec, said["entry"], "", cubin, *measures)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        raise BundleError(f"{path}: the kernel can't be read: {e}", hint="Export the bundle again.") from e
    if spec.stem != stem:
        raise BundleError(f"{path}: made for something else than its name says", hint="Export the bundle again.")
    return kernel
