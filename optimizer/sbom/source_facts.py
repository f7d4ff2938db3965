"""Collects facts about a bundle's source model for the bill of materials: its files with hashes, and its licence."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from enginewright.optimizer.capture.find_source import describe_source, find_source
from enginewright.optimizer.capture.gguf.header import all_parts, read_header
from enginewright.optimizer.shared.files import hash_file
from enginewright.runtime.bundle.manifest import FileSection
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.bundle.regular_file import MOST_TEXT_BYTES, read_regular
from enginewright.runtime.shared.errors import SourceError
from enginewright.runtime.shared.json_document import parse_json
from enginewright.runtime.shared.progress import Progress, ProgressEvent, silent

_FRONT_MATTER = re.compile(r"\A---\s*\n(.*?)^---\s*$", re.S | re.M)


@dataclass(frozen=True)
class SourceFacts:
    """Facts about a source model on disk.

    Attributes:
        name: the name of its folder or file.
        files: size and hash of its files by name, without hidden files.
        licence: the licence that the model states, such as "apache-2.0"; None if it states none.
    """

    name: str
    files: dict[str, FileSection]
    licence: str | None


def source_facts(bundle: Bundle, source: str | Path, progress: Progress = silent) -> SourceFacts:
    """Hashes the files of a bundle's source and reads its licence from the model card, config.json or GGUF metadata.

    Args:
        bundle: the bundle, whose manifest names the source.
        source: the Hugging Face directory, GGUF file or Hub id.
        progress: called with the stages "download" (for a Hub id) and "source", in bytes.

    Raises:
        SourceError: the source is missing or damaged, or its name differs from the manifest's.
    """
    source = find_source(source, option="source", progress=progress)
    described, section = describe_source(source), bundle.manifest.source
    name = described.name
    if (section.kind, section.name) != (described.kind, name):
        raise SourceError(
            f"source: {bundle.path} was made from {section.name} ({section.kind}), and {source} is called {name}",
            hint="Pass the model that the bundle was exported from, or leave --source out.",
        )
    paths = [*all_parts(source)] if source.is_file() else [source]
    if source.is_dir():
        paths = sorted(p for p in source.iterdir() if p.is_file() and not p.name.startswith("."))
    try:
        total, done, files = sum(p.stat().st_size for p in paths), 0, {}
        for path in paths:
            files[path.name] = hash_file(path)
            done += files[path.name].bytes
            progress(ProgressEvent("source", done, total, path.name))
        licence = _licence_of_directory(source) if source.is_dir() else _licence_of_gguf(source)
    except OSError as e:
        raise SourceError(f"{e.filename}: can't be read: {e.strerror}", hint="Check the file's permissions.") from e
    return SourceFacts(name, files, licence)


def _licence_of_directory(folder: Path) -> str | None:
    """Returns the licence in the model card's front matter, or else in config.json; None if neither states one."""
    card = folder / "README.md"
    text = read_regular(card, most=MOST_TEXT_BYTES).decode(errors="replace") if card.is_file() else ""
    if matter := _FRONT_MATTER.match(text.replace("\r\n", "\n")):
        # "other" has its name beside it.
        for key in ("license_name", "license"):
            if match := re.search(rf"^{key}:[ \t]*([^\s#\[{{&*|>][^#\n]*)", matter[1], re.M):
                return match[1].strip().strip("'\"") or None
    config = folder / "config.json"
    if config.is_file():
        try:
            document = parse_json(read_regular(config, most=MOST_TEXT_BYTES))
        except ValueError as e:
            raise SourceError(f"{config}: not JSON: {e}", hint="Download the model again.") from e
        licence = document.get("license") if isinstance(document, dict) else None
        return licence.strip() or None if isinstance(licence, str) else None
    return None


def _licence_of_gguf(path: Path) -> str | None:
    keys = read_header(path).keys
    for key in ("general.license.name", "general.license"):
        if isinstance(value := keys.get(key), str) and value.strip():
            return value.strip()
    return None
