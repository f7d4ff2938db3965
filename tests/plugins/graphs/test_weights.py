from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from enginewright.passes.ir.weights import Source
from enginewright.plugins.emit.bundle_writer import BundleWriter
from enginewright.plugins.graphs.weights import ExternalWeights, Stored
from enginewright.runtime.bundle.manifest import Manifest, TargetManifest
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.shared.progress import silent


@pytest.mark.parametrize("stored", ["f32", "f16", "bf16"])
def test_scales_of_zeros_are_positive(stored: Stored, manifest: Manifest, tmp_path: Path) -> None:
    """The others keep their bits, and products with what is 0 anyway stay 0."""
    scales = torch.tensor([[0.5, 0.0], [0.0, 2.0**-10], [3.0, 0.25]])
    with BundleWriter(tmp_path / "a.bundle") as writer:
        weights = ExternalWeights(writer, silent, 2)
        weights.add("s", Source("s", (3, 2), torch.float32, lambda: scales), "rows", stored, positive=True)
        weights.add("w", Source("w", (3, 2), torch.float32, lambda: scales), "rows", stored)
        writer.commit(manifest, {"t": TargetManifest()})
    bundle = Bundle.open(tmp_path / "a.bundle")
    positive, plain = (np.asarray(bundle.weight(f"{name}.onnx"), np.float32) for name in "sw")
    assert (positive > 0).all() and positive.max() == 3
    np.testing.assert_array_equal(positive[plain > 0], plain[plain > 0])
    assert 127 * positive[plain == 0].max() < 1e-5
