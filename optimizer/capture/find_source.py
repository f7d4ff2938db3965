"""What a user calls a model, found: a folder or file on this disk, or an id on the Hugging Face Hub.

Every command and function that takes a source asks here, so an id means the same everywhere:

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

from enginewright.runtime.bundle.manifest import HubSection, SourceSection
from enginewright.runtime.shared.errors import MissingDependencyError, SourceError
from enginewright.runtime.shared.progress import Progress, silent

_NAME = r"[A-Za-z0-9_][\w.-]*"
_ID = re.compile(rf"(?P<repository>{_NAME}/{_NAME})(?:@(?P<revision>[^@:\s]+))?(?::(?P<file>\S+))?", re.ASCII)
_FILES = (".gguf", ".safetensors", ".bin", ".bundle", ".json")
_SNAPSHOT = re.compile(r"models--([^/]+?)--([^/]+)/snapshots/([0-9a-f]{40})(?:/|\Z)")


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


def find_source(
    source: str | Path,
    *,
    revision: str | None = None,
    option: str = "",
    weights: bool = True,
    progress: Progress = silent,
) -> Path:
    """The folder or file that ``source`` names, fetched into the Hub's cache if it is an id and not there yet.

    Args:
        source: a path, or a Hub id as above.
        revision: of a Hub id that names none itself.
        option: what the user gave it as, for errors, such as "against".
        weights: False fetches no more of an id's folder than its config.json.
        progress: called with the stage "download", in bytes.

    Raises:
        SourceError: nothing is there, here or on the Hub, or it can't be fetched; says why and what to do.
        UnsupportedModelError: the configuration says already that it can't be compiled.
        CapacityError: the disk is too small.
        MissingDependencyError: huggingface_hub, or what reads configurations, is not installed.
    """
    wanted = find_here(source, revision=revision, option=option)
    if isinstance(wanted, Path):
        return wanted
    said = f"{option}: " if option else ""
    with MissingDependencyError.of_export(f"{said}{os.fspath(source)} isn't on this disk, and a model of the Hub"):
        from .hub import fetch
    return fetch(wanted, progress, weights=weights)


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


def describe_source(path: Path) -> SourceSection:
    """What a manifest says of a folder or GGUF file: its name, and of a snapshot in the Hub's cache id and commit.

    The cache's layout: https://huggingface.co/docs/huggingface_hub/guides/manage-cache
    """
    # A file in the cache is a link to one that is named after its content; a folder may be reached by a link.
    whole = path.resolve() if path.is_dir() else path.absolute()
    found = _SNAPSHOT.search(whole.as_posix())
    hub = None if found is None else HubSection(id=f"{found[1]}/{found[2]}", commit=found[3])
    if not path.is_dir():
        return SourceSection(kind="gguf", name=path.name, hub=hub)
    if found is None or hub is None:
        return SourceSection(kind="huggingface", name=whole.name)
    below = whole.as_posix()[found.end() :]
    return SourceSection(kind="huggingface", name=f"{hub.id}/{below}" if below else hub.id, hub=hub)


_BLOCKS = re.compile(
    r"[-._](?:UD-)?(?:I?Q\d\w*|TQ\d\w*|BF16|FP?16|FP?32|MXFP4\w*|NVFP4\w*)\Z", re.ASCII | re.IGNORECASE
)
_SAYS_NOTHING = frozenset({"", "model", "ggml-model", "ggml", "main", "unnamed"})


def model_name(path: Path, inside: object = None) -> str:
    """What a model is called: after its folder, or its GGUF file without the type of its blocks.

    ``inside``: the name that a GGUF file has of itself, for a file whose own says nothing. It is often that of a run of
    training.
    """
    said = describe_source(path).name.rpartition("/")[2]
    if path.is_dir():
        return said
    stem = said[: -len(".gguf")] if said.lower().endswith(".gguf") else said
    name = _BLOCKS.sub("", stem)
    if name.lower() not in _SAYS_NOTHING:
        return name
    return inside if isinstance(inside, str) and inside.strip() else stem
