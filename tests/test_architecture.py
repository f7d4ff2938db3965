"""The shape of the project: who may import whom and what, how quickly the package loads."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from graphlib import CycleError, TopologicalSorter
from importlib import metadata
from pathlib import Path

import pytest

from enginewright.runtime.shared.targets import OWN

REPOSITORY = Path(__file__).resolve().parent.parent
PARTS = ("optimizer", "passes", "plugins", "runtime")

HEAVY = {"torch", "transformers", "gguf", "safetensors", "torch_tensorrt", "onnx", "onnxruntime", "triton"} | {
    "jaxlib",
    "iree",
}
"""Modules that the runtime must do without."""

TARGETS = tuple(path.rpartition(".")[2] for path in OWN.values())
"""The packages of our targets, in ``plugins/``. What else is there are rooms that several of them share."""

ON_TORCH = ("plugins/cuda/serve/", "plugins/cpu/serve/remote", "plugins/ranks/")
"""The cuda target runs on torch, which is loaded when that target is opened. It joins ranks that share no memory."""

RUNS_ON = {
    "plugins.onnx.serve.session": "onnxruntime",
    "plugins.engines.library": "tensorrt_rtx",
    "plugins.stablehlo.serve.pjrt_library": "jaxlib",
    "plugins.doctor.machine": "torch",
    "plugins.cuda.serve.target": "torch",
    "runtime.executors.open": "torch",
}
"""The modules that load what a target runs on, when it is opened."""


@cache
def modules() -> dict[str, Path]:
    """Every module of the package, by its dotted name below ``enginewright``."""
    by_name = {}
    for part in PARTS:
        for path in sorted((REPOSITORY / part).rglob("*.py")):
            names = list(path.relative_to(REPOSITORY).with_suffix("").parts)
            by_name[".".join(names[:-1] if names[-1] == "__init__" else names)] = path
    return by_name


@cache
def imports(module: str, path: Path) -> Sequence[tuple[str, int]]:
    """(what, line) of every import in the file, at the top or in a function; ours without ``enginewright.``.

    Imports for type checkers alone count too: they tie the parts together all the same.
    """
    return tuple(_imports(module, path))


def _imports(module: str, path: Path) -> Iterator[tuple[str, int]]:
    is_package = path.name == "__init__.py"
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name.removeprefix("enginewright."), node.lineno
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                parents = module.split(".")
                base = parents[: len(parents) - node.level + is_package]
                origin = ".".join([*base, *([node.module] if node.module else [])])
            else:
                origin = (node.module or "").removeprefix("enginewright.")
            for alias in node.names:
                yield f"{origin}.{alias.name}", node.lineno


NOT_DECLARED = {
    "tensorrt": "comes with the CUDA that the machine has",
    "torch_tensorrt": "its wheels are for one build of torch each",
}
"""Packages that a target needs on machines with a GPU, whose errors and docs say how to install them; and what comes
with another package."""

IMPORTED_AS = {
    "tensorrt-rtx": "tensorrt_rtx",
    "apache-tvm": "tvm",
    "apache-tvm-ffi": "tvm_ffi",
    "opentelemetry-sdk": "opentelemetry",
}
"""Distributions whose module isn't called as they are."""


