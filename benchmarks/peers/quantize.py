"""Quantizes a GGUF file by llama.cpp: python -m peers.quantize SOURCE TARGET TYPE [NPZ]

Runs with the Python of the peers. NPZ is an importance matrix: the mean square of each column of what a tensor's rows
are multiplied with, by the tensor's name.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

import llama_cpp
import numpy as np


def quantize(source: Path, target: Path, kind: str, importance: Path | None) -> None:
    """Writes ``target`` in a file type of llama.cpp, such as Q4_K_M. Raises SystemExit if it can't."""
    data = np.load(importance) if importance is not None else {}
    names = sorted(data)
    columns = [np.ascontiguousarray(data[name], np.float32) for name in names]
    entries = (llama_cpp.llama_model_imatrix_data * (len(names) + 1))()  # an entry without a name ends them
    for entry, name, values in zip(entries, names, columns, strict=False):
        entry.name, entry.size = name.encode(), values.size
        entry.data = values.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
    options.nthread = len(os.sched_getaffinity(0))
    if names:
        options.imatrix = ctypes.cast(entries, ctypes.POINTER(llama_cpp.llama_model_imatrix_data))
    unfinished = target.with_suffix(".unfinished")
    if status := llama_cpp.llama_model_quantize(os.fsencode(source), os.fsencode(unfinished), ctypes.byref(options)):
        raise SystemExit(f"llama_model_quantize to {kind} failed with {status}")
    os.replace(unfinished, target)


if __name__ == "__main__":
    quantize(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], Path(sys.argv[4]) if len(sys.argv) > 4 else None)
