"""The names of the package: loaded when they are used, and none of them needs torch but ``export``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest

import enginewright


def run(code: str) -> Any:
    """The JSON that ``code`` prints, in an interpreter of its own without torch."""
    blocked = "import sys; sys.modules['torch'] = sys.modules['transformers'] = None\n"
    package = Path(enginewright.__file__).parents[1]
    environment = os.environ | {"PYTHONPATH": str(package)}
    done = subprocess.run(
        [sys.executable, "-c", blocked + code], env=environment, check=True, capture_output=True, text=True
    )
    return json.loads(done.stdout)


def test_importing_loads_nothing() -> None:
    loaded = run("import json, enginewright; print(json.dumps(sorted(sys.modules)))")
    assert not {"numpy", "pydantic", "tokenizers", "jinja2", "enginewright.runtime"} & set(loaded)


def test_the_runtime_needs_no_torch() -> None:
    code = "import json, enginewright as e; print(json.dumps([e.LLM.__name__, e.SamplingParams().max_tokens]))"
    assert run(code) == ["LLM", 256]


def test_export_says_what_to_install() -> None:
    code = (
        "import json, enginewright as e\n"
        "try: e.export\n"
        "except e.MissingDependencyError as error: print(json.dumps([str(error), isinstance(error, ImportError)]))"
    )
    message, is_import_error = run(code)
    assert "enginewright.export needs" in message and "pip install 'enginewright[export]'" in message
    assert is_import_error


def test_every_name_is_there() -> None:
    for name in set(enginewright.__all__) - {"export", "__version__"}:
        assert getattr(enginewright, name).__name__ == name
    assert dir(enginewright) == sorted(enginewright.__all__)


def test_the_version() -> None:
    try:
        version = enginewright.__version__
    except PackageNotFoundError:  # run from a tree that isn't installed
        pytest.skip("enginewright is not installed")
    assert version.count(".") == 2


def test_a_name_that_is_not_there() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        enginewright.Nothing  # noqa: B018


def test_every_error_is_exported_and_loads_nothing_heavy() -> None:
    from enginewright.runtime.shared import errors

    names = [
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, errors.EnginewrightError)
    ]
    assert len(names) > 10
    assert set(names) <= set(enginewright.__all__)
    assert all(getattr(enginewright, name) is getattr(errors, name) for name in names)
    code = f"import json, enginewright as e; [getattr(e, n) for n in {names}]; print(json.dumps(sorted(sys.modules)))"
    assert not {"numpy", "pydantic", "tokenizers"} & set(run(code))
