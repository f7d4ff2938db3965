"""Code that a bundle carries: it is read here alone, and only where a caller has said that it may run.

Libraries, kernels, engines and modules can do whatever a program can. A caller says that a bundle's may run by
``trust``: "code" allows it whoever made the bundle; "sha256:..." allows one bundle, by the hash of its manifests. Then
every file that is read is compared with what they list.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ..shared.errors import BundleError, RequestError, TrustError
from .regular_file import read_regular

if TYPE_CHECKING:
    from .reader import Bundle

CODE = "code"
"""What ``trust`` is where the bundle's code may run, whoever made it."""

MOST_CODE_BYTES = 512 << 20
"""Of a library or module that is read whole: those of large models have a few megabytes, as weights lie elsewhere."""

_HASH = re.compile(r"sha256:[0-9a-f]{64}")
_AGAIN = "Copy the bundle again, or export it again."


def bundle_hash(manifests: Mapping[str, bytes]) -> str:
    """What ``trust`` names a bundle by: "sha256:" and the hash of its manifests' paths and hashes, in order.

    The manifests have the hashes of all other files outside of report/.
    """
    lines = (f"{path} {hashlib.sha256(text).hexdigest()}\n" for path, text in sorted(manifests.items()))
    return f"sha256:{hashlib.sha256(''.join(lines).encode()).hexdigest()}"


def check_trust(trust: object, found: str, bundle: Path) -> str | None:
    """``trust`` as a caller gave it, for a bundle whose hash is ``found``.

    Raises RequestError for what says nothing, TrustError for the hash of another bundle.
    """
    if trust is None or trust == CODE:
        return CODE if trust is not None else None
    if not isinstance(trust, str) or not _HASH.fullmatch(trust):
        raise RequestError(
            f"trust: {trust!r} doesn't say what may run",
            hint='It is "code", or the hash that `optimize inspect` shows: "sha256:" and 64 digits, a to f in small '
            "letters.",
        )
    if trust != found:
        raise TrustError(
            f"{bundle}: it is another bundle than {trust}: its hash is {found}",
            hint="It was altered or exported anew since. Look where it comes from before you give the new hash.",
        )
    return trust


def require_trust(bundle: Bundle, target: str, carries: str | None, others: tuple[str, ...] = ()) -> None:
    """Raises TrustError if a target carries code, and the caller hasn't said that it may run.

    Where the caller has named the bundle by its hash, the target's files are compared with it first.

    Args:
        carries: what code the target's files are, for the message; None: none.
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


def read_code(bundle: Bundle, name: str, most: int = MOST_CODE_BYTES) -> bytes:
    """A file that will run. Raises TrustError if it may not, BundleError if it isn't what the manifest lists."""
    path, expected = bundle.path / name, bundle.files.get(name)
    if bundle.trust is None:
        raise TrustError(f"{path}: nobody has said that it may run", hint='Pass trust="code" if it may.')
    if expected is None:
        raise BundleError(f"{path}: it isn't the file that the manifest lists", hint=_AGAIN)
    try:
        content = read_regular(path, most=min(most, expected.bytes), within=bundle.path)
    except OSError as e:
        raise BundleError(f"{path}: cannot be read: {e.strerror}", hint=_AGAIN) from e
    if hashlib.sha256(content).hexdigest() != expected.sha256:
        raise BundleError(f"{path}: it isn't the file that the manifest lists", hint=_AGAIN)
    return content
