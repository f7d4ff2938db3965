"""Fetches from the Hugging Face Hub into its cache, only the files that an export reads.

huggingface_hub's settings determine cache, token and address (HF_HOME, HF_TOKEN or `hf auth login`, HF_ENDPOINT,
HF_HUB_OFFLINE). The cache has its usual layout and is shared with other tools. Only the download of bytes is our own
(``hub_blobs``), because huggingface_hub 2 drops interrupted downloads. Every file is compared with the hash in the
Hub's list before it is renamed to its final name.

Weights come last, so a snapshot that has its weights is complete.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from huggingface_hub import constants, hf_hub_download, hf_hub_url
from huggingface_hub.errors import (
    FileMetadataError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import build_hf_headers, validate_repo_id  # type: ignore[attr-defined]  # documented

from enginewright.runtime.bundle.hub_id import HubId, near_names
from enginewright.runtime.shared.errors import CapacityError, SourceError
from enginewright.runtime.shared.memory import format_bytes
from enginewright.runtime.shared.progress import Progress, ProgressEvent, silent

from .check_source import CONFIG, INDEX, SINGLE, check_folder, read_json
from .hub_blobs import HTTP_ERROR, Blob, download_blob, get_json, has_hash
from .quantized.config import CONFIGS_BESIDE

_SMALL = frozenset(
    {
        CONFIG,
        *CONFIGS_BESIDE,
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "tokenizer.model",
        "spiece.model",
        "tekken.json",
        "vocab.json",
        "vocab.txt",
        "merges.txt",
        "chat_template.jinja",
        "chat_template.json",
        "README.md",  # which says the licence
    }
)
_MORE_TEMPLATES = "additional_chat_templates/"
_SHARD = re.compile(r"model-\d+-of-\d+\.safetensors")

_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack")
_BLOCK_TYPE = re.compile(
    r"(?:^|[-._/])((?:UD-)?(?:I?Q\d\w*|TQ\d\w*|BF16|FP?16|FP?32|MXFP4\w*|NVFP4\w*))(?=[-.])", re.ASCII | re.IGNORECASE
)
_PART = re.compile(r"-\d{5}-of-(\d{5})\.gguf\Z", re.IGNORECASE)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_REVISION = re.compile(r"(?!.*\.\.)\w[\w./+-]*", re.ASCII)
_NO_NAME = re.compile(r"[\x00-\x1f\x7f\\]|\A[A-Za-z]:")
_LISTED = 12


def fetch(wanted: HubId, progress: Progress, *, weights: bool = True, listed: Listing | None = None) -> Path:
    """Returns the model's folder or GGUF file in the Hub's cache; without ``weights``, at least its config.json is
    there.

    In offline mode (HF_HUB_OFFLINE) only earlier downloads are used. Otherwise missing files of the Hub's current
    commit are fetched; the configuration first, which is checked before the weights are fetched. ``listed``: the result
    of ``check``, if there is one.

    Raises the errors of ``find_source``.
    """
    _check_revision(wanted)
    with _hub_errors(wanted):
        if constants.is_offline_mode():
            return _cached(wanted)
        repository = listed or Listing.of(wanted)
        parts = choose_files(wanted, repository.files, f"at {constants.ENDPOINT}")
        download = _Download(wanted, repository, progress)
        if parts is not None:
            download.get(parts)
            download.write_reference()
            return download.folder / parts[0]
        if not weights:
            download.get([CONFIG])
            return download.folder
        indexed = SINGLE not in repository.files
        small = [n for n in repository.files if n in _SMALL or (n.startswith(_MORE_TEMPLATES) and n.endswith(".jinja"))]
        small += [INDEX] if indexed else []
        large = [n for n in repository.files if _SHARD.fullmatch(n)] if indexed else [SINGLE]
        download.get(small, of=[*small, *large])
        from .huggingface import read_config  # transformers is slow to import, and refusing an id needs none of it

        read_config(download.folder)  # what can't be compiled is refused before gigabytes of it come
        if indexed:
            large = _shards(download.folder / INDEX, repository.files)
        download.get(large, of=[*small, *large])
        download.write_reference()
        return download.folder


def check(wanted: HubId) -> Listing | None:
    """Finds a model on the Hub, or in its cache in offline mode, and checks its configuration if it is a folder.

    It imports neither PyTorch nor transformers, which take longer than the Hub's answer.

    Returns the Hub's answer, for ``fetch``; None in offline mode. Raises the errors of ``find_source``.
    """
    repository: Listing | None = None
    with _hub_errors(wanted):
        _check_revision(wanted)
        if constants.is_offline_mode():
            place = _cached(wanted)
        else:
            repository = Listing.of(wanted)
            if choose_files(wanted, repository.files, f"at {constants.ENDPOINT}") is not None:
                return repository
            download = _Download(wanted, repository, silent)
            download.get([name for name in (CONFIG, *CONFIGS_BESIDE) if name in repository.files])
            place = download.folder
        if place.is_dir():
            check_folder(place)
    return repository


def _check_revision(wanted: HubId) -> None:
    if wanted.revision is not None and not _REVISION.fullmatch(wanted.revision):
        raise SourceError(f"{wanted}: {wanted.revision!r} can't be a revision", hint="Pass a branch, tag or commit.")


def choose_files(wanted: HubId, files: Collection[str], where: str) -> tuple[str, ...] | None:
    """Returns the names of all parts of the wanted GGUF file among a repository's ``files``.

    Returns None if no GGUF file is wanted and the repository has safetensors. Raises SourceError if the file or a part
    is missing, or several files match; lists the available ones.
    """
    ggufs = (n for n in files if n.lower().endswith(".gguf") and "mmproj" not in n.rpartition("/")[2].lower())
    firsts = sorted({_part(name, 1) for name in ggufs})
    if wanted.file is not None:
        matching = _matching(wanted.file, firsts)
    elif CONFIG in files and (SINGLE in files or INDEX in files):
        return None
    elif len(firsts) == 1:
        matching = firsts
    else:
        raise _no_weights(wanted, files, firsts, where)
    if len(matching) != 1:
        kind = "has no" if not matching else f"has {len(matching)} files for"
        raise SourceError(
            f"{wanted}: {wanted.repository} {where} {kind} {wanted.file}",
            hint=f"GGUF files there: {_shown(matching or firsts)}. Name one after a colon, by block type or file name.",
        )
    split = _PART.search(matching[0])
    count = 1 if split is None else int(split[1])
    missing = count - sum(_part(n, 1) == matching[0] for n in files)
    if missing:  # counted first: a name may state 99,999 parts
        raise SourceError(
            f"{wanted}: {wanted.repository} {where} lacks {missing:,} of the {count:,} parts of {matching[0]}",
            hint="Look for a revision that has all parts, or for another file.",
        )
    return tuple(_part(matching[0], number + 1) for number in range(count))


def _matching(wanted: str, firsts: Sequence[str]) -> list[str]:
    """Returns the GGUF files (their first parts) that match a file name or a quantization type."""
    if wanted.lower().endswith(".gguf"):
        return [n for n in firsts if n == _part(wanted, 1)]
    exact = [n for n in firsts if _block_type(n) == wanted.upper()]
    matching = exact or [n for n in firsts if _block_type(n) == f"UD-{wanted.upper()}"]
    return [n for n in matching if not _PART.search(n)] or matching


def _part(name: str, number: int) -> str:
    """Returns the name of part ``number`` of the split GGUF file ``name``; ``name`` itself if it isn't split."""
    return _PART.sub(lambda match: f"-{number:05d}{match[0][6:]}", name)


