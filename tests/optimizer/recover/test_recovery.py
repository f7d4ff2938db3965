"""recover and export: what was trained is what is exported, a stop changes nothing, and what can't be is refused."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from enginewright.optimizer.export import export
from enginewright.optimizer.recipes.recipe import Recipe, load_recipe
from enginewright.optimizer.recover import FinishedRecovery, RecoverOptions, recover, recovery, training
from enginewright.optimizer.recover.differentiable import recovered_in
from enginewright.optimizer.recover.distillation import Teacher
from enginewright.optimizer.recover.folder import RecoveryFolder
from enginewright.optimizer.recover.prepare import Prepared
from enginewright.passes.framework.token_sequences import packed_inputs
from enginewright.passes.ir.weights import Source, WeightExpr
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.bundle.weights import unpack
from enginewright.runtime.engine.llm import LLM
from enginewright.runtime.shared.errors import (
    CapacityError,
    EnginewrightError,
    RecipeError,
    RequestError,
    SourceError,
    VerificationError,
)
from enginewright.runtime.shared.progress import ProgressEvent, silent
from tests.conftest import make_tiny_model

SYMMETRIC = {"storage": "int4", "group_size": 32, "activation": "int8", "activation_group_size": 32}
OFFSETS = {"storage": "int4", "group_size": 64, "zero_point": True, "activation": "int8", "activation_group_size": 64}
RECIPE = Recipe.model_validate(
    {
        "name": "mixed",
        "weights": {
            "default": OFFSETS,
            "embeddings": {"storage": "int8", "activation": "int8"},
            "overrides": [{"layers": "*.down_proj", "format": SYMMETRIC}],
        },
        "budget": {"max_kl": 5.0},
    }
)
OPTIONS = RecoverOptions(
    steps=5, batch_tokens=64, sequence_length=32, sampled_tokens=512, checkpoint_every=2, learning_rate=1e-3
)


@pytest.fixture(scope="module")
def model() -> Any:
    return make_tiny_model("Llama", tie_word_embeddings=True)


@pytest.fixture(scope="module")
def trained(model: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Prepared]:
    """A finished recovery's folder, and the module that was trained."""
    folder = tmp_path_factory.mktemp("recovered") / "whole"
    seen: list[Prepared] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recovery, "prepare", lambda *a, **k: seen.append(PREPARE(*a, **k)) or seen[-1])
        report = recover(model, folder, recipe=RECIPE, options=OPTIONS)
    assert report.steps == len(report.losses) == 5
    assert [m.step for m in report.measured] == [0, 2, 4, 5]
    return folder, seen[0]


PREPARE = recovery.prepare


def test_the_bundle_has_the_integers_of_the_last_forward_pass_bit_for_bit(
    trained: tuple[Path, Prepared], model: Any, tmp_path: Path
) -> None:
    folder, prepared = trained
    codes = prepared.module.codes()  # of the measurement after the last step
    report = export(model, tmp_path / "b", recovered=folder)
    assert report.recipe == "mixed"
    bundle = Bundle.open(tmp_path / "b")

    def stored(name: str) -> Any:
        entry = bundle.tensor(name)
        return unpack(bundle.weight(name), entry.shape, entry.layout, entry.dtype)

    # Four products of two layers after fusion, and the table that is the head too.
    assert len(codes) == 9
    for name, one in codes.items():
        base = name.rpartition(".")[0]
        np.testing.assert_array_equal(stored(name), one.values.numpy())
        np.testing.assert_array_equal(stored(f"{base}.scales"), one.scales.numpy())
        if one.offsets is not None:
            np.testing.assert_array_equal(stored(f"{base}.offsets"), one.offsets.numpy())
    assert sum(one.offsets is not None for one in codes.values()) == 6
    tokens = list(range(3, 40))
    with torch.no_grad():
        trained_logits = prepared.module(packed_inputs(prepared.module.program, [torch.tensor(tokens)])).numpy()
    logits = LLM(tmp_path / "b").logits(tokens)
    # Sums in another order tip the rounding of an activation here and there, by a step of 1/127 of its group.
    assert np.abs(logits - trained_logits).max() <= 0.05 * np.abs(trained_logits).max()
    assert {s.name for s in report.passes if s.matched} >= {"load_recovered", "quantize_linears"}


