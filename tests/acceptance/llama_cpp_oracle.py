"""llama.cpp as the oracle of GGUF files: a process of its own, which is started again after it has aborted.

llama-cpp-python isn't installed with the project: `pip install llama-cpp-python==0.3.36`, then `pytest -m soak` with
the test's file.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.optimizer.capture.gguf.gguf_models import Array

ANSWER = "answer: "
MARKS = [
    pytest.mark.soak,
    pytest.mark.skipif(
        importlib.util.find_spec("llama_cpp") is None, reason="llama-cpp-python, the oracle, isn't installed"
    ),
]
"""The marks of a module that asks the oracle."""


class Oracle:
    """llama.cpp in a process of its own. See ``llama_cpp_worker``.

    Args:
        folder: a place for the logits.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: subprocess.Popen[str] | None = None

    def logits(self, path: Path, ids: list[int]) -> Array | None:
        """The logits [S, V]; None if llama.cpp doesn't take the file."""
        answer = self._ask({"path": str(path), "ids": ids, "out": str(self._folder / "logits.npy")})
        return np.load(answer["out"]) if answer is not None and "out" in answer else None

    def pooled(self, path: Path, ids: list[int], pooling: int = -1) -> Array | None:
        """The vector or the scores of a text, not normalized; None if llama.cpp doesn't take the file.

        ``pooling``: llama.cpp's number of one; -1 is the file's.
        """
        answer = self._ask({"path": str(path), "ids": ids, "out": str(self._folder / "pooled.npy"), "pooling": pooling})
        return np.load(answer["out"]) if answer is not None and "out" in answer else None

    def tokens(self, path: Path, texts: Sequence[str]) -> dict[str, Any] | None:
        """The answer of ``tokens_of`` in the worker; None if llama.cpp aborts, or doesn't take the file."""
        answer = self._ask({"path": str(path), "texts": list(texts)})
        return answer if answer is not None and "tokens" in answer else None

    def close(self) -> None:
        """Ends the process."""
        if self._process is not None:
            self._process.communicate()

    def _ask(self, request: dict[str, Any]) -> dict[str, Any] | None:
        """The answer; None if the process ended without one."""
        if self._process is None:
            worker = Path(__file__).with_name("llama_cpp_worker.py")
            self._process = subprocess.Popen(
                [sys.executable, str(worker)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:  # an abort prints lines of its own
            if line.startswith(ANSWER):
                answer: dict[str, Any] = json.loads(line.removeprefix(ANSWER))
                return answer
        self._process.stdout.close()
        self._process.wait()
        self._process = None
        return None


def write_report(line: dict[str, Any]) -> None:
    """Appends a line of counts to the file that the environment variable GGUF_REPORT names, if there is one."""
    if report := os.environ.get("GGUF_REPORT"):
        with open(report, "a") as file:
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
