"""A sound bundle opens; any other is refused with the file and field that is wrong."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from enginewright.plugins.emit.bundle_writer import BundleWriter
from enginewright.runtime.bundle import reader
from enginewright.runtime.bundle.manifest import Manifest, TargetManifest
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.bundle.weights import unpack
from enginewright.runtime.shared.errors import BundleError
from enginewright.runtime.shared.lowered_program import LoweredProgram
from enginewright.runtime.text.tokenizer import Tokenizer

Make = Callable[..., Path]
WEIGHT = np.random.default_rng(0).standard_normal((40, 6)).astype(np.float32)


def edit(path: Path, change: Callable[[Any], Any]) -> None:
    """Changes a JSON file, and the manifest's size of it."""
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def resize(bundle: Path, name: str) -> None:
    size = (bundle / name).stat().st_size
    if name.startswith("targets/cpu/"):
        name = name.removeprefix("targets/cpu/")
        edit(bundle / "targets/cpu/manifest.json", lambda m: m["files"][name].update(bytes=size))
    else:
        edit(bundle / "manifest.json", lambda m: m["files"][name].update(bytes=size))


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="the system has no transparent huge pages"
)
@pytest.mark.parametrize("load", ["map", "read"])
def test_weights_ask_for_huge_pages(load: reader.Load, tiny_bundle: Path) -> None:
    bundle = Bundle.open(tiny_bundle)
    weight = bundle.weight(next(iter(bundle.index.tensors)), load)
    flags: dict[range, list[str]] = {}
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match("[0-9a-f]+-[0-9a-f]+ ", line):
            place = range(*(int(end, 16) for end in line.split()[0].split("-")))
        elif line.startswith("VmFlags:"):
            flags[place] = line.split()
    (of_weight,) = (words for place, words in flags.items() if weight.ctypes.data in place)
    assert "hg" in of_weight


def test_weights_are_mapped_and_read_only(make_bundle: Make) -> None:
    bundle = Bundle.open(make_bundle())
    head = bundle.weight("head")
    np.testing.assert_array_equal(unpack(head, (40, 6), "panel32"), WEIGHT)
    np.testing.assert_array_equal(bundle.weight("norm"), WEIGHT[0])
    assert head.shape == (2, 6, 32) and head.dtype == np.float32 and not head.flags.owndata
    with pytest.raises(ValueError, match="read-only"):
        head[0] = 0
    assert [p.source for p in bundle.tensor("head").parts] == ["a", "b"]
    with pytest.raises(BundleError, match="no tensor 'tail'"):
        bundle.weight("tail")


def test_what_else_is_in_it(make_bundle: Make) -> None:
    bundle = Bundle.open(make_bundle())
    assert bundle.model.context_length == 128
    assert bundle.program("cpu").cache_groups[0].name == "full"
    assert Tokenizer(bundle.tokenizer_files()).encode("a") == [ord("a")]
    with pytest.raises(BundleError, match=r"other\.txt is not listed"):
        bundle.read_bytes("other.txt")


@pytest.mark.parametrize("path", ["none.bundle", "file", "."])
def test_what_is_no_bundle(tmp_path: Path, path: str) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(BundleError, match=r"is a file, not a bundle|doesn\'t exist|manifest\.json is missing"):
        Bundle.open(tmp_path / path)


@pytest.mark.parametrize(("path", "named"), [("a model.gguf", "a model"), ("folder", "folder")])
def test_a_model_is_to_be_exported_first(tmp_path: Path, path: str, named: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/config.json").write_text("{}")
    (tmp_path / "a model.gguf").write_bytes(b"GGUF")
    with pytest.raises(BundleError, match="is a model, not a bundle") as caught:
        Bundle.open(tmp_path / path)
    assert caught.value.hint is not None
    command = shlex.split(caught.value.hint.partition(": ")[2])
    assert command == ["optimize", "export", str(tmp_path / path), "-o", f"{named}.bundle"]


@pytest.mark.parametrize(
    "name",
    ["weights/weights-00000.bin", "weights/index.json", "targets/cpu/programs/decode.json", "tokenizer/tokenizer.json"],
)
def test_every_file_is_there_with_its_size(make_bundle: Make, name: str) -> None:
    path = make_bundle()
    size = (path / name).stat().st_size
    os.truncate(path / name, size - 1)
    with pytest.raises(BundleError, match=rf"{name}: {size - 1:,} bytes, files\.{name}\.bytes .* is {size:,}"):
        Bundle.open(path)
    (path / name).unlink()
    with pytest.raises(BundleError, match=f"{name}: No such file"):
        Bundle.open(path)
    (path / name).mkdir()
    with pytest.raises(BundleError, match=f"{name} isn't a file"):
        Bundle.open(path)


@pytest.mark.parametrize("keep", [0, 1, 50, -2])
def test_a_manifest_that_was_cut_off(make_bundle: Make, keep: int) -> None:
    manifest = make_bundle() / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:keep])
    with pytest.raises(BundleError, match=r"manifest\.json: not JSON"):
        Bundle.open(manifest.parent)


