"""Kernels that a bundle carries: code that was compiled ahead, read by the name of what it is for."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from enginewright.plugins.triton.compile_ahead import CompiledKernel, read_kernel
from enginewright.runtime.bundle.regular_file import MOST_TEXT_BYTES, read_regular


def read_by_stem(folder: Path, stem: str) -> CompiledKernel:
    """A kernel of a bundle. Raises BundleError where it is missing, damaged, or isn't what its name says."""
    return read_kernel(folder, stem, read=partial(read_regular, most=MOST_TEXT_BYTES), with_ptx=False)
