"""The files for GitHub, the site and wheels parse, and everything that they call exists."""

from __future__ import annotations

import re
import runpy
import subprocess
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
import typer.main
import yaml

import enginewright
from enginewright.optimizer.cli.app import app

REPOSITORY = Path(__file__).resolve().parent.parent
GITHUB = REPOSITORY / ".github"
WORKFLOWS = sorted(GITHUB.glob("workflows/*.yml"))
ACTIONS = (*WORKFLOWS, REPOSITORY / "examples" / "ci" / "github-actions.yml")
FORMS = sorted(GITHUB.glob("ISSUE_TEMPLATE/*.yml"))
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())


PINNED = re.compile(r"[\w-]+/[\w-]+@[0-9a-f]{40}")
"""An action by its commit: a tag may lead to other code tomorrow."""


class Loader(yaml.SafeLoader):
    """MkDocs takes a value from the environment by ``!ENV``."""


Loader.add_constructor("!ENV", lambda loader, node: loader.construct_sequence(node))


def read(path: Path) -> dict[Any, Any]:
    document: dict[Any, Any] = yaml.load(path.read_text(encoding="utf-8"), Loader)
    return document


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_calls_what_there_is(path: Path) -> None:
    document = read(path)
    assert document["permissions"] == {"contents": "read"}  # jobs ask for more
    for job in document["jobs"].values():
        assert job["timeout-minutes"] > 0
        for step in job["steps"]:
            assert ("uses" in step) != ("run" in step)
            if "uses" in step:
                assert PINNED.fullmatch(step["uses"])
                continue
            assert "${{" not in step["run"]  # what comes from outside isn't part of a command
            for line in step["run"].splitlines():
                program, *arguments = line.split()
                if program == "make":
                    subprocess.run(["make", "--dry-run", "--silent", *arguments], cwd=REPOSITORY, check=True)
                assert "/" not in program or (REPOSITORY / program).stat().st_mode & 0o100, line


@pytest.mark.parametrize("path", ACTIONS, ids=lambda path: path.stem)
def test_each_action_is_pinned_and_its_release_is_named(path: Path) -> None:
    lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if "uses:" in line]
    assert lines
    for line in lines:
        assert re.fullmatch(rf"(- )?uses: {PINNED.pattern} # v\d+\.\d+\.\d+", line), line


def test_an_action_has_one_commit_everywhere() -> None:
    named: dict[str, set[str]] = {}
    for path in ACTIONS:
        for name, commit in re.findall(r"uses: ([\w/-]+)@(\S+)", path.read_text(encoding="utf-8")):
            named.setdefault(name, set()).add(commit)
    assert {name: len(commits) for name, commits in named.items() if len(commits) > 1} == {}


def test_ci_is_the_project_s_own_with_an_index_and_without() -> None:
    (job,) = read(GITHUB / "workflows" / "ci.yml")["jobs"].values()
    assert [step["run"] for step in job["steps"] if "run" in step] == [".ci/run"]
    assert job["env"] == {"TORCH_INDEX": "${{ vars.TORCH_INDEX }}"}
    for index, options in (("", ""), ("https://wheels.example/cpu", " --index-url https://wheels.example/cpu")):
        completed = subprocess.run(
            ["make", "--dry-run", "--always-make", ".venv/.export"],
            cwd=REPOSITORY,
            env={"PATH": "/usr/bin:/bin", "TORCH_INDEX": index},  # unset, a variable of GitHub's is an empty string
            check=True,
            capture_output=True,
            text=True,
        )
        assert re.search(rf'install .*"torch==[\d.]+"{re.escape(options)}\s+&&', completed.stdout), completed.stdout