def test_a_recovery_that_was_stopped_goes_on_bit_for_bit(
    trained: tuple[Path, Prepared], model: Any, tmp_path: Path
) -> None:
    def interrupt(event: ProgressEvent) -> None:
        if event.stage == "train" and event.done == 3:
            os.kill(os.getpid(), signal.SIGINT)

    folder = tmp_path / "stopped"
    with pytest.raises(KeyboardInterrupt):
        recover(model, folder, recipe=RECIPE, options=OPTIONS, progress=interrupt)
    assert [p.name for p in folder.glob("checkpoint-*")] == ["checkpoint-000003"]
    assert not (folder / "weights.safetensors").exists()
    with pytest.raises(SourceError, match="isn't finished"):
        export(model, tmp_path / "b", recovered=folder)
    with pytest.raises(RequestError, match=r"steps: .* was begun with 5, and this is 6"):
        recover(model, folder, recipe=RECIPE, options=replace(OPTIONS, steps=6), resume=True)
    report = recover(model, folder, recipe=RECIPE, options=replace(OPTIONS, checkpoint_every=100), resume=True)
    assert report.resumed_at == 3
    whole, again = (load_file(f / "weights.safetensors") for f in (trained[0], folder))
    assert whole.keys() == again.keys()
    assert all(torch.equal(whole[name], again[name]) for name in whole)
    losses = json.loads((trained[0] / "recovery.json").read_text())["report"]["losses"]
    assert report.losses == losses
    assert (folder / "loss.html").read_text().count("<circle") == len(report.measured)
    with pytest.raises(RequestError, match="finished"):
        recover(model, folder, recipe=RECIPE, options=OPTIONS, resume=True)


def test_training_brings_a_quantized_model_nearer_to_its_source(model: Any, tmp_path: Path) -> None:
    options = replace(OPTIONS, steps=40, batch_tokens=256, sampled_tokens=4096, learning_rate=3e-4, hidden=0.1)
    options = replace(options, accumulate=2, checkpoint_every=40)
    report = recover(model, tmp_path / "r", recipe="int4", options=options)
    assert report.measured[-1].kl < 0.9 * report.measured[0].kl


def test_tensors_that_are_not_what_was_trained_are_refused(trained: tuple[Path, Prepared], tmp_path: Path) -> None:
    program = trained[1].module.program
    bases = {leaf.name: leaf.base for name in program.weights for leaf in recovered_in(program.weights[name])}
    first = next(iter(bases))

    def refused(match: str, change: Callable[[dict[str, torch.Tensor]], object], **instead: WeightExpr) -> None:
        folder = tmp_path / "r"
        shutil.copytree(trained[0], folder, dirs_exist_ok=True)
        tensors = load_file(folder / "weights.safetensors")
        change(tensors)
        save_file(tensors, folder / "weights.safetensors")
        with pytest.raises(SourceError, match=match):
            FinishedRecovery.open(folder).weights().replacing({**bases, **instead})

    def set_first(value: float) -> Callable[[dict[str, torch.Tensor]], object]:
        return lambda tensors: tensors[first].view(-1)[:1].fill_(value)

    refused("is missing", lambda tensors: tensors.pop(first))
    refused("none of this model's", lambda tensors: tensors.update(other=torch.zeros(3)))
    refused(r"is torch.float32 \(", lambda tensors: tensors.update({first: tensors[first][:-1].clone()}))
    refused("not finite", set_first(torch.nan))
    refused("not what was written", set_first(1.0))
    shape = bases[first].shape
    elsewhere = Source("another.weight", shape, torch.float32, lambda: torch.zeros(shape))
    refused("other rows of the source", lambda tensors: None, **{first: elsewhere})


def test_what_is_no_recovery_of_this_model_is_refused(
    trained: tuple[Path, Prepared], model: Any, tmp_path: Path
) -> None:
    folder = tmp_path / "r"
    for content, match in (("{", "damaged"), ('{"format": 9}', "format 9"), (None, "a recovery")):
        shutil.copytree(trained[0], folder, dirs_exist_ok=True)
        description = folder / "recovery.json"
        description.unlink() if content is None else description.write_text(content)
        with pytest.raises(SourceError, match=match):
            FinishedRecovery.open(folder)
    finished = FinishedRecovery.open(trained[0])
    with pytest.raises(RecipeError, match="weights is not what"):
        finished.recipe_for(load_recipe("int8"))
    assert finished.recipe_for(None) == RECIPE
    assert finished.recipe_for(RECIPE.model_copy(update={"name": "other"})).name == "other"
    other = make_tiny_model("Llama", tie_word_embeddings=True)
    with torch.no_grad():
        other.model.norm.weight[5] += 1.0
    with pytest.raises(SourceError, match="the same architecture with other weights"):
        export(other, tmp_path / "bundle", recovered=trained[0])
    assert not (tmp_path / "bundle").exists()


