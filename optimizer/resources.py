"""What the process has used."""

from __future__ import annotations

import resource
import sys


def peak_rss_bytes() -> int:
    """The process's largest resident size so far, from the system."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
