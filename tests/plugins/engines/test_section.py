"""A bundle of engines opens if their headers are what the manifest says, and else says which field isn't."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from enginewright.plugins.engines.section import ProfileSection, TensorRtSection
from enginewright.plugins.steps.linear_io import LinearIo
from enginewright.plugins.tensorrt_rtx.section import SECTIONS
from enginewright.runtime.bundle.manifest import Manifest, TargetManifest
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.shared.errors import BundleError
from tests.runtime.tensorrt_bundles import PLAN_PATH, linear_io, plan, section, write_engines


def test_a_bundle_of_engines_opens(tmp_path: Path, manifest: Manifest) -> None:
    fields = section(plan())
    bundle = Bundle.open(write_engines(tmp_path / "b", manifest, fields, plan()))
    assert bundle.target("tensorrt-rtx").section(TensorRtSection) == fields
    assert bundle.target("tensorrt-rtx").section(LinearIo) == linear_io()
    assert PLAN_PATH in bundle.files
    bundle.verify_hashes()


@pytest.mark.parametrize(
    ("altered", "message"),
    [
        (plan(magic=b"ftrt"), "model.plan: magic: "),
        (plan(version=(1, 8, 0, 0)), "model.plan: version: the plan's header has 1.8.0.0"),
        (plan(mask=0b1000), "model.plan: compute capabilities: the plan's header has 8.9, .*manifest.json 8.0"),
        (plan(8192)[:4096], "model.plan: bytes: the plan's header has 8192, .*manifest.json 4096"),
        (plan()[:4000], "model.plan: 4,000 bytes, files.targets/tensorrt-rtx/model.plan.bytes .* is 4,096"),
    ],
    ids=["magic", "version", "capabilities", "size", "cut off"],
)
def test_a_plan_that_was_altered(tmp_path: Path, manifest: Manifest, altered: bytes, message: str) -> None:
    path = write_engines(tmp_path / "b", manifest, section(plan()), plan())
    (path / PLAN_PATH).write_bytes(altered)
    with pytest.raises(BundleError, match=message):
        Bundle.open(path)


def test_damage_behind_the_header_is_found_by_its_hash(tmp_path: Path, manifest: Manifest) -> None:
    path = write_engines(tmp_path / "b", manifest, section(plan()), plan())
    (path / PLAN_PATH).write_bytes(plan()[:-1] + b"\x01")
    with pytest.raises(BundleError, match=r"model.plan: SHA-256"):
        Bundle.open(path).verify_hashes()


def test_engines_and_files_agree(tmp_path: Path, manifest: Manifest) -> None:
    fields = section(plan())
    other = fields.model_copy(update={"engines": (fields.engines[0].model_copy(update={"bytes": 1}),)})
    with pytest.raises(BundleError, match=r"tensorrt.engines.0: model.plan is not listed"):
        Bundle.open(write_engines(tmp_path / "b", manifest, other, plan()))
    none = fields.model_copy(update={"engines": ()})
    with pytest.raises(BundleError, match=r"tensorrt.engines: there is none"):
        Bundle.open(write_engines(tmp_path / "c", manifest, none, plan()))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.update(flavour="other"), "tensorrt.flavour"),
        (lambda t: t.update(compute_capabilities=["89"]), r"tensorrt.compute_capabilities.0: Expected `str` matching"),
        (lambda t: t["engines"][0]["profiles"][0].update(B=[4, 1, 16]), r"engines.0.profiles.0: B: \[4, 1, 16\]"),
        (lambda t: t["engines"].append(t["engines"][0]), "one file is listed twice"),
    ],
)
def test_wrong_fields_are_named(change: Any, message: str) -> None:
    data = json.loads(TargetManifest(sections={"io": linear_io(), "tensorrt": section(plan())}).to_json())
    change(data["tensorrt"])
    with pytest.raises(BundleError, match=message):
        TargetManifest.from_json(json.dumps(data), source="m", sections=SECTIONS)
    assert "tensorrt" not in json.loads(TargetManifest().to_json())


def test_what_a_profile_holds() -> None:
    profile = ProfileSection(phase="decode", B=(1, 4, 16), S=(1, 1, 1), R=(1, 4, 16), C=33)
    assert profile.holds(16, 1, 3)
    assert not profile.holds(17, 1, 3)
    assert not profile.holds(1, 2, 1)
