"""Nothing is ever replaced but a bundle with nothing else in it, and never what the new one is made from."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from enginewright.plugins.emit.bundle_writer import BundleWriter
from enginewright.runtime.bundle.manifest import FileSection, Manifest
from enginewright.runtime.bundle.output_folder import output_place, unlisted_files, why_not_a_bundle
from enginewright.runtime.shared.errors import BundleError, RequestError

Make = Callable[..., Path]

WEB_EXTENSION = json.dumps({"manifest_version": 3, "name": "My app", "version": "1.0"})


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def refused(output: str | Path, match: str, **inputs: str | Path) -> None:
    """An export to ``output`` with --force is refused, and everything around stays as it was."""
    around = Path.cwd()
    before, names = contents(around), sorted(p.name for p in around.rglob("*"))
    with pytest.raises(BundleError, match=match), BundleWriter(output, overwrite=True, inputs=inputs):
        pass
    assert contents(around) == before and sorted(p.name for p in around.rglob("*")) == names


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("manifest", [WEB_EXTENSION, "{}", "[]", "not JSON", "", "\udcff", '{"format_version": 1}'])
def test_a_folder_with_a_manifest_of_somebody_else_is_kept(manifest: str) -> None:
    Path("myapp/src").mkdir(parents=True)
    Path("myapp/src/main.js").write_text("alert(1)")
    Path("myapp/manifest.json").write_bytes(manifest.encode(errors="surrogateescape"))
    refused("myapp", r"myapp exists and isn't a bundle")


@pytest.mark.parametrize("path", ["notes.txt", ".git/config", "src/main.js", "targets/cpu/mine.bin", "weights/other"])
def test_a_bundle_with_somebody_elses_files_is_kept(make_bundle: Make, path: str) -> None:
    file = make_bundle("x.bundle") / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("mine")
    refused("x.bundle", rf"x\.bundle is a bundle with files in it that no manifest lists: {path}")
    file.unlink()
    assert why_not_a_bundle(Path("x.bundle")) is None


def test_a_linked_folder_in_a_bundle_is_somebody_elses(make_bundle: Make, tmp_path: Path) -> None:
    Path("precious").mkdir()
    Path("precious/notes.txt").write_text("mine")
    (make_bundle("x.bundle") / "linked").symlink_to(tmp_path / "precious")
    refused("x.bundle", "no manifest lists: linked")


def test_many_files_are_named_by_the_first(make_bundle: Make) -> None:
    for i in range(9):
        (make_bundle("x.bundle", overwrite=i > 0) if i == 0 else Path("x.bundle")).joinpath(f"{i}.txt").write_text("")
    refused("x.bundle", r"no manifest lists: 0\.txt, 1\.txt, 2\.txt and 6 more")


def test_what_may_be_replaced(make_bundle: Make, manifest: Manifest) -> None:
    """A bundle as exported, damaged ones, and one whose `optimize build` was killed."""

    def build_killed(path: Path) -> None:
        (path / "targets/cpu/.decode.123.partial").write_text("x")

    def add_report(path: Path) -> None:
        (path / "report/recipe.toml").write_text("x")

    for change in (
        lambda path: None,
        build_killed,
        add_report,
        lambda path: (path / "weights/weights-00000.bin").unlink(),
        lambda path: (path / "weights/index.json").write_text("damaged"),
        lambda path: (path / "empty").mkdir(),
    ):
        change(make_bundle("x.bundle", overwrite=True))
        with BundleWriter("x.bundle", overwrite=True) as writer:
            writer.commit(manifest, {})
        assert set(contents(Path("x.bundle"))) == {"manifest.json"}
        assert [p.name for p in Path.cwd().iterdir()] == ["x.bundle"]


def test_what_a_bundle_is_made_from_lies_elsewhere(make_bundle: Make, tmp_path: Path) -> None:
    bundle = make_bundle("x.bundle")
    Path("model/deep").mkdir(parents=True)
    Path("model/config.json").write_text("{}")
    Path("model.gguf").write_text("GGUF")
    (bundle / "report/recipe.toml").write_text("")
    refused(
        "x.bundle",
        r"the recipe x\.bundle/report/recipe\.toml lies in .*x\.bundle",
        **{"the recipe": "x.bundle/report/recipe.toml"},
    )
    refused("x.bundle", "the source x.bundle/report lies in", **{"the source": bundle.relative_to(tmp_path) / "report"})
    refused("model", "the source model lies in", **{"the source": "model"})
    refused("model.gguf", r"the source model\.gguf lies in", **{"the source": "model.gguf"})
    refused("model/deep/x.bundle", "x.bundle lies in the source model\n.*beside that folder", **{"the source": "model"})
    Path("linked").symlink_to("model")
    refused("linked/x.bundle", "lies in the source model", **{"the source": "model"})
    refused("model/x.bundle", "lies in the source linked", **{"the source": "linked"})
    with BundleWriter("y.bundle", inputs={"the source": "model", "the recipe": "no/such/file", "other": None}):
        pass


OUTPUTS = [
    (".", "is the current folder"),
    ("", "is the current folder"),
    ("./", "is the current folder"),
    ("sub/..", "is the current folder"),
    ("..", "has the current folder in it"),
    ("../..", "has the current folder in it"),
    ("/", "is the root folder"),
    ("//", "is the root folder"),
    ("/..", "is the root folder"),
    (os.fsdecode(b"a\xff"), r"'a\\udcff' isn't a file name in UTF-8"),
    (os.fsdecode(b"\xff/a"), r"isn't a file name in UTF-8"),
    ("a\0b", "isn't a file name in UTF-8"),
    ("n" * 300, "File name too long"),
    ("n" * 240, "cannot be written: File name too long"),
    ("file", "exists and isn't a bundle"),
    ("file/", "exists and isn't a bundle"),
    ("file/x", "Not a directory"),
    ("full", "exists and isn't a bundle"),
    ("full/", "exists and isn't a bundle"),
    ("sub/../full", "exists and isn't a bundle"),
    ("link", r"is a link to x\.bundle\n.*folder that it leads to"),
    ("link/", r"is a link to x\.bundle"),
    ("dangling", "is a link to nowhere"),
    ("loop", "is a link to loop"),
    ("loop/x", "symbolic links"),
    ("to-empty", "is a link to sub"),
    ("to-full/notes.txt", "exists and isn't a bundle"),
    ("pipe", "exists and isn't a bundle"),
    ("x.bundle/report", "exists and isn't a bundle"),
    ("/dev/null", "exists and isn't a bundle"),
    ("/dev/null/x", "Not a directory"),
    ("/proc/x", "cannot be written"),
]


@pytest.mark.parametrize(("output", "match"), OUTPUTS)
def test_outputs_that_are_refused(make_bundle: Make, output: str, match: str) -> None:
    make_bundle("x.bundle")
    Path("sub").mkdir()
    Path("full").mkdir()
    Path("full/notes.txt").write_text("mine")
    Path("file").write_text("mine")
    Path("link").symlink_to("x.bundle")
    Path("dangling").symlink_to("nowhere")
    Path("loop").symlink_to("loop")
    Path("to-empty").symlink_to("sub")
    Path("to-full").symlink_to("full")
    os.mkfifo("pipe")
    refused(output, match)


def test_the_current_folder_may_be_in_no_output(make_bundle: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = make_bundle("x.bundle")
    monkeypatch.chdir(bundle / "report")
    refused("..", "has the current folder in it")


def test_a_current_folder_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(BundleError, match="No such file"):
        BundleWriter("x.bundle")


@pytest.mark.parametrize(
    "output", ["new.bundle", "deep/in/new.bundle", "sub", "sub/", "ends.in.slash/", "to-sub/x", "é ü"]
)
def test_outputs_that_are_taken(output: str, manifest: Manifest, tmp_path: Path) -> None:
    Path("sub").mkdir()
    Path("to-sub").symlink_to("sub")
    with BundleWriter(output) as writer:
        writer.commit(manifest, {})
    assert Path(output, "manifest.json").is_file()
    assert not list(tmp_path.rglob(".*"))


def test_parents_links_are_followed_before_two_dots(manifest: Manifest) -> None:
    """The system resolves links first: "link/.." is the parent of the link's target."""
    Path("deep/in").mkdir(parents=True)
    Path("link").symlink_to("deep/in")
    assert output_place("link/../x", {}) == Path.cwd() / "deep/x"


