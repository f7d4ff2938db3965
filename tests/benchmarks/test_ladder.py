"""The ladder's table and page, of fakes; transformers' part on a tiny model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import ladder
import numpy as np
import pytest
import torch
from peers.ahead import Texts
from peers.workers import eager
from peers.workload import Report, Workload

from enginewright.optimizer.pipeline.pipeline import OPTIONAL
from enginewright.optimizer.recipes.recipe import load_recipe
from enginewright.optimizer.recipes.targets import TARGETS

SPEEDS = {"uncached": 4.0, "cached": 30.0, "unfused": 60.0, "f32": 66.0, "bf16": 120.0, "int8": 180.0, "int4": 240.0}


def test_every_rung_is_measured_and_the_page_has_it(
    tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exported: list[tuple[str, str]] = []
    calls: list[str] = []

    def export(source: Path, bundle: Path, recipe: str, kv_cache: str | None) -> None:
        exported.append((bundle.stem, Path(recipe).name))
        bundle.symlink_to(tiny_bundle)

    def run(command: Sequence[str]) -> Report:
        worker, arguments = command[2].removeprefix("peers.workers."), command[3:]
        if worker == "eager":
            how, _, work, reference = arguments
            calls.append(how)
            if how == "reference":
                return Report("")
            kl = {"kl": 0.25} if reference else {}
            return Report("transformers", "", {"decode_1": SPEEDS[how]} | kl, {"weights": 269_000_000})
        task, bundle, work = arguments[:3]
        calls.append(f"{task} {Path(bundle).stem}")
        if task == "ahead":
            texts = Texts.read(Workload.parse(work).texts)
            assert list(texts.prompts) == ["copy"] and texts.tokens == 128
            return Report("ours", "", {"copy.off": 250.0, "copy.on": 1000.0, "copy.same": 128.0})
        if task == "logits":
            return Report("", "", {"kl": 0.125})
        speed = SPEEDS[Path(bundle).stem]
        batch = Workload.parse(work).batches[0]
        return Report("ours", "", {f"decode_{batch}": speed * batch**0.5}, {"weights": 1_000_000})

    monkeypatch.setattr(ladder, "export", export)
    monkeypatch.setattr(ladder, "run", run)
    figures, page = tmp_path / "found.json", tmp_path / "ladder.md"
    arguments = [str(tmp_path), "--bundles", str(tmp_path / "bundles"), "--threads", "1"]
    assert ladder.main([*arguments, "--prepare"]) == 0
    assert exported == [("unfused", "unfused.toml"), *((name, name) for name in ("f32", "bf16", "int8", "int4"))]
    assert not calls
    monkeypatch.setattr(ladder, "export", lambda *_: None)
    assert ladder.main([*arguments, "--rounds", "2", "--json", str(figures), "--page", str(page)]) == 0
    assert calls.count("reference") == 1 and calls.count("uncached") == calls.count("ahead int4") == 2
    assert calls.count("logits int4") == 1, "once, and not of the batch's rung again"
    rungs = json.loads(figures.read_text())["rungs"]
    assert list(rungs) == [rung.name for rung in ladder.RUNGS]
    assert rungs["16 requests"]["tokens_per_second"] == 960 and "kl" not in rungs["16 requests"]
    assert rungs["int8"]["kl"] == 0.125 and rungs["KV cache"]["kl"] == 0.25
    lines = {line.split(" | ")[0].removeprefix("| "): line for line in page.read_text().splitlines() if "|" in line}
    assert lines["no KV cache"].endswith("| 4.0 |  | 0.13 | 269 | 0.25 |")
    assert lines["KV cache"].endswith("| 30.0 | 7.50 | 1.00 | 269 | 0.25 |")
    assert lines["int4"].endswith("| 240 | 1.33 | 8.00 | 1 | 0.12 |")
    assert lines["speculation"].endswith("| 1,000 | 4.00 |  | 1 | as int4 |")
    assert "at one request, is not reached: 8.0 is the most." in page.read_text()
    rungs["int8"]["tokens_per_second"] = 300.0
    again = ladder.page(json.loads(figures.read_text()) | {"rungs": rungs})
    assert "is reached by int8 with 10.0 (KL 0.12)." in again
    assert "- tiled attention: " in page.read_text(), "left out by name"
    assert "(ladder.svg)" in page.read_text() and "tokens/s" in (tmp_path / "ladder.svg").read_text()


def test_speculation_that_changes_a_token_is_an_error(
    tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rung = ladder.RUNGS[-1]
    monkeypatch.setattr(ladder, "run", lambda _: Report("", "", {"copy.same": 127.0, "copy.on": 1.0, "copy.off": 1.0}))
    options = ladder.argparse.Namespace(bundles=tmp_path)
    with pytest.raises(AssertionError, match="changed a token"):
        ladder.of_speculation(options, rung, Workload(), {}, None)


def test_the_recipe_turns_every_fusion_off(tmp_path: Path) -> None:
    path = tmp_path / "unfused.toml"
    path.write_text(ladder.UNFUSED)
    known = OPTIONAL | {one.name for one in TARGETS["cpu"].emitter.passes() if one.exact}
    assert load_recipe(path).passes == dict.fromkeys((name for name in known if name.startswith("fuse_")), False)


def test_transformers_has_the_same_logits_with_its_cache_and_without(tiny_folder: Path, tmp_path: Path) -> None:
    model = eager.opened(str(tiny_folder), torch.float32)
    ids = [3 + i % 200 for i in range(eager.CHUNK + 5)]
    with torch.inference_mode():
        whole, parts = eager.logits_uncached(model, ids), eager.logits_cached(model, ids)
        # The same sums in another order, of values of about 1.
        np.testing.assert_allclose(whole, parts, atol=1e-4)
        assert whole.shape[0] == len(ids)
        eager.write_reference(str(tiny_folder), tmp_path / "reference.npz")
        work = Workload(prompt=12, steps=10, vocabulary=250)
        kl = [
            eager.measured(how, str(tiny_folder), work, tmp_path / "reference.npz").figures["kl"]
            for how in ("uncached", "cached")
        ]
        without = eager.measured("cached", str(tiny_folder), work, Path(""))
    assert 0 < kl[0] < 0.1 and kl[1] == pytest.approx(kl[0], rel=0.5), "rounding to bf16 alone"
    assert set(without.figures) == {"decode_1"} and without.figures["decode_1"] > 0
    assert without.bytes["weights"] == sum(p.numel() * 2 for p in model.parameters())
