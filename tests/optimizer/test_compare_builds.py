"""The gate between two builds: planted regressions are found, equal builds pass, and what is wrong is named."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from enginewright.optimizer.build_budget import Budget, Check, default_budget, limit_of, shown
from enginewright.optimizer.build_speed import ROUNDS, Settled, SpeedPairs, measure_speed
from enginewright.optimizer.compare_builds import BuildComparison, compare_builds, write_junit
from enginewright.optimizer.export import export
from enginewright.runtime.bundle.manifest import MANIFEST_PATH
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.shared.errors import BundleError, RequestError, SourceError
from enginewright.runtime.shared.progress import Progress, ProgressEvent, silent
from tests.conftest import TINY_FAMILIES, make_tiny_model
from tests.optimizer.test_build_speed import noisy
from tests.sealed import sealed

BLOB = "weights/weights-00000.bin"
TOKENS = 259
"""The vocabulary of the tiny tokenizer."""


def timed(prefill: float, decode: float) -> Callable[..., SpeedPairs]:
    """Times as they would be measured: these many times those of the other bundle, with outliers in each."""

    def measure(
        new: Bundle, older: Bundle, target: str, threads: int, settled: Settled, progress: Progress
    ) -> SpeedPairs:
        machine = (0.010, 0.011, 0.090, 0.010, 0.012) * 4  # which slows both of a pair
        late = (*(1.0,) * 9, 9.0) * 2  # which slows one
        return SpeedPairs(
            tuple((t * prefill * x, t) for t, x in zip(machine, late, strict=True)),
            tuple((t * decode * x, t) for t, x in zip(machine, late, strict=True)),
        )

    return measure


@dataclass
class Builds:
    """Bundles by what they are made of; each is exported once in a session."""

    folder: Path
    tokenizer: PreTrainedTokenizerBase
    made: dict[str, Path] = field(default_factory=dict)

    def get(
        self,
        name: str,
        recipe: str,
        model: Callable[[], PreTrainedModel] = lambda: make_tiny_model("Llama", vocab_size=TOKENS),
        *,
        text: bool = True,
        **options: Any,
    ) -> Path:
        key = f"{name}-{recipe}"
        if key not in self.made:
            out = self.folder / f"{key}.bundle"
            tokenizer = self.tokenizer if text else None
            export(model(), out, recipe=recipe, targets=("cpu",), tokenizer=tokenizer, **options)
            self.made[key] = out
        return self.made[key]

    def copy(self, of: Path, to: Path) -> Path:
        return Path(shutil.copytree(of, to))


@pytest.fixture(scope="session")
def builds(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Builds:
    return Builds(tmp_path_factory.mktemp("builds"), AutoTokenizer.from_pretrained(tiny_folder))


def compare(new: Path, older: Path, **options: Any) -> BuildComparison:
    """Speed that isn't injected isn't measured: tests don't depend on it."""
    return compare_builds(new, older, **({"measure": timed(1, 1)} | options))


def twin(of: Path, folder: Path) -> Path:
    """A copy that computes the same, with a file more: bundles whose files are equal aren't compared further."""
    to = Path(shutil.copytree(of, folder / f"twin-{of.name}"))
    (to / "note.txt").write_text("note")
    return to


def names(checks: Sequence[Check]) -> set[str]:
    return {check.name for check in checks}


# ---- changes of a bundle's files, with hashes that agree


