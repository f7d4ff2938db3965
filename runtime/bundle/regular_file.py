"""Opens untrusted files: only regular files, of a limited size.

A pipe or device in place of a file would block the reader forever, a sparse file of terabytes would exhaust the memory,
and a link could lead out of the folder. So every file of a bundle or a source is opened with these functions.
"""

from __future__ import annotations

import errno
import io
import os
import stat
from pathlib import Path

MOST_JSON_BYTES = 64 << 20
"""The most bytes of a manifest, an index, a program or a report. A model with 70 layers has files of 1 MB."""
MOST_TEXT_BYTES = 512 << 20
"""The most bytes of a tokenizer, or of a text that is read whole. The largest tokenizers in use have 35 MB."""

_KINDS = (
    (stat.S_ISDIR, "it is a folder"),
    (stat.S_ISFIFO, "it is a pipe"),
    (stat.S_ISSOCK, "it is a socket"),
    (stat.S_ISCHR, "it is a device"),
    (stat.S_ISBLK, "it is a device"),
)


def open_regular(
    path: str | os.PathLike[str], *, most: int | None = None, within: Path | None = None
) -> io.BufferedReader:
    """Opens a regular file for reading.

    Args:
        path: the file's path. A link is followed.
        most: the largest size in bytes; None for no limit.
        within: the folder that must contain the file after links are followed; None for any folder.

    Raises:
        OSError: the file doesn't exist, can't be read, isn't regular, is too large, or is outside ``within``;
            ``strerror`` says which.
    """
    real = os.path.realpath(path)
    if within is not None and not Path(real).is_relative_to(os.path.realpath(within)):
        raise OSError(errno.ELOOP, "it is a link to a file outside of the folder", os.fspath(path))
    # Without O_NONBLOCK, opening a pipe waits for a writer.
    descriptor = os.open(real, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    try:
        _check(os.fstat(descriptor), most, os.fspath(path))
        return open(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_regular(path: str | os.PathLike[str], *, most: int, within: Path | None = None, piped: bool = False) -> bytes:
    """Returns the contents of a file of at most ``most`` bytes.

    With ``piped``, the file may also be a pipe of the shell ("/dev/stdin", "/dev/fd/63"); use it only for a path that
    the user gave. ``within`` is as for ``open_regular``.

    Raises OSError as ``open_regular`` does.
    """
    is_pipe = piped and os.path.realpath(path).startswith(f"/proc/{os.getpid()}/fd/pipe:")
    with open(path, "rb") if is_pipe else open_regular(path, most=most, within=within) as file:
        size = most if is_pipe else min(os.fstat(file.fileno()).st_size, most)  # Python makes room for all at once
        try:
            data = file.read(size + 1)
            if len(data) > size:  # it grew meanwhile
                data += file.read(most + 1 - len(data))
        except MemoryError as e:
            raise OSError(errno.ENOMEM, "there is no memory for it", os.fspath(path)) from e
    if len(data) > most:
        raise _too_large(len(data), most, os.fspath(path))
    return data


def _check(found: os.stat_result, most: int | None, path: str) -> None:
    if not stat.S_ISREG(found.st_mode):
        what = next((text for is_kind, text in _KINDS if is_kind(found.st_mode)), "it is something else")
        raise OSError(errno.EINVAL, f"{what}, not a regular file", path)
    if most is not None and found.st_size > most:
        raise _too_large(found.st_size, most, path)


def _too_large(size: int, most: int, path: str) -> OSError:
    return OSError(errno.EFBIG, f"it has {size:,} bytes, more than the {most:,} that are read of such a file", path)
