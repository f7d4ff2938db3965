"""The io section says what a step takes; a target without one is written as before."""

from __future__ import annotations

import json

import pytest

from enginewright.plugins.onnx.section import SECTIONS
from enginewright.plugins.steps.linear_io import LinearCacheGroup, LinearIo, cache_names, mask_name
from enginewright.runtime.bundle.manifest import TargetManifest
from enginewright.runtime.shared.contracts import CacheGroup
from enginewright.runtime.shared.errors import BundleError

GROUPS = (CacheGroup("full", (0, 2), 2, 16, 24), CacheGroup("window8", (1,), 4, 16, 16, window=8))


def _io() -> LinearIo:
    groups = tuple(LinearCacheGroup.from_group(group) for group in GROUPS)
    return LinearIo(opset=24, onnxruntime="1.25", cache_groups=groups, summed_products=100)


def test_groups_name_their_masks_and_are_slots_to_schedulers() -> None:
    io = _io()
    assert [group.mask for group in io.cache_groups] == ["mask", "mask_w8"] == [mask_name(0), mask_name(8)]
    slots = [group.to_group(512) for group in io.cache_groups]
    assert [group.block_size for group in slots] == [512, 512]
    assert [(g.name, g.layers, g.window) for g in slots] == [(g.name, g.layers, g.window) for g in GROUPS]
    assert cache_names(3) == (("past_key_3", "present_key_3"), ("past_value_3", "present_value_3"))


def test_a_manifest_has_the_section_where_there_is_one() -> None:
    written = TargetManifest(sections={"io": _io()}).to_json()
    assert TargetManifest.from_json(written, source="m", sections=SECTIONS).section(LinearIo) == _io()
    assert "io" not in json.loads(TargetManifest().to_json())
    damaged = written.replace('"opset": 24', '"opset": 0')
    with pytest.raises(BundleError, match=r"m: io.opset: "):
        TargetManifest.from_json(damaged, source="m", sections=SECTIONS)
