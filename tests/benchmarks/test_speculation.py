"""The benchmark of speculation, on a tiny bundle; of peers, fakes: they need an environment of their own."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import speculation
from peers import beside
from peers.ahead import Answer, Texts
from peers.loading import BENCHMARKS
from peers.marked_table import END, MarkedTable
from peers.prepare import Contender, Missing
from peers.processes import Command, WorkerError
from peers.workers import ours
from peers.workload import Report, Workload

from enginewright.runtime.bundle.reader import Bundle


def test_every_task_is_measured_and_compared(
    tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speculation, "TASKS", {"chat": "Hello", "copy": "One, one, one, one"})
    path = tmp_path / "found.json"
    assert (
        speculation.main([str(tiny_bundle), "--rounds", "1", "--tokens", "6", "--threads", "1", "--json", str(path)])
        == 0
    )
    (figures,) = json.loads(path.read_text()).values()
    assert len(figures["tasks"]) == 14
    assert all(of["ratio"] > 0 and of["accepted"] <= of["drafted"] for of in figures["tasks"].values())


def test_ours_has_the_same_tokens_with_speculation_and_without(tiny_bundle: Path, tmp_path: Path) -> None:
    Texts({"copy": [5, 6, 7] * 5, "chat": [9, 40, 22, 7]}, 9).write(tmp_path / "texts.json")
    report = ours.ahead(str(tiny_bundle), Workload(threads=1, texts=str(tmp_path / "texts.json"))).figures
    assert {name.partition(".")[0] for name in report} == {"copy", "chat"}
    assert all(report[f"{name}.same"] == 9 and report[f"{name}.on"] > 0 for name in ("copy", "chat"))
    for name in ("copy", "chat"):
        assert report[f"{name}.tokens_per_step"] == pytest.approx(8 / (8 - report[f"{name}.accepted"]))
        assert report[f"{name}.accepted"] <= report[f"{name}.drafted"]


def test_an_answer_that_changes_or_is_short_is_noticed() -> None:
    texts = Texts({"copy": [1, 2], "edit": [3]}, 5)
    assert texts.context == 7

    def plain(prompt: list[int]) -> Answer:
        return Answer([prompt[0]] * 5, 2.0, 4)

    def ahead(prompt: list[int]) -> Answer:
        return Answer([1, 1, 1, 1, 1], 1.0, 2, 6)

    figures = texts.figures(plain, ahead)
    assert (figures["copy.off"], figures["copy.on"], figures["copy.tokens_per_step"]) == (2, 4, 2)
    assert (figures["copy.same"], figures["edit.same"]) == (5, 0)
    assert (figures["copy.drafted"], figures["copy.accepted"]) == (6, 2)
    uncounted = texts.figures(plain, plain)
    assert "copy.drafted" not in uncounted and uncounted["copy.accepted"] == 0
    with pytest.raises(ValueError, match="edit: 5 and 4 tokens of 5"):
        texts.figures(plain, lambda prompt: Answer([1] * (5 if prompt[0] == 1 else 4), 1.0, 2))


def test_peers_are_beside_ours_and_a_crash_is_named(
    tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fakes give 100 tokens a second without, and with speculation 30 for each token of a step; one crashes."""
    runs: list[tuple[str, int, str]] = []

    def run(command: Sequence[str]) -> Report:
        worker, task, work = command[2].removeprefix("peers.workers."), command[3], Workload.parse(command[5])
        assert task == "ahead"
        texts = Texts.read(work.texts)
        runs.append((worker, work.draft, Path(work.draft_model).name))
        if worker == "openvino_cpu" and not work.draft_model:
            raise WorkerError("it ended with -11")
        per_step = work.draft or 6

        def answer(prompt: list[int], speed: float, steps: int, drafted: int | None) -> Answer:
            tokens = [8] * texts.tokens
            tokens[-1] = steps if per_step == 10 else 8
            return Answer(tokens, (texts.tokens - 1) / speed, steps, drafted)

        more = texts.tokens - 1
        figures = texts.figures(
            lambda p: answer(p, 100, more, None),
            lambda p: answer(p, 30 * per_step, more // per_step, None if work.draft == 3 else more),
        )
        return Report(worker, "told", figures)

    contenders = [
        Contender("llama.cpp", "smollm2", "int8", Command(Path("python"), "llama_cpp"), tmp_path / "a.gguf"),
        Contender("openvino", "smollm2", "int8", Command(Path("python"), "openvino_cpu"), tmp_path / "b"),
        Contender("openvino", "smollm2", "int4", Command(Path("python"), "openvino_cpu"), tmp_path / "b4"),
    ]
    missing = [Missing("llama.cpp", "", "", "no wheel"), Missing("llama.cpp", "smollm2", "int4", "no room")]
    monkeypatch.setattr(beside, "prepare", lambda *_: (contenders, missing))
    monkeypatch.setattr(beside, "run", run)
    monkeypatch.setattr(beside, "model_of", lambda _: "smollm2")
    monkeypatch.setattr(beside, "format_of", lambda *_: "int4")
    page, path = tmp_path / "page.md", tmp_path / "found.json"
    table, drafts = MarkedTable("speculation.py smollm2 int8"), beside.marked("smollm2", "int8", "int4")
    page.write_text(f"before\n{table.begin}\nstale\n{END}\n{drafts.begin}\nuntouched\n{END}\nafter\n")
    sizes = ["--rounds", "2", "--tokens", "61", "--threads", "1"]
    arguments = [str(tiny_bundle), "--peers", "int8", *sizes, "--json", str(path), "--page", str(page)]
    assert speculation.main(arguments) == 0
    assert sorted(runs[:5]) == sorted(runs[5:])
    peers = {(name, ahead, "") for name, ahead in (("llama_cpp", 2), ("llama_cpp", 10), ("openvino_cpu", 5))}
    assert set(runs) == {("ours", 0, ""), *peers, ("openvino_cpu", 10, "")}
    assert runs[0] == ("ours", 0, "") and runs[5] == ("llama_cpp", 2, ""), "another begins each round"
    (by_task,) = json.loads(path.read_text()).values()
    engines = by_task["engines"]
    assert set(engines) == {"Enginewright", "llama.cpp, 2 ahead", "llama.cpp, 10 ahead"}
    copy = engines["Enginewright"]["tasks"]["copy"]
    assert copy["ratio"] == pytest.approx(1.8) and copy["tokens_per_step"] == pytest.approx(6)
    assert (copy["drafted"], copy["accepted"], copy["same"]) == (60, 50, 61)
    assert set(engines["Enginewright"]["tasks"]) == {*speculation.TASKS, "random"}
    assert by_task["failed"]["OpenVINO GenAI, 10 ahead"] == "round 1: it ended with -11"
    text = page.read_text()
    assert text.startswith("before") and text.endswith("after\n") and "stale" not in text and "untouched" in text
    assert "| edit | Enginewright | 100 | 180 | 1.80 | 6.0 | 50 of 60 | the same |" in text
    assert "| others from token 61 on |" in text and "OpenVINO GenAI, 5 ahead has no results" in text
    assert "llama.cpp has no results for some or all rounds: no wheel" in text
    assert "- llama.cpp, 2 ahead: llama_cpp, told." in text
    runs.clear()
    assert speculation.main([*arguments, "--draft", str(tiny_bundle)]) == 0
    guesser = tiny_bundle.resolve().name
    assert {one for one in runs if one[2]} == {
        ("ours", 0, guesser),
        ("openvino_cpu", 3, "b4"),
        ("openvino_cpu", 5, "b4"),
    }
    name = f"{tiny_bundle.name}, draft {tiny_bundle.name}"
    assert "OpenVINO GenAI, draft model, 5 ahead" in json.loads(path.read_text())[name]["engines"]
    text = page.read_text().partition(drafts.begin)[2]
    assert "| copy | Enginewright, draft model | 100 | 180 | 1.80 | 6.0 | 50 of 60 | the same |" in text
    assert "| copy | OpenVINO GenAI, draft model, 3 ahead | 100 | 90 | 0.90 | 3.0 | 40, drafted not counted |" in text
    assert "- llama.cpp int4 has no results for some or all rounds: no room" in text and "untouched" not in text


def test_the_model_follows_from_the_bundle(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match="which peers aren't given; --peers needs a bundle of SmolLM2"):
        speculation.main([str(tiny_bundle), "--peers", "int8"])
    monkeypatch.setattr(beside, "model_of", lambda bundle: bundle.name)
    with pytest.raises(SystemExit, match="give one of the same model"):
        beside.format_of(tiny_bundle, "smollm2")
    recipe = Bundle.open(tiny_bundle).manifest.recipe["name"]
    monkeypatch.setattr(beside, "FORMATS", (recipe,))
    assert beside.format_of(tiny_bundle, tiny_bundle.name) == recipe
    monkeypatch.setattr(beside, "FORMATS", ("other",))
    with pytest.raises(SystemExit, match=f"recipe {recipe}; peers have other"):
        beside.format_of(tiny_bundle, tiny_bundle.name)


def test_ours_that_changes_a_token_is_an_error(
    tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = {f"{name}.{key}": 3.0 for name in (*speculation.TASKS, "random") for key in ("off", "on", "same")}
    monkeypatch.setattr(beside, "prepare", lambda *_: ([], []))
    monkeypatch.setattr(beside, "model_of", lambda _: "smollm2")
    monkeypatch.setattr(beside, "run", lambda _: Report("ours", "", figures | {"copy.tokens_per_step": 1.0}))
    with pytest.raises(AssertionError, match="speculation changed a token"):
        speculation.main([str(tiny_bundle), "--peers", "int8", "--rounds", "1", "--tokens", "4"])


def test_peers_have_a_worker_that_does_it() -> None:
    for name in ("ours", "llama_cpp", "openvino_cpu"):
        source = (BENCHMARKS / "peers" / "workers" / f"{name}.py").read_text(encoding="utf-8")
        assert "def ahead(" in source
