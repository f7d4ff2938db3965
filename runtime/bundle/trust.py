"""Reads the code that a bundle contains, and only if the caller allows it to run.

Libraries, kernels, engines and modules can do whatever a program can. The caller allows them with ``trust``: "code"
allows the code of any bundle; "sha256:..." allows the one bundle with that hash of its manifests, and every file is
compared with its hash when it is read.
"""

from __future__ import annotations

import hashlib

from ..shared.errors import BundleError, TrustError
from .reader import CODE, Bundle
from .regular_file import read_regular

MOST_CODE_BYTES = 512 << 20
"""The most bytes of a library or module that is read whole: large models' have a few megabytes, without weights."""

_AGAIN = "Copy the bundle again, or export it again."


def require_trust(bundle: Bundle, target: str, carries: str | None, others: tuple[str, ...] = ()) -> None:
    """Raises TrustError if a target contains code and the caller doesn't allow it.

    If the caller trusts the bundle by its hash, the target's files are hashed first, which may raise BundleError.

    Args:
        bundle: the bundle.
        target: the target to run.
        carries: the kind of code that the target contains, for the message; None if it contains none.
        others: targets of the bundle that could run without trust.
    """
    if carries is None:
        return
    if bundle.trust is None:
        instead = f" Or take target {others[0]!r}, which needs no trust." if others else ""
        raise TrustError(
            f"{bundle.path}: target {target!r} carries {carries}, and nobody has said that they may run",
            hint='If you made this bundle, or trust whoever did, pass trust="code". In the place of code, '
            f"{bundle.hash} allows this very bundle alone.{instead}",
        )
    if bundle.trust != CODE:
        bundle.verify_target(target)


def read_code(bundle: Bundle, name: str) -> bytes:
    """Returns the contents of the bundle's file ``name``, which contains code.

    Raises TrustError if the caller doesn't allow code, BundleError if the file differs from the manifest.
    """
    path, expected = bundle.path / name, bundle.files.get(name)
    if bundle.trust is None:
        raise TrustError(f"{path}: nobody has said that it may run", hint='Pass trust="code" if it may.')
    if expected is None:
        raise BundleError(f"{path}: it isn't the file that the manifest lists", hint=_AGAIN)
    try:
        content = read_regular(path, most=min(MOST_CODE_BYTES, expected.bytes), within=bundle.path)
    except OSError as e:
        raise BundleError(f"{path}: cannot be read: {e.strerror}", hint=_AGAIN) from e
    if hashlib.sha256(content).hexdigest() != expected.sha256:
        raise BundleError(f"{path}: it isn't the file that the manifest lists", hint=_AGAIN)
    return content
