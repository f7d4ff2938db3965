from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

import pytest
from peers.engines import ENGINES, Engine
from peers.install import install, last_error
from peers.processes import WorkerError, environment, main, reason, run


def script(text: str) -> list[str]:
    return [sys.executable, "-c", text]


def test_the_last_line_is_the_report() -> None:
    report = run(script('print(\'noise\'); print(\'{"engine": "e", "figures": {"prefill": 2}}\')'))
    assert (report.engine, report.figures) == ("e", {"prefill": 2})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("raise ValueError('no weights')", "ValueError: no weights"),
        ("raise SystemExit(3)", "ended with 3"),
        ("print('hello')", "no report, but: hello"),
    ],
)
def test_a_worker_that_fails_says_why(text: str, said: str) -> None:
    with pytest.raises(WorkerError, match=said):
        run(script(text))


def test_a_reason_is_the_line_with_the_error() -> None:
    assert reason("a\nRuntimeError: no\n[ERROR-free] blocks\n", 1) == "RuntimeError: no"
    assert reason("one\ntwo\n", 1) == "two"


def test_no_variable_tunes_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    monkeypatch.setenv("PATH_OF_MINE", "kept")
    assert "OMP_WAIT_POLICY" not in environment()
    assert environment()["PATH_OF_MINE"] == "kept"


def test_the_time_to_the_first_token_ends_with_it(capsys: pytest.CaptureFixture[str]) -> None:
    """The command would go on for a minute after its token."""
    assert main(["1", *script("import time; print('first token', flush=True); time.sleep(60)")]) == 0
    assert '"start": ' in capsys.readouterr().out
    with pytest.raises(WorkerError, match="without a first token"):
        main(["1", *script("print('none')")])


def fake_python(folder: Path, text: str) -> Path:
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{text}\n")
    os.chmod(path, path.stat().st_mode | stat.S_IXUSR)
    return path


def test_an_engine_that_can_not_be_installed_is_missing_with_the_reason(tmp_path: Path) -> None:
    engine: Engine = ENGINES["llama.cpp"]
    failing = fake_python(tmp_path, 'echo "ERROR: no wheel" >&2; echo "WARNING: old pip" >&2; exit 1')
    assert install(engine, failing) == "pip install llama-cpp-python==0.3.36 failed: ERROR: no wheel"
    broken = fake_python(tmp_path, 'case "$*" in *"import llama_cpp"*) echo "OSError: no libgomp" >&2; exit 1;; esac')
    assert install(engine, broken) == "import llama_cpp failed: OSError: no libgomp"
    assert install(engine, fake_python(tmp_path, "exit 0")) is None
    assert last_error("") == "it said nothing"
