"""The bill is valid CycloneDX 1.6, lists what is in the bundle, and is the same each time."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
from importlib.resources import files
from pathlib import Path
from typing import Any

import cyclonedx.schema
import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packaging.licenses._spdx import LICENSES

from enginewright.optimizer.sbom import SourceFacts, bill_of_materials, moment, source_facts, write_bill
from enginewright.runtime.bundle.manifest import FileSection
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.shared.errors import BundleError, RequestError
from tests.sealed import sealed

FILE = FileSection(bytes=3, sha256="ab" * 32)


def assert_valid(bill: dict[str, Any]) -> None:
    error = JsonStrictValidator(SchemaVersion.V1_6).validate_str(json.dumps(bill))
    assert error is None, error


def properties(component: dict[str, Any]) -> dict[str, str]:
    return {p["name"]: p["value"] for p in component["properties"]}


def test_every_file_is_listed_and_the_bill_is_valid(tiny_bundle: Path, tiny_folder: Path) -> None:
    bundle = Bundle.open(tiny_bundle)
    bill = bill_of_materials(bundle, source=source_facts(bundle, tiny_folder))
    assert_valid(bill)
    listed = {c["name"]: c["hashes"][0]["content"] for c in bill["components"] if c["type"] == "file"}
    there = {
        p.relative_to(tiny_bundle).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in tiny_bundle.rglob("*")
        if p.is_file() and p.parent.name != "report"
    }
    assert listed == there
    assert bill["dependencies"][0]["dependsOn"] == [f"file:{path}" for path in sorted(there)]

    model = bill["metadata"]["component"]
    assert model["type"] == "machine-learning-model"
    assert model["modelCard"]["modelParameters"]["modelArchitecture"] == "LlamaForCausalLM"
    facts = properties(model)
    assert facts["enginewright:recipe.name"] == "f32" and facts["enginewright:target.cpu.state"] == "ready"
    (ancestor,) = model["pedigree"]["ancestors"]
    assert {c["name"] for c in ancestor["components"]} == {p.name for p in tiny_folder.iterdir()}
    tools = {c["name"]: c for c in bill["components"] if c["type"] == "library"}
    assert {name: c["version"] for name, c in tools.items()} == bundle.manifest.toolchain
    assert {c["scope"] for c in tools.values()} == {"excluded"}
    assert "+" not in tools["torch"]["purl"]


def test_the_hash_of_the_whole_is_what_the_page_s_shell_line_gives(tiny_bundle: Path) -> None:
    page = (Path(__file__).parents[3] / "docs/use/commands/sbom.md").read_text()
    line = next(line for line in page.splitlines() if line.startswith("find . "))
    printed = subprocess.run(["bash", "-c", line], cwd=tiny_bundle, check=True, capture_output=True, text=True).stdout
    (stated,) = bill_of_materials(Bundle.open(tiny_bundle))["metadata"]["component"]["hashes"]
    assert stated == {"alg": "SHA-256", "content": printed.split()[0]}


def test_the_same_bundle_gives_the_same_bill(tiny_bundle: Path, tmp_path: Path) -> None:
    first = bill_of_materials(Bundle.open(tiny_bundle))
    assert_valid(first)
    assert "timestamp" not in first["metadata"]
    copy = Path(shutil.copytree(tiny_bundle, tmp_path / "copy.bundle"))
    assert bill_of_materials(Bundle.open(copy)) == first
    dated = bill_of_materials(Bundle.open(copy), timestamp=moment("1700000000"))
    assert_valid(dated)
    assert dated["metadata"]["timestamp"] == "2023-11-14T22:13:20Z"
    assert dated["serialNumber"] != first["serialNumber"]


@pytest.mark.parametrize(
    ("licence", "expected"),
    [
        ("apache-2.0", {"license": {"id": "Apache-2.0"}}),
        ("MIT", {"license": {"id": "MIT"}}),
        ("cern-ohl-s-2.0", {"license": {"id": "CERN-OHL-S-2.0"}}),
        ("gpl-2.0+", {"license": {"id": "GPL-2.0+"}}),
        ("mit or apache-2.0", {"expression": "MIT OR Apache-2.0"}),
        ("apache-2.0 WITH llvm-exception", {"expression": "Apache-2.0 WITH LLVM-exception"}),
        ("LicenseRef-ours", {"expression": "LicenseRef-ours"}),
        ("our-own", {"license": {"name": "our-own"}}),
        ("llama3.2", {"license": {"name": "llama3.2"}}),
        ("(", {"license": {"name": "("}}),
        (None, None),
    ],
)
def test_the_licence_is_spdx_s_where_that_has_it(
    licence: str | None, expected: dict[str, Any] | None, tiny_bundle: Path
) -> None:
    bill = bill_of_materials(Bundle.open(tiny_bundle), source=SourceFacts("m", {"config.json": FILE}, licence))
    assert_valid(bill)
    stated = []
    if expected is not None:
        declared = {"acknowledgement": "declared"}
        inner = {"license": expected["license"] | declared} if "license" in expected else expected | declared
        stated = [inner]
    model = bill["metadata"]["component"]
    assert model.get("licenses", []) == model["pedigree"]["ancestors"][0].get("licenses", []) == stated


def test_every_id_of_a_licence_is_one_that_the_schema_knows() -> None:
    ids = {entry["id"] for entry in LICENSES.values()}
    schema = json.loads((files(cyclonedx.schema) / "_res" / "spdx.SNAPSHOT.schema.json").read_text(encoding="utf-8"))
    assert len(ids) > 500 and ids <= set(schema["enum"])


def test_a_file_s_hash_is_its_component_s(tiny_bundle: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(tiny_bundle, tmp_path / "g.bundle"))
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["source"] = {"kind": "gguf", "name": "m.gguf"}
    (path / "manifest.json").write_text(sealed(manifest))
    coverage = {"sequences": 2, "tokens": 9000, "distinct_tokens": 5, "vocabulary_share": 0.1, "warnings": []}
    report = {"calibration": {"origin": "chats.jsonl", "coverage": coverage}}
    (path / "report/report.json").write_text(json.dumps(report))
    bill = bill_of_materials(Bundle.open(path), source=SourceFacts("m.gguf", {"m.gguf": FILE}, None))
    assert_valid(bill)
    (ancestor,) = bill["metadata"]["component"]["pedigree"]["ancestors"]
    assert ancestor["hashes"] == [{"alg": "SHA-256", "content": FILE.sha256}]
    (dataset,) = bill["metadata"]["component"]["modelCard"]["modelParameters"]["datasets"]
    assert (dataset["name"], dataset["description"]) == ("chats.jsonl", "9,000 tokens that weights were quantized by")


def test_the_schema_turns_down_what_is_wrong(tiny_bundle: Path) -> None:
    bill = bill_of_materials(Bundle.open(tiny_bundle))
    bill["metadata"]["component"]["licenses"] = [{"license": {"id": "our-own"}}]
    with pytest.raises(AssertionError):
        assert_valid(bill)


def test_a_damaged_bundle_has_no_bill(tiny_bundle: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(tiny_bundle, tmp_path / "d.bundle"))
    blob = path / "weights/weights-00000.bin"
    data = bytearray(blob.read_bytes())
    data[100] ^= 1
    blob.write_bytes(data)
    with pytest.raises(BundleError, match=r"weights-00000\.bin: SHA-256"):
        bill_of_materials(Bundle.open(path))


@pytest.mark.parametrize("epoch", ["", "now", "1e3", "9" * 30])
def test_a_time_that_is_none(epoch: str) -> None:
    with pytest.raises(RequestError, match="SOURCE_DATE_EPOCH: "):
        moment(epoch)


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="cannot be written: No such file"):
        write_bill({}, tmp_path / "none" / "bill.json")
