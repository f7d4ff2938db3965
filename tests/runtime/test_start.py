"""The modules that a process loads before its first token: for opening a bundle and one answer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

NEEDLESS = {"asyncio", "huggingface_hub", "jinja2", "multiprocessing", "pydantic", "rich", "torch", "typer"}
"""Each takes from 10 ms to seconds to import, and has nothing to do with a prompt's tokens."""

PROBE = """
import json, sys
from enginewright import LLM, SamplingParams
with LLM(sys.argv[1], memory="1MiB") as llm:
    ids = llm.CALL, SamplingParams(max_tokens=2, ignore_eos=True))[0].token_ids
print(json.dumps([len(ids), sorted(sys.modules)]))
"""


def loaded(bundle: Path, call: str, more: str = "") -> set[str]:
    """Top-level modules, and those of ours, behind the first tokens."""
    code = more + PROBE.replace("CALL", call)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")}
    command = [sys.executable, "-c", code, str(bundle)]  # coverage would load modules of its own
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    tokens, modules = json.loads(done.stdout)
    assert tokens == 2
    return {name for name in modules if "." not in name or name.startswith("enginewright.")}


@pytest.mark.parametrize("call", ["generate([5, 6, 7]", "generate('start'", "chat([{'role': 'user', 'content': 'a'}]"])
def test_the_first_token_waits_for_nothing_it_does_not_need(tiny_bundle: Path, call: str) -> None:
    modules = loaded(tiny_bundle, call)
    assert {"enginewright.runtime.engine.llm", "enginewright.plugins.native.executable", "tokenizers"} <= modules
    assert NEEDLESS.isdisjoint(modules)
    assert not {name for name in modules if name.startswith(("enginewright.optimizer", "enginewright.passes"))}


def test_the_probe_sees_what_is_loaded(tiny_bundle: Path) -> None:
    assert {"asyncio", "jinja2"} <= loaded(tiny_bundle, "generate([5]", "import asyncio, jinja2\n")
