"""Every byte of a bundle is hashed once, and told of."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from enginewright.optimizer.shared.hash_files import hash_files
from enginewright.optimizer.shared.progress import ProgressEvent
from enginewright.plugins.shared.errors import BundleError
from enginewright.runtime.bundle.reader import Bundle


def test_all_bytes_are_told(tiny_bundle: Path) -> None:
    bundle = Bundle.open(tiny_bundle)
    told: list[ProgressEvent] = []
    total = hash_files(bundle, told.append)
    assert total == sum((tiny_bundle / name).stat().st_size for name in bundle.files)
    assert {event.stage for event in told} == {"hash"}
    done = [event.done for event in told]
    assert done == sorted(done)
    assert done[-1] == total


def test_an_altered_file_is_named(tiny_bundle: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_bundle, tmp_path / "b")
    weights = tmp_path / "b" / "weights" / "weights-00000.bin"
    data = bytearray(weights.read_bytes())
    data[len(data) // 2] ^= 1
    weights.write_bytes(data)
    with pytest.raises(BundleError, match=r"weights-00000\.bin"):
        hash_files(Bundle.open(tmp_path / "b"), lambda event: None)
