"""A second export of the same takes what the first has made: the same bytes, or nothing where a byte is another."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import pytest
from typer.testing import CliRunner

from enginewright.optimizer.cli.app import app
from enginewright.optimizer.export import export, export_to_keep, find_kept, kept_exports, run
from enginewright.optimizer.export.kept_exports import KeptExports, describe, key_of
from enginewright.optimizer.export.report import ExportReport
from enginewright.optimizer.export.run import WantedExport
from enginewright.optimizer.recipes.recipe import Recipe, load_recipe
from enginewright.plugins.emit.bundle_writer import BundleWriter
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.shared.errors import BundleError, CapacityError, RequestError, SourceError
from enginewright.runtime.shared.progress import ProgressEvent
from tests.conftest import make_tiny_model
from tests.optimizer.capture.gguf.test_model import write
from tests.waiting import HANG

HASH = "0123456789abcdef" * 4


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> KeptExports:
    """A cache of its own, that also takes tiny models."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(kept_exports, "LEAST_SOURCE_BYTES", 0)
    exports = KeptExports.of_user()
    assert exports.root == tmp_path / "cache/enginewright/exports"
    return exports


@pytest.fixture
def source(tiny_folder: Path, tmp_path: Path) -> Path:
    """A tiny model that a test may change."""
    return Path(shutil.copytree(tiny_folder, tmp_path / "tiny"))


def files(bundle: Path, *, report: bool = True) -> dict[str, bytes]:
    return {
        str(p.relative_to(bundle)): p.read_bytes()
        for p in sorted(bundle.rglob("*"))
        if p.is_file() and (report or p.parent.name != "report")
    }


def export_once(source: Path, recipe: str | None = None) -> Path:
    """Returns the bundle that a command would run."""
    missing = find_kept(source, recipe=recipe)
    return missing.bundle or export_to_keep(missing)


def no_work(*arguments: object) -> ExportReport:
    raise AssertionError("an export was made")