def declared(*extras: str) -> set[str]:
    """Modules of what pyproject.toml requires, with these extras."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    optional = project["optional-dependencies"]
    lines = [*project["dependencies"], *(line for extra in extras for line in optional[extra])]
    names = [re.split(r"[<>=~! ;\[]", line, maxsplit=1)[0] for line in lines]
    return {IMPORTED_AS.get(name, name.replace("-", "_")).lower() for name in names}


def packages_of(*prefixes: str) -> dict[str, str]:
    """Top-level packages from outside that the modules below ``prefixes`` import, and one place of each."""
    return {
        what.partition(".")[0]: f"{path.relative_to(REPOSITORY)}:{line}"
        for module, path in modules().items()
        if any(below(module, prefix) for prefix in prefixes)
        for what, line in imports(module, path)
        if what.partition(".")[0] not in {*sys.stdlib_module_names, *PARTS, "enginewright"}
    }


def test_every_package_that_is_imported_is_declared() -> None:
    packages = packages_of(*PARTS)
    assert {"numpy", "torch", "huggingface_hub", "sympy"} <= set(packages)  # the test sees some
    extras = ("cli", "export", "onnx", "otel", "ray", "parquet", "serve", "structured", "tensorrt-rtx", "cuda", "tvm")
    known = declared(*extras) | set(NOT_DECLARED)
    assert {name: place for name, place in packages.items() if name not in known} == {}
    assert set(NOT_DECLARED) <= set(packages)


def test_transformers_is_capped_at_the_next_minor_version() -> None:
    """Capture stands on parts of it that aren't public, and change between minor versions: the next one isn't tried."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    (line,) = [s for s in project["optional-dependencies"]["export"] if s.startswith("transformers")]
    major, minor = map(int, metadata.version("transformers").split(".")[:2])
    assert line.endswith(f",<{major}.{minor + 1}"), line


def test_what_the_runtime_imports_comes_without_extras() -> None:
    optional = {"onnxruntime", "tensorrt", "tensorrt_rtx", "torch"}  # loaded where a target needs them; see RUNS_ON
    optional |= {"rich"}  # a bar of progress, where the command's packages are
    optional |= declared("otel", "ray", "serve") | {"h11", "starlette"}  # of runtime/server: a server alone imports it
    optional |= declared("structured")  # of answers that have a form
    optional |= {"pydantic"}  # of plugins/cpu/recipe.py, which the compiler reads
    packages = packages_of(
        "runtime",
        "plugins.cpu",
        "plugins.native",
        "runtime.shared.contracts",
        "runtime.shared.records",
        "runtime.shared.lowered_program",
    )
    assert {name: place for name, place in packages.items() if name not in declared() | optional} == {}


