"""Files of a bundle that are run as code: nothing but what was exported."""

from __future__ import annotations

import hashlib

from enginewright.plugins.shared.errors import BundleError

from .reader import Bundle


def checked_file(bundle: Bundle, name: str) -> bytes:
    """Its content. Raises BundleError if it isn't what the manifest lists."""
    path, expected = bundle.path / name, bundle.files.get(name)
    try:
        content = path.read_bytes()
    except OSError as e:
        raise BundleError(f"{path}: {e.strerror}", hint="Copy the bundle again, or export it again.") from e
    if expected is None or hashlib.sha256(content).hexdigest() != expected.sha256:
        raise BundleError(
            f"{path}: it isn't the file that the manifest lists", hint="Copy the bundle again, or export it again."
        )
    return content
