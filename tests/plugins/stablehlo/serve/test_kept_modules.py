"""Compiled modules are found at the next start, by what they were compiled for; what is damaged is compiled again."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from enginewright.plugins.stablehlo.section import KERNELS, StableHloSection
from enginewright.plugins.stablehlo.serve import kept_modules
from enginewright.plugins.stablehlo.serve.kept_modules import KeptModules
from enginewright.plugins.stablehlo.serve.pjrt_library import Pjrt
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.engine.llm import LLM
from enginewright.runtime.executors.open import make_executor
from enginewright.runtime.executors.target import Placement
from enginewright.runtime.requests.sampling import SamplingParams
from tests.plugins.graphs.linear_session import lowered_family
from tests.plugins.stablehlo.compile import module_session

from .test_pjrt_library import WRITES

pytest.importorskip("jaxlib", reason="jaxlib is not installed: pip install 'enginewright[stablehlo]'")

ARTIFACT = WRITES.encode()


@pytest.fixture
def folder(cache_home: Path) -> Path:
    return cache_home.parent / kept_modules.FOLDER


def load(threads: int = 1, artifact: bytes = ARTIFACT) -> tuple[int, int]:
    """Compiled, and found, by a client of its own."""
    modules = KeptModules(Pjrt("cpu", threads), threads)
    modules.load(artifact, "test")
    return modules.compiled, modules.found


def test_what_a_module_was_compiled_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [load(), load()] == [(1, 0), (0, 1)]
    (entry,) = folder.iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700
    assert load(threads=2) == (1, 0)
    assert load(artifact=ARTIFACT.replace(b"3.0", b"4.0")) == (1, 0)
    monkeypatch.setattr(kept_modules, "processor_features", lambda: ("sse2",))
    assert load() == (1, 0)
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=false")
    assert load() == (1, 0)
    assert len(list(folder.iterdir())) == 5 and entry.is_file()


def test_what_is_damaged_is_compiled_again(folder: Path) -> None:
    load()
    (entry,) = folder.iterdir()
    whole = entry.read_bytes()
    for damaged in (b"", whole[:20], whole[:-1], whole[:500] + bytes(8) + whole[508:], b"x" * len(whole)):
        entry.write_bytes(damaged)
        assert [load(), load()] == [(1, 0), (0, 1)]
    entry.chmod(0o666)
    assert load() == (1, 0)
    entry.chmod(0o600)
    folder.chmod(0o777)
    assert load() == (1, 0)


def test_the_least_recently_used_files_go_first(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    artifacts = [ARTIFACT.replace(b"3.0", f"{number}.0".encode()) for number in range(10, 14)]
    load(artifact=artifacts[0])
    (first,) = folder.iterdir()
    size = first.stat().st_size
    monkeypatch.setattr(kept_modules, "MOST_BYTES", 3 * size + size // 2)
    load(artifact=artifacts[1])
    (second,) = set(folder.iterdir()) - {first}
    load(artifact=artifacts[2])
    for age, path in enumerate([first, second, *(set(folder.iterdir()) - {first, second})]):
        os.utime(path, (age, age))
    assert load(artifact=artifacts[0]) == (0, 1)  # it is the newest now
    load(artifact=artifacts[3])
    assert len(list(folder.iterdir())) == 3 and first.is_file() and not second.exists()
    assert load(artifact=artifacts[1]) == (1, 0)
    monkeypatch.setattr(kept_modules, "MOST_BYTES", 0)
    load(artifact=ARTIFACT)
    assert len(list(folder.iterdir())) == 1 and load() == (0, 1)


def test_a_disk_that_is_full_and_no_home(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as m:
        m.setattr(kept_modules, "write_own", full)
        assert load() == (1, 0)
    assert list(folder.iterdir()) == []
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert [load(), load()] == [(1, 0), (1, 0)]


@pytest.mark.matrix
@pytest.mark.parametrize("kernels", [None, "enginewright"])
def test_what_is_found_computes_the_same_in_place(tmp_path: Path, kernels: str | None) -> None:
    written = module_session.write_bundle(lowered_family("llama"), tmp_path / "b", kernels)  # type: ignore[arg-type]
    assert written.target("stablehlo").section(StableHloSection).kernels == (KERNELS if kernels else ())  # type: ignore[union-attr]
    outputs = []
    for _ in range(2):
        opened = make_executor(
            Bundle.open(written.path, trust="code"), "stablehlo", {"full": 2}, 20, Placement(threads=1)
        )
        with LLM.from_executor(opened, written.model) as llm:
            logits = llm.logits([5, 9, 7, 11])
            params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
            tokens = list(llm.generate([5, 9, 7], params)[0].token_ids)
            outputs.append((logits, tokens, opened.describe()))
    (first, tokens, before), (second, again, after) = outputs
    np.testing.assert_array_equal(first, second)
    assert tokens == again and before["caches"] == after["caches"] == "in place"
    assert (before["found"], after["compiled"]) == (0, 0) and after["found"] == before["compiled"] > 1
