"""An export with the stablehlo target: compared with its source, byte-equal, moved, and what is refused."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from enginewright.optimizer.export import export
from enginewright.optimizer.recipes.bucket_section import BucketsSection
from enginewright.optimizer.recipes.recipe import Recipe, load_recipe
from enginewright.passes.framework.kv_options import CacheOptions
from enginewright.plugins.gpu.recipe import EnginesSection
from enginewright.plugins.stablehlo.compile import emit_modules
from enginewright.plugins.stablehlo.recipe import StableHloOptions
from enginewright.plugins.stablehlo.section import StableHloSection
from enginewright.plugins.stablehlo.serve import pjrt_library
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.engine.llm import LLM
from enginewright.runtime.requests.sampling import SamplingParams
from enginewright.runtime.shared.errors import MissingDependencyError, UnsupportedModelError
from tests.conftest import make_tiny_model
from tests.plugins.graphs.linear_session import lowered_family
from tests.plugins.stablehlo.compile.module_session import write_bundle

pytest.importorskip("jaxlib", reason="jaxlib is not installed: pip install 'enginewright[stablehlo]'")

RECIPE = Recipe(
    name="f32",
    targets=("cpu", "stablehlo"),
    buckets=BucketsSection(tokens=(8, 32), batch=(1, 4)),
    engines=EnginesSection(context=200),
)
LENGTHS, NEW_TOKENS = (1, 7, 21, 22, 40, 158), 6


BY_KERNELS = RECIPE.model_copy(update={"stablehlo": StableHloOptions(kernels="enginewright")})


@pytest.fixture(
    scope="module", params=[RECIPE, pytest.param(BY_KERNELS, marks=pytest.mark.matrix)], ids=["xla", "ours"]
)
def bundle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("stablehlo") / "tiny.bundle"
    report = export(make_tiny_model("Mistral"), path, recipe=request.param)
    agreed = [(v.target, v.random_tokens.top1_agreement) for v in report.verification]
    assert agreed == [("cpu", 1.0), ("stablehlo", 1.0)]
    return path


def test_what_is_written(bundle: Path) -> None:
    opened = Bundle.open(bundle, trust="code")
    section = opened.target("stablehlo").section(StableHloSection)
    assert section is not None
    assert section.lengths == ((160, 224) if section.kernels else (160, 201))  # of whole blocks
    assert {f"targets/stablehlo/{module.file}" for module in section.modules} <= set(opened.files)
    assert {"onnx", "jaxlib"} <= opened.manifest.toolchain.keys()
    assert set(section.weights) <= set(opened.index.tensors)
    assert [group.window for group in section.cache_groups] == [8]
    opened.verify_hashes()


def test_greedy_tokens_are_the_cpu_target_s(bundle: Path) -> None:
    """Alone, together, and in chunks; slots grow when the longest request passes 159 tokens."""
    rng = np.random.default_rng(3)
    prompts = [rng.integers(3, 256, length).tolist() for length in LENGTHS]
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)

    def run(target: str) -> tuple[list[list[int]], list[list[int]], np.ndarray]:
        with LLM(bundle, target=target, context=180, threads=2, trust="code") as llm:
            alone = [list(llm.generate(prompt, params)[0].token_ids) for prompt in prompts]
            together = [list(result.token_ids) for result in llm.generate(prompts, params)]
            if target == "stablehlo":
                assert llm.info()["executor"]["caches"] == "in place"
            return alone, together, llm.logits(prompts[-1])

    tokens, _, expected = run("cpu")
    alone, together, logits = run("stablehlo")
    assert alone == tokens
    assert together == tokens
    np.testing.assert_allclose(logits, expected, atol=1e-4)  # two orders of summation over 2 layers
    with LLM(bundle, target="stablehlo", trust="code", context=180, max_requests=3, prefill_chunk=16) as llm:
        assert [list(result.token_ids) for result in llm.generate(prompts, params)] == tokens


@pytest.mark.parametrize("context", [2, pytest.param(31, marks=pytest.mark.matrix)])
def test_slots_for_few_tokens(context: int, tmp_path: Path) -> None:
    """Fewer than a verification usually takes, and than the shortest prompt's module has: that runs token by token."""
    recipe_asked = RECIPE.model_copy(update={"engines": EnginesSection(context=context), "buckets": None})
    export(make_tiny_model("Llama"), tmp_path / "b", recipe=recipe_asked)
    prompt, params = list(range(3, 2 + context)), SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    logits = []
    for target in ("cpu", "stablehlo"):
        with LLM(tmp_path / "b", target=target, context=context, threads=1, trust="code") as llm:
            logits.append(llm.generate(prompt, params)[0].token_ids)
    assert logits[0] == logits[1]


