"""Parses the names that users give models: a local folder or file, or an id on the Hugging Face Hub.

Every command and function that takes a model accepts the same ids:

    org/name                     the repository's safetensors; or its GGUF file, if it has only one
    org/name:Q4_K_M              its GGUF file of that block type; org/name:FILE.gguf, the file of that name
    org/name@v1.0, @v1.0:Q8_0    at a branch, tag, pull request (refs/pr/1) or commit

1. A path that exists on this disk comes first: a folder called org/name hides the model of that id.
2. An id has exactly one slash before its @ or colon. Neither part begins with a dot, and the id has no ending of a
   weights file.
3. Any other name is a path that doesn't exist.
"""

from __future__ import annotations

import difflib
import os
import re
from dataclasses import dataclass
from pathlib import Path

from ..shared.errors import BundleError
from . import MANIFEST_PATH

_NAME = r"[A-Za-z0-9_][\w.-]*"
_ID = re.compile(rf"(?P<repository>{_NAME}/{_NAME})(?:@(?P<revision>[^@:\s]+))?(?::(?P<file>\S+))?", re.ASCII)
_GGUF = ".gguf"
_FILES = (_GGUF, ".safetensors", ".bin", ".bundle", ".json")
_FOLDER_FILES = ("config.json", "adapter_config.json", "model.safetensors", "model.safetensors.index.json")
"""Files by which a folder is recognized as a model's, even if it is incomplete."""


@dataclass(frozen=True)
class HubId:
    """An id of a model on the Hub.

    Attributes:
        repository: "org/name".
        revision: a branch, tag, pull request or commit; None is the repository's default branch.
        file: a GGUF file's path in the repository, or a type of blocks such as "Q4_K_M"; None if the id names neither.
    """

    repository: str
    revision: str | None = None
    file: str | None = None

    def __str__(self) -> str:
        revision = "" if self.revision is None else f"@{self.revision}"
        return self.repository + revision + ("" if self.file is None else f":{self.file}")

    @property
    def title(self) -> str:
        """The default name of a bundle that is exported from this model, without the bundle's ending."""
        name = self.repository.partition("/")[2]
        if self.file is None:
            return name
        stem = self.file.rpartition("/")[2]
        return stem[: -len(".gguf")] if stem.lower().endswith(".gguf") else f"{name}-{stem}"


def parse_hub_id(source: str) -> HubId | None:
    """Parses a Hub id; returns None if ``source`` can only be a path. It doesn't check if such a path exists."""
    match = _ID.fullmatch(source)
    if match is None or (match["file"] is None and match["repository"].lower().endswith(_FILES)):
        return None
    return HubId(match["repository"], match["revision"], match["file"])


def is_model(path: str | os.PathLike[str]) -> bool:
    """Returns True if ``path`` names a model that must be exported before it runs: a folder, a GGUF file or a Hub id.

    Returns False for a bundle and for anything unknown. A name that ends in .gguf counts as a GGUF file even if it
    doesn't exist. It reads at most the first bytes of a file, and doesn't access the Hub.
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


def check_there(path: str | os.PathLike[str]) -> None:
    """Raises BundleError if ``path`` is neither a bundle nor a model. Commands that run both use it."""
    text = os.fspath(path)
    hint = "Pass a bundle, a GGUF file, a Hugging Face folder, or a model's id on the Hub, such as org/name."
    if not os.path.lexists(text):
        if parse_hub_id(text) is None:
            raise BundleError(f"{shown_path(text)} doesn't exist", hint=hint + near_names(Path(text), models=True))
    elif os.path.isdir(text) and not os.path.lexists(os.path.join(text, MANIFEST_PATH)) and not is_model(text):
        missing = f"it has neither {MANIFEST_PATH} nor config.json"
        raise BundleError(f"{text} is neither a bundle nor a model: {missing}", hint=hint)
    elif os.path.isfile(text) and not is_model(text):
        raise BundleError(f"{text} is a file, but no GGUF file", hint=hint)


def shown_path(path: str) -> str:
    """Returns a path for a message: only its beginning if it is longer than 255 characters."""
    return path if len(path) <= 255 else f"{path[:60]}..."


def near_names(root: Path, *, bundles: bool = True, models: bool = False) -> str:
    """Returns a hint for a path that doesn't exist: the neighbour with the most similar name, or else some neighbours.

    Returns "" if there are none.

    Args:
        root: the path that doesn't exist.
        bundles: True to suggest bundles.
        models: True to suggest GGUF files and Hugging Face folders.
    """

    def fits(entry: os.DirEntry[str]) -> bool:
        if os.path.lexists(os.path.join(entry, MANIFEST_PATH)):
            return bundles
        gguf = entry.name.lower().endswith(_GGUF)
        return models and (gguf or (entry.is_dir() and _is_models_folder(entry.path)))

    try:
        names = [entry.name for entry in os.scandir(root.parent) if fits(entry)]
    except (OSError, ValueError):
        return ""
    near = difflib.get_close_matches(root.name[:255], names, 1)
    if near:
        return f" Did you mean {root.parent / near[0]}?"
    neighbours = ", ".join(str(root.parent / name) for name in sorted(names)[:3])
    return f" There is {neighbours}." if neighbours else ""
