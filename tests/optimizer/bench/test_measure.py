from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import enginewright
from enginewright.optimizer.bench import speculation
from enginewright.optimizer.bench.measure import bench
from enginewright.optimizer.bench.options import WARM_UP, BenchOptions, BenchPlan
from enginewright.optimizer.bench.plot import panels, svg
from enginewright.optimizer.bench.result import BenchResult
from enginewright.optimizer.bench.server import Server
from enginewright.plugins.native.executable import CpuProgram
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.kv_cache.kinds.table import cache_block_bytes
from enginewright.runtime.shared.contracts import StepInput, StepOutput
from enginewright.runtime.shared.errors import CapacityError, RequestError
from enginewright.runtime.shared.progress import ProgressEvent
from enginewright.runtime.shared.step_costs import StepCost, StepSizes, step_costs

SMALL = BenchOptions(prompts=(5, 33), batches=(1, 3), contexts=(4, 40), steps=3, rounds=2, threads=1, profile=True)


@pytest.fixture(scope="module")
def found(tiny_bundle: Path) -> BenchResult:
    return bench(Bundle.open(tiny_bundle), SMALL)


def test_every_size_has_its_figures(found: BenchResult) -> None:
    assert [p.tokens for p in found.prompts] == [5, 33]
    assert [(d.batch, d.context) for d in found.decodes] == [(1, 4), (3, 4), (1, 40), (3, 40)]
    for p in found.prompts:
        assert (p.ttft.count, p.tpot.count) == (2, 6)
        assert p.tokens_per_second == p.tokens / p.ttft.median
        assert p.limit_seconds is not None and p.share == p.limit_seconds / p.ttft.median
    for d in found.decodes:
        assert d.step is not None and d.step.count == 6 and d.omitted is None
        assert d.step.least <= d.step.low <= d.step.median <= d.step.high <= d.step.most
        assert d.tokens_per_second == d.batch / d.step.median
        assert d.limit_seconds is not None and d.share == d.limit_seconds / d.step.median


def test_texts_with_tokens_computed_ahead(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculation, "TASKS", {"copy": "one two " * 4, "long": "x " * 2000})
    options = BenchOptions(prompts=(5,), batches=(), steps=3, rounds=2, threads=1, speculate="lookup")
    result = bench(Bundle.open(tiny_bundle), options).speculation
    assert result is not None
    (one,) = result.tasks  # the other is longer than the context
    assert one.task == "copy" and one.ratio.count == 2 and one.ratio.least > 0
    assert one.accepted <= one.drafted == result.info["drafted"]
    for wrong, words in (("", "isn't a way"), ("lookup", "onnx")):
        with pytest.raises(RequestError, match=f"speculate: .*{words}"):
            speculation.check_speculation(Bundle.open(tiny_bundle), "onnx", wrong)


def test_limits_and_memory(found: BenchResult, tiny_bundle: Path) -> None:
    assert found.limits is not None
    assert found.limits.bandwidth.count == 2
    assert set(found.limits.peaks) == {"f32"}
    assert found.limits.peaks["f32"].least > 0
    assert found.memory.peak >= found.memory.before > 0
    assert found.memory.weights > 0 and found.memory.kv_cache > 0


def test_profiles_account_for_the_whole_program(found: BenchResult, tiny_bundle: Path) -> None:
    program = Bundle.open(tiny_bundle).program("cpu")
    names = [p.name for p in found.profiles]
    assert names[:3] == ["prompt of 5", "prompt of 33", "decode, 1 request at 4 tokens"]
    assert names[-1] == "decode, 3 requests at 40 tokens"
    for profile in found.profiles:
        for lines in (profile.by_op, profile.by_module):
            assert sum(line.calls for line in lines) == len(program.steps)
            assert sum(line.part for line in lines) == pytest.approx(1)
            kernels = sum(line.seconds for line in lines)
            assert kernels + profile.around == pytest.approx(profile.seconds)
    whole = sum(step_costs(program, StepSizes((33,), (33,))), StepCost())
    assert sum(line.weights for line in found.profiles[1].by_op) == whole.weights
    assert sum(line.products for line in found.profiles[1].by_op) == whole.multiply_adds
    assert found.profiles[2].runs == SMALL.steps + WARM_UP


def test_the_json_is_plain(found: BenchResult) -> None:
    data = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert data["format_version"] == 1
    assert set(data) == {
        *("format_version", "model", "recipe", "target", "engine", "machine", "options", "seconds", "memory", "limits"),
        *("prompts", "decodes", "profiles", "speculation"),
    }
    assert data["options"] == {
        "prompts": [5, 33],
        "batches": [1, 3],
        "contexts": [4, 40],
        "steps": 3,
        "rounds": 2,
    }


