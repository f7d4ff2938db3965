from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import bench_peers
import pytest
from peers.engines import ENGINES, TITLES, Engine
from peers.prepare import Asked, Contender, Missing, fingerprint, prepare
from peers.rounds import Job, Measured
from peers.workload import Report, Workload

from tests.benchmarks.peers_results import contender


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    def prepare(asked: Asked, tell: Any) -> tuple[list[Contender], list[Missing]]:
        missing = [Missing("openvino", "", "", "no wheel")]
        return [contender("enginewright"), contender("llama.cpp")], missing

    roof = Report("", figures={"bandwidth": 40, "bandwidth_of_weights": 45}, bytes={"read": 1})
    monkeypatch.setattr(bench_peers, "prepare", prepare)
    monkeypatch.setattr(bench_peers, "roofline", lambda contender, work: roof)


@pytest.mark.usefixtures("prepared")
def test_what_was_measured_survives_ctrl_c(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(jobs: list[Job], work: Workload, measured: dict[Contender, Measured], *rest: Any, **more: Any) -> None:
        more["before"]()
        measured[jobs[0].contender] = Measured(jobs[0].contender, "e", "s", [{"prefill": 5.0}])
        raise KeyboardInterrupt

    monkeypatch.setattr(bench_peers, "measure", measure)
    path = tmp_path / "out" / "result.json"
    assert bench_peers.main(["--json", str(path), "--update-docs"]) == 130
    result = json.loads(path.read_text())
    assert result["measured"]["whole"] is False
    assert result["models"]["smollm2"]["formats"]["int8"]["engines"]["enginewright"]["figures"] == {"prefill": 5.0}
    assert result["missing"] == [{"engine": "openvino", "model": "", "format": "", "reason": "no wheel"}]
    assert {"processor", "cores", "instruction_sets", "caches", "memory_gib"} <= set(result["machine"])


@pytest.mark.usefixtures("prepared")
def test_quick_is_one_round_of_short_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Job] = []
    monkeypatch.setattr(bench_peers, "measure", lambda jobs, *rest, **more: seen.extend(jobs))
    assert bench_peers.main(["--quick", "--json", str(tmp_path / "r.json")]) == 0
    assert {(job.round, job.task) for job in seen} == {(0, "speed"), (0, "start")}
    result = json.loads((tmp_path / "r.json").read_text())
    assert result["measured"]["command"] == "benchmarks/bench_peers.py --quick"
    assert result["goals"] == []


