"""A bundle's files, hashed with progress."""

from __future__ import annotations

from enginewright.runtime.bundle.reader import Bundle

from .progress import Progress, ProgressEvent


def hash_files(bundle: Bundle, progress: Progress) -> int:
    """Hashes every file that a bundle lists, telling the bytes done; returns how many bytes these are.

    Raises BundleError naming a file that was altered.
    """
    total, done = sum(f.bytes for f in bundle.files.values()), 0

    def hashed(size: int) -> None:
        nonlocal done
        done += size
        progress(ProgressEvent("hash", done, total))

    bundle.verify_hashes(hashed)
    return total
