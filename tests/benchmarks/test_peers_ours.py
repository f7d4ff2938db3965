"""The worker of our own engine on a tiny bundle; those of peers need the peers."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from peers.agent import Conversation
from peers.engines import ENGINES
from peers.loading import BENCHMARKS
from peers.processes import Command, main, run
from peers.workload import Report, Task, Workload

from enginewright import LLM

WORK = Workload(
    prompt=40,
    long_prompt=70,
    far_prompt=96,
    short_prompt=8,
    steps=4,
    long_steps=3,
    batches=(3, 2),
    threads=1,
    vocabulary=259,
)


def ours(task: Task, bundle: Path, *more: str, worker: str = "ours") -> Report:
    return run(Command(Path(sys.executable), worker).line(task, bundle, WORK, *more))


def test_a_run_gives_every_speed(tiny_bundle: Path) -> None:
    report = ours("speed", tiny_bundle)
    assert set(report.figures) == {"prefill", "decode_1", "decode_3", "decode_2"}
    assert all(speed > 0 for speed in report.figures.values())
    assert "threads 1" in report.settings
    assert report.bytes["peak"] > report.bytes["import"] > report.bytes["weights"] > 0
    # Both ways to use the cache fit into it: three short requests, and a long one alone.
    with LLM(tiny_bundle) as llm:
        block = llm.info()["kv_cache_bytes"] // llm.info()["kv_cache_tokens"]
    assert report.bytes["kv"] >= block * max(3 * WORK.short_context, WORK.prompt + WORK.steps)


def test_a_long_prompt_and_limits(tiny_bundle: Path) -> None:
    assert set(ours("long", tiny_bundle).figures) == {"prefill_long", "decode_long"}
    far = ours("far", tiny_bundle).figures
    assert set(far) == {"prefill_far", "decode_far", "decode_farther"}
    limits = ours("roofline", tiny_bundle, worker="roofline")
    assert set(limits.figures) == {"bandwidth", "bandwidth_of_weights"}  # it has no products of 8 bits
    sizes = [limits.bytes[name] for name in ("read", "decode_long", "decode_far", "decode_farther")]
    assert 0 < sizes[0] < sizes[1] < sizes[2] < sizes[3]


def test_a_start_is_timed_to_its_first_token(tiny_bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["1", *Command(Path(sys.executable), "ours").bare("start", tiny_bundle, WORK)]) == 0
    assert '"start": ' in capsys.readouterr().out


def test_logits_of_itself_have_no_divergence(tiny_bundle: Path, tmp_path: Path) -> None:
    ids = list(range(3, 30))
    with LLM(tiny_bundle) as llm:
        logits = llm.logits(ids)
    np.savez(tmp_path / "reference.npz", ids=ids, logits=logits)
    figures = ours("logits", tiny_bundle, "--reference", str(tmp_path / "reference.npz")).figures
    assert figures["kl"] == pytest.approx(0, abs=1e-12)
    assert figures["top_1"] == 1
    np.savez(tmp_path / "reference.npz", ids=ids, logits=logits[:, ::-1])
    assert ours("logits", tiny_bundle, "--reference", str(tmp_path / "reference.npz")).figures["kl"] > 0.01


def test_workers_are_where_engines_say() -> None:
    for engine in ENGINES.values():
        assert (BENCHMARKS / "peers" / "workers" / f"{engine.worker}.py").exists()


def test_an_agents_answers_are_the_same_with_the_cache_and_without(tiny_bundle: Path, tmp_path: Path) -> None:
    talk = Conversation.of_text([3 + i % 250 for i in range(90)], system=40, tool=10, turns=4)
    talk.write(tmp_path / "conversation.json")
    assert Conversation.read(tmp_path / "conversation.json") == talk
    work = replace(WORK, conversation=str(tmp_path / "conversation.json"))
    figures = run(Command(Path(sys.executable), "ours").line("agent", tiny_bundle, work)).figures
    assert figures["turns"] == 4
    assert figures["changed"] == 0
    assert 0 < figures["first_with"] < figures["with"]
    assert 0 < figures["first_without"] < figures["without"]


def test_a_conversation_counts_the_answers_that_a_cache_changes() -> None:
    talk = Conversation([1, 2], [[3], [4], [5]], answer=1)
    prompts: list[list[int]] = []

    def cached(prompt: list[int]) -> tuple[list[int], float]:
        prompts.append(prompt)
        return [len(prompt)], time.perf_counter()

    figures = talk.figures(cached, lambda prompt: ([len(prompt) + (prompt[-1] == 4)], time.perf_counter()))
    assert prompts == [[1, 2, 3], [1, 2, 3, 3, 4], [1, 2, 3, 3, 4, 5, 5]]
    assert figures["changed"] == 1
    with pytest.raises(ValueError, match="90 tokens, where 1500 are needed"):
        Conversation.of_text([0] * 90, system=1500, tool=0, turns=1)
