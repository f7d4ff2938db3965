"""The findings of ``optimize verify``: damage anywhere, another source, another weight."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from transformers import PreTrainedModel

from enginewright.optimizer.check_bundle import check_bundle
from enginewright.runtime.bundle.manifest import MANIFEST_PATH, FileSection, TargetManifest, target_manifest_path
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.engine.llm import LLM
from enginewright.runtime.shared.errors import (
    BundleError,
    EnginewrightError,
    MissingDependencyError,
    SourceError,
    VerificationError,
)
from enginewright.runtime.shared.progress import ProgressEvent
from tests.plugins.steps import tiny_onnx
from tests.runtime.bundle.code_targets import with_target
from tests.sealed import sealed

WEIGHTS = "weights/weights-00000.bin"


@pytest.fixture
def bundle(tiny_bundle: Path, tmp_path: Path) -> Path:
    """A copy to be damaged."""
    return Path(shutil.copytree(tiny_bundle, tmp_path / "a.bundle"))


def test_a_bundle_that_is_whole(tiny_bundle: Path, tiny_folder: Path) -> None:
    events: list[ProgressEvent] = []
    check = check_bundle(tiny_bundle, progress=events.append)
    size = sum(f.bytes for f in Bundle.open(tiny_bundle).files.values())
    assert (check.files, check.bytes, check.source) == (len(Bundle.open(tiny_bundle).files), size, None)
    assert [(e.stage, e.done, e.total) for e in events][-1] == ("hash", size, size)
    (target,) = check.targets
    assert (target.target, target.why_not, target.comparison) == ("cpu", None, None)
    assert {"isa", "threads"} <= target.runs_with.keys()

    check = check_bundle(tiny_bundle, source=tiny_folder, targets=["cpu"], progress=events.append)
    compared = check.targets[0].comparison
    assert compared is not None and compared.tolerance is not None
    assert 0 < compared.random_tokens.max_logit_error <= compared.tolerance
    assert json.loads(json.dumps(check.to_json()))["targets"][0]["comparison"]["exact"] is True
    assert "verify" in {e.stage for e in events}


@pytest.mark.parametrize(
    "name",
    [WEIGHTS, "weights/index.json", "targets/cpu/programs/decode.json", "tokenizer/tokenizer.json", "manifest.json"],
)
def test_one_bit_anywhere_is_found_and_the_file_named(name: str, bundle: Path) -> None:
    """In JSON in a number or a name, so that it is JSON still."""
    path = bundle / name
    data = bytearray(path.read_bytes())
    at = len(data) // 2 if name == WEIGHTS else data.index(b"1", len(data) // 2)
    data[at] ^= 2
    path.write_bytes(data)
    for check in (check_bundle, lambda path: LLM(path, verify=True).close()):
        with pytest.raises(BundleError, match=r"a\.bundle/") as error:
            check(bundle)
        assert error.value.exit_code == 7
        assert name in str(error.value)


def test_a_file_that_is_gone_or_cut_off(bundle: Path) -> None:
    (bundle / WEIGHTS).write_bytes((bundle / WEIGHTS).read_bytes()[:-1])
    with pytest.raises(BundleError, match=WEIGHTS):
        check_bundle(bundle)
    (bundle / WEIGHTS).unlink()
    with pytest.raises(BundleError, match=f"{WEIGHTS}: No such file"):
        check_bundle(bundle)


def scale_a_weight(bundle: Path) -> None:
    """By 1.01, with a manifest that agrees: what somebody did, or a bug before the hash was taken."""
    opened = Bundle.open(bundle)
    name = next(n for n in opened.index.tensors if ".1.mlp.down_proj" in n)
    entry = opened.tensor(name)
    data = bytearray((bundle / WEIGHTS).read_bytes())
    values = np.frombuffer(data, np.float32, entry.bytes // 4, entry.offset)
    values *= np.float32(1.01)
    (bundle / WEIGHTS).write_bytes(data)
    manifest = json.loads((bundle / MANIFEST_PATH).read_text())
    manifest["files"][WEIGHTS]["sha256"] = hashlib.sha256(data).hexdigest()
    (bundle / MANIFEST_PATH).write_text(sealed(manifest))


def test_a_weight_off_by_one_percent_needs_the_source_to_be_found(bundle: Path, tiny_folder: Path) -> None:
    scale_a_weight(bundle)
    assert check_bundle(bundle).targets[0].why_not is None
    with pytest.raises(VerificationError, match="target cpu: the exported program differs from its source"):
        check_bundle(bundle, source=tiny_folder)


def test_another_source_is_refused(
    tiny_bundle: Path, tiny_folder: Path, tiny_model: Callable[..., PreTrainedModel], tmp_path: Path
) -> None:
    def refused(source: Path, match: str, kind: type[EnginewrightError] = SourceError) -> None:
        with pytest.raises(kind, match=match):
            check_bundle(tiny_bundle, source=source)

    refused(tmp_path / "nothing", "source: .*nothing doesn't exist")
    tiny_model("Qwen2", vocab_size=259).save_pretrained(tmp_path / "qwen")
    refused(tmp_path / "qwen", "another model than .*: its architecture is Qwen2ForCausalLM, the bundle's Llama")
    tiny_model("Llama").save_pretrained(tmp_path / "small")
    refused(tmp_path / "small", "its vocab_size is 256, the bundle's 259")
    tiny_model("Llama", vocab_size=259, num_hidden_layers=3).save_pretrained(tmp_path / "deep")
    refused(tmp_path / "deep", "its parameters is|its parameters are")

    other = Path(shutil.copytree(tiny_folder, tmp_path / "other"))
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["e"] = vocabulary["e"], vocabulary["a"]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    refused(other, "another tokenizer than .*: they make different tokens of a text, from its token")

    model = tiny_model("Llama", vocab_size=259)
    model.model.layers[0].mlp.down_proj.weight.data *= 1.01
    same_shape = Path(shutil.copytree(tiny_folder, tmp_path / "same"))
    model.save_pretrained(same_shape)
    refused(same_shape, "differs from its source", VerificationError)
    with pytest.raises(VerificationError) as error:
        check_bundle(tiny_bundle, source=same_shape)
    hint = str(error.value.hint)
    assert "may be another checkpoint" in hint and Bundle.open(tiny_bundle).manifest.source.name in hint
    assert f"optimize bisect {same_shape} {tiny_bundle}" in hint and "report it" not in hint


def test_targets_that_do_not_run_here(bundle: Path) -> None:
    with pytest.raises(BundleError, match="no target 'cuda'; it has cpu"):
        check_bundle(bundle, targets=["cuda"])
    path = bundle / target_manifest_path("cpu")
    target = json.loads(path.read_text())
    path.write_text(sealed(target | {"state": "needs-build", "needs": "a GPU"}))
    (one,) = check_bundle(bundle).targets
    assert (one.why_not, one.comparison) == ("it is not built yet, and needs a GPU", None)
    with pytest.raises(BundleError, match="not built"):
        check_bundle(bundle, targets=["cpu"])


def test_a_target_that_onnxruntime_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny_onnx.write_bundle(tmp_path / "tiny.bundle")
    (target,) = check_bundle(path).targets
    assert (target.target, target.why_not) == ("onnx", None)
    assert target.runs_with["provider"] == "CPUExecutionProvider"
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    (target,) = check_bundle(path).targets
    assert target.why_not is not None and "onnxruntime, which target 'onnx' runs on" in target.why_not
    with pytest.raises(MissingDependencyError, match=r"enginewright\[onnx\]"):
        check_bundle(path, targets=["onnx"])


def test_a_recipe_of_a_later_version(bundle: Path, tiny_folder: Path) -> None:
    manifest = json.loads((bundle / MANIFEST_PATH).read_text())
    manifest["recipe"]["weights"]["rounding"] = "magic"
    (bundle / MANIFEST_PATH).write_text(sealed(manifest))
    check_bundle(bundle)
    with pytest.raises(BundleError, match=r"manifest\.json: recipe\.weights\.rounding"):
        check_bundle(bundle, source=tiny_folder)


def _edited(program: bytes, **changes: object) -> bytes:
    return json.dumps(json.loads(program) | changes).encode()


@pytest.mark.parametrize("target", ["tvm", "cuda"])
def test_a_program_is_verified_whoever_runs_it(target: str, bundle: Path) -> None:
    """Also of a target whose code nobody has allowed, and whose hashes are right."""
    if target == "cuda":
        with_target(bundle, target)
        assert [check.target for check in check_bundle(bundle).targets] == ["cpu", "cuda"]
    program = (bundle / "targets/cpu/programs/decode.json").read_bytes()
    arenas: list[object] = [-1, 0, 7, 64, {"T": 1}, {"T": -8, "1": 64}]
    buffers = json.loads(program)["buffers"]
    for edited in (
        *(_edited(program, arena_bytes=arena) for arena in arenas),
        _edited(program, buffers=[b | {"offset": 1 << 30} for b in buffers]),
        _edited(program, buffers=[b | {"size": -4} for b in buffers]),
        _edited(program, buffers=[{k: v for k, v in b.items() if k != "offset"} for b in buffers]),
    ):
        with_target(bundle, target, program=edited)
        with pytest.raises(BundleError, match=r"arena|offset|negative|buffer"):
            check_bundle(bundle)


def test_the_cpu_target_s_memory_is_verified(bundle: Path) -> None:
    path, listed = bundle / "targets/cpu/programs/decode.json", bundle / "targets/cpu/manifest.json"
    program, manifest = path.read_bytes(), TargetManifest.from_json(listed.read_bytes(), source="")
    for arena in (-1, 0, 7, 64):
        path.write_bytes(edited := _edited(program, arena_bytes=arena))
        entry = FileSection(bytes=len(edited), sha256=hashlib.sha256(edited).hexdigest())
        listed.write_text(
            manifest.model_copy(update={"files": {**manifest.files, "programs/decode.json": entry}}).to_json()
        )
        with pytest.raises(BundleError, match="outside of the arena"):
            check_bundle(bundle)
