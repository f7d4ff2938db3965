"""The programs of a bundle by their entries: a second one beside ``decode``, and bundles from before there were any."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from transformers import PreTrainedModel

from enginewright.optimizer.export import export
from enginewright.plugins.emit.bundle_writer import BundleWriter
from enginewright.runtime.bundle.manifest import Manifest, TargetManifest
from enginewright.runtime.bundle.reader import Bundle, program_path
from enginewright.runtime.engine.llm import LLM
from enginewright.runtime.executors.open import make_executor
from enginewright.runtime.executors.target import Placement
from enginewright.runtime.ranks.partition import Partition
from enginewright.runtime.shared.contracts import StepInput
from enginewright.runtime.shared.errors import BundleError, RequestError
from enginewright.runtime.shared.lowered_program import LoweredProgram, WeightUse
from tests.plugins.native.lowered_builder import LoweredBuilder, R, T

PROMPT = list(range(3, 43))
TABLE = np.random.default_rng(3).standard_normal((50, 8)).astype(np.float32)


def tower() -> tuple[LoweredProgram, np.ndarray]:
    """pooled = normalized rows of a table: no cache, no logits."""
    b = LoweredBuilder()
    x, rows, pooled = b.buffer(T, 8), b.buffer(R, 8), b.buffer(R, 8)
    b.logits = pooled
    b.step("embedding", [b.input("ids"), b.weight(TABLE)], [x])
    b.step("take_rows", [x, b.input("rows")], [rows])
    norm = b.step("rms_norm", [rows], [pooled], eps=1e-5, has_weight=False)  # type: ignore[arg-type]
    return b.program().model_copy(update={"outputs": {}, "taps": {"pooled": (norm, 0)}}), b.weights["w0"]


def named(program: LoweredProgram, prefix: str) -> LoweredProgram:
    """A copy of the program with a prefix before the weights' names."""
    uses = tuple(WeightUse(**{**use.model_dump(), "name": prefix + use.name}) for use in program.weights)
    steps = tuple(
        step.model_copy(
            update={
                "inputs": tuple(
                    o if o.kind != "weight" else o.model_copy(update={"name": prefix + o.name}) for o in step.inputs
                )
            }
        )
        for step in program.steps
    )
    return program.model_copy(update={"weights": uses, "steps": steps})


@pytest.fixture
def bundle(tmp_path: Path, manifest: Manifest) -> Bundle:
    decode, (second, weight) = LoweredBuilder(), tower()
    x = decode.values(TABLE[:8])
    decode.logits = decode.buffer(R, 8)
    decode.step("take_rows", [x, decode.input("rows")], [decode.logits])
    small = manifest.model.model_copy(update={"vocab_size": 8, "eos_token_ids": (), "bos_token_id": None})
    with BundleWriter(tmp_path / "two.bundle") as writer:
        lowered = decode.program()
        for use in lowered.weights:
            writer.weights().add(use.name, decode.weights[use.name], use.layout, shape=use.shape)
        writer.weights().add("tower.w0", weight)
        writer.write_text(program_path("cpu"), lowered.to_json())
        writer.write_text(program_path("cpu", "tower"), named(second, "tower.").to_json())
        writer.commit(manifest.model_copy(update={"model": small}), {"cpu": TargetManifest()})
    return Bundle.open(tmp_path / "two.bundle")


def test_an_executor_opens_a_second_entry(bundle: Bundle) -> None:
    assert list(bundle.entries["cpu"]) == ["decode", "tower"]
    executor = make_executor(bundle, "cpu", {}, 64, entry="tower")
    assert executor.caps.outputs == ("pooled",) and executor.cache_groups == ()
    ids = np.array([4, 40, 7, 7, 49], np.int32)
    rows = np.array([1, 4, 2], np.int32)
    step = StepInput.packed(ids=ids, counts=[2, 3], kv_len=[2, 3], tables={}, groups=(), rows=rows, outputs=("pooled",))
    output = executor.submit(step).result()
    x = TABLE[ids[rows]].astype(np.float64)
    expected = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(output.outputs["pooled"], expected, rtol=1e-5)  # float32 of 8 columns
    assert output.tokens is None and output.logits is None
    executor.close()


def test_entries_that_are_not_there(bundle: Bundle) -> None:
    with pytest.raises(BundleError, match=r"programs/head\.json is not listed .*: the entries are decode, tower"):
        make_executor(bundle, "cpu", {}, 64, entry="head")
    ranks = Placement(partition=Partition.parse("tensor=2"))
    with pytest.raises(RequestError, match="entry: ranks open 'decode' alone"):
        make_executor(bundle, "cpu", {}, 64, ranks, entry="tower")


def test_a_bundle_from_before_entries(tiny_model: Callable[..., PreTrainedModel], tmp_path: Path) -> None:
    """It has program.json, of version 5, which names no taps: they are found in it."""
    path = tmp_path / "llama.bundle"
    export(tiny_model("Llama"), path, recipe="f32")
    with LLM(path) as llm:
        states, tokens = llm.hidden_states(PROMPT, [0, 1, -1]), llm.generate([PROMPT])[0].token_ids
    now = Bundle.open(path).program("cpu")
    assert set(now.taps) == {"hidden:0", "hidden:1", "hidden:2"}
    folder = path / "targets/cpu"
    fields = json.loads((folder / "programs/decode.json").read_text())
    del fields["taps"]
    text = json.dumps(fields | {"format_version": 5})
    (folder / "program.json").write_text(text)
    (folder / "programs/decode.json").unlink()
    listed = json.loads((folder / "manifest.json").read_text())
    del listed["files"]["programs/decode.json"]
    digest = hashlib.sha256(text.encode()).hexdigest()
    listed["files"]["program.json"] = {"bytes": len(text), "sha256": digest}
    (folder / "manifest.json").write_text(json.dumps(listed))
    assert Bundle.open(path).program("cpu").taps == now.taps
    with LLM(path) as llm:
        np.testing.assert_array_equal(llm.hidden_states(PROMPT, [0, 1, -1]), states)
        assert llm.generate([PROMPT])[0].token_ids == tokens
