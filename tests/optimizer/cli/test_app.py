from __future__ import annotations

import os
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from enginewright.optimizer.cli.app import app
from enginewright.runtime.shared.targets import OWN

COMMANDS = tuple(command.name or "" for command in app.registered_commands)


def test_help_lists_every_command() -> None:
    result = CliRunner().invoke(app, ["--help"])
    assert result.exit_code == 0
    for command in COMMANDS:
        assert command in result.output
    assert "Examples:" in result.output


def test_help_groups_the_commands() -> None:
    printed = CliRunner().invoke(app, ["--help"]).output
    panels = [command.rich_help_panel for command in app.registered_commands]
    assert all(isinstance(panel, str) and f"─ {panel} ─" in printed for panel in panels)
    assert 4 <= len(set(panels)) <= 6 and "─ Commands ─" not in printed
    assert printed.index("─ Run a model ─") < printed.index("│ chat ") < printed.index("─ Make a bundle ─")


@pytest.mark.parametrize(
    ("command", "names"),
    [("serve", ("OpenAI", "Anthropic", "Ollama")), ("export", tuple(OWN)), ("chat", ("GGUF", "Hugging Face", "Hub"))],
)
def test_help_names_what_there_is(command: str, names: tuple[str, ...]) -> None:
    printed = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "400"}).output
    assert [name for name in names if name not in printed] == []


def test_both_names_are_the_same_program(repository: Path) -> None:
    scripts = tomllib.loads((repository / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts["enginewright"] == scripts["optimize"]


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_flags_take_no_value(command: str) -> None:
    printed = CliRunner().invoke(app, [command, "--help"] if command else ["--help"]).output
    assert "bool" not in printed and "--help" in printed


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_shows_examples(command: str) -> None:
    result = CliRunner().invoke(app, [command, "--help"])
    assert result.exit_code == 0
    assert "Examples:" in result.output
    assert f"optimize {command}" in result.output


def test_the_package_runs_as_a_module() -> None:
    done = subprocess.run([sys.executable, "-m", "enginewright", "--help"], capture_output=True, text=True, check=True)
    assert "python -m enginewright" in done.stdout
    assert "export" in done.stdout


@pytest.mark.parametrize("package", ["typer", "pydantic"])
def test_without_its_packages_the_extra_is_named(package: str) -> None:
    code = f"import sys; sys.modules[{package!r}] = None\nfrom enginewright.__main__ import main; main()"
    done = subprocess.run([sys.executable, "-c", code, "recipes"], capture_output=True, text=True, check=False)
    assert done.returncode == 10
    assert done.stderr.startswith(f"error: the optimize command needs {package}, which is not installed\n")
    assert "pip install 'enginewright[cli]'" in done.stderr and "Traceback" not in done.stderr


def test_shells_can_complete() -> None:
    environment = os.environ | {"_OPTIMIZE_COMPLETE": "complete_bash", "COMP_WORDS": "optimize ex", "COMP_CWORD": "1"}
    code = "import sys; sys.argv = ['optimize']\nfrom enginewright.optimizer.cli.app import main; main()"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["export"], done.stderr
    assert "--install-completion" in CliRunner().invoke(app, ["--help"]).output


def test_version() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert result.exit_code == 0
    assert result.output.startswith("enginewright ")


@pytest.mark.parametrize(
    "arguments", [["nothing"], ["generate"], ["recipes", "--unknown"], ["inspect", "b", "--json=x"]]
)
def test_a_wrong_command_line_exits_with_2(arguments: list[str]) -> None:
    assert CliRunner().invoke(app, arguments).exit_code == 2


def test_importing_the_command_loads_nothing_heavy() -> None:
    code = (
        "import sys\nfrom enginewright.optimizer.cli.app import app\n"
        "print(sorted({'torch', 'transformers', 'numpy', 'pydantic', 'rich.progress'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"


def test_a_command_imports_no_other() -> None:
    code = (
        "import sys; sys.argv = ['optimize', 'recipes', '--help']\n"
        "from enginewright.optimizer.cli.app import main\n"
        "try:\n    main()\nexcept SystemExit:\n"
        "    print({'recipes', 'serve', 'loadtest'} & {name.rpartition('cli.')[2] for name in sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "{'recipes'}"


def test_ctrl_c_while_python_ends_is_quiet() -> None:
    late = "import atexit, os, signal, sys\natexit.register(os.kill, os.getpid(), signal.SIGINT)\n"
    code = late + "from enginewright.optimizer.cli.app import main\nsys.argv = ['optimize', '--version']\nmain()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGINT
    assert done.stdout.startswith("enginewright ")
    assert done.stderr == ""


@pytest.mark.parametrize(("before", "after"), [(None, "passive"), ("active", "active")])
def test_threads_that_wait_sleep_unless_told_otherwise(before: str | None, after: str) -> None:
    code = (
        "import os, sys; sys.argv = ['optimize', '--version']\n"
        "from enginewright.optimizer.cli.app import main\n"
        "try:\n    main()\nexcept SystemExit:\n    print(os.environ['OMP_WAIT_POLICY'])"
    )
    environment = {k: v for k, v in os.environ.items() if k != "OMP_WAIT_POLICY"}
    environment |= {} if before is None else {"OMP_WAIT_POLICY": before}
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, env=environment)
    assert done.stdout.splitlines()[-1] == after
