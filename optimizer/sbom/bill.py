"""Writes a bundle's bill of materials as CycloneDX 1.6, with the model as a machine-learning component (an ML-BOM).

Specification: https://cyclonedx.org/docs/1.6/json/ . The same bundle gives the same bytes: the serial number is derived
from the contents, and the timestamp is left out unless the caller passes one.
"""

from __future__ import annotations

import hashlib
import json
import re
import uuid
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any
from urllib.parse import quote

from packaging.licenses import InvalidLicenseExpression, canonicalize_license_expression

from enginewright.optimizer.report.document import read_report
from enginewright.optimizer.shared.files import write_output
from enginewright.plugins.emit.finished_bundle import hash_files
from enginewright.runtime.bundle import MANIFEST_PATH
from enginewright.runtime.bundle.manifest import FileSection, target_manifest_path
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.bundle.regular_file import MOST_JSON_BYTES, read_regular
from enginewright.runtime.shared.errors import RequestError
from enginewright.runtime.shared.progress import Progress, silent
from enginewright.runtime.shared.targets import part

from .source_facts import SourceFacts

PREFIX = "enginewright"
"""The prefix of the names of properties, which CycloneDX leaves to each tool."""

_BUNDLE, _CALIBRATION, _SOURCE = "bundle", "calibration", "source"

_SPDX_ID = re.compile(r"(?!LicenseRef-)[\w.+-]+")


def bill_of_materials(
    bundle: Bundle, *, source: SourceFacts | None = None, timestamp: str | None = None, progress: Progress = silent
) -> dict[str, Any]:
    """Returns the bill of materials of a bundle, as a JSON document.

    Args:
        bundle: the bundle. The hashes of its files are checked first.
        source: facts about the model that the bundle was made from; if None, the bill has only the model's name.
        timestamp: the time of the bill (RFC 3339); left out if None.
        progress: called with the stage "hash", in bytes.

    Raises:
        BundleError: a file was altered, or the report of the export is damaged. The message names the file.
    """
    files = _files(bundle, progress)
    body: dict[str, Any] = {
        "metadata": {
            **({} if timestamp is None else {"timestamp": timestamp}),
            "lifecycles": [{"phase": "build"}],
            "tools": {"components": [_package("enginewright", version("enginewright"), "application")]},
            "component": _model(bundle, files, source),
        },
        "components": [*_file_components(files), *_toolchain(bundle)],
        "dependencies": [{"ref": _BUNDLE, "dependsOn": [f"file:{path}" for path in files]}],
    }
    serial = uuid.uuid5(uuid.NAMESPACE_OID, json.dumps(body, sort_keys=True))
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{serial}",
        "version": 1,
        **body,
    }


