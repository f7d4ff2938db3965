"""examples/service and the page on it: the image and the unit name files, extras and options that there are."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import typer.main

from enginewright.optimizer.cli.app import app
from enginewright.runtime.server.options import options_from_file

REPOSITORY = Path(__file__).resolve().parent.parent
FOLDER = REPOSITORY / "examples" / "service"
UNIT = FOLDER / "enginewright.service"
PAGE = (REPOSITORY / "docs" / "build" / "service.md").read_text(encoding="utf-8")


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile's, each on one line."""
    lines = (FOLDER / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ").splitlines()
    return [(name, rest.strip()) for name, _, rest in (x.partition(" ") for x in lines if x and not x.startswith("#"))]


def said(name: str) -> list[str]:
    """What comes after an instruction, the last one of its name."""
    return [rest for found, rest in instructions() if found == name]


def options_of(command: str) -> set[str]:
    known = typer.main.get_command(app).commands[command].params  # type: ignore[attr-defined]
    return {flag for one in known for flag in (*one.opts, *one.secondary_opts)}


def unit() -> dict[str, list[str]]:
    """Keys of the unit's section Service, with all their values."""
    found: dict[str, list[str]] = {}
    section = ""
    for line in UNIT.read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            section = line
        elif section == "[Service]" and line and not line.startswith("#"):
            key, _, value = line.partition("=")
            found.setdefault(key, []).append(value)
    return found


def test_the_dockerfile_copies_all_that_a_wheel_is_built_from() -> None:
    copied = {name for rest in said("COPY") if not rest.startswith("--from") for name in rest.split()[:-1]}
    assert [name for name in copied if not (REPOSITORY / name).exists()] == []
    links = {path.readlink().name for path in (REPOSITORY / "src" / "enginewright").iterdir() if path.is_symlink()}
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert copied >= {"CMakeLists.txt", "pyproject.toml", "src", *links, project["readme"], *project["license-files"]}
    (extras,) = re.findall(r"whl\)\[(\w+)\]", "\n".join(said("RUN")))
    assert extras in project["optional-dependencies"]


def test_the_image_runs_as_nobody_s_user_a_command_that_there_is() -> None:
    assert len(set(said("FROM")[0].split()[:1] + said("FROM")[1].split()[:1])) == 1  # of one Python and one glibc
    assert re.fullmatch(r"[1-9]\d+:[1-9]\d+", said("USER")[-1])
    names = [name for name, _ in instructions()]
    assert names.index("USER") < names.index("ENTRYPOINT")
    entry = json.loads(said("ENTRYPOINT")[-1]) + json.loads(said("CMD")[-1])
    assert entry[:4] == ["python", "-m", "enginewright", "serve"]
    check = json.loads(said("HEALTHCHECK")[-1].partition(" CMD ")[2])
    assert check[0] == "python" and "/health" in check[2]
    compile(check[2], "HEALTHCHECK", "exec")
    for words in (entry, shlex.split(PAGE.partition("enginewright --model")[2].partition("\n")[0])):
        assert {word for word in words if word.startswith("--")} <= options_of("serve")


def test_the_unit_is_closed_and_runs_a_command_that_there_is() -> None:
    found = unit()
    program, command, *words = found["ExecStart"][0].split()
    assert (Path(program).name, command) == ("optimize", "serve")
    assert {word for word in words if word.startswith("--")} <= options_of("serve")
    (credential,) = found["LoadCredential"]
    assert "${CREDENTIALS_DIRECTORY}/" + credential.partition(":")[0] in words
    assert found.keys() >= {"NoNewPrivileges", "DynamicUser", "PrivateTmp", "PrivateDevices", "ProtectHome"}
    assert found["ProtectSystem"] == ["strict"] and found["CapabilityBoundingSet"] == [""]
    assert int(found["TimeoutStopSec"][0]) > 60  # the drain_seconds of the page


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd isn't installed")
def test_systemd_finds_nothing_wrong_with_the_unit(tmp_path: Path) -> None:
    program = unit()["ExecStart"][0].split()[0]
    copy = tmp_path / UNIT.name
    copy.write_text(UNIT.read_text(encoding="utf-8").replace(program, sys.executable), encoding="utf-8")
    done = subprocess.run(["systemd-analyze", "verify", str(copy)], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_page_s_file_of_options_is_one(tmp_path: Path) -> None:
    (block,) = re.findall(r"^```toml\n(.*?)^```", PAGE, re.M | re.S)
    file = tmp_path / "server.toml"
    file.write_text(block)
    assert options_from_file(file)["drain_seconds"] < int(unit()["TimeoutStopSec"][0])


@pytest.mark.parametrize("command", ["plan", "export", "verify", "loadtest"])
def test_the_page_s_commands_have_the_options_that_it_names(command: str) -> None:
    lines = re.findall(rf"^optimize {command} (.*)$", PAGE, re.M)
    assert lines
    for line in lines:
        assert {word for word in line.split() if word.startswith("-")} <= options_of(command)
