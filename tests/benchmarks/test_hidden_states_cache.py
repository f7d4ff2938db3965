"""benchmarks/hidden_states_cache.py: what the products read gives the very cache, whatever lies between."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import hidden_states_cache
import pytest
from transformers import PreTrainedModel

from enginewright.optimizer.export import export


@pytest.mark.parametrize(("family", "recipe"), [("Llama", "int8"), ("Qwen3", "f32"), ("GPT2", "f32")])
def test_keys_and_values_are_made_again(
    family: str,
    recipe: str,
    tiny_model: Callable[..., PreTrainedModel],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    export(tiny_model(family), tmp_path / "tiny.bundle", recipe=recipe, targets=["cpu"])
    arguments = ["", str(tmp_path / "tiny.bundle"), "--tokens", "40", "--rounds", "1"]
    monkeypatch.setattr("sys.argv", [*arguments, "--folder", str(tmp_path), "--json", str(tmp_path / "found.json")])
    assert hidden_states_cache.main() == 0
    [row] = json.loads((tmp_path / "found.json").read_text())["models"]
    assert row["same_bits"]
    assert 0 < row["restore_us"] < row["compute_us"] and 0 < row["keys_and_values_of_products"] <= 1
    assert row["hidden_bytes"] > 0 and row["kv_bytes"] > 0


def test_other_hidden_states_give_another_cache(tiny_model: Callable[..., PreTrainedModel], tmp_path: Path) -> None:
    """The comparison could fail."""
    export(tiny_model("Llama"), tmp_path / "tiny.bundle", targets=["cpu"])
    options = hidden_states_cache.argparse.Namespace(tokens=40, rounds=1, folder=tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        whole = hidden_states_cache.products_of
        patch.setattr(hidden_states_cache, "products_of", lambda program: tuple(part[:1] for part in whole(program)))
        assert not hidden_states_cache.measured(tmp_path / "tiny.bundle", options)["same_bits"]
