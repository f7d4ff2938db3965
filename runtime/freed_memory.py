"""Memory that was freed and that the C library still keeps for itself."""

from __future__ import annotations

import ctypes
import sys


def return_freed_memory() -> None:
    """Gives it back to the system, where that can be asked for (glibc); else does nothing.

    What opening a bundle parses, the tokenizer's vocabulary above all, takes several times what is left of it, in
    pieces too small for the library to give back by itself. A server would have them resident for good.
    """
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
