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
        """The name of its bundle, without the ending."""
        name = self.repository.partition("/")[2]
        if self.file is None:
            return name
        stem = self.file.rpartition("/")[2]
        return stem[: -len(".gguf")] if stem.lower().endswith(".gguf") else f"{name}-{stem}"


def parse_hub_id(source: str) -> HubId | None:
    """The Hub id that ``source`` is, None if it can only be a path. What exists on this disk isn't asked here."""
    match = _ID.fullmatch(source)
    if match is None or (match["file"] is None and match["repository"].lower().endswith(_FILES)):
        return None
    return HubId(match["repository"], match["revision"], match["file"])


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


def check_there(path: str | os.PathLike[str]) -> None:
    """Raises BundleError unless ``path`` may be a bundle or a model: for commands that run both."""
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
    """A path for a message: the beginning of one that is longer than a file's name can be."""
    return path if len(path) <= 255 else f"{path[:60]}..."


def near_names(root: Path, *, bundles: bool = True, models: bool = False) -> str:
    """Returns a hint for a path that doesn't exist: its nearest neighbour, or else some neighbours; empty without any.

    Args:
        root: the path that doesn't exist.
        bundles: whether bundles are named.
        models: whether GGUF files and Hugging Face folders are named.
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