def test_progress_ends_where_it_says(tiny_bundle: Path) -> None:
    events: list[ProgressEvent] = []
    bench(Bundle.open(tiny_bundle), BenchOptions(prompts=(4,), batches=(), steps=1, rounds=3), events.append)
    assert [e.done for e in events] == list(range(len(events)))
    assert events[-1].done == events[-1].total == 3 * 2
    assert {e.stage for e in events} == {"bench"}


def test_what_the_memory_has_no_room_for_is_left_out(tiny_bundle: Path) -> None:
    group = Bundle.open(tiny_bundle).program("cpu").cache_groups[0]
    memory = 2 * cache_block_bytes(group)
    options = BenchOptions(prompts=(5,), batches=(1, 3), contexts=(4,), steps=2, rounds=1, memory=memory)
    one, three = bench(Bundle.open(tiny_bundle), options).decodes
    assert one.omitted is None and three.step is None
    assert three.omitted == "the KV cache has no room for 3 requests of 9 tokens"
    options = BenchOptions(prompts=(5, 70), batches=(), steps=2, rounds=2, memory=memory, threads=1, profile=True)
    result = bench(Bundle.open(tiny_bundle), options)
    short, long = result.prompts
    assert short.omitted is None and short.ttft is not None and short.ttft.count == 2
    assert long.ttft is None and long.omitted is not None and "holds 64" in long.omitted
    assert [profile.name for profile in result.profiles] == ["prompt of 5"]
    assert [line.label for panel in panels(result) for line in panel.series]  # the prompt that was measured


def test_decode_steps_run_where_they_say(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = BenchPlan((), (3,), (40,), 2)
    server = Server(Bundle.open(tiny_bundle), "cpu", plan, threads=1)
    ran: list[tuple[list[int], list[int]]] = []
    run = CpuProgram.run

    def watched(program: CpuProgram, step: StepInput) -> StepOutput:
        ran.append((np.diff(step.q_start).tolist(), step.kv_len.tolist()))
        return run(program, step)

    monkeypatch.setattr(CpuProgram, "run", watched)
    assert len(server.decode(3, 40, 2)) == 2
    assert ran == [([1, 1, 1], [41 + i] * 3) for i in range(WARM_UP + 2)]
    with pytest.raises(CapacityError):
        server.decode(4, 40, 2)
    ran.clear()
    server.prompt(7, 2)
    assert ran == [([7], [7]), ([1], [8]), ([1], [9])]
    server.close()


def test_sizes_longer_than_the_context(tiny_bundle: Path) -> None:
    with pytest.raises(RequestError, match="600 tokens leave no room"):
        bench(Bundle.open(tiny_bundle), BenchOptions(prompts=(600,)))


def test_the_plot_has_what_was_measured(found: BenchResult) -> None:
    import xml.etree.ElementTree as ElementTree

    drawn = panels(found)
    assert [len(panel.series) for panel in drawn] == [2, 1]
    for panel in drawn:
        for series in panel.series:
            assert len(series.points) == len(series.limits) == len(series.titles)
            for x, y in (*series.points, *series.limits):
                assert panel.left <= x <= panel.right and panel.top <= y <= panel.bottom
    root = ElementTree.fromstring(svg(found))
    name = "{http://www.w3.org/2000/svg}"
    assert root.tag == f"{name}svg"
    titles = [e.text or "" for e in root.iter(f"{name}title")]
    assert len(titles) == sum(len(series.titles) for panel in drawn for series in panel.series)
    assert titles[0].startswith("1 at 4 tokens: ")
    assert "http" not in svg(found).replace("http://www.w3.org/2000/svg", "")


def test_a_target_that_reads_its_prompts(tiny_folder: Path, tmp_path: Path) -> None:
    """Slots, no limits, no profile: what is measured is the same."""
    pytest.importorskip("onnxruntime")
    enginewright.export(tiny_folder, tmp_path / "onnx.bundle", recipe="f32", targets=["onnx"])
    options = BenchOptions(prompts=(5,), batches=(1, 2), contexts=(8,), steps=2, threads=1, profile=True)
    result = bench(Bundle.open(tmp_path / "onnx.bundle"), options)
    assert result.target == "onnx" and result.limits is None and result.profiles == ()
    assert result.options["rounds"] == 1
    assert [d.step.count for d in result.decodes if d.step is not None] == [2, 2]
    assert result.prompts[0].share is None and result.memory.weights == 0 < result.memory.kv_cache
    assert [len(panel.series[0].limits) for panel in panels(result)] == [0, 0]
    assert "dashed" in svg(result)
