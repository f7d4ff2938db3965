"""The contents of a bundle: manifest.json and targets/NAME/manifest.json (docs/inside/bundle-format.md).

Nothing in them depends on the machine, the folder or the time of the export: two exports of one input are byte-equal. A
field that is added later has a default, so that older bundles still open; any other change raises ``FORMAT_VERSION``.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from msgspec import Meta, field

from ..shared.contracts import Default, ModelInfo, PoolingInfo
from ..shared.errors import BundleError
from ..shared.json_document import parse_json
from ..shared.lowered_program import LoweredProgram
from ..shared.records import Count, R, Record, Sha256, parse_versioned, read
from . import MANIFEST_PATH

FORMAT_VERSION = 2
"""The only version that can be read. Version 1 was never released."""
REPORT_FOLDER = "report/"
"""The folder of measurements and times. Its files are neither listed in ``files`` nor hashed."""


_OWN_HASH = "sha256"
"""The field of a manifest with the hash of its own text, written without that field."""

_PATH = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*(/[A-Za-z0-9_][A-Za-z0-9_.\-]*)*")


def check_path(path: str) -> str:
    """Returns ``path``; raises ValueError unless it is relative, with forward slashes, without ``..`` and hidden
    files.
    """
    if not _PATH.fullmatch(path):
        raise ValueError(f"{path!r} is not a path inside a bundle")
    return path


BundlePath = Annotated[str, Meta(pattern=rf"^(?:{_PATH.pattern})\Z")]
TargetName = Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9\-]*$")]
Commit = Annotated[str, Meta(pattern=r"^[0-9a-f]{40}\Z")]


_LOOKUPS = ("embedding", "quantized_embedding")
_LARGEST = 2**31 - 1
TokenId = Annotated[int, Meta(ge=0, le=_LARGEST)]
Size = Annotated[int, Meta(ge=1, le=_LARGEST)]
"""A size of a model. Tokens and positions of steps are 32-bit integers."""


class ModelSection(Record, frozen=True, kw_only=True):
    """``contracts.ModelInfo`` as JSON. ``parameters`` is the number of weights; 0 if it is unknown."""

    name: str
    architecture: str
    vocab_size: Size
    context_length: Size
    eos_token_ids: tuple[TokenId, ...] = ()
    bos_token_id: int | None = None
    parameters: Count = 0
    generation_defaults: dict[str, Default] = field(default_factory=dict)
    pooling: PoolingInfo | None = None

    @classmethod
    def from_info(cls, info: ModelInfo) -> ModelSection:
        return cls(
            name=info.name,
            architecture=info.architecture,
            vocab_size=info.vocab_size,
            context_length=info.context_length,
            eos_token_ids=info.eos_token_ids,
            bos_token_id=info.bos_token_id,
            parameters=info.parameters,
            generation_defaults=info.generation_defaults,
            pooling=info.pooling,
        )

    def to_info(self) -> ModelInfo:
        return ModelInfo(**{name: getattr(self, name) for name in self.__struct_fields__})

    def disagreement(self, program: LoweredProgram) -> str | None:
        """Returns a message if the vocabulary or context differs from the sizes of the program's tables; None if they
        agree.
        """
        tables = {
            step.inputs[0].name: step.inputs[1].shape[0].constant
            for step in program.steps
            if step.op in _LOOKUPS and len(step.inputs) > 1 and step.inputs[0].kind == "input" and step.inputs[1].shape
        }
        logits = program.outputs.get("logits")
        tokens, positions = tables.get("ids"), tables.get("positions")
        if logits is not None and logits.shape and logits.shape[-1].constant != self.vocab_size:
            return f"model.vocab_size is {self.vocab_size:,}, and its logits are {logits.shape[-1]} wide"
        if tokens is not None and tokens < self.vocab_size:
            return f"model.vocab_size is {self.vocab_size:,}, and its table of tokens has {tokens:,} rows"
        if positions is not None and positions < self.context_length:
            return f"model.context_length is {self.context_length:,}, and its table of positions has {positions:,} rows"
        return None


class HubSection(Record, frozen=True, kw_only=True):
    """A model on the Hugging Face Hub: ``id`` is "org/name", and ``commit`` is the commit that was exported."""

    id: str
    commit: Commit


class AdapterSection(Record, frozen=True, kw_only=True):
    """A PEFT adapter that was merged into the weights: its folder's name, its factor, and the hash of its weights."""

    name: str
    weight: float
    sha256: Sha256