def test_an_export_that_fails_says_why(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def prepare(asked: Asked, tell: Any) -> None:
        raise subprocess.CalledProcessError(1, ["export"], stderr="Traceback:\nSourceError: no weights\n")

    monkeypatch.setattr(bench_peers, "prepare", prepare)
    assert bench_peers.main([]) == 1
    assert "our own part can't be made ready: SourceError: no weights" in capsys.readouterr().err


def test_a_document_can_only_point_to_a_result_in_the_repository(tmp_path: Path) -> None:
    result = {
        "machine": {"processor": "p", "instruction_sets": [], "caches": {}, "memory_gib": 1, "system": "s"},
        "measured": {"date": "d", "commit": "c", "rounds": 1, "seconds": 1, "whole": True},
        "workload": {"threads": 1},
        "models": {},
        "missing": [],
        "goals": [],
    }
    path = tmp_path / "r.json"
    path.write_text(json.dumps(result))
    assert bench_peers.main(["--from-json", str(path)]) == 0
    assert bench_peers.main(["--from-json", str(path), "--update-docs"]) == 1


def test_an_engine_that_can_not_be_prepared_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours can: its bundle is there, and is kept."""
    (tmp_path / "smollm2" / "int4.bundle").mkdir(parents=True)
    monkeypatch.setattr("peers.prepare.BUILD", tmp_path)
    monkeypatch.setattr("peers.prepare.peers_python", lambda folder: Path("no-python"))
    monkeypatch.setattr("peers.prepare.quietly", lambda command: None)
    reasons = {"llama.cpp": "no wheel"}
    monkeypatch.setattr("peers.prepare.install", lambda engine, python, isa: reasons.get(engine.name))
    selection = Asked(["smollm2"], ["int4"], ["enginewright", "llama.cpp", "ctranslate2"], ("nice",), keep=True)
    contenders, missing = prepare(selection, lambda text: None)
    assert [(c.engine, c.model, c.format, c.command.prefix) for c in contenders] == [
        ("enginewright", "smollm2", "int4", ("nice",))
    ]
    assert [(m.engine, m.format, m.reason) for m in missing] == [
        ("llama.cpp", "", "no wheel"),
        ("ctranslate2", "int4", "it doesn't support the format int4"),
    ]


def test_an_instruction_set_limits_what_is_built_and_what_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built: dict[str, tuple[Path, str | None]] = {}

    def install(engine: Engine, python: Path, isa: str | None) -> None:
        built[engine.name] = (python, isa)

    monkeypatch.setattr("peers.prepare.BUILD", tmp_path)
    monkeypatch.setattr("peers.prepare.peers_python", lambda folder: folder)
    monkeypatch.setattr("peers.prepare.quietly", lambda command: None)
    monkeypatch.setattr("peers.prepare.install", install)
    for name in ("q8_0.gguf", "ctranslate2-int8"):
        (tmp_path / "smollm2" / name).mkdir(parents=True)
    selection = Asked(["smollm2"], ["int8"], ["llama.cpp", "ctranslate2"], keep=True, isa="avx2")
    contenders, _ = prepare(selection, lambda text: None)
    assert built == {"llama.cpp": (tmp_path / "peers-avx2", "avx2"), "ctranslate2": (tmp_path / "peers", None)}
    assert [c.command.python for c in contenders] == [tmp_path / "peers-avx2", tmp_path / "peers"]
    assert all("CT2_FORCE_CPU_ISA=AVX2" in c.command.prefix for c in contenders)


def test_a_file_that_llama_cpp_can_not_make_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def quietly(command: Sequence[str]) -> None:
        if "peers.quantize" in command and command[-1] == "Q6_K":
            raise subprocess.CalledProcessError(1, command, stderr="it failed with 1\n")
        if "peers.quantize" in command:
            Path(command[-2]).write_bytes(b"")

    monkeypatch.setattr("peers.prepare.BUILD", tmp_path)
    monkeypatch.setattr("peers.prepare.peers_python", lambda folder: Path("no-python"))
    monkeypatch.setattr("peers.prepare.quietly", quietly)
    monkeypatch.setattr("peers.prepare.install", lambda engine, python, isa: None)
    (tmp_path / "smollm2").mkdir()
    contenders, missing = prepare(Asked(["smollm2"], ["q6_k", "iq4_xs"], ["llama.cpp"], keep=True), lambda text: None)
    assert [(c.engine, c.format) for c in contenders] == [("llama.cpp", "iq4_xs")]
    assert [(m.engine, m.format, m.reason) for m in missing] == [
        ("llama.cpp", "q6_k", "llama.cpp can't make the file: it failed with 1")
    ]


def test_a_model_has_formats_of_its_own_and_more_where_they_are_asked_for() -> None:
    assert [Asked([], [], []).formats_of(model) for model in ("smollm2", "gemma3")] == [["int8", "int4"], ["q4_k_m"]]
    some = Asked([], ["int4", "q6_k", "q4_k_m"], [])
    assert some.formats_of("smollm2") == ["int4", "q6_k", "q4_k_m"]
    assert some.formats_of("llama-1b") == some.formats and some.formats_of("gemma3") == ["q4_k_m"]


def test_every_engine_has_a_title() -> None:
    assert set(TITLES) == set(ENGINES)


def test_bundles_are_of_the_code_that_made_them(tmp_path: Path) -> None:
    for part in ("optimizer", "passes", "plugins", "runtime"):
        (tmp_path / part).mkdir()
    source = tmp_path / "plugins" / "kernel.cpp"
    source.write_text("a")
    before = fingerprint(tmp_path)
    (tmp_path / "plugins" / "notes.md").write_text("b")
    assert fingerprint(tmp_path) == before
    source.write_text("b")
    assert fingerprint(tmp_path) != before