def below(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


def offences(importer: str, forbidden: set[str]) -> list[str]:
    """``file:line imports what`` for every import of ``forbidden`` in the modules below ``importer``."""
    return [
        f"{path.relative_to(REPOSITORY)}:{line} imports {what}"
        for module, path in modules().items()
        if below(module, importer)
        for what, line in imports(module, path)
        if any(below(what, f) for f in forbidden)
    ]


def test_there_are_modules_to_look_at() -> None:
    by_name = modules()
    assert len(by_name) > 40
    known = {"runtime.shared.contracts", "runtime.engine.llm", "passes.framework.base", "optimizer.pipeline.pipeline"}
    assert known <= set(by_name)
    # Relative imports are followed to where they lead: the check would be blind without that.
    reader = dict.fromkeys(what for what, _ in imports("runtime.bundle.reader", by_name["runtime.bundle.reader"]))
    assert "runtime.bundle.manifest.Manifest" in reader


@pytest.mark.parametrize("importer", ["passes", "plugins", "runtime"])
def test_nobody_imports_the_optimizer(importer: str) -> None:
    assert offences(importer, {"optimizer"}) == []


def test_the_runtime_stands_at_the_bottom() -> None:
    """A target's package is loaded by its name."""
    assert offences("runtime", HEAVY | {"optimizer", "passes", "plugins"}) == []


def test_serving_does_without_torch_and_the_compiler() -> None:
    rooms = ("native", "steps", "engines", "doctor", "ranks")
    halves = [f"plugins.{target}.{half}" for target in TARGETS for half in ("serve", "kernels")]
    for name in (*halves, "plugins.cpu", *(f"plugins.{room}" for room in rooms)):
        above = {"optimizer", *(f"plugins.{target}.compile" for target in TARGETS), "plugins.graphs"}
        lines = [line for line in offences(name, HEAVY | above | {"passes", "plugins.emit"}) if not allowed(line)]
        assert lines == [], name


def allowed(offence: str) -> bool:
    """Returns True for lazy imports that are allowed: a compiling half in a room, the libraries that targets run on."""
    place, _, what = offence.partition(" imports ")
    if (
        "/compile/" in place
        or place.startswith("plugins/cpu/recipe.py")
        or place.startswith(
            ("plugins/engines/emit_kernels.py", "plugins/engines/emitter.py", "plugins/engines/gpus.py")
        )
    ):
        return True
    if place.startswith(ON_TORCH):
        return what.partition(".")[0] in ("torch", "triton")
    return what.partition(".")[0] in {"onnxruntime", "iree", "jaxlib"} and "/serve/" in place


NAMES = "|".join(sorted({re.sub("[-_]", "[-_]", name) for name in OWN}, key=len, reverse=True))
LETTERS = "A-Za-z0-9"

SPELLED = {
    "runtime/shared/targets.py": "the table of their names",
    "runtime/shared/dtypes.py": "names of types in the libraries that some targets are named for",
    "runtime/shared/threads.py": "the controller of a cgroup's CPU time",
    "optimizer/bench/measure.py": "the cpu target's executor, which times each step's kernels",
    "optimizer/bench/server.py": "the cpu target's executor, which times each step's kernels",
    "optimizer/check_engine/check.py": "the driver's version of CUDA",
    "optimizer/cli/doctor.py": "the driver's version of CUDA",
}
"""Files outside the targets' packages whose code has one of these names, and the reason."""

DECIDING = ("startswith", "endswith", "removeprefix", "removesuffix", "partition", "fullmatch", "getattr", "get")
"""Functions whose arguments decide something."""


def test_nobody_else_spells_a_target_s_name() -> None:
    """They ask a target's declaration. Messages, hints, help and docstrings may say the names."""
    naming = {
        path.relative_to(REPOSITORY).as_posix()
        for module, path in modules().items()
        if module.partition(".")[0] in ("optimizer", "passes", "runtime")
        and any(spelled(ast.parse(path.read_text(encoding="utf-8"))))
    }
    assert naming == set(SPELLED)


def spelled(tree: ast.AST) -> Iterator[str]:
    """Yields where code has a target's name: alone in a string, within one that decides, or as an attribute."""
    whole, within = re.compile(NAMES), re.compile(rf"(?<![{LETTERS}])({NAMES})(?![{LETTERS}])")
    tensors = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call) and not node.args}  # x.cpu()
    for node in ast.walk(tree):
        deciding: list[ast.AST] = []
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and whole.fullmatch(node.value):
            yield node.value
        elif isinstance(node, ast.Attribute) and whole.fullmatch(node.attr) and id(node) not in tensors:
            yield node.attr
        elif isinstance(node, ast.Compare | ast.MatchValue):
            deciding = [node]
        elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            deciding = [node.slice]
        elif isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            deciding = list(node.args) if called in DECIDING else []
        for inner in (x for at in deciding for x in ast.walk(at)):
            if isinstance(inner, ast.Constant) and isinstance(inner.value, str) and within.search(inner.value):
                yield inner.value


@pytest.mark.parametrize(
    ("code", "names"),
    [
        ('x = target == "tvm"', True),
        ('x = target in ("tensorrt-rtx", "onnx")', True),
        ('x = name.startswith("cuda:")', True),
        ("x = recipe.torch_tensorrt", True),
        ('match target:\n    case "cuda 12":\n        x = 1', True),
        ('x = tables["stablehlo"]', True),
        ('raise ValueError("use the cpu target")', False),
        ('x = name == "onnxruntime"', False),
    ],
)
def test_names_are_found(code: str, names: bool) -> None:
    assert any(spelled(ast.parse(code))) == names


def test_targets_stand_apart() -> None:
    """A target imports rooms, never another target. The extension module is loaded by ``plugins.native`` alone."""
    packages = {f"plugins.{target}" for target in TARGETS}
    for module, path in modules().items():
        own_package = next((package for package in packages if below(module, package)), None)
        for what, line in imports(module, path):
            other = next((package for package in packages if below(what, package)), None)
            if not module.startswith("plugins.") or other in (None, own_package):
                continue
            fine = below(module, "plugins.native") and other == "plugins.cpu"
            assert fine, f"{path.relative_to(REPOSITORY)}:{line} imports {what}"