def _no_weights(wanted: HubId, files: Collection[str], ggufs: Sequence[str], where: str) -> SourceError:
    name = f"{wanted}: {wanted.repository} {where}"
    if ggufs:
        example = next((t for t in map(_block_type, ggufs) if t), ggufs[0])
        return SourceError(
            f"{name} has {len(ggufs)} GGUF files, and none is named",
            hint=f"Name one, as in {wanted.repository}:{example}. There are {_shown(ggufs)}.",
        )
    if "adapter_config.json" in files:
        return SourceError(
            f"{name} is an adapter (LoRA) of another model",
            hint=f"Fetch it: hf download {wanted.repository} --local-dir FOLDER; then export MODEL --lora FOLDER.",
        )
    if pickles := sorted(n for n in files if n.endswith(_PICKLES)):
        return SourceError(
            f"{name} has its weights in {pickles[0]} only, and such files can run code: they are never loaded",
            hint="Look for a revision with safetensors (such as @refs/pr/1, by the Hub's converter), or load it with "
            "transformers where you trust it, save_pretrained() it, and export that folder.",
        )
    return SourceError(
        f"{name} has neither {CONFIG} with {SINGLE} or {INDEX}, nor a GGUF file",
        hint=f"It has {_shown(sorted(files))}." if files else "It is empty.",
    )