def test_a_newer_bundle_says_what_to_do(make_bundle: Make) -> None:
    path = make_bundle()
    edit(path / "manifest.json", lambda m: m.update(format_version=3))
    with pytest.raises(BundleError, match=r"manifest\.json: format_version is 3.*\n.*newer enginewright"):
        Bundle.open(path)


def test_links_do_not_lead_out(make_bundle: Make, tmp_path: Path) -> None:
    path = make_bundle()
    name = "tokenizer/tokenizer.json"
    (path / name).rename(tmp_path / "outside.json")
    (path / name).symlink_to(tmp_path / "outside.json")
    with pytest.raises(BundleError, match=rf"{name} isn't a file of this bundle"):
        Bundle.open(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda i: i["blobs"][0].update(bytes=10**6), r"blobs\.0: weights/weights-00000\.bin with 1000000 bytes"),
        (lambda i: i["blobs"][0].update(file="weights/other.bin"), r"blobs\.0: weights/other\.bin"),
        (lambda i: i["blobs"][0].update(file="../../etc/passwd"), r"blobs\.0\.file: "),
        (lambda i: i["tensors"]["norm"].update(offset=1 << 40), r"tensors\.norm: ends at byte"),
        (lambda i: i["tensors"].pop("norm"), r"decode\.json: weight 'norm' is not in"),
        (lambda i: i["tensors"]["norm"].update(dtype="i32"), r"weight 'norm' needs dtype f32, .* has i32"),
        (lambda i: i["tensors"]["norm"].update(shape=[2, 3]), r"weight 'norm' needs shape \(6,\), .* has \(2, 3\)"),
        (lambda i: i["tensors"].update(norm=i["tensors"]["head"]), r"weight 'norm' needs shape"),
        (
            lambda i: i["tensors"]["head"].update(layout="rows", bytes=960),
            r"weight 'head' needs layout panel32, .* has rows",
        ),
    ],
)
def test_an_index_that_is_wrong(make_bundle: Make, change: Callable[[Any], Any], message: str) -> None:
    path = make_bundle()
    edit(path / "weights/index.json", change)
    resize(path, "weights/index.json")
    with pytest.raises(BundleError, match=message):
        Bundle.open(path)


def test_a_program_that_is_wrong(make_bundle: Make) -> None:
    path = make_bundle()
    edit(path / "targets/cpu/programs/decode.json", lambda p: p["weights"][0].update(shape="wide"))
    resize(path, "targets/cpu/programs/decode.json")
    with pytest.raises(BundleError, match=r"decode\.json: weights\.0\.shape"):
        Bundle.open(path)


def test_targets(make_bundle: Make) -> None:
    path = make_bundle()
    with pytest.raises(BundleError, match=r"no target 'cuda'; it has cpu\n.*--target cuda"):
        Bundle.open(path).target("cuda")
    root = (path / "manifest.json").read_bytes()
    waiting = {"state": "needs-build", "needs": "a GPU of SM 8.9"}
    edit(path / "targets/cpu/manifest.json", lambda m: m.update(waiting))
    bundle = Bundle.open(path)
    assert bundle.targets["cpu"].needs == "a GPU of SM 8.9"
    with pytest.raises(BundleError, match=r"needs a GPU of SM 8\.9\n.*optimize build"):
        bundle.program("cpu")
    edit(path / "targets/cpu/manifest.json", lambda m: m.update(state="ready", needs=None, files={}))
    with pytest.raises(BundleError, match=r"targets/cpu/programs/decode\.json is not listed"):
        Bundle.open(path).program("cpu")
    assert (path / "manifest.json").read_bytes() == root  # a target is finished in its own folder
    (path / "targets/cpu/manifest.json").unlink()
    with pytest.raises(BundleError, match=r"targets/cpu/manifest\.json: cannot be read"):
        Bundle.open(path)


def test_hashes_name_the_file_that_was_altered(make_bundle: Make) -> None:
    path = make_bundle()
    seen: list[int] = []
    Bundle.open(path).verify_hashes(seen.append)
    assert "targets/cpu/programs/decode.json" in Bundle.open(path).files
    assert sum(seen) == sum(f.bytes for f in Bundle.open(path).files.values())
    blob = path / "weights/weights-00000.bin"
    data = bytearray(blob.read_bytes())
    data[100] ^= 1
    blob.write_bytes(data)
    bundle = Bundle.open(path)  # sizes are right: opening doesn't read weights
    with pytest.raises(BundleError, match=r"weights-00000\.bin: SHA-256"):
        bundle.verify_hashes()


