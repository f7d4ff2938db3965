"""Downloads a file into the blobs of the Hub's cache, and continues an earlier attempt that stopped."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

from huggingface_hub import constants, errors, get_session
from huggingface_hub.utils import build_hf_headers, hf_raise_for_status  # type: ignore[attr-defined]  # documented

from enginewright.runtime.shared.errors import SourceError
from enginewright.runtime.shared.json_document import parse_json

HTTP_ERROR: type[Exception] = vars(errors)["HTTPError"]
"""The base error of the HTTP library that huggingface_hub uses: httpx, or httpx2."""

_CHUNK_BYTES = 1 << 20
_MOST_ANSWER_BYTES = 64 << 20
"""The most bytes of a repository's list of files: one of a hundred thousand files has some 20 MB."""
_OF_THE_CONNECTION = ("content-encoding", "content-length", "transfer-encoding")
_TRIES = 5
_PAUSE_SECONDS = 1.0
_HASH = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_RANGE = re.compile(r"bytes (\d+)-")


@dataclass(frozen=True)
class Blob:
    """Bytes that the Hub stores: ``hash``, their name in the cache, is SHA-256, or git's SHA-1 of a small file."""

    hash: str
    size: int

    def __post_init__(self) -> None:
        sizes = type(self.size) is int and 0 <= self.size < 1 << 63  # JSON also has NaN, and integers without end
        if not isinstance(self.hash, str) or not _HASH.fullmatch(self.hash) or not sizes:
            raise ValueError(f"{self.hash!r} of {self.size} bytes isn't a hash")


def get_json(path: str, params: Mapping[str, str] = MappingProxyType({})) -> Any:
    """Fetches JSON from a path of the Hub's API.

    Raises ValueError if the answer isn't JSON or is too long, and huggingface_hub's errors for an error status.
    """
    headers = build_hf_headers(library_name="enginewright") | {"Accept-Encoding": "identity"}
    timeout, content = constants.HF_HUB_DOWNLOAD_TIMEOUT, bytearray()
    url = f"{constants.ENDPOINT}/{path}"
    with get_session().stream("GET", url, headers=headers, params=dict(params), timeout=timeout) as response:
        for chunk in response.iter_raw():
            content += chunk
            if len(content) > _MOST_ANSWER_BYTES:
                raise ValueError(f"{url}: the answer has more than {_MOST_ANSWER_BYTES:,} bytes")
        fields = {name: value for name, value in response.headers.items() if name not in _OF_THE_CONNECTION}
        whole = type(response)(response.status_code, headers=fields, content=bytes(content), request=response.request)
    hf_raise_for_status(whole)
    return parse_json(bytes(content))


def download_blob(blob: Blob, url: str, headers: dict[str, str], folder: Path, progress: Callable[[int], None]) -> None:
    """Downloads ``url`` to ``folder / blob.hash``, continuing a partial ``folder / blob.hash.incomplete``.

    A broken connection is reopened, up to five times in a row without a new byte. A lock makes a second process wait
    for the first, and then find the file.

    Args:
        headers: the headers, with the token; they aren't sent to another host that ``url`` redirects to.
        progress: called repeatedly with the number of bytes present.

    Raises:
        SourceError: the downloaded bytes have another hash.
        OSError, HTTP_ERROR: of the disk and of the network. The partial file stays for the next attempt.
    """
    done, partial = folder / blob.hash, folder / f"{blob.hash}.incomplete"
    folder.mkdir(parents=True, exist_ok=True)
    with partial.open("a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if not done.exists():  # else another process was quicker
            _fill(file, blob, url, headers, progress)
            if not _is_whole(file, blob):
                file.truncate(0)
                raise SourceError(
                    f"{url}: what came isn't what the Hub lists (hash {blob.hash})", hint="Run the command again."
                )
            os.replace(partial, done)
        else:
            partial.unlink(missing_ok=True)


def _fill(file: BinaryIO, blob: Blob, url: str, headers: dict[str, str], progress: Callable[[int], None]) -> None:
    """Downloads the missing rest of a partial file."""
    failed = 0
    while (have := file.seek(0, os.SEEK_END)) < blob.size:
        try:
            _append(file, blob, url, headers, progress)
            if file.tell() < blob.size:
                raise ConnectionError(f"{url}: it ended {blob.size - file.tell():,} bytes too early")
        except (HTTP_ERROR, ConnectionError) as e:
            failed = 0 if file.tell() > have else failed + 1
            if isinstance(e, (errors.HfHubHTTPError, errors.OfflineModeIsEnabled)) or failed >= _TRIES:
                raise
            time.sleep(_PAUSE_SECONDS)


def _append(file: BinaryIO, blob: Blob, url: str, headers: dict[str, str], progress: Callable[[int], None]) -> None:
    have = file.tell()
    progress(have)
    range_headers = headers | {"Range": f"bytes={have}-", "Accept-Encoding": "identity"}
    timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
    with get_session().stream("GET", url, headers=range_headers, timeout=timeout) as response:
        hf_raise_for_status(response)
        start = _RANGE.match(response.headers.get("Content-Range", ""))
        if have and (start is None or int(start[1]) != have):  # a server without ranges sends everything
            file.truncate(0)
            file.seek(0)
        reported = file.tell()
        for chunk in response.iter_bytes():  # as they come: of a chunk that isn't whole nothing would be kept
            file.write(chunk)
            if file.tell() > blob.size:
                break  # its hash can't be right
            if file.tell() - reported >= _CHUNK_BYTES:
                reported = file.tell()
                progress(reported)


def has_hash(path: Path, blob: Blob) -> bool:
    """Returns True if a file in the Hub's cache is a blob: by its name there, or else by its bytes."""
    if path.resolve().name == blob.hash:
        return True
    with path.open("rb") as file:
        return _is_whole(file, blob)


def _is_whole(file: BinaryIO, blob: Blob) -> bool:
    file.flush()
    file.seek(0)
    of_git = hashlib.sha1(b"blob %d\0" % blob.size, usedforsecurity=False)
    digest = hashlib.sha256() if len(blob.hash) == 64 else of_git
    while chunk := file.read(_CHUNK_BYTES):
        digest.update(chunk)
    return digest.hexdigest() == blob.hash