def _block_type(name: str) -> str | None:
    """Returns the quantization type in a GGUF file's name: "Q4_K_M" for "model-q4_k_m.gguf"."""
    types = _BLOCK_TYPE.findall(_PART.sub(".gguf", name))
    return types[-1].upper() if types else None


def _shown(names: Sequence[str]) -> str:
    more = f", and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more if names else "none"


@dataclass(frozen=True)
class Listing:
    """The Hub's answer for an id: a commit and its files. The value of a file is None if the Hub doesn't tell
    its hash.
    """

    commit: str
    files: Mapping[str, Blob | None]

    @staticmethod
    def of(wanted: HubId) -> Listing:
        """Fetches the list of a repository's files from the Hub.

        Raises the errors of huggingface_hub; SourceError if the answer isn't in the Hub's format.
        """
        files: dict[str, Blob | None] = {}
        try:
            validate_repo_id(wanted.repository)
            revision = "" if wanted.revision is None else f"/revision/{quote(wanted.revision, safe='')}"
            info = get_json(f"api/models/{wanted.repository}{revision}", {"blobs": "true"})
            commit = str(info["sha"])
            if not _COMMIT.fullmatch(commit):
                raise ValueError(f"the commit is {commit!r}")
            for entry in info.get("siblings") or ():
                if not _is_inside(name := entry["rfilename"]):
                    continue  # whoever joins a folder and this name is led out of the folder
                digest, size = entry["lfs"]["sha256"] if entry.get("lfs") else entry.get("blobId"), entry.get("size")
                files[name] = None if digest is None or size is None else Blob(digest, size)
        except (HFValidationError, HfHubHTTPError):
            raise
        except UnicodeEncodeError as e:
            raise SourceError(
                f"{wanted}: the token has a character that none can have", hint="Log in again, or set HF_TOKEN anew."
            ) from e
        except (ValueError, KeyError, TypeError, AttributeError) as e:
            raise SourceError(
                f"{wanted}: the answer of {constants.ENDPOINT} isn't the Hub's ({type(e).__name__})",
                hint="Check HF_ENDPOINT, and that no proxy or login page answers in its place.",
            ) from e
        return Listing(commit, files)


def _is_inside(name: object) -> bool:
    """Returns True if a file's name in a repository's listing stays inside the folder that it is joined to."""
    if not isinstance(name, str) or _NO_NAME.search(name):
        return False
    return not any(part in ("", ".", "..") for part in name.split("/"))