def test_a_targets_package_is_empty() -> None:
    for target in TARGETS:
        for path in (REPOSITORY / "plugins" / target).rglob("__init__.py"):
            assert path.read_text(encoding="utf-8").count("\n") <= 1, path


@pytest.mark.parametrize(("module", "library"), RUNS_ON.items())
def test_what_a_target_runs_on_is_loaded_when_it_is_opened(module: str, library: str) -> None:
    probe = f"import sys, enginewright.{module}, enginewright.runtime.engine.llm; print({library!r} in sys.modules)"
    printed = subprocess.run([sys.executable, "-c", probe], check=True, capture_output=True, text=True).stdout
    assert printed.strip() == "False"


def test_the_bottom_stands_alone() -> None:
    others = {f"runtime.{path.name}" for path in (REPOSITORY / "runtime").iterdir() if path.name != "shared"}
    others = {name.removesuffix(".py") for name in others}
    assert {"runtime.bundle", "runtime.engine"} <= others
    assert offences("runtime.shared", HEAVY | others | {"optimizer", "passes", "plugins"}) == []


def test_bundles_are_read_without_what_serves_them() -> None:
    above = {"runtime.engine", "runtime.executors", "runtime.scheduler", "runtime.kv_cache"}
    assert offences("runtime.bundle", HEAVY | above) == []


SERVER_ROOMS = ("engines", "http", "replicas", "protocols")
"""The folders of ``runtime/server/``, in order: a module imports from its own folder and from the ones before it."""


def test_rooms_of_the_server_are_in_order() -> None:
    """The modules in ``runtime/server/`` itself (app, serve, ingress) join the rooms, and no room imports them."""
    server = REPOSITORY / "runtime" / "server"
    assert {path.parent.name for path in server.glob("*/*.py")} == set(SERVER_ROOMS)
    joining = {f"runtime.server.{path.stem}" for path in server.glob("*.py") if path.stem != "__init__"}
    assert {"runtime.server.app", "runtime.server.serve"} <= joining
    for i, room in enumerate(SERVER_ROOMS):
        later = {f"runtime.server.{other}" for other in SERVER_ROOMS[i + 1 :]}
        assert offences(f"runtime.server.{room}", later | joining) == []
    assert offences("runtime.server.protocols", {"runtime.server.replicas"}) == []


def test_passes_stand_on_what_is_shared() -> None:
    assert offences("passes", {"transformers", "gguf", "plugins", "optimizer"}) == []
    lines = [line for line in offences("passes", {"runtime"}) if " imports runtime.shared." not in line]
    assert lines == []


def test_plugins_know_nobody_above_them() -> None:
    assert offences("plugins", {"optimizer", "transformers", "gguf"}) == []
    others = {f"runtime.{name}" for name in ("engine", "scheduler")}
    assert offences("plugins", others) == []


def test_scheduler_and_cache_know_no_executor() -> None:
    for importer in ("runtime.scheduler", "runtime.kv_cache"):
        assert offences(importer, {"runtime.executors", "plugins.cpu", "runtime.engine"}) == []


def test_commands_hold_no_torch() -> None:
    """``optimize --help`` answers at once: torch comes with the export alone."""
    assert offences("optimizer.cli", HEAVY) == []
    assert offences("optimizer.recipes", HEAVY) == []


def test_the_four_parts_are_links() -> None:
    package = REPOSITORY / "src" / "enginewright"
    links = {entry.name: str(entry.readlink()) for entry in package.iterdir() if entry.is_symlink()}
    assert links == {part: f"../../{part}" for part in PARTS}
    for part in PARTS:
        assert (package / part / "__init__.py").samefile(REPOSITORY / part / "__init__.py")