def test_the_callers_error_is_raised() -> None:
    with pytest.raises(RequestError, match="root folder"):
        output_place("/", {}, RequestError)


def test_folders_that_look_like_an_exports_are_left_alone(make_bundle: Make) -> None:
    for name in (".x.bundle.replaced-mine", ".x.bundle.partial-mine", ".x.bundle.replaced-0123456789abc"):
        Path(name).mkdir()
        Path(name, "notes.txt").write_text("mine")
    make_bundle("x.bundle")
    assert len(list(Path.cwd().glob(".x.bundle.*/notes.txt"))) == 3


def test_unlisted_files(make_bundle: Make) -> None:
    bundle = make_bundle("x.bundle")
    (bundle / "report/more.txt").write_text("")
    everything = set(contents(bundle))
    assert unlisted_files(bundle, everything) == []
    assert unlisted_files(bundle, everything - {"weights/index.json"}) == ["weights/index.json"]


def test_a_file_in_report_that_no_export_writes_is_somebody_elses(make_bundle: Make) -> None:
    file = make_bundle("x.bundle") / "report/my measurements.txt"
    file.write_text("mine")
    refused("x.bundle", r"files in it that no manifest lists: report/my measurements\.txt")
    file.rename(file.with_name("report.json"))
    assert why_not_a_bundle(Path("x.bundle")) is None


@pytest.mark.parametrize("sealed", [False, True])
def test_what_an_edited_manifest_lists_is_kept(make_bundle: Make, sealed: bool) -> None:
    path = make_bundle("x.bundle") / "manifest.json"
    (path.parent / "notes.txt").write_text("mine")
    entry = FileSection(bytes=4, sha256="0" * 64)
    manifest = Manifest.from_json(path.read_text())
    edited = manifest.model_copy(update={"files": {**manifest.files, "notes.txt": entry}}).to_json()
    path.write_text(edited if sealed else edited.replace('"name"', ' "name"'))
    refused("x.bundle", r"notes\.txt" if sealed else r"isn't a bundle that can be read: .*altered")
    # What is listed and is what was listed is the bundle's, wherever a package's target writes it.
    entry = FileSection(bytes=4, sha256=hashlib.sha256(b"mine").hexdigest())
    path.write_text(manifest.model_copy(update={"files": {**manifest.files, "notes.txt": entry}}).to_json())
    assert why_not_a_bundle(Path("x.bundle")) is None