class SourceSection(Record, frozen=True, kw_only=True):
    """The source of the model.

    Attributes:
        name: the name of a file or folder, or a Hub id; never an absolute path.
        hub: the model's place on the Hub, if it came from there or from the Hub's cache; otherwise None.
        reader: the version of the reader of GGUF files; None for other sources and in older bundles.
        adapters: the adapters that were merged into the weights.
    """

    kind: Literal["huggingface", "gguf", "module"]
    name: str
    hub: HubSection | None = None
    reader: int | None = None
    adapters: tuple[AdapterSection, ...] = ()


class PassSection(Record, frozen=True, kw_only=True):
    """The result of a pass: the number of matches, and of candidates that its checks rejected."""

    name: str
    matched: Count
    rejected: Count = 0


class FileSection(Record, frozen=True, kw_only=True):
    """The size and SHA-256 (lower-case hex) of a file. They reveal damage, but not forgery."""

    bytes: Count
    sha256: Sha256


class TargetManifest(Record, frozen=True, kw_only=True):
    """targets/NAME/manifest.json: the state of a target, and the files of its folder.

    It is a file of its own, so that ``optimize build`` on a target's device changes nothing outside the target's
    folder.

    Attributes:
        state: "ready", or "needs-build" before ``optimize build``.
        needs: the device that ``optimize build`` must run on; None if the target is ready.
        files: path in the target's folder -> size and hash; the writer fills it in.
        sections: the target's own fields by name: records of its package (``runtime/shared/targets.py``), or plain JSON
            if no installed package defines the target.
    """

    format_version: int = FORMAT_VERSION
    state: Literal["ready", "needs-build"] = "ready"
    needs: str | None = None
    files: dict[BundlePath, FileSection] = field(default_factory=dict)
    sections: dict[str, Any] = field(default_factory=dict)

    def section(self, kind: type[R]) -> R | None:
        """Returns the section of type ``kind``; None if there is none."""
        return next((section for section in self.sections.values() if isinstance(section, kind)), None)

    def with_section(self, section: Record) -> TargetManifest:
        """Returns a copy in which ``section`` replaces the section of the same type."""
        changed = {k: section if isinstance(v, type(section)) else v for k, v in self.sections.items()}
        return self.model_copy(update={"sections": changed})

    def to_json(self) -> str:
        """Returns the manifest as readable JSON; equal manifests give equal bytes."""
        return _sealed(self.model_dump(mode="json"))

    def model_dump(self, **options: Any) -> dict[str, Any]:
        """Returns the fields as in ``Record.model_dump``, with the sections at the top level."""
        fields = super().model_dump(**options)
        section_fields: dict[str, Any] = fields.pop("sections", {})
        return section_fields | fields

    @classmethod
    def from_json(
        cls, text: str | bytes, *, source: str, sections: Mapping[str, type[Record]] | None = None
    ) -> TargetManifest:
        """Parses a target's manifest. Raises BundleError as ``Manifest.from_json`` does.

        Args:
            text: the manifest's text.
            source: the file's name, for messages.
            sections: the allowed sections: name -> type. If None, any section is allowed and stays plain JSON.
        """
        data = _manifest_data(text, source)
        section_fields = {key: data.pop(key) for key in data.keys() - _SHARED_FIELDS}
        manifest = read(cls, data, source)
        if sections is not None:
            for key in section_fields:
                if key not in sections:
                    raise BundleError(f"{source}: {key}: there is no such field", hint="Export the bundle again.")
            section_fields = {key: read(sections[key], value, source, key) for key, value in section_fields.items()}
        return manifest.model_copy(update={"sections": section_fields})


_SHARED_FIELDS = frozenset(TargetManifest.__struct_fields__) - {"sections"}


