"""examples/ci: the script is run as it stands on a tiny model; workflow and Dockerfile name what there is."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import typer.main
import yaml
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

from enginewright.optimizer.build_budget import read_budget
from enginewright.optimizer.cli.app import app

REPOSITORY = Path(__file__).resolve().parent.parent
FOLDER = REPOSITORY / "examples" / "ci"
SCRIPT = FOLDER / "pipeline.sh"


def commands_of(text: str) -> dict[str, set[str]]:
    """Options of each ``optimize`` command that a script calls; those collected in ``options`` are export's."""
    commands: dict[str, set[str]] = {"export": set()}
    for line in text.replace("\\\n", " ").splitlines():
        code = line.partition(" #")[0]
        if call := re.search(r"\boptimize ([a-z]+)(.*)", code):
            commands.setdefault(call[1], set()).update(re.findall(r"(?<![\w-])--[a-z-]+", call[2]))
        elif "options" in code:
            commands["export"].update(re.findall(r"(?<![\w-])--[a-z-]+", code))
    return commands


def test_the_script_uses_commands_and_options_that_there_are() -> None:
    known = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    used = commands_of(SCRIPT.read_text())
    assert {"export", "verify", "diff", "doctor", "sbom"} <= used.keys()
    assert {"--recipe", "--target", "--context", "--output"} <= used["export"]
    for command, options in used.items():
        assert options <= {flag for p in known[command].params for flag in p.opts}, command


def test_the_workflow_runs_the_script_with_variables_that_it_reads() -> None:
    document: dict[Any, Any] = yaml.safe_load((FOLDER / "github-actions.yml").read_text())
    assert set(document) == {"name", True, "permissions", "jobs"}  # YAML 1.1 takes "on" for true; GitHub doesn't
    inputs = document[True]["workflow_dispatch"]["inputs"]
    assert document["permissions"] == {"contents": "read", "id-token": "write"}
    (job,) = document["jobs"].values()
    variables = "\n".join(str(value) for value in job["env"].values())
    assert set(re.findall(r"inputs\.(\w+)", variables)) == set(inputs)
    read = set(re.findall(r"\$\{([A-Z_]+):-", SCRIPT.read_text()))
    assert set(job["env"]) - {"MODEL", "REVISION", "RELEASED"} <= read
    runs = [step["run"] for step in job["steps"] if "run" in step]
    assert not any("inputs." in run for run in runs)  # what is typed in isn't part of a command
    (line,) = [run for run in runs if "pipeline.sh" in run]
    assert REPOSITORY / line.split()[0] == SCRIPT
    assert extras_in("\n".join(runs)) <= known_extras()
    for step in job["steps"]:
        assert ("uses" in step) != ("run" in step)


@pytest.mark.parametrize(
    ("index", "options"), [("", []), ("https://wheels.example/cpu", ["--index-url", "https://wheels.example/cpu"])]
)
def test_the_workflow_installs_with_an_index_and_without(index: str, options: list[str], tmp_path: Path) -> None:
    document: dict[Any, Any] = yaml.safe_load((FOLDER / "github-actions.yml").read_text())
    (job,) = document["jobs"].values()
    (step,) = [step for step in job["steps"] if "pip install" in step.get("run", "")]
    assert step["env"] == {"TORCH_INDEX": "${{ vars.TORCH_INDEX }}"} and "${{" not in step["run"]
    pip = tmp_path / "pip"
    pip.write_text('#!/bin/sh\nprintf "%s\\n" "$@" END >> "$SAID"\n')
    pip.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SAID": str(tmp_path / "said"), "TORCH_INDEX": index}
    subprocess.run(["bash", "-e", "-c", step["run"]], env=environment, check=True)
    first = (tmp_path / "said").read_text().split("END")[0].split()
    assert first == ["install", "torch==2.13.0", *options]


def test_the_dockerfile_names_files_and_extras_that_there_are() -> None:
    text = (FOLDER / "Dockerfile").read_text().replace("\\\n", " ")
    instructions = [line.split(maxsplit=1) for line in text.splitlines() if line and not line.startswith("#")]
    assert {name for name, _ in instructions} == {"FROM", "RUN", "ARG", "COPY", "ENTRYPOINT"}
    copies = [rest.split() for name, rest in instructions if name == "COPY"]
    for *sources, _ in copies:
        for source in sources:
            assert source.startswith(("--from=build", "/wheels")) or (REPOSITORY / source).exists(), source
    (entry,) = [json.loads(rest) for name, rest in instructions if name == "ENTRYPOINT"]
    assert copies[-1] == ["examples/ci/pipeline.sh", f"/usr/local/bin/{entry[0]}"]
    assert extras_in(text) <= known_extras()
    torch = re.search(r"^TORCH := (\S+)$", (REPOSITORY / "Makefile").read_text(), re.M)
    assert torch is not None and torch[1] in text
    assert torch[1] in (FOLDER / "github-actions.yml").read_text()


def extras_in(text: str) -> set[str]:
    extras = re.findall(r"(?:\.|whl\))\[([\w,-]+)\]", text)
    assert extras
    return {extra for group in extras for extra in group.split(",")}


