"""What a user calls a model: a folder or file on this disk, or an id on the Hugging Face Hub.

An id means the same in every command and function that takes a source:

    org/name                     the repository's safetensors; or its GGUF file, if it has only one
    org/name:Q4_K_M              its GGUF file of that block type; org/name:FILE.gguf, the file of that name
    org/name@v1.0, @v1.0:Q8_0    at a branch, tag, pull request (refs/pr/1) or commit

1. What exists on this disk is meant: a folder called org/name hides the model of that id.
2. An id has exactly one slash before its @ or colon, and neither begins with a dot nor ends like a file of weights.
3. All else is a path, and missing.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from pathlib import Path

from enginewright.runtime.shared.errors import SourceError

_NAME = r"[A-Za-z0-9_][\w.-]*"
_ID = re.compile(rf"(?P<repository>{_NAME}/{_NAME})(?:@(?P<revision>[^@:\s]+))?(?::(?P<file>\S+))?", re.ASCII)
_FILES = (".gguf", ".safetensors", ".bin", ".bundle", ".json")


@dataclass(frozen=True)
class HubId:
    """A model on the Hub.

    Attributes:
        repository: "org/name".
        revision: a branch, tag, pull request or commit; None is the repository's default, main.
        file: a GGUF file's path in the repository, or the type of its blocks, such as "Q4_K_M".
    """

    repository: str
    revision: str | None = None
    file: str | None = None

    def __str__(self) -> str:
        revision = "" if self.revision is None else f"@{self.revision}"
        return self.repository + revision + ("" if self.file is None else f":{self.file}")

    @property
    def title(self) -> str:
        """What a bundle of it is called."""
        name = self.repository.partition("/")[2]
        if self.file is None:
            return name
        stem = self.file.rpartition("/")[2]
        return stem[: -len(".gguf")] if stem.lower().endswith(".gguf") else f"{name}-{stem}"


def parse_hub_id(source: str) -> HubId | None:
    """The Hub id that ``source`` is, None if it can only be a path. What exists on this disk isn't asked here."""
    found = _ID.fullmatch(source)
    if found is None or (found["file"] is None and found["repository"].lower().endswith(_FILES)):
        return None
    return HubId(found["repository"], found["revision"], found["file"])


def find_here(source: str | os.PathLike[str], *, revision: str | None = None, option: str = "") -> Path | HubId:
    """The path on this disk that ``source`` names, or else the Hub id that it is; nothing is fetched.

    Raises SourceError for what is neither, and for a revision that doesn't go with it.
    """
    text = os.fspath(source)
    said = f"{option}: " if option else ""
    if os.path.exists(text):
        if revision is not None:
            raise SourceError(
                f"{said}revision {revision!r} is for models of the Hub, and {text} is on this disk",
                hint="Leave the revision out, or call the command from another folder.",
            )
        return Path(text)
    wanted = parse_hub_id(text)
    if wanted is None:
        raise SourceError(
            f"{said}{text} doesn't exist",
            hint="Pass a Hugging Face folder, a GGUF file, or a model's id on the Hub, such as org/name.",
        )
    if revision is not None:
        if wanted.revision is not None:
            raise SourceError(
                f"{said}{text} names a revision, and {revision!r} is given too", hint="Leave one of them out."
            )
        wanted = replace(wanted, revision=revision)
    return wanted