class Manifest(Record, frozen=True, kw_only=True):
    """manifest.json of a bundle.

    Attributes:
        targets: the names of the folders in targets/.
        files: path -> size and hash of every file except this one, the targets' files and those in report/. The writer
            fills it in.
    """

    format_version: int = FORMAT_VERSION
    model: ModelSection
    source: SourceSection
    targets: tuple[TargetName, ...]
    recipe: dict[str, Any] = field(default_factory=dict)
    passes: tuple[PassSection, ...] = ()
    toolchain: dict[str, str] = field(default_factory=dict)
    files: dict[BundlePath, FileSection] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if len(set(self.targets)) < len(self.targets):
            raise ValueError(f"targets: one is named twice: {', '.join(self.targets)}")
        model = self.model
        named = {"eos_token_ids": model.eos_token_ids, "bos_token_id": (model.bos_token_id,)}
        for field_name, ids in named.items():
            for token in ids:
                if token is not None and not 0 <= token < model.vocab_size:
                    raise ValueError(f"model.{field_name}: {token} is outside the vocabulary of {model.vocab_size}")

    def to_json(self) -> str:
        """Returns the manifest as readable JSON; equal manifests give equal bytes."""
        fields = self.model_dump(mode="json")
        for optional in ("hub", "reader", "adapters"):
            if not fields["source"][optional]:
                del fields["source"][optional]
        if fields["model"]["pooling"] is None:
            del fields["model"]["pooling"]
        return _sealed(fields)

    @classmethod
    def from_json(cls, text: str | bytes, *, source: str = MANIFEST_PATH) -> Manifest:
        """Parses a manifest. Raises BundleError naming ``source`` and the field if this version can't read it."""
        return read(cls, _manifest_data(text, source), source)


def target_folder(name: str) -> str:
    """Returns the path of a target's folder in the bundle."""
    return f"targets/{name}"


def target_manifest_path(name: str) -> str:
    """Returns the path of a target's own manifest in the bundle."""
    return f"{target_folder(name)}/{MANIFEST_PATH}"


def bundle_hash(manifests: Mapping[str, bytes]) -> str:
    """Returns a bundle's identity: "sha256:" and one hash over the paths and hashes of its manifests.

    The manifests contain the hashes of all other files, except for those in report/.
    """
    lines = (f"{path} {hashlib.sha256(text).hexdigest()}\n" for path, text in sorted(manifests.items()))
    return f"sha256:{hashlib.sha256(''.join(lines).encode()).hexdigest()}"


def check_own_hash(text: bytes, source: str) -> None:
    """Raises BundleError if a manifest was altered: its field ``sha256`` must be the hash of its text without that
    field.
    """
    try:
        data = parse_json(text)
    except ValueError as e:
        raise BundleError(f"{source}: not JSON: {e}", hint="Export the bundle again.") from e
    if isinstance(data, dict) and _OWN_HASH in data:
        fields = {key: value for key, value in data.items() if key != _OWN_HASH}
        if _sealed(fields).encode() != text:
            raise BundleError(
                f"{source}: SHA-256 is not the one that it states of itself; the file was altered",
                hint="Copy the bundle again, or export it again.",
            )


def _sealed(fields: dict[str, Any]) -> str:
    """Returns the text of a manifest with the field ``sha256``, the hash of the text without it."""
    digest = hashlib.sha256(_dumped(fields).encode()).hexdigest()
    return _dumped(fields | {_OWN_HASH: digest})


def _dumped(fields: dict[str, Any]) -> str:
    return json.dumps(fields, sort_keys=True, indent=1) + "\n"


def _manifest_data(text: str | bytes, source: str) -> dict[str, Any]:
    """Parses a manifest and returns its fields without ``sha256``. Raises BundleError."""
    data = parse_versioned(text, FORMAT_VERSION, source, oldest=FORMAT_VERSION)
    if data.pop(_OWN_HASH, None) is None:  # what it is: see check_own_hash
        raise BundleError(f"{source}: {_OWN_HASH} is missing", hint="Copy the bundle again, or export it again.")
    return data