def moment(epoch: str) -> str:
    """Converts seconds since 1970, as text, into an RFC 3339 time in UTC. Raises RequestError if the text isn't a
    number.
    """
    try:
        return datetime.fromtimestamp(int(epoch), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    except (ValueError, OverflowError, OSError) as e:
        raise RequestError(
            f"SOURCE_DATE_EPOCH: {epoch!r} isn't a number of seconds since 1970", hint="Unset it, or set it right."
        ) from e


def write_bill(bill: Mapping[str, Any], path: Path) -> None:
    """Writes a bill as indented JSON. Raises RequestError if it can't be written."""
    write_output(path, json.dumps(bill, indent=2, ensure_ascii=False) + "\n", RequestError)


def _files(bundle: Bundle, progress: Progress) -> dict[str, FileSection]:
    """Returns size and hash by path of the files that the bundle's manifests list, and of the manifests themselves."""
    hash_files(bundle, progress)
    files = dict(bundle.files)
    for path in (MANIFEST_PATH, *(target_manifest_path(name) for name in bundle.targets)):
        data = read_regular(bundle.path / path, most=MOST_JSON_BYTES, within=bundle.path)
        files[path] = FileSection(bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
    return dict(sorted(files.items()))


def _model(bundle: Bundle, files: Mapping[str, FileSection], source: SourceFacts | None) -> dict[str, Any]:
    model, report = bundle.manifest.model, read_report(bundle).document
    card: dict[str, Any] = {
        "task": "text-generation",
        "modelArchitecture": model.architecture,
        "inputs": [{"format": "text"}],
        "outputs": [{"format": "text"}],
    }
    if report is not None and report.calibration is not None:
        tokens = report.calibration.coverage.tokens
        card["datasets"] = [
            {
                "type": "dataset",
                "bom-ref": _CALIBRATION,
                "name": report.calibration.origin,
                "description": f"{tokens:,} tokens that weights were quantized by",
            }
        ]
    facts = {
        "model.parameters": model.parameters,
        "model.context_length": model.context_length,
        "model.vocab_size": model.vocab_size,
        **{f"target.{name}.{key}": value for name in bundle.targets for key, value in _target(bundle, name)},
        **dict(_flat(bundle.manifest.recipe, "recipe")),
    }
    return {
        "type": "machine-learning-model",
        "bom-ref": _BUNDLE,
        "name": model.name,
        "description": "A bundle of Enginewright. Its hash is that of the lines that sha256sum writes of its files.",
        "hashes": [{"alg": "SHA-256", "content": _digest(files)}],
        **_licences(source),
        "pedigree": {"ancestors": [_ancestor(bundle, source)]},
        "modelCard": {"modelParameters": card},
        "properties": _properties(facts),
    }


def _digest(files: Mapping[str, FileSection]) -> str:
    """Returns one SHA-256 for all files: the hash of the lines that sha256sum would write for them, sorted by path."""
    lines = "".join(f"{file.sha256}  {path}\n" for path, file in files.items())
    return hashlib.sha256(lines.encode()).hexdigest()


def _target(bundle: Bundle, name: str) -> Iterator[tuple[str, Any]]:
    """Yields (name, value) of a target's properties: its state, the hardware that it needs, versions of compilers."""
    target = bundle.targets[name]
    yield "state", target.state
    if target.needs is not None:
        yield "needs", target.needs
    made_with = getattr(part(name, "section"), "made_with", None)
    if made_with is not None:
        yield from made_with(target)


def _ancestor(bundle: Bundle, source: SourceFacts | None) -> dict[str, Any]:
    """Returns the component for the source model. A GGUF file has a hash; a folder has a component for each file."""
    section = bundle.manifest.source
    component: dict[str, Any] = {"type": "machine-learning-model", "bom-ref": _SOURCE, "name": section.name}
    if source is not None:
        component |= _licences(source)
        if section.kind == "gguf":
            component["hashes"] = [{"alg": "SHA-256", "content": source.files[source.name].sha256}]
        else:
            component["components"] = _file_components(source.files, f"{_SOURCE}:")
    adapters = [f"{one.name}={one.weight:g} sha256:{one.sha256}" for one in section.adapters]
    facts: dict[str, Any] = {"source.kind": section.kind} | ({"source.adapters": adapters} if adapters else {})
    return component | {"properties": _properties(facts)}


def _licences(source: SourceFacts | None) -> dict[str, Any]:
    if source is None or source.licence is None:
        return {}
    declared = {"acknowledgement": "declared"}
    try:
        spdx = canonicalize_license_expression(source.licence)
    except InvalidLicenseExpression:  # as the model names it: "llama3.2", "other"
        return {"licenses": [{"license": {"name": source.licence} | declared}]}
    if _SPDX_ID.fullmatch(spdx):
        return {"licenses": [{"license": {"id": spdx} | declared}]}
    return {"licenses": [{"expression": spdx} | declared]}


def _file_components(files: Mapping[str, FileSection], prefix: str = "file:") -> list[dict[str, Any]]:
    return [
        {
            "type": "file",
            "bom-ref": f"{prefix}{path}",
            "name": path,
            "hashes": [{"alg": "SHA-256", "content": file.sha256}],
            "properties": _properties({"bytes": file.bytes}),
        }
        for path, file in files.items()
    ]


def _toolchain(bundle: Bundle) -> list[dict[str, Any]]:
    """Returns components for the packages that made the bundle, with the scope "excluded": the bundle doesn't contain
    them.
    """
    return [
        {"bom-ref": f"tool:{name}"} | _package(name, release, "library") | {"scope": "excluded"}
        for name, release in sorted(bundle.manifest.toolchain.items())
    ]


def _package(name: str, release: str, kind: str) -> dict[str, Any]:
    """Returns a component for a Python package. Its purl has the package's name in PyPI's form."""
    purl = f"pkg:pypi/{quote(name.lower().replace('_', '-'))}@{quote(release, safe='')}"
    return {"type": kind, "name": name, "version": release, "purl": purl}


def _flat(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yields (dotted name, value) of all fields of nested objects. Lists aren't flattened; None and [] are skipped."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _flat(inner, f"{name}.{key}")
    elif value is not None and value != []:
        yield name, value


def _properties(facts: Mapping[str, Any]) -> list[dict[str, str]]:
    return [
        {"name": f"{PREFIX}:{name}", "value": value if isinstance(value, str) else json.dumps(value)}
        for name, value in sorted(facts.items())
    ]