def test_a_model_that_is_served_is_exported_once(
    source: Path, kept: KeptExports, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = export_once(source, recipe="f32")
    (entry,) = kept.entries()
    assert first == kept.bundle(entry.key) and (first / "manifest.json").exists()
    monkeypatch.setattr("enginewright.optimizer.export.compile_model.compile_model", no_work)
    assert export_once(source, recipe="f32") == first
    with pytest.raises(AssertionError, match="an export was made"):
        export_once(source)


@pytest.mark.matrix
def test_a_second_export_is_the_first_byte_by_byte(
    source: Path, tmp_path: Path, kept: KeptExports, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = export(source, tmp_path / "plain.bundle", recipe="int8")
    assert kept.entries() == []  # not unless it is asked for
    first = export(source, tmp_path / "first.bundle", recipe="int8", cache=True)
    assert first.kept_since is None and plain.kept_since is None
    (entry,) = kept.entries()
    assert (entry.source, entry.recipe, entry.targets) == ("tiny", "int8", ("cpu",))
    monkeypatch.setattr("enginewright.optimizer.export.compile_model.compile_model", no_work)
    second = export(source, tmp_path / "second.bundle", recipe="int8", cache=True)
    assert second.kept_since is not None and second.path == str(tmp_path / "second.bundle")
    assert files(tmp_path / "second.bundle") == files(tmp_path / "first.bundle")
    assert files(tmp_path / "second.bundle", report=False) == files(tmp_path / "plain.bundle", report=False)
    assert second.verification == first.verification and second.stages == first.stages
    assert second.to_json().keys() == first.to_json().keys()
    with pytest.raises(BundleError, match=r"second\.bundle exists"):
        export(source, tmp_path / "second.bundle", recipe="int8", cache=True)
    export(source, tmp_path / "second.bundle", recipe="int8", cache=True, overwrite=True)
    for options in ({"recipe": "f32"}, {"context_length": 64}, {"kv_cache": "f32"}, {"name": "mine"}):
        with pytest.raises(AssertionError, match="an export was made"):
            export(source, tmp_path / "third.bundle", cache=True, **{"recipe": "int8", **options})  # type: ignore[arg-type]
    assert not (tmp_path / "third.bundle").exists()


def _change_a_weight(entry: Path) -> None:
    blob = max((p for p in entry.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    data = blob.read_bytes()
    blob.unlink()  # it may be the same file as the bundle's
    blob.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


def _remove_a_file(entry: Path) -> None:
    (entry / "bundle/manifest.json").unlink()


def _link_elsewhere(entry: Path) -> None:
    (entry / "bundle/manifest.json").unlink()
    (entry / "bundle/manifest.json").symlink_to("/etc/passwd")


def _lead_outside(entry: Path) -> None:
    text = (entry / "entry.json").read_text()
    (entry / "entry.json").write_text(text.replace('"manifest.json"', '"../../../manifest.json"'))


def _no_json(entry: Path) -> None:
    (entry / "entry.json").write_bytes(b"\x80\x04pickle")


def _of_another_key(entry: Path) -> None:
    text = (entry / "entry.json").read_text()
    (entry / "entry.json").write_text(text.replace(entry.name, HASH))


DAMAGES: list[Callable[[Path], None]] = [
    *(_change_a_weight, _remove_a_file, _link_elsewhere, _lead_outside, _no_json, _of_another_key),
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_entry_is_none(damage: Callable[[Path], None], tiny_bundle: Path, tmp_path: Path) -> None:
    exports = KeptExports(tmp_path / "cache")
    assert exports.keep(describe(HASH[::-1], tiny_bundle, "f32", ("cpu",), "tiny"), tiny_bundle)
    assert exports.root is not None
    damage(exports.root / HASH[::-1])
    (tmp_path / "taken").mkdir()
    assert exports.take(HASH[::-1], tmp_path / "taken") is None
    assert list((tmp_path / "taken").iterdir()) == []
    assert exports.take(HASH, tmp_path / "taken") is None
    assert not (tmp_path.parent / "manifest.json").exists()


def test_what_is_taken_is_a_copy(tiny_bundle: Path, tmp_path: Path) -> None:
    exports = KeptExports(tmp_path / "cache")
    assert exports.keep(describe(HASH, tiny_bundle, "f32", ("cpu",), "tiny"), tiny_bundle)
    (tmp_path / "taken").mkdir()
    assert exports.take(HASH, tmp_path / "taken") is not None
    assert files(tmp_path / "taken") == files(tiny_bundle)
    (tmp_path / "taken/manifest.json").write_text("mine")
    (tmp_path / "again").mkdir()
    assert exports.take(HASH, tmp_path / "again") is not None
    assert files(tmp_path / "again") == files(tiny_bundle)


def test_an_entry_that_may_be_running_stays(tiny_bundle: Path, tmp_path: Path) -> None:
    exports = KeptExports(tmp_path / "cache")
    entry = describe(HASH, tiny_bundle, "f32", ("cpu",), "tiny")
    assert exports.keep(entry, tiny_bundle)
    bundle = exports.bundle(HASH)
    assert bundle is not None
    before = bundle.parent.stat().st_ino
    assert exports.keep(entry, tiny_bundle) and bundle.parent.stat().st_ino == before
    (bundle / "manifest.json").unlink()
    assert exports.keep(entry, tiny_bundle) and exports.bundle(HASH) == bundle  # it was damaged


def test_all_entries_together_have_a_bound(tiny_bundle: Path, tmp_path: Path) -> None:
    exports = KeptExports(tmp_path / "cache")
    entry = describe(HASH, tiny_bundle, "f32", ("cpu",), "tiny")
    assert not exports.keep(entry, tiny_bundle, most=entry.bytes - 1)
    assert exports.entries() == [] and exports.root is not None and list(exports.root.iterdir()) == []
    keys = [f"{i:064x}" for i in range(4)]
    for i, key in enumerate(keys):
        assert exports.keep(describe(key, tiny_bundle, "f32", ("cpu",), "tiny"), tiny_bundle, most=3 * entry.bytes)
        os.utime(exports.root / key, (i, 100 + i))  # in the order in which they were used
    assert sorted(e.key for e in exports.entries()) == keys[1:]
    (tmp_path / "taken").mkdir()
    assert exports.take(keys[1], tmp_path / "taken") is not None
    assert exports.entries()[0].key == keys[1]  # it was used just now
    assert exports.clear() >= 3 * entry.bytes
    assert exports.entries() == [] and list(exports.root.iterdir()) == []


def test_what_decides_is_in_the_key(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_exports, "LEAST_SOURCE_BYTES", 0)
    (tmp_path / "text.txt").write_text("calibration")
    recipe = load_recipe("int8")

    def key(model: Path = source, using: Recipe = recipe, **given: Any) -> str | None:
        return key_of(model, using, files={"calibration": tmp_path / "text.txt"}, **given)

    keys = [key(), key(using=load_recipe("f32")), key(context_length=3), key(name="mine")]
    copied = Path(shutil.copytree(source, tmp_path / "elsewhere/tiny"))
    assert key(copied) == keys[0]  # the same bytes under the same name
    keys.append(key(Path(shutil.copytree(source, tmp_path / "another"))))
    before = os.stat(source / "config.json")
    (source / "config.json").write_bytes((source / "config.json").read_bytes().replace(b" ", b"\t", 1))
    os.utime(source / "config.json", ns=(before.st_atime_ns, before.st_mtime_ns))  # of the same size, at the same time
    keys.append(key())
    (tmp_path / "text.txt").write_text("Calibration")
    keys.append(key())
    monkeypatch.setattr(kept_exports, "_version", lambda name: "another")
    keys.append(key())
    monkeypatch.setattr(kept_exports, "_our_code", lambda: "another")
    keys.append(key())
    monkeypatch.setattr(kept_exports, "_machine", dict)
    keys.append(key())
    assert None not in keys and len(set(keys)) == len(keys)
    monkeypatch.setattr(kept_exports, "_foreign", lambda: {"theirs"})
    assert key(using=Recipe(name="mine", passes={"theirs": True})) is None
    assert key(using=Recipe(name="mine", passes={"theirs": False})) is not None
    monkeypatch.setattr(kept_exports, "LEAST_SOURCE_BYTES", 1 << 30)
    assert key() is None


@pytest.mark.matrix
def test_the_command_shows_and_clears(source: Path, tmp_path: Path, kept: KeptExports) -> None:
    arguments = ["export", str(source), "--quiet"]
    assert CliRunner().invoke(app, [*arguments, "--no-cache", "-o", str(tmp_path / "0.bundle")]).exit_code == 0
    empty = json.loads(CliRunner().invoke(app, ["cache", "--json"]).stdout)
    assert empty["entries"] == [] and empty["folder"] == str(kept.root)
    assert CliRunner().invoke(app, [*arguments, "-o", str(tmp_path / "1.bundle")]).exit_code == 0
    (entry,) = json.loads(CliRunner().invoke(app, ["cache", "--json"]).stdout)["entries"]
    assert (entry["source"], entry["recipe"]) == ("tiny", "f32")
    assert "tiny, recipe f32, for cpu" in CliRunner().invoke(app, ["cache"]).stdout
    again = CliRunner().invoke(app, ["export", str(source), "-o", str(tmp_path / "2.bundle")])
    assert again.exit_code == 0 and "an earlier export of the same" in again.stdout, again.output
    cleared = json.loads(CliRunner().invoke(app, ["cache", "clear", "--json"]).stdout)
    assert cleared["freed_bytes"] >= entry["bytes"]
    assert CliRunner().invoke(app, ["cache"]).stdout.startswith("0 kept")
    assert CliRunner().invoke(app, ["cache", "nonsense"]).exit_code == 2


@pytest.mark.parametrize(
    ("library", "targets", "decides"),
    [
        *((name, ("cpu",), True) for name in ("numpy", "torch", "transformers", "gguf", "enginewright")),
        *((name, ("cpu",), False) for name in ("onnx", "onnxruntime", "triton", "ray", "fastapi", "rich", "pytest")),
        *((name, ("cpu", "onnx"), True) for name in ("onnx", "onnxruntime", "onnxruntime-gpu")),
        *((name, ("stablehlo",), True) for name in ("jaxlib", "iree-base-compiler")),
        *((name, ("cuda",), decides) for name, decides in (("triton", True), ("ray", False), ("jaxlib", False))),
        *((name, ("tvm",), decides) for name, decides in (("apache-tvm", True), ("onnx", False))),
    ],
)
def test_the_version_of_what_an_export_may_use_decides(
    library: str, targets: tuple[str, ...], decides: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, version = kept_exports._versions(targets), kept_exports._version
    monkeypatch.setattr(kept_exports, "_version", lambda name: "0.0.1" if name == library else version(name))
    assert (kept_exports._versions(targets) != before) == decides


def test_targets_that_are_named_decide_as_the_recipe_s_do(
    source: Path, kept: KeptExports, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = load_recipe("int8")
    keys = {key_of(source, recipe, targets=targets) for targets in (None, ["onnx"], ["cpu", "onnx"])}
    assert len(keys) == 3 and key_of(source, recipe, targets=["cpu"]) in keys
    monkeypatch.setattr(kept_exports, "_foreign", lambda: {"theirs"})
    assert key_of(source, recipe, targets=["theirs"]) is None


def test_a_quantized_file_is_kept_under_the_recipe_that_it_gets(
    kept: KeptExports, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write(make_tiny_model("Llama"), tmp_path / "tiny.gguf", gguf.GGMLQuantizationType.Q4_0)
    first = export(source, tmp_path / "first.bundle", cache=True)
    (entry,) = kept.entries()
    assert (first.recipe, entry.recipe) == ("gguf", "gguf")
    monkeypatch.setattr("enginewright.optimizer.export.compile_model.compile_model", no_work)
    for recipe in ("gguf", None):
        again = export(source, tmp_path / "again.bundle", recipe=recipe, cache=True, overwrite=True)
        assert again.kept_since is not None
    assert files(tmp_path / "again.bundle") == files(tmp_path / "first.bundle")
    for options in ({"recipe": "f32"}, {"recipe": "int8"}, {"kv_cache": "f32"}):
        with pytest.raises(AssertionError, match="an export was made"):
            export(source, tmp_path / "other.bundle", cache=True, **options)  # type: ignore[arg-type]


# ---- several processes, and disks that are full


@pytest.fixture
def wanted(tiny_bundle: Path, kept: KeptExports, monkeypatch: pytest.MonkeyPatch) -> WantedExport:
    """A model whose export is a copy of the tiny bundle."""

    def copied(source: object, output: Path, **given: object) -> SimpleNamespace:
        # Without shutil.copyfile, which a test replaces.
        shutil.copytree(tiny_bundle, output, copy_function=lambda a, b: Path(b).write_bytes(Path(a).read_bytes()))
        return SimpleNamespace(recipe="f32", targets=["cpu"])

    monkeypatch.setattr(run, "export", copied)
    return WantedExport(tiny_bundle, load_recipe("f32"), HASH, None)


def left(kept: KeptExports) -> list[str]:
    """The names in the cache that aren't entries."""
    assert kept.root is not None
    return [name for name in os.listdir(kept.root) if name.startswith(".")]


def test_of_two_that_want_the_same_one_exports(wanted: WantedExport, kept: KeptExports, monkeypatch: Any) -> None:
    exports, waits, began = list[object](), list[ProgressEvent](), threading.Event()
    copied, both = run.export, threading.Event()

    def slow(*given: Any, **named: Any) -> Any:
        exports.append(given)
        began.set()
        assert both.wait(HANG)
        return copied(*given, **named)

    def on_progress(event: ProgressEvent) -> None:
        waits.append(event)
        both.set()

    monkeypatch.setattr(run, "export", slow)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(export_to_keep, wanted)
        assert began.wait(HANG)
        second = pool.submit(export_to_keep, wanted, on_progress)
        assert first.result(HANG) == second.result(HANG) == kept.bundle(HASH)
    assert len(exports) == 1
    assert [(event.stage, event.detail) for event in waits] == [("wait", "for another process's export of the same")]
    assert left(kept) == []


HOLDS = """
import sys, time
from enginewright.optimizer.export.kept_exports import KeptExports
kept = KeptExports.of_user()
with kept.exporting(sys.argv[1], lambda: None), kept.unfinished(sys.argv[1]) as output:
    output.mkdir()
    (output / "half").write_text("written")
    print("ready", flush=True)
    time.sleep(3600)
"""


def test_a_killed_export_blocks_nobody_and_leaves_nothing(wanted: WantedExport, kept: KeptExports) -> None:
    command = [sys.executable, "-c", HOLDS, HASH]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "ready\n"
        kept.clear()  # takes nothing from an export that is being made
        assert len(left(kept)) == 2
        killer = threading.Timer(0, holder.kill)
        bundle = export_to_keep(wanted, lambda event: killer.start())  # which waits for it
    assert bundle == kept.bundle(HASH) and Bundle.open(bundle)
    assert left(kept) == []


def test_what_fails_blocks_nobody(wanted: WantedExport, kept: KeptExports, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*given: object, **named: object) -> None:
        raise SourceError("damaged")

    with monkeypatch.context() as patch, pytest.raises(SourceError):
        patch.setattr(run, "export", fails)
        export_to_keep(wanted)
    assert left(kept) == [] and export_to_keep(wanted) == kept.bundle(HASH)


def _full_while_written(patch: pytest.MonkeyPatch) -> None:
    def export(source: object, output: Path, **named: object) -> None:
        with BundleWriter(output) as writer:
            writer.write_text("a.txt", "text")

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    patch.setattr(run, "export", export)
    patch.setattr(os, "fsync", full)


def _full_at_once(patch: pytest.MonkeyPatch) -> None:
    def full(*given: object, **named: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    patch.setattr(tempfile, "mkdtemp", full)


def _full_at_the_end(patch: pytest.MonkeyPatch) -> None:
    def full(*given: object, **named: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    patch.setattr(os, "link", full)
    patch.setattr(shutil, "copyfile", full)


@pytest.mark.parametrize("fill", [_full_while_written, _full_at_once, _full_at_the_end])
def test_a_full_disk_says_what_to_do(
    fill: Callable[[pytest.MonkeyPatch], None], wanted: WantedExport, kept: KeptExports, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch, pytest.raises(CapacityError, match="hasn't the room") as caught:
        fill(patch)
        export_to_keep(wanted)
    assert str(kept.root) in caught.value.message and "\n" not in caught.value.message
    assert caught.value.hint is not None
    assert "optimize cache clear" in caught.value.hint and "XDG_CACHE_HOME" in caught.value.hint
    assert left(kept) == [] and export_to_keep(wanted) == kept.bundle(HASH)


@pytest.mark.parametrize("place", ["cache", "cache/enginewright", "cache/enginewright/exports"])
def test_a_cache_that_can_t_be_written_is_named(place: str, wanted: WantedExport, tmp_path: Path) -> None:
    (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / place).write_text("a file")
    with pytest.raises(RequestError, match=r"exports, where exports are kept, can't be written: ") as caught:
        export_to_keep(wanted)
    assert caught.value.hint is not None and "XDG_CACHE_HOME" in caught.value.hint


SERVED = """
import sys
from enginewright.optimizer.export import find_kept, kept_exports
kept_exports._our_code = lambda: "the same"  # the working tree may change while tests run
heard = []
print(find_kept(sys.argv[1], progress=heard.append).bundle)
print(*[event.detail for event in heard if event.stage == "recipe"])
print(*sorted({"torch", "transformers", "gguf"} & set(sys.modules)))
"""


@pytest.mark.parametrize(("kind", "recipe"), [("Q8_0", "gguf"), ("F16", "int8")])
def test_what_a_file_that_is_served_gets_is_found_out_without_torch(
    kind: str, recipe: str, kept: KeptExports, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_exports, "_our_code", lambda: "the same")
    source = write(make_tiny_model("Llama"), tmp_path / "tiny.gguf", gguf.GGMLQuantizationType[kind])
    first = export_once(source)
    (entry,) = kept.entries()
    assert entry.recipe == recipe == Bundle.open(first).manifest.recipe["name"]
    assert export_once(source, recipe=recipe) == first
    done = subprocess.run([sys.executable, "-c", SERVED, str(source)], check=True, capture_output=True, text=True)
    reasons = {
        "gguf": "gguf, as the file is quantized",
        "int8": "int8, as no recipe is named and the model isn't a quantized GGUF file",
    }
    assert done.stdout == f"{first}\n{reasons[recipe]}\n\n"
