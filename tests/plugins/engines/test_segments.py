"""A schedule of segments opens if it makes sense with the bundle around it, and else says where it doesn't."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from enginewright.plugins.emit.bundle_writer import BundleWriter
from enginewright.plugins.engines.section import EngineSection, TensorRtSection
from enginewright.plugins.engines.segments import (
    AttentionStep,
    SegmentSchedule,
    SegmentStep,
    schedule_of,
    segments_path,
)
from enginewright.runtime.bundle.manifest import Manifest, TargetManifest
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.kv_cache.kinds.table import cache_block_bytes
from enginewright.runtime.shared.errors import BundleError
from tests.runtime.tensorrt_bundles import plan

TARGET = "tensorrt-rtx"
Change = Callable[[dict[str, Any]], object]


def schedule() -> dict[str, Any]:
    """One layer with two heads of four values that share keys, a vocabulary of five."""
    heads, narrow, hidden = ({"dtype": "f16", "shape": ["T", *sizes]} for sizes in ((2, 4), (1, 4), (8,)))
    logits = {"dtype": "f32", "shape": ["R", 5]}
    tokens, rows = ({"dtype": "i32", "shape": [letter]} for letter in "TR")
    first = {
        "name": "segment_0",
        "file": "segment_0.plan",
        "inputs": {"ids": tokens},
        "weights": {"weight_0": {"dtype": "f16", "shape": [5, 8]}},
        "outputs": {"y_0": hidden, "q": heads, "k": narrow, "v": narrow},
    }
    last = {
        "name": "segment_1",
        "file": "segment_1.plan",
        "inputs": {"attention": heads, "x_0": hidden, "rows": rows},
        "weights": {"weight_0": {"dtype": "f16", "shape": [5, 8]}},
        "outputs": {"logits": logits},
    }
    steps = [
        {
            "op": "segment",
            "segment": "segment_0",
            "inputs": {"ids": "ids"},
            "weights": {"weight_0": "table"},
            "outputs": {"y_0": "buffer_0", "q": "buffer_1", "k": "buffer_2", "v": "buffer_3"},
        },
        {
            **{"op": "attention", "layer": 0, "group": "full", "scale": 0.5, "sinks": "sinks"},
            **{"q": "buffer_1", "k": "buffer_2", "v": "buffer_3", "out": "buffer_4"},
        },
        {
            "op": "segment",
            "segment": "segment_1",
            "inputs": {"attention": "buffer_4", "x_0": "buffer_0", "rows": "rows"},
            "weights": {"weight_0": "table"},
            "outputs": {"logits": "logits"},
        },
    ]
    kernels = {"write": "w", "prefill": ["p"], "decode": ["d"], "combine": "c"}
    group = {"name": "full", "layers": [0], "kv_heads": 1, "key_head_size": 4, "value_head_size": 4}
    return {
        "format_version": 1,
        "dtype": "f16",
        "cache_groups": [group | {"dtype": "f16", "block_size": 32}],
        "profiles": [{"T": [1, 4, 16], "R": [1, 4, 16]}, {"T": [1, 128, 512], "R": [1, 1, 512]}],
        "segments": [first, last],
        "buffers": {
            **{"buffer_0": hidden, "buffer_1": heads, "buffer_2": narrow, "buffer_3": narrow, "buffer_4": heads},
            "logits": logits,
        },
        "steps": steps,
        "kernels": [{"layers": [0], "compute_capability": gpu, **kernels} for gpu in ("8.0", "8.6", "8.9")],
    }


def write(path: Path, manifest: Manifest, said: dict[str, Any], table: int = 8, kernel: str = "w") -> Path:
    """A bundle with that schedule, whose engines are nothing but headers."""
    digest = hashlib.sha256(plan()).hexdigest()
    engines = tuple(EngineSection(file=f"segment_{i}.plan", bytes=len(plan()), sha256=digest) for i in range(2))
    gpus = ("8.0", "8.6", "8.9")
    section = TensorRtSection(
        flavour="rtx", form="segments", version="1.7.1.116", compute_capabilities=gpus, engines=engines
    )
    with BundleWriter(path) as writer:
        for engine in engines:
            writer.write_bytes(f"targets/{TARGET}/{engine.file}", plan())
        for stem in (kernel, "p", "d", "c"):
            for kind in ("json", "cubin", "ptx"):
                writer.write_bytes(f"targets/{TARGET}/kernels/{stem}.{kind}", b"")
        writer.weights().add("table", np.zeros((5, table), np.float16), dtype="f16")
        writer.weights().add("sinks", np.zeros(2, np.float32))
        writer.write_text(segments_path(TARGET), json.dumps(said))
        writer.commit(manifest, {TARGET: TargetManifest(sections={"tensorrt": section})})
    return path


def test_a_schedule_opens_and_is_written_as_it_was_read(tmp_path: Path, manifest: Manifest) -> None:
    bundle = Bundle.open(write(tmp_path / "b", manifest, schedule()))
    read = schedule_of(bundle, TARGET)
    assert SegmentSchedule.from_json(read.to_json(), source="s") == read
    assert [type(step) for step in read.steps] == [SegmentStep, AttentionStep, SegmentStep]
    assert cache_block_bytes(read.cache_groups[0]) == 2 * (4 + 4) * 32
    assert [p.holds(17, 1) for p in read.profiles] == [False, True]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.update(format_version=2), "format_version is 2"),
        (lambda s: s["steps"].pop(1), r"steps.1.inputs.attention: nothing has written the buffer 'buffer_4'"),
        (lambda s: s["steps"].pop(2), "no step writes the buffer 'logits'"),
        (lambda s: s["steps"].insert(2, s["steps"][1]), r"attend in the layers \[0, 0\]"),
        (lambda s: s["steps"][0].update(segment="other"), "steps.0: there is no segment 'other'"),
        (lambda s: s["steps"][0]["weights"].clear(), r"steps.0.weights: they are \[\], .* \['weight_0'\]"),
        (lambda s: s["steps"][0]["outputs"].update(v="buffer_2"), "steps.0.outputs: a buffer is written twice"),
        (lambda s: s["steps"][1].update(q="buffer_0"), "steps.1.q: 'buffer_0' is .*"),
        (lambda s: s["steps"][1].update(k="buffer_1"), r"steps.1.k: .* f16 \[T, 2, 4\], and f16 \[T, 1, 4\]"),
        (lambda s: s["steps"][1].update(layer=1), "no cache group 'full' has the layer 1"),
        (lambda s: s["steps"][2]["inputs"].update(x_0="ids"), r"steps.2.inputs.x_0: 'ids' is i32 \[T\]"),
        (lambda s: s["steps"][2]["inputs"].update(x_0="gone"), "steps.2.inputs.x_0: there is no buffer 'gone'"),
        (lambda s: s["kernels"][1]["layers"].append(1), r"kernels: those for 8.6 are of the layers \[0, 1\]"),
        (lambda s: s["kernels"].pop(), "compute_capabilities: they are"),
        (lambda s: s["segments"][1].update(file="other.plan"), "engines: they are"),
        (lambda s: s["kernels"][0].update(write="gone"), "kernels/gone.json is not listed"),
        (lambda s: s["steps"][0]["weights"].update(weight_0="gone"), "steps.0: weight 'gone' is not in weights/"),
        (lambda s: s["steps"][1].update(sinks="table"), r"steps.1: weight 'table' has to be f32 \[2\], weights"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, manifest: Manifest, change: Change, message: str) -> None:
    fields = schedule()
    change(fields)
    with pytest.raises(BundleError, match=message):
        Bundle.open(write(tmp_path / "b", manifest, fields))


def test_a_weight_of_another_shape_is_named(tmp_path: Path, manifest: Manifest) -> None:
    with pytest.raises(BundleError, match=r"weight 'table' has to be f16 \[5, 8\], .* f16 \[5, 4\] in rows"):
        Bundle.open(write(tmp_path / "b", manifest, schedule(), table=4))
