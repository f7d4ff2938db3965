"""examples/extension, installed as a user would: a pass and a target that a recipe names and nobody imports."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from enginewright.runtime.executors.target import ServedTarget
from enginewright.runtime.shared.errors import TargetError
from enginewright.runtime.shared.extensions import Extensible
from enginewright.runtime.shared.targets import GROUP, OWN, Halves, part, sections_of

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "extension"

RECIPE = """
name = "toy"
targets = ["toy"]

[passes]
fold_scales = true
"""

USE = """
import sys
from pathlib import Path
import enginewright as ew
from enginewright.optimizer.verify import measure_passes
from enginewright.runtime.bundle.reader import Bundle

folder, source = Path(sys.argv[1]), sys.argv[2]
measure_passes.SHARE = 1e9  # every pass is measured, whatever the machine is busy with
ew.export(source, folder / "plain.bundle", recipe="f32")
assert not [name for name in sys.modules if name.startswith("enginewright_toy")]  # nobody has named it
report = ew.export(source, folder / "toy.bundle", recipe=folder / "toy.toml")
(folded,) = (p for p in report.passes if p.name == "fold_scales")
assert folded.matched == 4 and folded.measurement is not None, folded  # attention and MLP of each of two layers
plain, toy = (Bundle.open(folder / f"{n}.bundle").program(t) for n, t in (("plain", "cpu"), ("toy", "toy")))
assert len(toy.steps) <= len(plain.steps) - 4  # the products are gone, and what stood beside them is fused
found = {}
for target, bundle in (("cpu", "plain.bundle"), ("toy", "toy.bundle")):
    with ew.LLM(folder / bundle, target=target) as llm:
        assert llm.info()["executor"]["target"] == target
        found[target] = llm.generate([[5, 6, 7]], ew.SamplingParams(max_tokens=12, ignore_eos=True))[0].token_ids
assert found["cpu"] == found["toy"] and len(found["toy"]) == 12
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a process that has the package."""
    folder = tmp_path_factory.mktemp("installed")
    shutil.copytree(EXAMPLE, folder / "source")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "--target", folder / "site", folder / "source"], check=True)
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(folder / "site"), os.environ.get("PYTHONPATH", "")])}


def test_the_page_shows_the_package_s_pass() -> None:
    page = (EXAMPLE.parent.parent / "docs" / "build" / "extending.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"^```python\n(.*?)^```", page, re.S | re.M)
    assert shown in (EXAMPLE / "enginewright_toy" / "__init__.py").read_text(encoding="utf-8")


def test_a_recipe_names_them(
    installed: dict[str, str], tiny_model: Callable[..., PreTrainedModel], tmp_path: Path
) -> None:
    (tmp_path / "toy.toml").write_text(RECIPE)
    granite = tmp_path / "granite"
    tiny_model("Granite", residual_multiplier=0.22).save_pretrained(granite)
    done = subprocess.run(
        [sys.executable, "-c", USE, tmp_path, granite], env=installed, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    bundle = tmp_path / "toy.bundle"
    manifest = json.loads((bundle / "manifest.json").read_text())
    assert manifest["targets"] == ["toy"] and manifest["toolchain"]["enginewright-toy"] == "0.1.0"
    doctor = [sys.executable, "-m", "enginewright", "doctor", bundle, "--json"]
    done = subprocess.run(doctor, env=installed, capture_output=True, text=True, check=True)
    assert {t["target"]: t["verdict"] for t in json.loads(done.stdout)["targets"]} == {"toy": "runs"}
    # Without the package it is refused by name.
    done = subprocess.run(doctor, capture_output=True, text=True, check=False)
    assert {t["target"]: t["verdict"] for t in json.loads(done.stdout)["targets"]} == {"toy": "can't"}


class _Entry:
    dist = None

    def __init__(self, name: str, value: str) -> None:
        self.name, self.value, self.module = name, value, value.partition(":")[0]

    def load(self) -> object:
        return metadata.EntryPoint(self.name, self.value, "g").load()


def test_what_cannot_be_loaded_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [_Entry("gone", "no_such_package:X"), _Entry("text", "string:digits"), _Entry("mine", "string:digits")]
    monkeypatch.setattr(metadata, "entry_points", lambda group: entries if group == "g" else [])
    table = Extensible({"mine": 1}, "g", int)
    assert list(table) == ["mine", "gone", "text"] and len(table) == 3 and "gone" in table and "other" not in table
    assert table["mine"] == 1  # nobody replaces ours
    with pytest.raises(TargetError, match="gone: package no_such_package declares it as no_such_package:X, which"):
        table["gone"]
    with pytest.raises(TargetError, match="text: package string declares string:digits, which is str and not int"):
        table["text"]
    with pytest.raises(KeyError):
        table["other"]


def test_a_target_s_package_that_cannot_be_loaded_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [_Entry("gone", "no_such_package"), _Entry("text", "json"), _Entry("cpu", "json")]
    monkeypatch.setattr(metadata, "entry_points", lambda group: entries if group == GROUP else [])
    table = Halves("serve.target", ServedTarget)
    assert tuple(table) == (*OWN, "gone", "text") and len(table) == len(OWN) + 2
    assert "gone" in table and "other" not in table
    assert table["cpu"].carries is None  # nobody replaces ours
    with pytest.raises(TargetError, match="gone: package no_such_package declares it as no_such_package, which"):
        table["gone"]
    with pytest.raises(TargetError, match=r"text: json\.serve\.target\.TARGET is NoneType and not ServedTarget"):
        table["text"]
    with pytest.raises(KeyError):
        table["other"]
    assert part("other", "section") is None and sections_of("other") is None and sections_of("text") == {}


OUTSIDE = r"""
import sys
from pathlib import Path
import enginewright as ew

