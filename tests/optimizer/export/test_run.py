"""An export is compared with its source, always: whatever a pass gets wrong ends it, and nothing is left behind."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.fx.node import Node
from transformers import PreTrainedModel

from enginewright.optimizer.export import export
from enginewright.optimizer.recipes.recipe import Recipe, load_recipe
from enginewright.passes.formats.rounding import RoundedRows
from enginewright.passes.framework.base import Pass, PassContext, PassResult
from enginewright.passes.ir import quantized
from enginewright.passes.ir.prequantized import CodeFormat
from enginewright.passes.ir.program import Program
from enginewright.passes.ir.scaled import hadamard
from enginewright.passes.ir.weights import Apply, Concat, WeightExpr, Zeros
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.bundle.weights import Array, unpack
from enginewright.runtime.shared.errors import (
    BundleError,
    CapacityError,
    PartialExportError,
    SourceError,
    TargetError,
    VerificationError,
)
from enginewright.runtime.shared.progress import ProgressEvent

aten, ew = torch.ops.aten, torch.ops.ew

MakeModel = Callable[..., PreTrainedModel]
Bug = Callable[[Program], int]


class PlantedBug(Pass):
    """Does what a wrong pass would do; the verifier of programs finds nothing to say against it."""

    name = "planted_bug"

    def __init__(self, bug: Bug) -> None:
        self._bug = bug

    def call(self, program: Program, context: PassContext) -> PassResult:
        return PassResult(self._bug(program))


def plant(monkeypatch: pytest.MonkeyPatch, bug: Bug) -> None:
    """Exports have a last pass more; it must find a place."""
    module = import_module("enginewright.optimizer.export.stages")
    choose = module.choose_passes

    def with_bug(switches: dict[str, bool], **options: bool) -> tuple[list[Pass], frozenset[str]]:
        passes, required = choose(switches, **options)
        return [*passes, PlantedBug(bug)], required | {PlantedBug.name}

    monkeypatch.setattr(module, "choose_passes", with_bug)


def replace_weight(program: Program, part: str, change: Callable[[WeightExpr], WeightExpr]) -> int:
    """Changes the first weight whose name has ``part`` in it."""
    node = next(n for n in program.graph.nodes if n.op == "get_attr" and part in str(n.target))
    program.weights._by_name[str(node.target)] = change(program.weights[str(node.target)])
    return 1


def one_percent_too_large(program: Program) -> int:
    def scale(weight: WeightExpr) -> WeightExpr:
        return Apply(aten.mul.Tensor, (weight, 1.01), (), weight.shape, weight.dtype)

    return replace_weight(program, "layers.1.mlp.down_proj", scale)


def gate_and_up_swapped(program: Program) -> int:
    def swap(weight: WeightExpr) -> WeightExpr:
        assert isinstance(weight, Concat)
        return Concat(weight.bases[::-1], weight.dim)

    return replace_weight(program, "gate_proj+up_proj", swap)


def bias_dropped(program: Program) -> int:
    linear = next(n for n in program.nodes_of(ew.linear.default) if n.args[2] is not None)
    weight = program.weight_of(linear.args[1])
    assert weight is not None
    assert isinstance(linear.args[2], Node)
    program.weights._by_name[str(linear.args[2].target)] = Zeros(weight)
    return 1


def rope_off_by_one(program: Program) -> int:
    """Shifts those of queries only: rotations are relative, and all off by one are all right."""
    rope = program.nodes_of(ew.rope.default)[0]
    table = rope.args[1]
    assert isinstance(table, Node)
    with program.inserting_before(rope):
        positions = program.call(aten.add.Tensor, table.args[0], 1, where=("test",))
        late = program.call(ew.rope_table.default, positions, *table.args[1:], where=("test",))
    rope.update_arg(1, late)
    return 1


BUGS: dict[str, tuple[str, Bug, str]] = {
    "a weight 1 % too large": (
        "Llama",
        one_percent_too_large,
        r"model\.layers\.1\.mlp\.down_proj \(ew\.linear, tensor model\.layers\.1\.mlp\.down_proj\.weight\) by 1 %\n",
    ),
    "gate and up swapped": (
        "Llama",
        gate_and_up_swapped,
        r"model\.layers\.\d\.mlp\.gate_proj \+ .*up_proj\.weight.*\) by 1\d\d %\n",
    ),
    "a dropped bias": ("Qwen2", bias_dropped, r"model\.layers\.\d\.self_attn\.q_proj .*tensor .*q_proj\.bias.* by"),
    "rope off by one": ("Llama", rope_off_by_one, r"model\.layers\.0\.self_attn.* \(ew\.rope\) by .* %\n"),
}
"""With the family that shows it, and the layer that is to be named first."""


@pytest.mark.parametrize("bug", BUGS)
@pytest.mark.parametrize(("hidden", "layers"), [(64, 2), (96, 3)])
def test_what_a_pass_gets_wrong_ends_the_export(
    bug: str, hidden: int, layers: int, tiny_model: MakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, planted, layer = BUGS[bug]
    plant(monkeypatch, planted)
    model = tiny_model(family, hidden_size=hidden, num_hidden_layers=layers)
    expected = (
        r"^after the pass planted_bug the program differs from its source: on random tokens a logit is off by .* "
        rf"What it changed most: {layer}"
    )
    with pytest.raises(VerificationError, match=expected) as error:
        export(model, tmp_path / "a.bundle")
    assert error.value.exit_code == 11
    assert "report it" in str(error.value.hint)
    assert list(tmp_path.iterdir()) == []


def test_a_harmless_pass_does_not(tiny_model: MakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def all_off_by_one(program: Program) -> int:
        """Rotations are relative: nothing but rounding changes."""
        tables = program.nodes_of(ew.rope_table.default)
        for table in tables:
            with program.inserting_before(table):
                positions = program.call(aten.add.Tensor, table.args[0], 1, where=("test",))
            table.update_arg(0, positions)
        return len(tables)

    plant(monkeypatch, all_off_by_one)
    report = export(tiny_model("Llama"), tmp_path / "a.bundle")
    assert [p.matched for p in report.passes if not p.target][-1] == 1
    assert report.verification[0].random_tokens.max_logit_error > 0


def test_the_old_bundle_stays(tiny_model: MakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    export(tiny_model("Llama"), tmp_path / "a.bundle")
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    plant(monkeypatch, one_percent_too_large)
    with pytest.raises(VerificationError):
        export(tiny_model("Llama"), tmp_path / "a.bundle", overwrite=True)
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before


def test_the_figures_are_in_the_report(tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("enginewright.optimizer.verify.measure_passes.SHARE", 1e9)  # whatever the machine is busy with
    events: list[ProgressEvent] = []
    report = export(tiny_folder, tmp_path / "a.bundle", progress=events.append)
    verification = report.verification[0]
    assert verification.target == "cpu"
    assert verification.exact
    assert verification.tolerance is not None
    assert 0 < verification.random_tokens.max_logit_error <= verification.tolerance
    assert verification.random_tokens.tokens == 48 + 34
    assert verification.random_tokens.kl_mean < 1e-9  # rounding, squared
    assert verification.random_tokens.top1_agreement == 1
    assert (verification.max_kl, verification.text, verification.text_omitted) == (None, None, "the recipe is exact")
    assert verification.seconds <= report.stages["verify"] + 0.01
    assert 0 < verification.peak_rss_bytes <= report.peak_rss_bytes
    written = json.loads((tmp_path / "a.bundle/report/report.json").read_text())
    assert all(0 < size["live_bytes"] <= size["arena_bytes"] for size in written.pop("arena"))  # of the bundle itself
    assert written == json.loads(json.dumps(report.to_json()))
    passes = {p.name: p.measurement for p in report.passes if p.measurement is not None}
    assert passes["normalize_linear"] is not None and passes["fold_constants"] is not None
    assert not passes["normalize_linear"].unchanged
    assert (passes["fold_constants"].unchanged, passes["fold_constants"].seconds) == (True, 0)
    how = report.pass_verification
    assert (how.origin, how.sequences, how.tokens, how.exact_tokens) == ("the package's text", 4, 64, 64)
    assert 0 < how.seconds <= report.stages["measure"] + 0.01
    for measured in passes.values():
        assert measured.max_logit_error <= how.relative_tolerance * measured.largest_logit
        assert measured.perplexity == pytest.approx(measured.source_perplexity)
    stages = list(dict.fromkeys(e.stage for e in events))
    assert stages == ["capture", "measure", "passes", "emit", "verify", "roofline", "write"]


def test_a_model_in_training_mode(tiny_model: MakeModel, tmp_path: Path) -> None:
    model = tiny_model("GPT2", embd_pdrop=0.5, resid_pdrop=0.5, attn_pdrop=0.5).train()
    export(model, tmp_path / "a.bundle")
    assert model.training


def test_a_model_changed_beyond_its_configuration_is_refused(tiny_model: MakeModel, tmp_path: Path) -> None:
    """Capture goes by the configuration, and the comparison by the model itself."""
    model = tiny_model("Llama")
    model.model.layers[0].mlp.act_fn = torch.nn.ReLU()
    with pytest.raises(VerificationError, match="differs from its source"):
        export(model, tmp_path / "a.bundle")


@pytest.mark.parametrize(("hidden", "layers"), [(64, 2), (96, 3)])
def test_a_recipe_that_loses_precision(
    hidden: int, layers: int, tiny_model: MakeModel, tiny_folder: Path, tmp_path: Path
) -> None:
    model = tiny_model("Llama", hidden_size=hidden, num_hidden_layers=layers, vocab_size=259)
    model.save_pretrained(tmp_path / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny_folder / name, tmp_path / "model" / name)
    verification = export(tmp_path / "model", tmp_path / "a.bundle", recipe="int8").verification[0]
    assert not verification.exact
    assert verification.tolerance is None
    assert verification.max_kl == 0.05
    assert verification.text is not None
    assert verification.text_omitted is None
    for part in (verification.random_tokens, verification.text):
        assert 1e-7 < part.kl_mean < 0.01  # 8 bits: 1e-4 of these models' logits, which are nothing a text fits
        assert part.kl_mean <= part.kl_max
        assert 0.8 < part.top1_agreement <= 1  # the logits of random weights lie close together
    assert verification.text.perplexity == pytest.approx(verification.text.source_perplexity, rel=0.01)
    assert verification.text.tokens > 4_000
    assert (verification.text.windows, verification.text.windows_in_text) == (8, 60)


@pytest.mark.parametrize("recipe", ["int8", "bf16"])
def test_a_budget_that_is_not_kept(recipe: str, tiny_model: MakeModel, tmp_path: Path) -> None:
    tight = tmp_path / "tight.toml"
    table = {"int8": 'storage = "int8", group_size = 32, activation = "int8", activation_group_size = 32'}
    table["bf16"] = 'storage = "bf16", activation = "bf16"'
    tight.write_text(f'name = "x"\n[weights]\ndefault = {{ {table[recipe]} }}\n[budget]\nmax_kl = 1e-9\n')
    with pytest.raises(VerificationError, match=r"KL .* on random tokens, and the recipe's max_kl is 1e-09") as error:
        export(tiny_model("Llama"), tmp_path / "a.bundle", recipe=tight)
    assert "max_kl" in str(error.value.hint)
    assert [p.name for p in tmp_path.iterdir()] == ["tight.toml"]


def test_without_a_tokenizer_there_is_no_text(tiny_model: MakeModel, tmp_path: Path) -> None:
    verification = export(tiny_model("Llama"), tmp_path / "a.bundle", recipe="int8").verification[0]
    assert verification.text is None
    assert verification.text_omitted == "the model has no tokenizer"


@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
def test_a_weight_that_is_not_finite_is_named(value: float, tiny_model: MakeModel, tmp_path: Path) -> None:
    model = tiny_model("Llama")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 5:7] = value
    with pytest.raises(SourceError, match=r"LlamaForCausalLM: tensor model\.layers\.1\.mlp\.up_proj\.weight has "):
        export(model, tmp_path / "object.bundle")
    model.save_pretrained(tmp_path / "model")
    with pytest.raises(SourceError, match=r"model\.safetensors: tensor model\.layers\.1\.mlp\.up_proj\.weight has .*2"):
        export(tmp_path / "model", tmp_path / "a.bundle")
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_the_disk_must_have_room_for_the_recipe_s_bytes(
    tiny_model: MakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("Llama")
    parameters = sum(p.numel() for p in model.parameters())
    usage = shutil.disk_usage(tmp_path)
    room = usage._replace(free=2 * parameters)  # for 8 bits, not for 32
    monkeypatch.setattr(shutil, "disk_usage", lambda _: room)
    with pytest.raises(CapacityError, match=r"bytes, and .* are free"):
        export(model, tmp_path / "a.bundle")
    export(model, tmp_path / "b.bundle", recipe="int8")


def test_a_recipe_object_is_taken_too(tiny_model: MakeModel, tmp_path: Path) -> None:
    assert export(tiny_model("GPT2"), tmp_path / "a.bundle", recipe=Recipe(name="mine")).recipe == "mine"


def test_an_export_replaces_nothing_but_a_bundle(tiny_folder: Path, tmp_path: Path) -> None:
    """Refused before the model is read, and nothing has changed."""
    shutil.copytree(tiny_folder, tmp_path / "app/src")
    (tmp_path / "app/manifest.json").write_text('{"manifest_version": 3, "name": "mine"}')
    (tmp_path / "recipe.toml").write_text('name = "mine"\n[weights.default]\nstorage = "bf16"\nactivation = "bf16"\n')
    before = {p: p.is_file() and p.read_bytes() for p in tmp_path.rglob("*")}
    for source, output, match in (
        (tiny_folder, "app", "app exists and isn't a bundle"),
        (tmp_path / "app/src", "app", "the source .*app/src lies in .*app, which would be replaced"),
        (tmp_path / "app/src", "app/src", "the source .* lies in"),
        (tmp_path / "app/src", "app/src/x.bundle", "lies in the source"),
        (tiny_folder, "recipe.toml", "the recipe .* lies in"),
        (tiny_folder, "/", "is the root folder"),
    ):
        with pytest.raises(BundleError, match=match):
            export(source, tmp_path / output, recipe=tmp_path / "recipe.toml", overwrite=True)
    assert {p: p.is_file() and p.read_bytes() for p in tmp_path.rglob("*")} == before


@pytest.mark.parametrize("rotate", [False, True])
def test_a_bundle_has_what_its_channels_were_multiplied_by(tiny_model: MakeModel, tmp_path: Path, rotate: bool) -> None:
    """Adapters of the source need it: a stored weight is the source's, rotated, by its outputs' scale, over its
    inputs'."""
    model, recipe = tiny_model("Llama", tie_word_embeddings=True), load_recipe("int8")
    recipe = recipe.model_copy(update={"weights": recipe.weights.model_copy(update={"rotate": rotate})})
    bundle = Bundle.open(export(model, tmp_path / "a.bundle", recipe=recipe).path)

    def read(name: str) -> Array:
        entry = bundle.tensor(name)
        return unpack(bundle.weight(name), entry.shape, entry.layout, entry.dtype).astype(np.float32)

    def scale(path: str, what: str) -> Array | float:
        name = f"{path}.{what}_scale"
        return read(name) if name in bundle.index.tensors else 1.0

    def rotated(value: Array, path: str, what: str) -> Array:
        """Rotates its last axis."""
        name = f"{path}.{what}_rotation"
        if name not in bundle.index.tensors:
            return value
        (size,) = np.frombuffer(bundle.weight(name), np.int32)
        rotations.append(name)
        return (value.reshape(*value.shape[:-1], -1, size) @ hadamard(int(size)).numpy()).reshape(value.shape)

    rotations: list[str] = []
    weights = {name.removesuffix(".int8"): name for name in bundle.index.tensors if name.endswith(".int8")}
    scaled = 0
    for name, values in weights.items():
        steps = read(f"{name}.scales").repeat(32, axis=1)  # half of one is the most that rounding changes
        rows, start = read(values) * steps, 0
        for part in bundle.tensor(values).parts:
            size, path = part.rows[1] - part.rows[0], part.source.removesuffix(".weight")
            outputs = np.broadcast_to(scale(path, "output"), (size,))
            source = rotated(model.state_dict()[part.source].numpy(), path, "input")
            expected = rotated(source.T, path, "output").T * outputs[:, None] / scale(path, "input")
            off = np.abs(rows[start : start + size] - expected)
            assert (off <= 0.51 * steps[start : start + size] + 1e-7).all(), path
            scaled += f"{path}.input_scale" in bundle.index.tensors
            start += size
    assert scaled > 10
    layers = range(model.config.num_hidden_layers) if rotate else ()
    ends = ("v_proj.output_rotation", "o_proj.input_rotation")
    assert sorted(rotations) == sorted(f"model.layers.{i}.self_attn.{end}" for i in layers for end in ends)