class _Download:
    """Downloads files of one commit into the cache. ``folder`` is the commit's snapshot."""

    def __init__(self, wanted: HubId, repository: Listing, progress: Progress) -> None:
        self._wanted, self._repository, self._progress = wanted, repository, progress
        self._cache = _cache_of(wanted)
        self.folder = self._cache / "snapshots" / repository.commit

    def get(self, names: Sequence[str], of: Sequence[str] = ()) -> None:
        """Fetches the missing files of ``names``, in their order.

        ``of``: all files that will be fetched, as far as known, for the progress; () for ``names``.
        """
        whole = list(dict.fromkeys([*(of or names), *names]))
        done = sum(self._size(n) for n in whole if self._is_there(n))
        total = sum(map(self._size, whole))
        missing = [n for n in names if not self._is_there(n)]
        self._check_disk(missing)
        for name in missing:
            blob = self._repository.files[name]
            if blob is not None and blob.size <= constants.MAX_HTTP_DOWNLOAD_SIZE:
                started = done

                def on_bytes(have: int, name: str = name, started: int = started) -> None:
                    self._report(started + have, total, name)

                url = hf_hub_url(self._wanted.repository, name, revision=self._repository.commit)
                download_blob(blob, url, build_hf_headers(library_name="enginewright"), self._cache / "blobs", on_bytes)
            if blob is None:
                raise SourceError(
                    f"{self._wanted}: {constants.ENDPOINT} doesn't say which bytes {name} has",
                    hint="Take the Hub itself, or a mirror that lists sizes and hashes.",
                )
            # Finds the bytes there and gives them their name; or fetches what the Hub offers now.
            hf_hub_download(self._wanted.repository, name, revision=self._repository.commit)
            if not has_hash(place := self.folder / name, blob):
                place.unlink(missing_ok=True)
                raise SourceError(
                    f"{self._wanted}: {name} isn't what the Hub lists (hash {blob.hash})", hint="Run the command again."
                )
            done += self._size(name)
            self._report(done, total, name)

    def _report(self, done: int, total: int, name: str) -> None:
        detail = f"{name} ({format_bytes(done)} of {format_bytes(total)})"
        self._progress(ProgressEvent("download", done, total, detail))

    def _is_there(self, name: str) -> bool:
        return (self.folder / name).is_file()

    def _size(self, name: str) -> int:
        blob = self._repository.files[name]
        return 0 if blob is None else blob.size

    def _check_disk(self, missing: Sequence[str]) -> None:
        here = next(p for p in (self._cache, *self._cache.parents) if p.exists())
        needed = sum(map(self._size, missing))
        for name in missing:
            blob = self._repository.files[name]
            if blob is not None:
                with suppress(FileNotFoundError):
                    needed -= (self._cache / "blobs" / f"{blob.hash}.incomplete").stat().st_size
        if needed > (free := shutil.disk_usage(here).free):
            raise _disk_full(self._wanted, f"{format_bytes(needed)} are missing, and {format_bytes(free)} are free")

    def write_reference(self) -> None:
        """Records the revision's commit in the cache for offline mode, after all files are fetched."""
        revision = self._wanted.revision or constants.DEFAULT_REVISION
        if revision == self._repository.commit:
            return
        path = self._cache / "refs" / revision
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=".", delete=False) as unfinished:
            unfinished.write(self._repository.commit)
        os.replace(unfinished.name, path)


def _shards(index: Path, files: Collection[str]) -> list[str]:
    weight_map = read_json(index).get("weight_map")
    named = set(weight_map.values()) if isinstance(weight_map, dict) else set()
    shards = sorted(n for n in named if isinstance(n, str) and n.endswith(".safetensors") and "/" not in n)
    if missing := sorted(n for n in shards if n not in files):
        raise SourceError(
            f"{index}: it names {missing[0]}, which the repository doesn't have", hint="Try another revision."
        )
    if not shards or len(shards) != len(named):
        raise SourceError(f"{index}: weight_map names no safetensors files", hint="Try another revision.")
    return shards


# ---- offline


def _cached(wanted: HubId) -> Path:
    """Returns the snapshot of a model in the Hub's cache. Raises SourceError naming the missing part."""
    cache, revision = _cache_of(wanted), wanted.revision or constants.DEFAULT_REVISION
    reference = cache / "refs" / revision
    commit = revision if _COMMIT.fullmatch(revision) else reference.read_text() if reference.is_file() else ""
    folder = cache / "snapshots" / commit
    there = sorted(p.name for p in cache.glob("snapshots/*"))
    if not commit or not folder.is_dir():
        commits = f"; it has the commits {', '.join(there)}" if there else ""
        raise SourceError(
            f"{wanted}: it isn't on this disk, and not in the Hub's cache {constants.HF_HUB_CACHE}{commits}; "
            "HF_HUB_OFFLINE is set, so nothing is fetched",
            hint="Unset HF_HUB_OFFLINE to fetch it.",
        )
    files = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}
    if (parts := choose_files(wanted, files, "in the Hub's cache (HF_HUB_OFFLINE is set)")) is not None:
        return folder / parts[0]
    if SINGLE not in files:
        _shards(folder / INDEX, files)
    return folder


