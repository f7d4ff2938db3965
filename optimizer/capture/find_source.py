"""Finds the model that a user names: a path on this disk, or an id on the Hub (``hub_id``), which is fetched.

All commands and functions with a source use it.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from enginewright.runtime.bundle.manifest import HubSection, SourceSection
from enginewright.runtime.shared.errors import MissingDependencyError
from enginewright.runtime.shared.progress import Progress, silent

from .check_source import check_source
from .gguf.header import READER_VERSION
from .hub_id import find_here

if TYPE_CHECKING:
    from .hub import Listing

_SNAPSHOT = re.compile(r"models--([^/]+?)--([^/]+)/snapshots/([0-9a-f]{40})(?:/|\Z)")


def find_source(
    source: str | Path,
    *,
    revision: str | None = None,
    option: str = "",
    weights: bool = True,
    progress: Progress = silent,
    listed: Listing | None = None,
) -> Path:
    """Returns the folder or file of a source. A Hub id is fetched into the Hub's cache unless it is there.

    Args:
        source: a path, or a Hub id; see ``hub_id``.
        revision: the revision of a Hub id that has none in its text.
        option: the option that the source was passed as, for errors, such as "against".
        weights: False fetches only config.json of a folder on the Hub.
        progress: called with the stage "download", in bytes.
        listed: the result of ``check_named`` for the same source, which saves a request to the Hub.

    Raises:
        SourceError: the source doesn't exist here or on the Hub, or can't be fetched.
        UnsupportedModelError: the configuration can't be compiled.
        CapacityError: the disk is too small.
        MissingDependencyError: huggingface_hub, or a library that reads configurations, is not installed.
    """
    place = find_here(source, revision=revision, option=option)
    if isinstance(place, Path):
        return place
    prefix = f"{option}: " if option else ""
    with MissingDependencyError.of_export(f"{prefix}{os.fspath(source)} isn't on this disk, and a model of the Hub"):
        from .hub import fetch
    return fetch(place, progress, weights=weights, listed=listed)


def check_named(source: str | os.PathLike[str], *, revision: str | None = None) -> Listing | None:
    """Checks a source without its weights and without PyTorch; a Hub id after a request to the Hub.

    Returns the Hub's answer, for ``find_source``; None for a path. The arguments are those of ``find_source``.

    Raises the errors of ``find_source``, and SourceError for a folder or file that isn't a model.
    """
    place = find_here(source, revision=revision)
    if isinstance(place, Path):
        check_source(place)
        return None
    with MissingDependencyError.of_export(f"{os.fspath(source)} isn't on this disk, and a model of the Hub"):
        from .hub import check
    return check(place)


def describe_source(path: Path) -> SourceSection:
    """Describes a folder or GGUF file for the manifest: its name and, for a snapshot in the Hub's cache, id and commit.

    The cache's layout: https://huggingface.co/docs/huggingface_hub/guides/manage-cache
    """
    # A file in the cache is a link to one that is named after its content; a folder may be reached by a link.
    whole = path.resolve() if path.is_dir() else path.absolute()
    snapshot = _SNAPSHOT.search(whole.as_posix())
    hub = None if snapshot is None else HubSection(id=f"{snapshot[1]}/{snapshot[2]}", commit=snapshot[3])
    if not path.is_dir():
        return SourceSection(kind="gguf", name=path.name, hub=hub, reader=READER_VERSION)
    if snapshot is None or hub is None:
        return SourceSection(kind="huggingface", name=whole.name)
    below = whole.as_posix()[snapshot.end() :]
    return SourceSection(kind="huggingface", name=f"{hub.id}/{below}" if below else hub.id, hub=hub)


def older_reader(source: SourceSection) -> str | None:
    """Returns a message if an older reader of GGUF files made the bundle with this source; None otherwise."""
    if source.kind != "gguf" or (source.reader or 1) >= READER_VERSION:
        return None
    return (
        f"{source.name} was read by an older version of the GGUF reader ({source.reader or 1}; this version's is "
        f"{READER_VERSION}), which misread some files. Export it again."
    )


_BLOCKS = re.compile(
    r"[-._](?:UD-)?(?:I?Q\d\w*|TQ\d\w*|BF16|FP?16|FP?32|MXFP4\w*|NVFP4\w*)\Z", re.ASCII | re.IGNORECASE
)
PART = re.compile(r"-\d{5}-of-\d{5}\Z", re.ASCII)
"""Matches the end of the name of a part of a split file, without .gguf."""
_SAYS_NOTHING = frozenset({"", "model", "ggml-model", "ggml", "main", "unnamed"})


def model_name(path: Path, inside: object = None) -> str:
    """Returns the model's name: its folder's, or its GGUF file's without the quantization type.

    Args:
        inside: the name in the GGUF file's header, used only if the file's own name is generic, because it is often the
            name of a training run.
    """
    file_name = describe_source(path).name.rpartition("/")[2]
    if path.is_dir():
        return file_name
    stem = PART.sub("", file_name[: -len(".gguf")] if file_name.lower().endswith(".gguf") else file_name)
    name = _BLOCKS.sub("", stem)
    if name.lower() not in _SAYS_NOTHING:
        return name
    return inside if isinstance(inside, str) and inside.strip() else stem