def known_extras() -> set[str]:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    return set(project["optional-dependencies"])


def pipeline(folder: Path, *arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs the script with this interpreter's ``optimize``, and ``python3``."""
    tools = folder / "bin"
    tools.mkdir(exist_ok=True)
    (tools / "optimize").write_text(f"#!{sys.executable}\nfrom enginewright.optimizer.cli.app import main\nmain()\n")
    (tools / "optimize").chmod(0o755)
    if not (tools / "python3").exists():
        (tools / "python3").symlink_to(sys.executable)
    unset = {"AGAINST", "BUDGET", "NAME", "RECIPE", "TARGETS", "GPUS", "CONTEXT", "SIGN", "SOURCE_DATE_EPOCH"}
    variables = {name: value for name, value in os.environ.items() if name not in unset}
    return subprocess.run(
        [str(SCRIPT), *map(str, arguments)],
        cwd=folder,
        env=variables | {"PATH": f"{tools}:{os.environ['PATH']}"} | environment,
        capture_output=True,
        text=True,
    )


@pytest.mark.soak
def test_the_pipeline_on_a_tiny_model(tiny_folder: Path, tmp_path: Path) -> None:
    done = pipeline(
        tmp_path, tiny_folder, "out", NAME="tiny", RECIPE="int8", GPUS="8.9", SOURCE_DATE_EPOCH="1700000000"
    )
    assert done.returncode == 0, done.stderr
    out = tmp_path / "out"
    assert {p.name for p in out.iterdir()} == {
        *("tiny.tar", "tiny.cdx.json", "tiny.sha256", "report.html"),
        *("export.json", "verify.json", "doctor.json"),
    }
    sums = dict(line.split("  ")[::-1] for line in (out / "tiny.sha256").read_text().splitlines())
    assert set(sums) == {"tiny.tar", "tiny.cdx.json"}
    for name, digest in sums.items():
        assert hashlib.sha256((out / name).read_bytes()).hexdigest() == digest
    verified = json.loads((out / "verify.json").read_text())
    compared = {t["target"]: t["comparison"] and t["comparison"]["exact"] for t in verified["targets"]}
    assert compared == {"cpu": False, "onnx": False, "tensorrt-rtx": None}  # no GPU runs the last
    bill = json.loads((out / "tiny.cdx.json").read_text())
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(json.dumps(bill)) is None
    assert bill["metadata"]["timestamp"].startswith("2023-11-14")
    with tarfile.open(out / "tiny.tar") as archive:
        members = archive.getmembers()
    assert {(m.mtime, m.uid, m.gid, m.uname, m.gname) for m in members} == {(0, 0, 0, "", "")}
    assert [m.name for m in members] == sorted(m.name for m in members)
    packed = {m.name.removeprefix("tiny.bundle/") for m in members if m.isfile()}
    assert packed == {c["name"] for c in bill["components"] if c["type"] == "file"}  # all of it, and no report


@pytest.mark.soak
def test_the_pipeline_is_a_gate(tiny_folder: Path, tiny_bundle: Path, tmp_path: Path) -> None:
    """Against the same build it ends well; against another recipe's, one check or more fail, and nothing is packed."""
    budget = tmp_path / "budget.toml"
    budget.write_text((FOLDER / "budget.toml").read_text() + "speed = false\n")
    variables = {"NAME": "tiny", "TARGETS": "cpu", "AGAINST": str(tiny_bundle), "BUDGET": str(budget)}
    done = pipeline(tmp_path, tiny_folder, "same", **variables)
    assert done.returncode == 0, done.stderr
    assert ElementTree.parse(tmp_path / "same/verify.xml").getroot().get("failures") == "0"
    done = pipeline(tmp_path, tiny_folder, "other", RECIPE="int4", **variables)
    assert done.returncode == 16, done.stderr
    assert "over the budget" in done.stdout and not (tmp_path / "other/tiny.tar").exists()
    assert int(str(ElementTree.parse(tmp_path / "other/verify.xml").getroot().get("failures"))) > 0


def test_the_sample_budget_is_one(tmp_path: Path) -> None:
    assert read_budget(FOLDER / "budget.toml").speed_margin == 0.25


def test_what_is_wrong_is_said_before_the_work(tiny_folder: Path, tmp_path: Path) -> None:
    done = pipeline(tmp_path, tiny_folder)
    assert done.returncode == 2
    assert "usage: pipeline.sh MODEL OUT" in done.stderr
    for wrong, code in (({"AGAINST": "none.bundle"}, 3), ({"BUDGET": "none.toml"}, 8)):
        done = pipeline(tmp_path, tiny_folder, "out", **wrong)
        assert done.returncode == code and f"{next(iter(wrong))}: none." in done.stderr
    (tmp_path / "sigstore.py").write_text("raise ModuleNotFoundError('sigstore')")  # in its way, if it is installed
    done = pipeline(tmp_path, tiny_folder, "out", SIGN="1")
    assert done.returncode == 10
    assert "pip install sigstore" in done.stderr
    done = pipeline(tmp_path, tiny_folder / "none", "out")
    assert done.returncode == 3  # of the export
    assert list((tmp_path / "out").iterdir()) == [tmp_path / "out" / "export.json"]