@pytest.mark.parametrize("name", ["docs", "wheels"])
def test_nothing_is_published_unasked(name: str) -> None:
    publish = read(GITHUB / "workflows" / f"{name}.yml")["jobs"]["publish"]
    assert f"vars.PUBLISH_{name.upper()} == 'true'" in publish["if"]


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_a_form_asks_for_commands_that_there_are(path: Path) -> None:
    document = read(path)
    assert {"name", "description", "body"} <= document.keys()
    questions = [part for part in document["body"] if part["type"] != "markdown"]
    assert all(part["type"] in ("input", "textarea") and part["attributes"]["label"] for part in questions)
    assert len({part["id"] for part in questions}) == len(questions)
    text = path.read_text(encoding="utf-8")
    for page in re.findall(r"\.\./blob/HEAD/([^)]+)\)", text):
        assert (REPOSITORY / page).is_file(), page
    command = typer.main.get_command(app)
    for name, rest in re.findall(r"\boptimize (--version|[a-z]+)([^`\n]*)", text):
        options = {name} if name.startswith("--") else set(re.findall(r"(?<![\w-])--?[a-z]+", rest))
        called = command if name.startswith("--") else command.commands[name]  # type: ignore[attr-defined]
        assert options <= {flag for p in called.params for flag in p.opts}, (name, rest)


def test_the_site_has_a_place_for_every_page_and_sends_other_links_to_the_repository() -> None:
    document = read(REPOSITORY / "mkdocs.yml")
    (path,) = document["hooks"]
    assert document["exclude_docs"] == "*.py"
    hooks = runpy.run_path(str(REPOSITORY / path))
    docs = REPOSITORY / document["docs_dir"]
    pages = [(docs / name).read_text(encoding="utf-8") for name in ("README.md", hooks["ARCHITECTURE"])]
    navigation = hooks["navigation"](*pages)
    assert [next(iter(part)) for part in navigation] == ["Enginewright", "Use", "Build", "Inside"]
    named = re.findall(r"'([\w/-]+\.md)'", str(navigation))
    assert set(named) == {page.relative_to(docs).as_posix() for page in docs.rglob("*.md")}

    page = SimpleNamespace(file=SimpleNamespace(abs_src_path=str(docs / "build" / "cpu.md"), src_uri="build/cpu.md"))
    config = SimpleNamespace(repo_url="https://host.example/r")
    text = "[a](../../SECURITY.md#reporting) [b](../inside/numerics.md#sums) [c](../../none.md)"
    written = hooks["on_page_markdown"](text, page=page, config=config, files=[])
    assert written == text.replace("../../SECURITY.md", "https://host.example/r/blob/HEAD/SECURITY.md")


def test_the_site_s_reference_has_every_public_name() -> None:
    hooks = runpy.run_path(str(REPOSITORY / "docs" / "site_hooks.py"))
    assert (REPOSITORY / "docs" / hooks["REFERENCE"]).is_file()
    assert re.findall(r"^::: enginewright\.(\w+)$", hooks["reference"](), re.M) == [
        name for name in enginewright.__all__ if not name.startswith("_")
    ]
    page = SimpleNamespace(file=SimpleNamespace(src_uri=hooks["REFERENCE"]))
    assert hooks["on_page_markdown"]("", page=page, config=None, files=[]) == hooks["reference"]()


def test_the_site_s_code_map_says_something_about_every_source_file() -> None:
    hooks = runpy.run_path(str(REPOSITORY / "docs" / "site_hooks.py"))
    page = SimpleNamespace(file=SimpleNamespace(src_uri=hooks["CODE_MAP"]))
    written = hooks["on_page_markdown"]("", page=page, config=None, files=[])
    rows = [line.split(" | ") for line in written.splitlines() if re.match(r"\| [\w-]+\.\w+ \|", line)]
    assert [row[0] for row in rows if not row[1].strip()] == []
    assert "## runtime/scheduler/" in written and any("`ContinuousScheduler`" in row[2] for row in rows)
    users = {row[0].removeprefix("| "): row[3] for row in rows}
    assert "runtime/engine/engine.py (ContinuousScheduler)" in users["continuous.py"]
    assert "turns.js (codeBlock)" in users["code.js"] and "cuda_kernels.py" in users["ops_attention.py"]
    assert re.search(r"^\| `Pulse` \| step, running, .* \|$", written, re.M)


