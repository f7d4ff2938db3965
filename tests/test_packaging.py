"""What is packed: the sdist is the tree, the wheel is the four parts, and the runtime needs neither torch nor transformers.

Everything is built from a copy of the files that git tracks, so that nothing untracked can make up for what is missing.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

PARTS = ("optimizer", "passes", "plugins", "runtime")
MOST_WHEEL_BYTES = 60e6


def tracked(repository: Path) -> list[str]:
    """Files and links that git knows and that are there."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=repository, check=True, capture_output=True, text=True)
    return [name for name in listed.stdout.split("\0") if name and os.path.lexists(repository / name)]


@pytest.fixture(scope="module")
def packages(repository: Path, shared_folder: Path) -> tuple[Path, Path]:
    """(sdist, wheel): the sdist is built from the tree, and the wheel from the sdist."""
    if not (repository / ".git").exists():
        pytest.skip("not a git working tree, so there is no list of files to compare with")
    tree, out = shared_folder / "tree", shared_folder / "dist"
    for name in tracked(repository):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(repository / name, tree / name, follow_symlinks=False)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(tree)]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout[-4000:] + built.stderr[-4000:]
    return next(out.glob("*.tar.gz")), next(out.glob("*.whl"))


def test_the_sdist_holds_the_whole_tree(packages: tuple[Path, Path], repository: Path) -> None:
    with tarfile.open(packages[0]) as archive:
        members = {m.name.partition("/")[2]: m for m in archive.getmembers()}
        expected = {name for name in tracked(repository) if Path(name).name != ".gitignore"}
        assert expected - set(members) == set()
        assert set(members) - expected <= {"PKG-INFO", ".gitignore"}
        for name in expected:
            member, path = members[name], repository / name
            if path.is_symlink():
                assert member.issym()
                assert member.linkname == str(path.readlink())
            else:
                file = archive.extractfile(member)
                assert file is not None
                assert file.read() == path.read_bytes(), name
    links = {name for name, member in members.items() if member.issym()}
    assert links == {f"src/enginewright/{part}" for part in PARTS}


def test_the_wheel_holds_the_four_parts(packages: tuple[Path, Path], repository: Path) -> None:
    with zipfile.ZipFile(packages[1]) as archive:
        names = set(archive.namelist())
        suffixes = (".py", ".pyi", ".toml", ".typed")
        expected = {
            f"enginewright/{name.removeprefix('src/enginewright/')}": name
            for name in tracked(repository)
            if name.startswith((*(f"{part}/" for part in PARTS), "src/enginewright/")) and name.endswith(suffixes)
        }
        assert len(expected) > 60
        assert set(expected) - names == set()
        for packed, name in expected.items():
            assert archive.read(packed) == (repository / name).read_bytes(), name
        ours = {name for name in names if name.startswith("enginewright/")}
        extension = [
            name for name in ours if name.startswith("enginewright/plugins/cpu/_cpu.") and name.endswith(".so")
        ]
        assert len(extension) == 1
        assert ours - set(expected) - set(extension) == set()  # neither C++ sources nor tests
        tops = {name.partition("/")[0] for name in names}
        assert tops == {"enginewright", next(t for t in tops if t.endswith(".dist-info"))}
    assert packages[1].stat().st_size < MOST_WHEEL_BYTES


@pytest.fixture(scope="module")
def bare_environment(packages: tuple[Path, Path], shared_folder: Path) -> Path:
    """bin/ of an environment with the wheel and what it requires, and nothing else."""
    folder = shared_folder / "bare"
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
    installed = subprocess.run([*pip, "install", "--quiet", str(packages[1])], capture_output=True, text=True)
    assert installed.returncode == 0, installed.stderr
    listed = subprocess.run([*pip, "list", "--format", "json"], check=True, capture_output=True, text=True)
    assert {"torch", "transformers", "gguf", "safetensors"}.isdisjoint(p["name"] for p in json.loads(listed.stdout))
    return folder / "bin"


def run(program: Path, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """In a folder outside the tree, so that the installed package alone is found."""
    return subprocess.run([str(program), *arguments], cwd=cwd, capture_output=True, text=True)


def test_the_runtime_answers_without_torch(bare_environment: Path, smollm2_bundle: Path, tmp_path: Path) -> None:
    code = (
        "import sys, enginewright as ew\n"
        f"llm = ew.LLM({str(smollm2_bundle)!r})\n"
        "question = [{'role': 'user', 'content': 'What is the capital of France?'}]\n"
        "print(llm.chat(question, ew.SamplingParams(max_tokens=16))[0].text)\n"
        "print(*sorted({'torch', 'transformers'} & set(sys.modules)))\n"
    )
    done = run(bare_environment / "python", "-c", code, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
    assert done.stdout.endswith("\n\n")  # neither was loaded


def test_the_command_works_without_torch(bare_environment: Path, tiny_bundle: Path, tmp_path: Path) -> None:
    optimize = bare_environment / "optimize"
    assert run(optimize, "--version", cwd=tmp_path).stdout.startswith("enginewright 0.")
    done = run(optimize, "generate", str(tiny_bundle), "Hello", "--max-tokens", "4", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["results"][0]["token_ids"]) <= 4
    assert run(optimize, "inspect", str(tiny_bundle), cwd=tmp_path).returncode == 0
    assert "f32" in run(optimize, "recipes", cwd=tmp_path).stdout


def test_exporting_without_torch_says_what_to_install(bare_environment: Path, tmp_path: Path) -> None:
    done = run(bare_environment / "optimize", "export", "model", "-o", "out.bundle", cwd=tmp_path)
    assert done.returncode == 10  # MissingDependencyError
    assert "enginewright[export]" in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []
