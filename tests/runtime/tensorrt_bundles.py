"""Bundles of engines that are nothing but headers, for tests without TensorRT."""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path

from enginewright.plugins.emit.bundle_writer import BundleWriter
from enginewright.plugins.engines.section import EngineSection, ProfileSection, TensorRtSection
from enginewright.plugins.steps.linear_io import LinearCacheGroup, LinearIo
from enginewright.runtime.bundle.manifest import Manifest, TargetManifest

PLAN_FILE = "model.plan"
PLAN_PATH = f"targets/tensorrt-rtx/{PLAN_FILE}"


def plan(
    size: int = 4096, version: tuple[int, int, int, int] = (1, 7, 1, 116), mask: int = 0b1110, magic: bytes = b"vtrt"
) -> bytes:
    """A plan of ``size`` bytes that is nothing but a header and holes; by default for 8.0, 8.6 and 8.9."""
    header = magic.ljust(16, b"\x00") + struct.pack("<Q", size) + bytes(version) + bytes(4) + struct.pack("<I", mask)
    return header.ljust(size, b"\x00")


def section(data: bytes) -> TensorRtSection:
    """The section of the manifest for ``plan()``."""
    profiles = (
        ProfileSection(phase="decode", B=(1, 4, 16), S=(1, 1, 1), R=(1, 4, 16), C=33),
        ProfileSection(phase="prefill", B=(1, 1, 4), S=(1, 8, 32), R=(1, 1, 32), C=33),
    )
    engine = EngineSection(file=PLAN_FILE, bytes=len(data), sha256=hashlib.sha256(data).hexdigest(), profiles=profiles)
    return TensorRtSection(
        flavour="rtx", version="1.7.1.116", compute_capabilities=("8.0", "8.6", "8.9"), engines=(engine,)
    )


def linear_io() -> LinearIo:
    """Makes those of one layer."""
    group = LinearCacheGroup(
        name="full", layers=(0,), kv_heads=1, key_head_size=2, value_head_size=2, dtype="f16", mask="mask"
    )
    return LinearIo(file="", opset=24, onnxruntime="1.25", cache_groups=(group,), summed_products=4)


def write_engines(path: Path, manifest: Manifest, said: TensorRtSection, data: bytes) -> Path:
    """A bundle whose target tensorrt-rtx has one plan."""
    with BundleWriter(path) as writer:
        writer.write_bytes(PLAN_PATH, data)
        writer.commit(manifest, {"tensorrt-rtx": TargetManifest(sections={"io": linear_io(), "tensorrt": said})})
    return path
