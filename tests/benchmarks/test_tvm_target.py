"""The tvm target beside the others on a tiny model: a row for each case and engine, and other recipes' results stay."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from enginewright.optimizer.export import export
from enginewright.optimizer.recipes.recipe import load_recipe
from enginewright.plugins.tvm.recipe import TvmOptions
from enginewright.runtime.bundle.reader import Bundle
from tests.conftest import make_tiny_model

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


def test_a_time_for_each_case_and_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    import tvm_target

    for name, value in {"PAST": 8, "PROMPT": 20, "BATCHES": (1, 2), "BLOCKS": 8, "ROUND": 0.001, "PAUSE": 0.0}.items():
        monkeypatch.setattr(tvm_target, name, value)
    model = make_tiny_model("Llama")
    model.save_pretrained(tmp_path / "source")
    recipe = load_recipe("f32").model_copy(update={"tvm": TvmOptions(levels=("v3",), kernels="enginewright")})
    export(model, tmp_path / "b", recipe=recipe, targets=("cpu", "tvm"))
    result = tmp_path / "result.json"
    result.write_text('{"int8": {"seconds": 1}}')
    paths = [str(tmp_path / name) for name in ("b", "source", "result.json")]
    tvm_target.main([*paths, "--ours", str(tmp_path / "b"), "--rounds", "1", "--threads", "1"])
    results = json.loads(result.read_text())
    assert results["int8"] == {"seconds": 1}
    figures = results["f32"]
    assert figures["seconds"].keys() == {"prefill 20", "decode 1", "decode 2"}
    for times in figures["seconds"].values():
        assert times.keys() == {tvm_target.EAGER, "cpu", "tvm", tvm_target.OURS} and min(times.values()) > 0
    assert figures["kl"].keys() == {"cpu", "tvm", tvm_target.OURS} and max(figures["kl"].values()) < 1e-9
    assert figures["engines"][tvm_target.OURS]["kernels"] == "enginewright"


def test_steps_are_the_same_requests_as_transformers_gets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    import tvm_target

    export(make_tiny_model("Llama"), tmp_path / "b", recipe="f32", targets=("cpu",))
    groups = Bundle.open(tmp_path / "b").program("cpu").cache_groups
    step = tvm_target.step_of(groups, past=40, new=2, requests=3, vocabulary=200)
    assert step.ids.shape == (6,) and step.positions.tolist() == [40, 41] * 3
    assert step.q_start.tolist() == [0, 2, 4, 6]
    assert step.kv_len.tolist() == [42] * 3 and step.rows.tolist() == [1, 3, 5]
    for group in groups:
        table = step.block_tables[group.name]
        assert sorted(table.reshape(-1).tolist()) == list(range(6))  # two blocks each
        assert step.slots[group.name].tolist() == [int(row[1]) * 32 + p for row in table for p in (8, 9)]
