"""Raises the process's limit of open files."""

from __future__ import annotations

import contextlib
import resource

_ENOUGH = 65536


def raise_file_limit() -> None:
    """Raises the limit of open files as far as the system allows, as each connection is a file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = _ENOUGH if hard == resource.RLIM_INFINITY else min(hard, _ENOUGH)
    if soft < limit:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