def test_what_can_t_be_trained_is_refused(model: Any, tmp_path: Path) -> None:
    def refused(error: type[EnginewrightError], match: str, recipe: Any = "int4", **given: Any) -> None:
        with pytest.raises(error, match=match):
            recover(model, tmp_path / "r", recipe=recipe, **{"options": OPTIONS, **given})
        assert not (tmp_path / "r").exists()

    refused(RecipeError, "changes nothing", recipe="f32")
    refused(RecipeError, "method 'gptq'", recipe="int4-gptq")
    refused(RecipeError, r"\[auto\] searches", recipe="auto")
    refused(RecipeError, "keep_blocks", recipe="gguf")
    refused(RecipeError, "can't round weights to fp8", recipe="fp8")
    sparse = {"default": {"storage": "f32", "sparsity": "2:4"}, "sparsify": "sparsegpt"}
    refused(RecipeError, "'sparsegpt' changes", recipe=Recipe.model_validate({"name": "s", "weights": sparse}))
    refused(RequestError, "steps: 0", options=replace(OPTIONS, steps=0))
    refused(RequestError, "learning_rate", options=replace(OPTIONS, learning_rate=float("nan")))
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "notes.txt").write_text("mine")
    with pytest.raises(RequestError, match=r"exists, and isn.t a recovery"):
        recover(model, tmp_path / "there", recipe="int4", options=OPTIONS, overwrite=True)
    assert (tmp_path / "there" / "notes.txt").exists()


def test_force_replaces_nothing_but_a_recovery(
    trained: tuple[Path, Prepared], tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(output: Path, match: str, **given: Any) -> None:
        before = {p: p.is_file() and p.read_bytes() for p in tmp_path.rglob("*")}
        with pytest.raises(RequestError, match=match):
            recover(given.pop("source", tiny_folder), output, **{"recipe": "int4", "overwrite": True, **given})
        assert {p: p.is_file() and p.read_bytes() for p in tmp_path.rglob("*")} == before

    other, ours = tmp_path / "app", tmp_path / "r"
    other.mkdir()
    (other / "recovery.json").write_text('{"points": ["disk"]}')
    (other / "backup.tar").write_text("mine")
    refused(other, "isn't a recovery that can be read")
    shutil.copytree(trained[0], ours)
    RecoveryFolder(ours).refuse_if_there(True)
    for name in ("notes.txt", "manifest.json", "report/page.html", "checkpoint-000001/mine/x"):
        path = ours / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("mine")
        refused(ours, f"files in it that aren't part of it: {name}")
        path.unlink()
    (ours / "text.unfinished").write_text("")
    refused(ours, r"files in it that aren't part of it: text\.unfinished")
    (ours / "text.unfinished").unlink()
    refused(ours, "the text .* lies in", text=ours / "recovery.json")
    refused(ours, "the source .* lies in", source=ours)
    (tmp_path / "link").symlink_to(ours)
    refused(tmp_path / "link", "is a link to")
    monkeypatch.chdir(other)
    refused(Path("."), "is the current folder")


def test_a_text_that_is_too_small_is_refused(tiny_folder: Path, tmp_path: Path) -> None:
    text = tmp_path / "notes.txt"
    text.write_text("A few words. " * 20)
    with pytest.raises(RequestError, match=r"too small to recover with: .* fewer than the 4,096 of a step"):
        recover(tiny_folder, tmp_path / "r", recipe="int4", text=text, options=replace(OPTIONS, batch_tokens=4096))
    assert not (tmp_path / "r").exists()


def test_memory_and_divergence_are_said_with_their_figures(
    trained: tuple[Path, Prepared], model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recovery, "free_memory", lambda: 1 << 20)
    with pytest.raises(CapacityError, match=r"recovery takes about .* and 1\.0 MiB are free: .* for activations"):
        recover(model, tmp_path / "r", recipe="int4", options=OPTIONS)
    monkeypatch.undo()
    monkeypatch.setattr(training, "loss_of", lambda *given: torch.tensor(torch.nan, requires_grad=True))
    sequences, _ = RecoveryFolder(trained[0]).tokens("")
    run = training.Training(trained[1].module, Teacher(model, 512, 1 << 30), sequences, OPTIONS)
    with pytest.raises(VerificationError, match="diverged: after 0 steps the loss is nan"):
        run.run(silent, lambda checkpoint: None)