folder, source = Path(sys.argv[1]), sys.argv[2]
found = {}
for target in ("onnx", "outside"):
    (folder / "own.toml").write_text(f'name = "own"\ntargets = ["{target}"]\n[{target}]\ncontrib = true\n')
    ew.export(source, folder / target, recipe=folder / "own.toml", cache=False)
    with ew.LLM(folder / target, target=target) as llm:
        assert llm.info()["executor"]["target"] == target
        found[target] = llm.generate([[5, 6, 7]], ew.SamplingParams(max_tokens=12, ignore_eos=True))[0].token_ids
assert found["onnx"] == found["outside"] and len(found["onnx"]) == 12
for model in ("model.onnx", "model.contrib.onnx"):
    assert (folder / "onnx" / model).read_bytes() == (folder / "outside" / model).read_bytes()
(folder / "own.toml").write_text('name = "own"\n[outside]\ncontrob = true\n')
try:
    ew.export(source, folder / "wrong", recipe=folder / "own.toml")
except ew.RecipeError as e:
    assert "own.toml:3: outside.controb: unknown key" in e.message and e.hint == "Did you mean 'contrib'?", e
else:
    raise AssertionError("the package's table has no such key")
ours = {name for name in sys.modules if name.startswith("outside_onnx.")}
assert {"outside_onnx.section", "outside_onnx.compile.target", "outside_onnx.serve.target"} <= ours, ours
"""


def test_a_target_of_ours_can_be_a_package_of_its_own(tiny_folder: Path, tmp_path: Path) -> None:
    """plugins/onnx, moved out: only what it imports of the rooms is spelled another way."""
    package = tmp_path / "source" / "outside_onnx"
    shutil.copytree(EXAMPLE.parent.parent / "plugins" / "onnx", package, ignore=shutil.ignore_patterns("__pycache__"))
    for path in package.rglob("*.py"):
        above = re.escape("." * (len(path.relative_to(package).parts) + 1))
        text = path.read_text(encoding="utf-8")
        text = re.sub(rf"^( *)from {above}(\w)", r"\1from enginewright.plugins.\2", text, flags=re.M)
        path.write_text(text.replace('name = "onnx"', 'name = "outside"'), encoding="utf-8")
    project = (EXAMPLE / "pyproject.toml").read_text(encoding="utf-8").replace("toy =", "outside =")
    project = project.replace("enginewright_toy", "outside_onnx").replace("enginewright-toy", "outside-onnx")
    folders = sorted(".".join(path.parent.relative_to(package.parent).parts) for path in package.rglob("__init__.py"))
    project = re.sub(r"^packages = .*$", f"packages = {json.dumps(folders)}", project, flags=re.M)
    (tmp_path / "source" / "pyproject.toml").write_text(project, encoding="utf-8")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "--target", tmp_path / "site", tmp_path / "source"], check=True)
    path = os.pathsep.join([str(tmp_path / "site"), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", OUTSIDE, tmp_path, tiny_folder]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
