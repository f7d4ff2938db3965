"""Compiled kernels are found again at the next start; never those of another engine, GPU, library or user."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from enginewright.plugins.engines.runtime_cache import FOLDER, RuntimeCache
from enginewright.runtime.engine.llm import LLM
from enginewright.runtime.executors.kept_files import cache_file
from enginewright.runtime.requests.sampling import SamplingParams
from tests.plugins.engines import fake_tensorrt as fakes
from tests.plugins.engines.fake_tensorrt import _RtxConfig
from tests.plugins.engines.test_slots import Install, bundle, install  # noqa: F401  fixtures

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


def test_the_next_start_compiles_nothing(cache_home: Path, install: Install, bundle: Path) -> None:  # noqa: F811
    states = []
    for _ in range(2):
        install(graphs=True)
        fakes.COMPILED.clear()
        with LLM(bundle, trust="code") as llm:
            llm.generate([1, 2, 3], GREEDY)  # of several, those of a step hang on when each comes
            states.append((llm.info()["executor"]["runtime_cache"], bool(fakes.COMPILED)))
    assert states == [("made", True), ("found", False)]
    (stored_file,) = cache_home.iterdir()
    assert cache_home.stat().st_mode & 0o777 == 0o700
    stored_file.write_bytes(b"of another driver")
    install(graphs=True)
    with LLM(bundle, trust="code") as llm:
        assert llm.info()["executor"]["runtime_cache"] == "made anew: the library refuses the one that is there"
        llm.generate([1, 2, 3], GREEDY)
    assert stored_file.read_bytes().startswith(b"kernels ")
    assert [path.name for path in cache_home.iterdir()] == [stored_file.name]


def test_each_engine_gpu_and_version_has_its_own() -> None:
    names = [
        ("1.7", "L4", "8.9", "ab"),
        ("1.8", "L4", "8.9", "ab"),
        ("1.7", "L40", "8.9", "ab"),
        ("1.7", "L4", "8.9", "c"),
    ]
    assert len({cache_file(FOLDER, *of) for of in names}) == 4


def test_what_others_may_write_is_not_read(cache_home: Path) -> None:
    path = cache_file(FOLDER, "a")
    assert path is not None and path.parent == cache_home
    cache = RuntimeCache(path, _RtxConfig())
    cache._api.kernels.add("one")
    cache.save()
    assert RuntimeCache(path, _RtxConfig()).state == "found"
    path.chmod(0o666)
    assert RuntimeCache(path, _RtxConfig()).state == f"not kept: {path.name} is another user's, or others may write it"
    path.chmod(0o600)
    cache_home.chmod(0o777)
    assert "tensorrt-rtx is another user's, or others may" in RuntimeCache(path, _RtxConfig()).state
    cache_home.chmod(0o700)
    path.unlink()
    os.mkfifo(path)
    assert RuntimeCache(path, _RtxConfig()).state == "not kept: it is a pipe, not a regular file"


def test_a_folder_that_can_t_be_made(cache_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache_home.parent.parent.write_text("a file")
    cache = RuntimeCache(cache_file(FOLDER, "a"), _RtxConfig())
    assert cache.state == "not kept: Not a directory"
    cache.save()
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_file(FOLDER, "a") is None
    assert RuntimeCache(None, _RtxConfig()).state == "not kept"


def test_a_disk_that_is_full(cache_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = RuntimeCache(cache_file(FOLDER, "a"), _RtxConfig())
    cache._api.kernels.add("one")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    cache.save()
    assert cache.state == "not kept: No space left on device" and not list(cache_home.iterdir())