@pytest.mark.matrix
@pytest.mark.parametrize("recipe", ["int8", "int4", "bf16", "fp8"])
def test_weights_of_fewer_bits_mean_what_they_mean_to_onnxruntime(recipe: str, tmp_path: Path) -> None:
    """The standard file has the same weights, and activations that nobody rounds: prompts, and decodes of one row."""
    sizes = {"buckets": BucketsSection(tokens=(8,), batch=(1,)), "engines": EnginesSection(context=63)}
    recipe_used = load_recipe(recipe).model_copy(update={"targets": ("onnx", "stablehlo"), **sizes})
    export(make_tiny_model("Gemma2"), tmp_path / "b", recipe=recipe_used)
    logits = []
    for target in ("onnx", "stablehlo"):
        with LLM(tmp_path / "b", target=target, context=63, threads=1, trust="code") as llm:
            whole = llm.logits([5, 9, 7, 11, 6, 8, 3, 4])
            tokens = llm.generate([5, 9], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))[0].token_ids
            logits.append((whole, list(tokens)))
    np.testing.assert_allclose(logits[0][0], logits[1][0], atol=1e-4)
    assert logits[0][1] == logits[1][1]


@pytest.mark.matrix
@pytest.mark.parametrize("recipe", ["int8", "int4", "bf16", "fp8"])
def test_by_our_kernels_they_mean_what_they_mean_to_the_cpu_target(recipe: str, tmp_path: Path) -> None:
    """Activations are rounded as its kernels round them; those are the same bytes of the bundle."""
    changes = {
        "buckets": BucketsSection(tokens=(8,), batch=(1,)),
        "engines": EnginesSection(context=63),
        "kv_cache": CacheOptions(dtype="f32"),
        "stablehlo": BY_KERNELS.stablehlo,
    }
    recipe_used = load_recipe(recipe).model_copy(update=changes)
    logits = []
    export(
        make_tiny_model("Llama"),
        tmp_path / "b",
        recipe=recipe_used.model_copy(update={"targets": ("cpu", "stablehlo")}),
    )
    for target in ("cpu", "stablehlo"):
        with LLM(tmp_path / "b", target=target, context=63, threads=2, trust="code") as llm:
            logits.append(llm.logits([5, 9, 7, 11, 6, 8, 3, 4]))
    np.testing.assert_allclose(logits[0], logits[1], atol=1e-4)
    opened = Bundle.open(tmp_path / "b", trust="code")
    section = opened.target("stablehlo").section(StableHloSection)
    assert section is not None
    panels = [opened.index.tensors[name] for name in section.weights if name.endswith(".panels")]
    places = {(entry.blob, entry.offset) for name, entry in opened.index.tensors.items() if name not in section.weights}
    assert panels and all((entry.blob, entry.offset) in places for entry in panels)


@pytest.mark.matrix
def test_the_same_input_gives_the_same_bytes(tmp_path: Path) -> None:
    files = []
    for folder in (tmp_path / "a", tmp_path / "b"):
        write_bundle(lowered_family("llama"), folder)
        files.append({str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob("*") if f.is_file()})
    assert files[0] == files[1]


def test_an_operator_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    handlers = {kind: handler for kind, handler in emit_modules.HANDLERS.items() if kind != "RotaryEmbedding"}
    monkeypatch.setattr(emit_modules, "HANDLERS", handlers)
    message = r"RotaryEmbedding at model\.layers\.0\.self_attn.*: StableHLO has no operation for it here"
    with pytest.raises(UnsupportedModelError, match=message):
        write_bundle(lowered_family("llama"), tmp_path / "b")
    assert not (tmp_path / "b").exists()


def test_an_op_that_no_standard_operator_expresses(tmp_path: Path) -> None:
    program = lowered_family("llama")
    with program.inserting_before(program.output):
        summed = program.call(torch.ops.aten.cumsum.default, program.logits, -1, where=("lm_head",))
    program.output.args = ((summed,),)
    with pytest.raises(UnsupportedModelError, match=r"aten.cumsum at lm_head"):
        write_bundle(program, tmp_path / "b")


def test_packages_that_are_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = lowered_family("llama")
    with monkeypatch.context() as m:
        m.setitem(sys.modules, "onnx", None)
        m.delitem(sys.modules, emit_modules.__name__)
        m.delattr(sys.modules["enginewright.plugins.stablehlo.compile"], "emit_modules")
        with pytest.raises(MissingDependencyError, match="writing it needs onnx, which is not installed"):
            write_bundle(program, tmp_path / "b")
    monkeypatch.setattr(pjrt_library.metadata, "version", lambda name: "0.9.2")
    with pytest.raises(MissingDependencyError, match=r"runs on jaxlib 0\.10, .* and 0\.9\.2 is installed"):
        write_bundle(program, tmp_path / "b")