def test_files_that_may_not_be_read(make_bundle: Make, monkeypatch: Any) -> None:
    def denied(path: Path, **_: Any) -> bytes:
        raise PermissionError(13, "Permission denied")

    path = make_bundle()
    monkeypatch.setattr(reader, "read_regular", denied)
    with pytest.raises(BundleError, match=r"manifest\.json: cannot be read: Permission denied"):
        Bundle.open(path)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_opening_a_large_bundle_reads_no_weights(tmp_path: Path, manifest: Manifest) -> None:
    """300 tensors in a blob that reads as 540 MB, and a program that uses them all."""
    path = tmp_path / "large.bundle"
    names = [f"layers.{i}" for i in range(300)]
    program = LoweredProgram.model_validate(
        {
            "cache_groups": [],
            "weights": [{"name": n, "dtype": "f32", "shape": [16], "layout": "rows"} for n in names],
            "buffers": [],
            "steps": [
                {
                    "op": "add",
                    "inputs": [
                        {"kind": "buffer", "name": "b", "dtype": "f32", "shape": [{"T": 1}, 16], "strides": [16, 1]},
                        {"kind": "weight", "name": n, "dtype": "f32", "shape": [16], "strides": [1]},
                    ],
                    "outputs": [],
                }
                for n in names * 2
            ],
            "outputs": {},
        }
    )
    with BundleWriter(path) as writer:
        for name in names:
            writer.weights().add(name, np.zeros(16, np.float32))
        writer.write_text("targets/cpu/programs/decode.json", program.to_json())
        writer.commit(manifest, {"cpu": TargetManifest()})
    blob = path / "weights/weights-00000.bin"
    os.truncate(blob, 540_000_000)  # a hole: takes no disk
    edit(path / "weights/index.json", lambda i: i["blobs"][0].update(bytes=540_000_000))
    resize(path, "weights/index.json")
    resize(path, "weights/weights-00000.bin")
    before = resident_bytes()
    bundle = Bundle.open(path)
    weights = [bundle.weight(name) for name in names]
    assert len(weights) == 300
    assert resident_bytes() - before < 100_000_000


def test_files_that_no_manifest_lists_are_named(make_bundle: Make) -> None:
    path = make_bundle()
    (path / "report/notes.txt").write_text("")  # nothing in report/ is listed
    (path / "targets/cpu/.decode.12.partial").write_text("")  # a killed build
    Bundle.open(path).verify_hashes()
    for name in ("weights/more.bin", "README.md"):
        (path / name).write_text("")
    with pytest.raises(BundleError, match=r"toy\.bundle: no manifest lists README\.md, weights/more\.bin\n"):
        Bundle.open(path).verify_hashes()


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("Llama", {"vocab_size": 257}, "model.vocab_size is 257, and its logits are 256 wide"),
        ("Llama", {"vocab_size": 255}, "model.vocab_size is 255, and its logits are 256 wide"),
        ("GPT2", {"context_length": 513}, "model.context_length is 513, and its table of positions has 512 rows"),
        ("GPT2", {"vocab_size": 300}, "model.vocab_size is 300, and its logits are 256 wide"),
    ],
)
def test_the_manifest_is_of_the_programs_model(
    tiny_model: Any, tmp_path: Path, family: str, change: dict[str, int], message: str
) -> None:
    from enginewright.optimizer.export import export

    export(tiny_model(family), tmp_path / "a.bundle")
    path = tmp_path / "a.bundle/manifest.json"
    Bundle.open(tmp_path / "a.bundle")
    edit(path, lambda m: m["model"].update(change))
    with pytest.raises(
        BundleError, match=f"manifest.json: targets/cpu/programs/decode.json is of another model: {message}"
    ):
        Bundle.open(tmp_path / "a.bundle")


def test_a_table_of_fewer_tokens_than_the_logits_have(tiny_bundle: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_bundle, tmp_path / "a.bundle")
    rows = Bundle.open(tiny_bundle).model.vocab_size

    def fewer(program: Any) -> None:
        table = next(step for step in program["steps"] if step["op"] == "embedding")["inputs"][1]
        table["shape"][0] = rows - 1

    edit(tmp_path / "a.bundle/targets/cpu/programs/decode.json", fewer)
    resize(tmp_path / "a.bundle", "targets/cpu/programs/decode.json")
    with pytest.raises(BundleError, match=f"its table of tokens has {rows - 1} rows"):
        Bundle.open(tmp_path / "a.bundle")