def test_importing_loads_nothing_heavy() -> None:
    """The time goes into the modules it loads: the package itself loads the standard library alone."""
    probe = "import enginewright, json, sys; print(json.dumps(sorted(m for m in sys.modules if '.' not in m)))"
    printed = subprocess.run([sys.executable, "-c", probe], check=True, capture_output=True, text=True).stdout
    loaded = json.loads(printed)
    assert "enginewright" in loaded
    assert HEAVY.isdisjoint(loaded)
    assert {"numpy", "pydantic", "tokenizers", "jinja2", "rich", "typer"}.isdisjoint(loaded)


def test_help_loads_nothing_heavy() -> None:
    probe = (
        "import sys; sys.argv = ['optimize', '--help']\n"
        "from enginewright.optimizer.cli.app import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "assert not {'torch', 'transformers', 'numpy', 'pydantic'} & set(sys.modules), 'loaded too much'\n"
        "print('done')"
    )
    done = subprocess.run([sys.executable, "-c", probe], check=True, capture_output=True, text=True)
    assert "Usage: optimize" in done.stdout and done.stdout.splitlines()[-1] == "done"


def test_recipes_are_read_without_torch() -> None:
    probe = "import sys, enginewright.optimizer.recipes.recipe; print('torch' in sys.modules)"
    printed = subprocess.run([sys.executable, "-c", probe], check=True, capture_output=True, text=True).stdout
    assert printed == "False\n"


@cache
def benchmarks() -> dict[str, Path]:
    """Every module of the benchmarks, by the name that the others import it by: their folder is on the path."""
    folder = REPOSITORY / "benchmarks"
    modules = {}
    for path in sorted(folder.rglob("*.py")):
        names = path.relative_to(folder).with_suffix("").parts
        modules[".".join(names[:-1] if names[-1] == "__init__" else names)] = path
    return modules


def circle(found: dict[str, Path], group: Callable[[Path], Path]) -> list[str]:
    """Groups of modules that import each other, one the next and the last the first; empty if there is no such circle.

    Imports in functions and for type checkers alone count as well. ``group``: what a module's path belongs to.
    """
    needs: dict[str, set[str]] = {}
    for module, path in found.items():
        own_group = group(path.relative_to(REPOSITORY)).as_posix()
        for what, _ in imports(module, path):
            name = what
            while name and name not in found:
                name = name.rpartition(".")[0]
            other = group(found[name].relative_to(REPOSITORY)).as_posix() if name else own_group
            if other != own_group:
                needs.setdefault(own_group, set()).add(other)
    assert len(needs) > 1
    try:
        TopologicalSorter(needs).prepare()
    except CycleError as e:
        return list(reversed(e.args[1]))
    return []


def test_folders_do_not_import_each_other() -> None:
    """Not directly, and not around a corner: what two folders need lies in a third."""
    assert circle(modules(), lambda path: path.parent) == []


def test_files_do_not_import_each_other() -> None:
    """Not in functions either, nor for type checkers alone."""
    assert circle(modules(), lambda path: path) == []


def test_benchmarks_do_not_import_each_other() -> None:
    """Neither files nor folders; ``enginewright`` imports none of them."""
    assert {"peers.engines", "claims", "peers"} <= set(benchmarks())
    assert circle(benchmarks(), lambda path: path) == []
    assert circle(benchmarks(), lambda path: path.parent) == []
    for module, path in modules().items():
        assert not [what for what, _ in imports(module, path) if below(what, "peers") or below(what, "benchmarks")]


def test_benchmarks_import_what_there_is() -> None:
    """By name, without running them: some need packages that only their peers bring."""
    seen = 0
    for path in (REPOSITORY / "benchmarks").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(("peers", "enginewright")):
                module = importlib.import_module(str(node.module))
                for alias in node.names:
                    known = hasattr(module, alias.name) or importlib.util.find_spec(f"{node.module}.{alias.name}")
                    assert known, f"{path.name} imports {alias.name} from {node.module}"
                    seen += 1
    assert seen > 50