def _failing(monkeypatch: pytest.MonkeyPatch, *targets: str) -> None:
    """The emitters of ``targets`` fail once they have written everything."""
    from enginewright.optimizer.recipes.targets import TARGETS

    for name in targets:
        kind = type(TARGETS[name].emitter)

        def emit(*args: Any, _emit: Any = kind.emit, _name: str = name, **options: Any) -> Any:
            _emit(*args, **options)
            raise TargetError(f"target {_name}: planted", hint="None.")

        monkeypatch.setattr(kind, "emit", emit)


def test_a_target_that_fails_leaves_the_others(
    tiny_model: MakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bundle is what an export for the others gives, but for the report, which says what failed."""
    model = tiny_model("Llama")
    export(model, tmp_path / "cpu.bundle", targets=["cpu"])
    with monkeypatch.context() as patch:
        _failing(patch, "onnx")
        with pytest.raises(PartialExportError, match="target onnx failed: planted") as caught:
            export(model, tmp_path / "some.bundle", targets=["onnx", "cpu"])
    assert caught.value.report.failed == {"onnx": "target onnx: planted"}
    assert caught.value.report.targets == ["cpu"]
    assert caught.value.exit_code == 17
    assert json.loads((tmp_path / "some.bundle/report/report.json").read_text())["failed"] == caught.value.report.failed
    files = {
        str(path.relative_to(folder)): path.read_bytes()
        for folder in (tmp_path / "some.bundle",)
        for path in folder.rglob("*")
        if path.is_file() and "report" not in path.parts
    }
    assert files == {name: (tmp_path / "cpu.bundle" / name).read_bytes() for name in files}
    assert set(Bundle.open(tmp_path / "some.bundle").targets) == {"cpu"}


def test_an_export_whose_targets_all_fail_leaves_nothing(
    tiny_model: MakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _failing(monkeypatch, "onnx", "cpu")
    with pytest.raises(TargetError, match="target onnx: planted"):
        export(tiny_model("Llama"), tmp_path / "a.bundle", targets=["onnx", "cpu"])
    assert not list(tmp_path.iterdir())


@pytest.mark.matrix
@pytest.mark.parametrize("recipe", ["int8", "int4"])
def test_rows_of_zeros_are_built_for_tensorrt_rtx(recipe: str, tiny_model: MakeModel, tmp_path: Path) -> None:
    """Rows of padding tokens have scales of 0, which TensorRT-RTX refuses."""
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX isn't installed")
    model = tiny_model("Llama")
    with torch.no_grad():
        model.model.embed_tokens.weight[0] = 0
        model.lm_head.weight[3] = 0
        model.model.layers[0].mlp.down_proj.weight[5, 32:] = 0
    report = export(model, tmp_path / "a.bundle", recipe=recipe, targets=["tensorrt-rtx"], gpus=["8.9"])
    assert report.targets == ["tensorrt-rtx"] and len(report.engines) > 0


FORMS = {
    "int8": 'storage = "int8", group_size = 32, activation = "int8", activation_group_size = 32',
    "int4": 'storage = "int4", group_size = 32, activation = "int8", activation_group_size = 32',
    "with offsets": 'storage = "int4", group_size = 64, zero_point = true, activation = "int8", '
    "activation_group_size = 64",
    "bytes as scales": 'storage = "int4", group_size = 32, zero_point = true, activation = "int8", '
    "activation_group_size = 32, scale_block = 8",
}


@pytest.mark.parametrize("form", FORMS)
def test_each_weight_is_rounded_once_and_alike_by_any_number_of_threads(
    form: str, tiny_model: MakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The report has measured several programs by then, and two targets have written the weights."""
    tiny_model("Llama", hidden_size=256, intermediate_size=512).save_pretrained(tmp_path / "model")
    (tmp_path / "a.toml").write_text(
        f'name = "a"\n[weights]\nsmooth = true\ndefault = {{ {FORMS[form]} }}\nembeddings = {{ {FORMS["int8"]} }}\n'
        "[budget]\nmax_kl = 5.0\n[calibration]\ntokens = 256\nsequence_length = 64\n"
    )
    rounded: list[int] = []
    round_rows = quantized.round_rows

    def counted(rows: torch.Tensor, code_format: CodeFormat) -> RoundedRows:
        rounded.append(rows.numel())
        return round_rows(rows, code_format)

    monkeypatch.setattr(quantized, "round_rows", counted)
    monkeypatch.setattr(quantized, "_CHUNK_ELEMENTS", 1000)
    targets = ("cpu",) if form == "bytes as scales" else ("cpu", "onnx")
    bundles = []
    for threads in (1, 3):
        monkeypatch.setattr(quantized, "available_threads", lambda count=threads: count)
        report = export(tmp_path / "model", tmp_path / f"{threads}.bundle", recipe=tmp_path / "a.toml", targets=targets)
        assert report.quantization is not None and sum(rounded) == report.quantization.values
        rounded.clear()
        files = [f for f in Path(report.path).rglob("*") if f.is_file() and "report" not in f.parts]
        bundles.append({str(f.relative_to(report.path)): f.read_bytes() for f in files})
    assert bundles[0] == bundles[1]