def _cache_of(wanted: HubId) -> Path:
    """Returns the model's folder in the Hub's cache."""
    return Path(constants.HF_HUB_CACHE).expanduser() / f"models--{wanted.repository.replace('/', '--')}"


# ---- errors


@contextmanager
def _hub_errors(wanted: HubId) -> Iterator[None]:
    """Converts errors of huggingface_hub, its HTTP library and the disk in the block to our errors.

    Their texts aren't included: an address may contain a signature, and a header the token.
    """
    hub = constants.ENDPOINT
    log_in = "`hf auth login`, or HF_TOKEN"
    try:
        yield
    except GatedRepoError as e:
        raise SourceError(
            f"{wanted}: the model is gated, and this token, or none, has no access",
            hint=f"Ask for access at {hub}/{wanted.repository}, then log in: {log_in}.",
        ) from e
    except RepositoryNotFoundError as e:
        raise SourceError(
            f"{wanted}: there is neither a folder {wanted.repository} here nor a model of that id at {hub} that may "
            "be read",
            hint=f"Check the spelling. If the model is private, log in: {log_in}."
            + near_names(Path(wanted.repository), bundles=False, models=True),
        ) from e
    except RevisionNotFoundError as e:
        raise SourceError(
            f"{wanted}: {wanted.repository} has no revision {wanted.revision!r}",
            hint=f"It has {_revisions(wanted)}; or pass a whole commit.",
        ) from e
    except HFValidationError as e:
        raise SourceError(f"{wanted}: it doesn't exist, and can't be a model's id on the Hub", hint=str(e)) from e
    except HfHubHTTPError as e:
        status = e.response.status_code
        hint = f"Check that the token is valid and may read the model: {log_in}." if status in (401, 403) else None
        raise SourceError(
            f"{wanted}: {hub} answers {status} {e.response.reason_phrase}", hint=hint or "Try again later."
        ) from e
    except (HTTP_ERROR, ConnectionError, LocalEntryNotFoundError, FileMetadataError) as e:
        there = ", or set HF_HUB_OFFLINE=1 to take what its cache has" if _cache_of(wanted).is_dir() else ""
        raise SourceError(
            f"{wanted}: there is no folder {wanted.repository} here, and the connection to {hub} failed "
            f"({type(e).__name__})",
            hint=f"Check the network, proxies and HF_ENDPOINT{there}. What was fetched stays, and the next attempt "
            f"goes on from it.{near_names(Path(wanted.repository), bundles=False, models=True)}",
        ) from e
    except OSError as e:
        if e.errno in (errno.ENOSPC, errno.EDQUOT):
            raise _disk_full(wanted, "there is no space left") from e
        raise SourceError(
            f"{wanted}: {e.filename or constants.HF_HUB_CACHE} can't be written: {e.strerror or type(e).__name__}",
            hint="Check the permissions of the Hub's cache, or set HF_HOME to another folder.",
        ) from e


def _disk_full(wanted: HubId, what: str) -> CapacityError:
    return CapacityError(
        f"{wanted}: the Hub's cache {constants.HF_HUB_CACHE} is full: {what}",
        hint="Free some (`hf cache ls` and `hf cache rm`), or set HF_HOME to a folder on another disk.",
    )


def _revisions(wanted: HubId) -> str:
    try:
        references = get_json(f"api/models/{wanted.repository}/refs")
        return _shown([str(entry["name"]) for kind in ("branches", "tags") for entry in references[kind]])
    except (HTTP_ERROR, OSError, ValueError, KeyError, TypeError, AttributeError):  # the list is only a help
        return "others"
