"""Models by the names that users give them: a folder or file on this disk, or an id on the Hugging Face Hub.

An id means the same in every command and function that takes a model:

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
from dataclasses import dataclass

from . import MANIFEST_PATH

_NAME = r"[A-Za-z0-9_][\w.-]*"
_ID = re.compile(rf"(?P<repository>{_NAME}/{_NAME})(?:@(?P<revision>[^@:\s]+))?(?::(?P<file>\S+))?", re.ASCII)
_GGUF = ".gguf"
_FILES = (_GGUF, ".safetensors", ".bin", ".bundle", ".json")
_FOLDER_FILES = ("config.json", "adapter_config.json", "model.safetensors", "model.safetensors.index.json")
"""Files that make a folder a model's, whole or not."""


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


def is_model(path: str | os.PathLike[str]) -> bool:
    """Returns True for what must be exported before it runs: a model's folder, a GGUF file, or a Hub id.

    A name that ends in .gguf is meant as such a file, whatever has that name. A bundle, and anything unknown, is False.
    Nothing is read but the first bytes of a file, and nothing is asked of the Hub.
    """
    text = os.fspath(path)
    if os.path.isdir(text):
        return _is_models_folder(text)
    if text.lower().endswith(_GGUF):
        return True
    if os.path.isfile(text):
        return _first_bytes(text) == b"GGUF"
    return not os.path.lexists(text) and parse_hub_id(text) is not None


def _is_models_folder(folder: str) -> bool:
    try:
        names = os.listdir(folder)
    except OSError:
        return False
    if MANIFEST_PATH in names:
        return False
    known = any(name in _FOLDER_FILES or name.lower().endswith(_GGUF) for name in names)
    return known or folder.rstrip("/").lower().endswith(_GGUF)


def _first_bytes(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(4)
    except OSError:
        return b""
