"""Plants bugs in a copy of a bundle: in its weights, and in its program."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedModel

from enginewright.optimizer.bisect.replay import replay
from enginewright.optimizer.capture import CapturedModel, capture
from enginewright.optimizer.recipes.recipe import Recipe, load_recipe
from enginewright.passes.ir.program import Program
from enginewright.plugins.cpu.compile.emitter import CpuEmitter
from enginewright.plugins.emit.bundle_writer import BundleWriter
from enginewright.runtime.bundle.manifest import MANIFEST_PATH, Manifest, ModelSection
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.bundle.weights import pack, unpack
from enginewright.runtime.shared.dtypes import DTYPES
from enginewright.runtime.shared.progress import silent

Array = npt.NDArray[Any]
Bundles = Callable[[str, str], Path]
"""A tiny model's family and a recipe's name -> its bundle, not to be changed."""
Steps = list[dict[str, Any]]

_TARGET = "targets/cpu"


class Planting:
    """A copy of a bundle in ``folder``, to be damaged; sizes and hashes in its manifests are kept right."""

    def __init__(self, bundle: Path, folder: Path) -> None:
        shutil.copytree(bundle, folder)
        self.folder = folder

    def change_weight(self, name: str, change: Callable[[Array], Array]) -> None:
        """``change`` gets a weight as its rows are, [N, K] in the type that it has, and gives the new one."""
        bundle = Bundle.open(self.folder)
        entry = bundle.tensor(name)
        before = unpack(np.array(bundle.weight(name)), entry.shape, entry.layout, entry.dtype)
        after = change(before.astype(DTYPES[entry.dtype].numpy)).astype(DTYPES[entry.dtype].numpy)
        assert not np.array_equal(before, after)
        path = self.folder / bundle.index.blobs[entry.blob].file
        with open(path, "r+b") as blob:
            blob.seek(entry.offset)
            blob.write(pack(after, entry.layout, entry.dtype).tobytes())
        self._list(path.relative_to(self.folder).as_posix(), self.folder / MANIFEST_PATH)

    def change_program(self, change: Callable[[dict[str, Any]], None]) -> None:
        """``change`` gets the cpu program as JSON, and edits it in place."""
        path = self.folder / _TARGET / "programs/decode.json"
        program = json.loads(path.read_text())
        change(program)
        path.write_text(json.dumps(program))
        self._list("programs/decode.json", self.folder / _TARGET / MANIFEST_PATH)

    def _list(self, name: str, manifest: Path) -> None:
        data = (manifest.parent / name).read_bytes()
        listed = json.loads(manifest.read_text())
        listed["files"][name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        manifest.write_text(json.dumps(listed))


def scale_rows(planting: Planting, name: str, start: int, stop: int, factor: float = 1.01) -> None:
    """Rows of a weight, or of its scales (and offsets, where it has them), times ``factor``."""

    def scale(weight: Array) -> Array:
        scaled = weight.astype(np.float32)
        scaled[start:stop] *= factor
        return scaled

    planting.change_weight(name, scale)
    offsets = name.replace(".scales", ".offsets")
    if offsets != name and offsets in Bundle.open(planting.folder).index.tensors:
        planting.change_weight(offsets, scale)


def swap_halves(planting: Planting, name: str) -> None:
    """The first half of a weight's rows behind the second one."""
    planting.change_weight(name, lambda weight: np.roll(weight, len(weight) // 2, axis=0))


def drop_bias(planting: Planting, where: str) -> None:
    """The step at ``where`` no longer reads its bias, the last of its weights."""

    def change(program: dict[str, Any]) -> None:
        (step,) = [s for s in program["steps"] if s.get("where") == where and "linear" in s["op"]]
        bias = max(i for i, operand in enumerate(step["inputs"]) if operand["kind"] == "weight")
        assert "bias" in step["inputs"][bias]["name"]
        del step["inputs"][bias]
        if "has_bias" in step.get("attrs", {}):
            step["attrs"]["has_bias"] = False

    planting.change_program(change)


def shift_rope(planting: Planting, where: str) -> None:
    """The ropes at ``where`` turn by the positions after their own: by a table of their own."""

    def change(program: dict[str, Any]) -> None:
        steps: Steps = program["steps"]
        ropes = [i for i, s in enumerate(steps) if s["op"] in ("rope", "rope_kv_write") and s.get("where") == where]
        table = next(s for s in steps if s["op"] == "rope_table")
        shape = table["outputs"][0]["shape"]
        positions = _buffer(program, "shifted_positions", "i32", [{"T": 1}], [1])
        shifted = _buffer(program, "shifted_table", "f32", shape, [shape[1], 1])
        reads = [table["inputs"][0]]
        attrs = {"fn": "add", "scalar": 1}
        add = {"op": "elementwise", "inputs": reads, "outputs": [positions], "attrs": attrs, "where": where}
        turn = {**table, "inputs": [positions, *table["inputs"][1:]], "outputs": [shifted]}
        for at in ropes:
            inputs = steps[at]["inputs"]
            first = next(i for i, o in enumerate(inputs) if o["name"] == table["outputs"][0]["name"])
            inputs[first] = shifted
        steps[ropes[0] : ropes[0]] = [add, turn]

    planting.change_program(change)


def _buffer(program: dict[str, Any], name: str, dtype: str, shape: list[Any], strides: list[Any]) -> dict[str, Any]:
    """A new buffer of 4-byte elements for each token behind all others; its operand."""
    columns = shape[1] if len(shape) > 1 else 1
    end = program["arena_bytes"]
    assert set(end) <= {"T", "R", "B", "1"}
    program["buffers"].append({"name": name, "size": {"T": 4 * columns}, "offset": dict(end)})
    aligned = -(-4 * columns // 64) * 64
    program["arena_bytes"] = {**end, "T": end.get("T", 0) + aligned}
    return {"kind": "buffer", "name": name, "dtype": dtype, "shape": shape, "strides": strides}


def emit_bundle(model: PreTrainedModel | Path, folder: Path, recipe: str = "f32") -> Path:
    """A model's bundle as an export writes it, without its comparisons with the source."""
    chosen, captured = load_recipe(recipe), capture(model)
    scratch = folder.parent / f"{folder.name}.scratch"
    scratch.mkdir()
    stages = replay(model, captured, chosen, "cpu", calibration=None, scratch=scratch, progress=silent)
    return write_bundle(captured, chosen, stages[-1].program, folder)


def write_bundle(captured: CapturedModel, recipe: Recipe, program: Program, folder: Path) -> Path:
    """The files of a bundle."""
    manifest = Manifest(
        model=ModelSection.from_info(captured.model_info),
        source=captured.source,
        targets=(),
        recipe=recipe.model_dump(mode="json"),
    )
    with BundleWriter(folder) as writer:
        writer.complete(manifest, {"cpu": CpuEmitter().emit(program, writer, silent)})
        writer.publish()
    return folder