def write(bundle: Path, file: str, data: bytes) -> None:
    (bundle / file).write_bytes(data)
    manifest = json.loads((bundle / MANIFEST_PATH).read_text())
    manifest["files"][file] |= {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (bundle / MANIFEST_PATH).write_text(sealed(manifest))


def change_weight(part: str, change: Callable[[np.ndarray[Any, Any]], None]) -> Callable[[Path], None]:
    """Changes the stored values of the first weight whose name has ``part``."""

    def edit(bundle: Path) -> None:
        opened = Bundle.open(bundle)
        name = next(n for n in opened.index.tensors if part in n)
        entry = opened.tensor(name)
        data = bytearray((bundle / BLOB).read_bytes())
        kinds = {"f32": np.float32, "f16": np.float16, "s8": np.int8}
        kind = np.dtype(kinds[entry.dtype])
        change(np.frombuffer(data, kind, entry.bytes // kind.itemsize, entry.offset))
        write(bundle, BLOB, bytes(data))

    return edit


def change_text(file: str, old: str, new: str) -> Callable[[Path], None]:
    def edit(bundle: Path) -> None:
        text = (bundle / file).read_text()
        assert old in text
        write(bundle, file, text.replace(old, new).encode())

    return edit


def change_model(**fields: Any) -> Callable[[Path], None]:
    def edit(bundle: Path) -> None:
        manifest = json.loads((bundle / MANIFEST_PATH).read_text())
        manifest["model"] |= fields
        (bundle / MANIFEST_PATH).write_text(sealed(manifest))

    return edit


def swap_tokens(bundle: Path) -> None:
    file = "tokenizer/tokenizer.json"
    document = json.loads((bundle / file).read_text())
    vocabulary = document["model"]["vocab"]
    vocabulary["a"], vocabulary["e"] = vocabulary["e"], vocabulary["a"]
    write(bundle, file, json.dumps(document).encode())


def scale_by(factor: float) -> Callable[[np.ndarray[Any, Any]], None]:
    def change(values: np.ndarray[Any, Any]) -> None:
        values *= values.dtype.type(factor)

    return change


def to_one(values: np.ndarray[Any, Any]) -> None:
    values[:] = 1


def to_nan(values: np.ndarray[Any, Any]) -> None:
    values[:1] = np.nan


# ---- changes of the model before its export


def llama(change: Callable[[Any], None] | None = None, **config: Any) -> Callable[[], PreTrainedModel]:
    return of_family("Llama", change, **({"vocab_size": TOKENS} | config))


def of_family(family: str, change: Callable[[Any], None] | None = None, **config: Any) -> Callable[[], PreTrainedModel]:
    def make() -> PreTrainedModel:
        model = make_tiny_model(family, **config)
        if change is not None:
            with torch.no_grad():
                change(model)
        return model

    return make


def swap_layers(model: Any) -> None:
    layers = model.model.layers
    layers[0], layers[1] = layers[1], layers[0]
    for number, layer in enumerate(layers):
        layer.self_attn.layer_idx = number


def flip_row(model: Any) -> None:
    model.model.embed_tokens.weight[40] *= -1  # of a letter that the prompts have


def lose_bias(model: Any) -> None:
    model.model.layers[1].self_attn.q_proj.bias.zero_()


def lose_a_head(model: Any) -> None:
    model.model.layers[0].self_attn.o_proj.weight[:, :16] = 0


def scale_head(model: Any) -> None:
    model.lm_head.weight *= 1.1


SUITE = {"tokens_changed", "kl_mean", "kl_max"}

EDITS: dict[str, tuple[str, Callable[[Path], None], set[str]]] = {
    "a scale": ("int8", change_weight("1.mlp.down_proj.weight.scale", scale_by(1.25)), {"kl_mean", "kl_layer"}),
    "a norm's weight": ("int8", change_weight("layers.1.input_layernorm", to_one), {"kl_mean", "kl_layer"}),
    "a weight that is not a number": ("f32", change_weight("layers.0.input_layernorm", to_nan), SUITE),
    "a chat template": ("int8", change_text("tokenizer/chat_template.jinja", "[assistant] ", "[bot] "), {"templates"}),
    "an altered tokenizer": ("int8", swap_tokens, {"tokenizer"}),
    "a special token": ("int8", change_text("tokenizer/special_tokens.json", '"<pad>"', '"</s>"'), {"tokenizer"}),
    "a generation setting": ("int8", change_model(generation_defaults={"temperature": 0.7}), {"generation"}),
    "an end of text": ("int8", change_model(eos_token_ids=[2, 7]), {"generation"}),
}
"""Regressions in a bundle's files: the recipe of the build before, what was changed, checks that have to fail."""

ROPE = {"rope_type": "default", "rope_theta": 500.0}

Changed = tuple[str, str, Callable[[], PreTrainedModel], dict[str, Any], set[str]]
EXPORTS: dict[str, Changed] = {
    "int4 in place of int8": ("int8", "int4", llama(), {}, SUITE | {"kl_layer"}),
    "a larger file": ("int8", "bf16", llama(), {}, {"size_ratio", "memory_ratio"}),
    "another KV format": ("int8", "int8", llama(), {"kv_cache": "fp8"}, {"kv_cache"}),
    "a shorter context": ("int8", "int8", llama(), {"context_length": 128}, {"kv_cache"}),
    "swapped layers": ("int8", "int8", llama(swap_layers), {}, SUITE | {"kl_layer"}),
    "another rope theta": (
        "int8",
        "int8",
        llama(rope_parameters={"rope_type": "default", "rope_theta": 500.0}),
        {},
        SUITE,
    ),
    "fewer layers": ("int8", "int8", llama(num_hidden_layers=1), {}, SUITE),
    "another epsilon": ("f32", "f32", llama(rms_norm_eps=0.05), {}, {"kl_mean", "kl_layer"}),
    "another activation": ("f32", "f32", llama(hidden_act="relu"), {}, SUITE | {"kl_layer"}),
    "a flipped row of embeddings": ("int8", "int8", llama(flip_row), {}, {"kl_mean", "kl_layer"}),
    "a lost head": ("int8", "int8", llama(lose_a_head), {}, SUITE | {"kl_layer"}),
    "scaled logits": ("int8", "int8", llama(scale_head), {}, {"kl_mean"}),
    "another vocabulary": ("int8", "int8", llama(vocab_size=TOKENS + 5), {}, SUITE),
}
"""Regressions of an export: recipe before, recipe now, the model now, what else was asked for, checks that fail."""

FAMILIES: dict[str, tuple[str, Callable[[], PreTrainedModel], set[str]]] = {
    "a lost bias": ("Qwen2", of_family("Qwen2", lose_bias), {"kl_mean", "kl_layer"}),
    "a lost window": ("Mistral", of_family("Mistral", sliding_window=None), {"kl_mean"}),
    "a lost cap of logits": ("Gemma2", of_family("Gemma2", final_logit_softcapping=None), {"kl_mean"}),
}
"""Planted errors in other families, in f32 and without a tokenizer: random tokens are the suite."""

SPEEDS = {"a slower prefill": ((1.3, 1.0), {"prefill_ratio"}), "a slower kernel": ((1.0, 1.2), {"decode_ratio"})}


def test_there_are_twenty_regressions_and_more() -> None:
    assert len(EDITS) + len(EXPORTS) + len(FAMILIES) + len(SPEEDS) >= 20


def check_found(found: BuildComparison, expected: set[str]) -> None:
    assert expected <= names(found.failed), [f"{c.name} {shown(c)} {c.detail}" for c in found.checks]
    assert not found.within_budget
    untouched = {"tokenizer", "templates", "generation"} - expected
    assert not untouched & names(found.failed)


@pytest.mark.parametrize("planted", EDITS)
def test_a_planted_edit_is_found(planted: str, builds: Builds, tmp_path: Path) -> None:
    recipe, edit, expected = EDITS[planted]
    older = builds.get("llama", recipe)
    new = builds.copy(older, tmp_path / "new.bundle")
    edit(new)
    comparison = compare(new, older)
    check_found(comparison, expected)
    if expected & {"kl_mean"}:
        part = "down_proj" if planted == "a scale" else "layernorm"
        assert comparison.files[0].startswith(f"{BLOB}: ") and part in comparison.files[0]
    else:
        assert not names(comparison.failed) & SUITE


@pytest.mark.parametrize("planted", EXPORTS)
def test_a_planted_export_is_found(planted: str, builds: Builds) -> None:
    was, now, model, options, expected = EXPORTS[planted]
    new = builds.get(planted.replace(" ", "-"), now, model, **options)
    check_found(compare(new, builds.get("llama", was)), expected)


@pytest.mark.parametrize("planted", FAMILIES)
def test_what_a_family_has_is_found_missing(planted: str, builds: Builds) -> None:
    family, model, expected = FAMILIES[planted]
    older = builds.get(f"{family}-0", "f32", of_family(family), text=False)
    check_found(compare(builds.get(planted.replace(" ", "-"), "f32", model, text=False), older), expected)


@pytest.mark.parametrize("planted", SPEEDS)
def test_a_slower_build_is_found(planted: str, builds: Builds, tmp_path: Path) -> None:
    factors, expected = SPEEDS[planted]
    bundle = builds.get("llama", "int8")
    comparison = compare(twin(bundle, tmp_path), bundle, measure=timed(*factors))
    assert names(comparison.failed) == expected
    (check,) = comparison.failed
    assert check.measured == pytest.approx(max(factors)) and "margin of 5%" in check.detail


def test_a_busy_machine_makes_the_speed_inconclusive_and_no_failure(builds: Builds, tmp_path: Path) -> None:
    bundle = builds.get("llama", "int8")
    budget = Budget(layers=False)
    new = twin(bundle, tmp_path)
    comparison = compare(new, bundle, budget=budget, measure=noisy(1.0, 0))
    assert [check.name for check in comparison.inconclusive] == ["prefill_ratio", "decode_ratio"]
    assert comparison.within_budget and not comparison.failed
    write_junit(comparison, tmp_path / "out.xml")
    skipped = [one.get("message", "") for one in ElementTree.parse(tmp_path / "out.xml").iter("skipped")]
    assert sum(message.startswith("inconclusive: ") for message in skipped) == 2
    # Much slower is still found.
    assert names(compare(new, bundle, budget=budget, measure=noisy(40.0, 0)).failed) == {
        "prefill_ratio",
        "decode_ratio",
    }


PAIRS = [(family, recipe) for family in TINY_FAMILIES for recipe in ("f32", "int8")]
PAIRS += [("text", recipe) for recipe in ("f32", "int8", "int4", "bf16")]


@pytest.mark.parametrize(("family", "recipe"), PAIRS)
def test_equal_builds_pass_a_budget_of_nothing(family: str, recipe: str, builds: Builds, tmp_path: Path) -> None:
    """Two exports of the same model: no byte differs; and where one does that nothing reads, no token and no logit."""
    nothing = Budget(tokens_changed=0, kl_mean=0, kl_max=0, kl_layer=0, size_ratio=1, memory_ratio=1)
    text = family == "text"
    model = llama() if text else of_family(family)
    first, second = (
        builds.get("llama" if text and i == 0 else f"{family}-{i}", recipe, model, text=text) for i in range(2)
    )
    assert first != second

    def never(*_: object) -> SpeedPairs:
        raise AssertionError("equal files aren't timed")

    equal = compare(second, first, budget=nothing.model_copy(update={"bytes": True}), measure=never)
    assert (
        equal.equal_files
        and equal.within_budget
        and [(c.name, c.outcome) for c in equal.checks] == [("bytes", "passed")]
    )
    comparison = compare(twin(second, tmp_path), first, budget=nothing, measure=timed(1.09, 0.9))  # within the margin
    assert comparison.within_budget, [f"{c.name} {shown(c)} {c.detail}" for c in comparison.failed]
    assert {check.outcome for check in comparison.checks if check.name != "bytes"} == {"passed"}
    assert [one.layer for one in comparison.layers] == [0, 1, None] and comparison.changed == ()
    assert comparison.files == ("note.txt: only in the new one",)


def test_there_are_twenty_pairs() -> None:
    assert len(PAIRS) >= 20


@pytest.mark.parametrize("recipe", ["f32", "int8"])
def test_a_source_is_what_a_bundle_is_held_against(recipe: str, builds: Builds, tiny_folder: Path) -> None:
    bundle = builds.get("llama", recipe)
    comparison = compare(bundle, tiny_folder)
    assert (comparison.kind, comparison.within_budget) == ("source", True), comparison.failed
    skipped = {c.name for c in comparison.checks if c.outcome == "not compared"}
    assert skipped == {"kv_cache", "size_ratio", "memory_ratio", "prefill_ratio", "decode_ratio", "bytes"}
    assert [one.layer for one in comparison.layers] == [0, 1, None]
    assert comparison.speed is None
    strict = compare(bundle, tiny_folder, budget=Budget(kl_mean=1e-9))
    assert names(strict.failed) >= ({"kl_mean"} if recipe == "int8" else set())
    assert strict.within_budget == (recipe == "f32")


def test_a_source_that_differs(builds: Builds, tiny_folder: Path, tmp_path: Path) -> None:
    llama(scale_head)().save_pretrained(tmp_path / "other")
    for file in tiny_folder.glob("*token*"):
        shutil.copy(file, tmp_path / "other")
    (tmp_path / "other/generation_config.json").write_text('{"temperature": 0.5, "do_sample": true}')
    comparison = compare(builds.get("llama", "f32"), tmp_path / "other")
    assert {"kl_mean", "templates", "generation"} == names(comparison.failed) - {"kl_max", "kl_layer", "tokens_changed"}
    with pytest.raises(SourceError, match="against"):
        compare(builds.get("llama", "f32"), tmp_path / "nothing")


# ---- what is asked for


def test_the_default_budget_is_the_recipe_s_for_a_source(builds: Builds) -> None:
    exact, lossy = (Bundle.open(builds.get("llama", recipe)) for recipe in ("f32", "int4"))
    assert default_budget(lossy, source=False) == default_budget(exact, source=True) == Budget()
    allowed = default_budget(lossy, source=True)
    assert allowed.kl_mean == 0.5 == lossy.manifest.recipe["budget"]["max_kl"] and allowed.kl_max == math.inf


def test_what_the_budget_leaves_out(builds: Builds, tmp_path: Path) -> None:
    bundle = builds.get("llama", "int8")
    new = builds.copy(bundle, tmp_path / "new.bundle")
    change_model(eos_token_ids=[2, 7])(new)

    def never(*_: object) -> SpeedPairs:
        raise AssertionError("speed isn't to be measured")

    comparison = compare(new, bundle, budget=Budget(generation=False, layers=False, speed=False), measure=never)
    assert comparison.within_budget and comparison.layers == () and comparison.speed is None
    skipped = {c.name: c.detail for c in comparison.checks if c.outcome == "not compared"}
    assert skipped.keys() == {"generation", "kl_layer", "prefill_ratio", "decode_ratio", "bytes"}
    assert "generation = false" in skipped["generation"] and "speed = false" in skipped["decode_ratio"]
    assert names(compare(new, bundle, budget=Budget(bytes=True)).failed) == {"generation", "bytes"}
    short = compare(twin(bundle, tmp_path), bundle, measure=lambda *_: None)
    assert [c.detail for c in short.checks if c.name == "decode_ratio"] == ["the context is too short"]


def test_prompts_of_a_file(builds: Builds, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "abc"}\n\n{"messages": [{"role": "user", "content": "Hi"}]}\n')
    bundle = builds.get("llama", "int8")
    events: list[ProgressEvent] = []
    comparison = compare(twin(bundle, tmp_path), bundle, prompts=file, progress=events.append)
    assert comparison.prompts == 2 and comparison.tokens == 3 + len("<s>[user] Hi\n[assistant] ") - 2 + 2 * 32
    assert {"load", "prompts", "layers", "compare"} <= {e.stage for e in events}
    worse = compare(builds.get("llama", "int4"), bundle, prompts=file)
    assert {one.where for one in worse.changed} <= {f"{file}:1", f"{file}:3"} and worse.changed
    one = worse.changed[0]
    assert 0 <= one.first < one.tokens and 0 < one.changed <= one.tokens and one.expected != one.found
    bare = builds.get("Qwen2-0", "f32", of_family("Qwen2"), text=False)
    with pytest.raises(RequestError, match=r"prompts: .* has no tokenizer"):
        compare(twin(bare, tmp_path), bare, prompts=file)
    edited = builds.copy(bundle, tmp_path / "new.bundle")
    manifest = json.loads((edited / MANIFEST_PATH).read_text())
    del manifest["files"]["tokenizer/chat_template.jinja"]
    (edited / MANIFEST_PATH).write_text(sealed(manifest))
    (edited / "tokenizer/chat_template.jinja").unlink()
    with pytest.raises(RequestError, match=rf"prompts: {file}:3: messages need a chat template"):
        compare(twin(edited, tmp_path), edited, prompts=file)
    assert compare(tmp_path / "twin-new.bundle", edited).within_budget  # ours suit every model


def test_targets_and_bundles_that_are_not_there(builds: Builds, tmp_path: Path) -> None:
    bundle = builds.get("llama", "int8")
    with pytest.raises(BundleError, match="no target 'onnx'"):
        compare(bundle, bundle, target="onnx")
    with pytest.raises(BundleError):
        compare(tmp_path / "none.bundle", bundle)


def test_speed_is_measured_in_pairs(builds: Builds) -> None:
    bundle = Bundle.open(builds.get("llama", "int8"))
    seen: list[int] = []

    def settled(pairs: SpeedPairs) -> bool:
        seen.append(len(pairs.decode))
        return len(seen) == 2

    speeds = measure_speed(bundle, bundle, "cpu", 1, settled, silent)
    assert speeds is not None and seen == list(ROUNDS[:2])
    for pairs in (speeds.prefill, speeds.decode):
        assert len(pairs) == ROUNDS[1] and all(time > 0 for pair in pairs for time in pair)
    short = Bundle.open(builds.get("short", "f32", llama(max_position_embeddings=16)))
    assert measure_speed(short, short, "cpu", 1, settled, silent) is None


# ---- what is written


@pytest.fixture(scope="module")
def worse(builds: Builds) -> BuildComparison:
    return compare(builds.get("llama", "int4"), builds.get("llama", "int8"), budget=Budget(layers=False))


def test_junit(worse: BuildComparison, tmp_path: Path) -> None:
    """Checks it by the schema that CI systems read: counts, a case for each check, failures and skipped ones."""
    worse = replace(worse, files=("tokenizer: \x00\x1b broken",))
    write_junit(worse, tmp_path / "out.xml")
    assert [p.name for p in tmp_path.iterdir()] == ["out.xml"]
    root = ElementTree.parse(tmp_path / "out.xml").getroot()
    (suite,) = root
    cases = suite.findall("testcase")
    assert [case.get("name") for case in cases] == [check.name for check in worse.checks]
    failed = {case.get("name") for case in cases if case.find("failure") is not None}
    skipped = {case.get("name") for case in cases if case.find("skipped") is not None}
    assert failed == names(worse.failed) == SUITE and skipped == {"kl_layer", "bytes"}
    for element in (root, suite):
        counts = {key: element.get(key) for key in ("tests", "failures", "errors", "skipped")}
        assert counts == {"tests": str(len(cases)), "failures": "3", "errors": "0", "skipped": "2"}
    failure = cases[0].find("failure")
    assert failure is not None and failure.text is not None
    assert "at most 0.01" in failure.get("message", "") and "built-in:1" in failure.text and "broken" in failure.text
    properties = {p.get("name"): p.get("value") for p in suite.iter("property")}
    assert properties["bundle"] == worse.bundle and properties["budget.layers"] == "false"
    with pytest.raises(RequestError, match="cannot be written"):
        write_junit(worse, tmp_path / "none" / "out.xml")


def test_json_has_no_number_that_json_lacks(worse: BuildComparison) -> None:
    plain = replace(worse, budget=Budget(kl_max=math.inf)).to_json()
    document = json.loads(json.dumps(plain, allow_nan=False))
    assert document["within_budget"] is False and document["budget"]["kl_max"] is None
    assert [c["name"] for c in document["checks"]] == [c.name for c in worse.checks]


def test_words_of_a_check() -> None:
    assert shown(Check("a", "passed", 1.23456, 2.0)) == "1.235, at most 2"
    assert shown(Check("a", "failed", "different", "equal")) == "different, equal"
    assert shown(Check("a", "not compared", detail="why")) == ""
    assert limit_of(Check("a", "passed", 1.0, math.inf)) == "no limit"
