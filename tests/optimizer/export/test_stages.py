"""The stages of an export: their seconds add up; what they do is tested by whole exports, in test_export.py."""

from __future__ import annotations

import json
import math
import re
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from enginewright.optimizer.capture.model_source import ModelSource
from enginewright.optimizer.export import stages as export_stages
from enginewright.optimizer.export.stages import Clock, warn_of_few_bits
from enginewright.optimizer.recipes.recipe import load_recipe
from enginewright.passes.ir.code_files import CodeFiles
from enginewright.runtime.shared.errors import CapacityError, SourceWarning
from tests.passes.small_programs import decoder


def test_each_stage_takes_from_the_end_of_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(export_stages, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    clock = Clock()
    for name, end, elsewhere in (("capture", 102.0, 0.0), ("measure", 103.0, 0.0), ("passes", 110.0, 4.0)):
        now[0] = end
        clock.end(name, elsewhere)
    # Of the passes' seven seconds four went into measuring them.
    assert clock.seconds == {"measure": 1.0 + 4.0, "capture": 2.0, "passes": 3.0}
    assert sum(clock.seconds.values()) == clock.elapsed == 10.0


def test_the_disk_has_room_for_all_targets_and_shared_weights_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = decoder()
    sizes = {name: 4 * math.prod(program.weights[name].shape) for name in program.weights}
    tables = {str(node.args[1].target) for node in program.nodes_of(torch.ops.ew.embedding.default)}  # type: ignore[union-attr]
    linears = {str(node.args[1].target) for node in program.nodes_of(torch.ops.ew.linear.default)}  # type: ignore[union-attr]
    norms = set(sizes) - tables - linears
    assert tables and linears and norms
    again = sum(sizes[name] for name in linears)
    free = 0
    monkeypatch.setattr(export_stages.shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    for count in (1, 2, 3):
        free = sum(sizes.values()) + (count - 1) * again
        export_stages._check_disk([program] * count, tmp_path / "b", CodeFiles(tmp_path))
        free -= 1
        with pytest.raises(CapacityError, match=f"the weights need {free + 1:,} bytes, and {free:,} are free"):
            export_stages._check_disk([program] * count, tmp_path / "b", CodeFiles(tmp_path))


def test_the_source_s_bytes_are_those_of_its_weights_files(tmp_path: Path) -> None:
    (tmp_path / "file.gguf").write_bytes(bytes(70))
    assert export_stages.source_bytes(ModelSource(tmp_path / "file.gguf")) == 70
    for name, size in (("a.safetensors", 10), ("b.safetensors", 20), ("other.safetensors", 40)):
        (tmp_path / name).write_bytes(bytes(size))
    index = {"weight_map": {"x": "a.safetensors", "y": "b.safetensors", "z": "a.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert export_stages.source_bytes(ModelSource(tmp_path)) == 30
    (tmp_path / "model.safetensors").write_bytes(bytes(50))  # the one that is read where there are both
    assert export_stages.source_bytes(ModelSource(str(tmp_path))) == 50


def _gguf(**elements: int) -> SimpleNamespace:
    """An open file with a matrix of each type."""
    bits = {"IQ1_S": 1.5625, "IQ3_S": 3.4375, "Q4_K": 4.5, "Q4_1": 5.0, "Q6_K": 6.5625, "Q8_0": 8.5, "F16": 16.0}
    tensors = {
        name: SimpleNamespace(
            shape=(n, 1), n_elements=n, n_bytes=n * bits[name] / 8, tensor_type=SimpleNamespace(name=name)
        )
        for name, n in elements.items()
    }
    return SimpleNamespace(tensors=tensors)


@pytest.mark.parametrize(
    ("recipe", "elements", "said"),
    [
        (
            "int4",
            {"Q4_K": 1000, "Q6_K": 300},
            "5.0 bits a weight already .Q4_K., and recipe int4 .* --recipe gguf keeps",
        ),
        ("int4", {"IQ3_S": 1000, "Q6_K": 300}, "4.2 bits a weight already .IQ3_S., .* --recipe gguf keeps"),
        ("int4", {"IQ1_S": 1000, "Q6_K": 300}, "2.7 bits a weight already .IQ1_S., .* --recipe int8 loses"),
        ("int4-gptq", {"Q4_1": 1000, "Q8_0": 300}, "5.8 bits a weight already .Q4_1., .* --recipe gguf keeps"),
        ("int4", {"Q8_0": 1000}, None),
        ("int4", {"F16": 1000}, None),
        ("int8", {"Q4_K": 1000}, None),
        ("gguf", {"Q4_1": 1000}, None),
    ],
)
def test_a_file_of_few_bits_is_warned_of_before_the_work(
    recipe: str, elements: dict[str, int], said: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export_stages, "open_gguf", lambda path: _gguf(**elements))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_of_few_bits(tmp_path / "model.gguf", load_recipe(recipe))
        warn_of_few_bits(tmp_path, load_recipe(recipe))  # a folder
    assert [w.category for w in caught] == ([] if said is None else [SourceWarning])
    if said is not None:
        assert re.search(said, str(caught[0].message)), caught[0].message