@pytest.mark.parametrize(
    ("page", "declared"),
    [
        ("step-array", ["Port(IDS,", "class Port:", "provider: Provider | None = None"]),
        ("proposer", ["def propose(self, wanted:", "class ProposerSetup:"]),
        ("op", ["class OpSchema:", '{.name = "gated_activation", .verify =']),
        ("instruction-set", []),
    ],
)
def test_the_site_s_pages_on_adding_have_the_declarations_that_they_name(page: str, declared: list[str]) -> None:
    hooks = runpy.run_path(str(REPOSITORY / "docs" / "site_hooks.py"))
    path = REPOSITORY / "docs" / "inside" / "adding" / f"{page}.md"
    text = path.read_text(encoding="utf-8")
    at = SimpleNamespace(file=SimpleNamespace(abs_src_path=str(path), src_uri=f"inside/adding/{page}.md"))
    config = SimpleNamespace(repo_url="https://host.example/r")
    written = hooks["on_page_markdown"](text, page=at, config=config, files=[])
    assert [each for each in declared if each not in written] == []


def test_the_front_page_has_a_path_for_each_reader_and_the_drawing() -> None:
    page = (REPOSITORY / "docs" / "README.md").read_text(encoding="utf-8").partition("\n## ")[0]
    rows = [line.split("|")[1].strip() for line in page.splitlines() if line.startswith("| a ")]
    assert rows == ["a laptop", "a CI machine", "a cluster"]
    (drawing,) = re.findall(r"\]\(([\w/]+\.svg)\)", page)
    picture = ElementTree.parse(REPOSITORY / "docs" / drawing).getroot()
    style = "".join(picture.find("{http://www.w3.org/2000/svg}style").itertext())  # type: ignore[union-attr]
    light, _, dark = style.partition("prefers-color-scheme: dark")
    colours = [set(re.findall(r"(--[a-z]+): #", part)) for part in (light, dark)]
    assert colours[0] == colours[1] and colours[0] == set(re.findall(r"var\((--[a-z]+)\)", style))


def test_wheels_are_for_the_versions_that_the_package_names() -> None:
    built = PROJECT["tool"]["cibuildwheel"]
    named = {c.split(":: ")[-1] for c in PROJECT["project"]["classifiers"] if re.search(r"Python :: 3\.", c)}
    assert {re.sub(r"cp3(\d+)-.*", r"3.\1", build) for build in built["build"]} == named
    assert set(built["test-extras"]) <= PROJECT["project"]["optional-dependencies"].keys()


def test_the_changelog_has_the_version_with_a_date_below_what_is_unreleased() -> None:
    headings = re.findall(r"^## (.*)$", (REPOSITORY / "CHANGELOG.md").read_text(encoding="utf-8"), re.M)
    assert headings[0] == "Unreleased"
    assert re.fullmatch(rf"{re.escape(PROJECT['project']['version'])} - \d{{4}}-\d\d-\d\d", headings[1])


def test_the_repository_s_address_is_in_one_place() -> None:
    urls = PROJECT["project"]["urls"]
    assert {"Repository", "Documentation", "Changelog", "Issues"} <= urls.keys()
    assert all(url.startswith(urls["Repository"]) for url in urls.values())
    listed = subprocess.run(["git", "ls-files"], cwd=REPOSITORY, check=True, capture_output=True, text=True).stdout
    named = [
        name
        for name in listed.splitlines()
        if (REPOSITORY / name).is_file()
        and (
            urls["Repository"].encode() in (data := (REPOSITORY / name).read_bytes())
            or b"com/OWNER/enginewright" in data
        )
    ]
    assert set(named) - {"tests/test_hosting.py"} == {"pyproject.toml"}


def test_the_package_s_description_has_no_relative_link() -> None:
    """An index shows it without the repository's files."""
    provider = runpy.run_path(str(REPOSITORY / "src" / "package_readme.py"))
    description = provider["dynamic_metadata"]({}, PROJECT["project"])["readme"]
    text, repository = description["text"], PROJECT["project"]["urls"]["Repository"]
    links = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'(?:src|srcset)="([^"]+)"', text)
    assert all(link.startswith(("https://", "#")) for link in links)
    ours = [link.partition("#")[0] for link in links if link.startswith(repository)]
    assert any("/raw/" in link for link in ours) and any("/blob/" in link for link in ours)
    for link in ours:
        _, tag, path = link.removeprefix(f"{repository}/").split("/", 2)
        assert tag == f"v{PROJECT['project']['version']}" and (REPOSITORY / path).exists(), link
