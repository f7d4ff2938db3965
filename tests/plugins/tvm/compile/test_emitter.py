"""The tvm target's files: the same bytes each time, weights that are shared, and what is refused."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from enginewright.optimizer.export import export
from enginewright.optimizer.recipes.recipe import Recipe, load_recipe
from enginewright.plugins.emit.base import EmitOptions
from enginewright.plugins.emit.bundle_writer import BundleWriter
from enginewright.plugins.native.processor import processor_features
from enginewright.plugins.steps.x86_levels import FEATURES, LevelName
from enginewright.plugins.tvm.compile import emitter as emitter_module
from enginewright.plugins.tvm.compile.emitter import TvmEmitter
from enginewright.plugins.tvm.recipe import TvmOptions
from enginewright.plugins.tvm.section import OURS, SECTIONS, KernelsName, TvmSection
from enginewright.plugins.tvm.serve import executor as tvm_blocks
from enginewright.runtime.bundle.manifest import FileSection, TargetManifest
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.engine.llm import LLM
from enginewright.runtime.requests.sampling import SamplingParams
from enginewright.runtime.shared.errors import (
    BundleError,
    EnginewrightError,
    MissingDependencyError,
    TargetError,
    UnsupportedModelError,
)
from enginewright.runtime.shared.progress import silent
from tests.conftest import make_tiny_model
from tests.passes.small_programs import decoder


def recipe_of(*levels: str, name: str = "f32", kernels: KernelsName | None = None) -> Recipe:
    options = TvmOptions.model_validate({"levels": levels, "kernels": kernels})
    return load_recipe(name).model_copy(update={"tvm": options})


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tvm") / "tiny.bundle"
    export(make_tiny_model("Llama"), path, recipe=recipe_of("v3"), targets=("cpu", "tvm"))
    return path


def contents(path: Path) -> dict[str, bytes]:
    return {str(f.relative_to(path)): f.read_bytes() for f in sorted(path.rglob("*")) if f.is_file()}


def test_two_exports_are_byte_equal(bundle: Path, tmp_path: Path) -> None:
    export(make_tiny_model("Llama"), tmp_path / "again", recipe=recipe_of("v3"), targets=("cpu", "tvm"))
    first, second = ({n: d for n, d in contents(p).items() if "report" not in n} for p in (bundle, tmp_path / "again"))
    assert "targets/tvm/step-v3.so" in first and first == second
    assert not any(str(tmp_path).encode() in data for data in first.values())
    opened = Bundle.open(bundle, trust="code")
    section = opened.target("tvm").section(TvmSection)
    assert section is not None and section.levels == ("v3",)
    assert {"apache-tvm"} < opened.manifest.toolchain.keys()
    names = {name for name in opened.index.tensors if name.endswith(".tvm")}
    assert names and not names & opened.index.stored_once().keys()


def test_it_runs_without_torch_and_without_the_compiler(bundle: Path) -> None:
    script = (
        "import sys, enginewright as ew\n"
        "from enginewright.runtime.requests.sampling import SamplingParams\n"
        "llm = ew.LLM(sys.argv[1], target='tvm', threads=1, trust='code')\n"
        "params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)\n"
        "print(list(llm.generate([5, 6, 7], params)[0].token_ids))\n"
        "print(sorted({'torch', 'tvm', 'transformers'} & sys.modules.keys()))\n"
        "print(any('libtvm_compiler' in line for line in open('/proc/self/maps')))\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(bundle)], capture_output=True, text=True, check=True)
    tokens, modules, compiler = done.stdout.splitlines()
    assert len(eval(tokens)) == 4 and modules == "[]" and compiler == "False"


def test_a_row_s_bits_are_the_same_in_any_batch(bundle: Path) -> None:
    rng = np.random.default_rng(5)
    prompts = [rng.integers(3, 250, n).tolist() for n in (1, 12, 13, 70)]
    with LLM(bundle, target="tvm", trust="code", threads=2) as llm:
        whole = [llm.logits(prompt) for prompt in prompts]
    with LLM(bundle, target="tvm", trust="code", threads=1, prefill_chunk=7) as llm:
        for prompt, logits in zip(prompts, whole, strict=True):
            assert np.array_equal(llm.logits(prompt), logits)


def test_a_prefix_changes_no_bit(bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found in memory to the token, or read from a folder by an executor that begins with nothing."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    shared = np.random.default_rng(3).integers(3, 256, 90).tolist()
    prompts = [[*shared[:n], n] for n in (90, 90, 80, 40)]
    params = SamplingParams(max_tokens=6, ignore_eos=True, logprobs=2)
    with LLM(bundle, target="tvm", trust="code", threads=1, prefix_cache=False) as llm:
        plain = llm.generate(prompts, params)
    for reused, from_disk in ((90 + 80 + 40, False), (64 + 90 + 80 + 40, True)):
        with LLM(bundle, target="tvm", trust="code", threads=2, prefix_folder=tmp_path / "kept") as llm:
            results = [llm.generate([prompt], params)[0] for prompt in prompts]
            use = llm.info()["prefix_cache"]
        assert results == plain
        assert (use["reused"], use["from_disk"] > 0) == (reused, from_disk)


def test_what_does_not_run_here_is_refused(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(tvm_blocks, "tvm_version", lambda: "0.99.0")
        with pytest.raises(TargetError, match=r"made by TVM 0\.27.*, and 0\.99\.0 is installed\n.*pip install"):
            LLM(bundle, target="tvm", trust="code")
    with monkeypatch.context() as patch:
        patch.setattr(tvm_blocks, "processor_features", lambda: ("sse4_2",))
        with pytest.raises(TargetError, match=r"for x86-64-v3, whose instructions this processor doesn't have\n"):
            LLM(bundle, target="tvm", trust="code")


@pytest.mark.parametrize("damage", ["cut", "gone", "text"])
def test_a_damaged_library_is_said(bundle: Path, tmp_path: Path, damage: str) -> None:
    copy = tmp_path / "copy.bundle"
    subprocess.run(["cp", "-r", str(bundle), str(copy)], check=True)
    library = copy / "targets/tvm/step-v3.so"
    whole = library.read_bytes()
    library.unlink()
    if damage != "gone":
        library.write_bytes(whole[: len(whole) // 3] if damage == "cut" else b"text" * (len(whole) // 4))
    with pytest.raises(BundleError, match=r"step-v3\.so.*\n.*[Ee]xport"):
        LLM(copy, target="tvm", trust="code")


def test_without_tvm_or_a_linker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = decoder()
    writer = BundleWriter(tmp_path / "b.bundle")
    with writer, monkeypatch.context() as patch:
        patch.setattr(emitter_module, "tvm_version", lambda: None)
        with pytest.raises(MissingDependencyError, match=r"needs TVM \(apache-tvm\).*\n.*enginewright\[tvm\]"):
            TvmEmitter().emit(program, writer, silent, EmitOptions())
    with BundleWriter(tmp_path / "c.bundle") as other, monkeypatch.context() as patch:
        patch.setattr("tvm.support.cc.get_cc", lambda: None)
        with pytest.raises(MissingDependencyError, match=r"needs a compiler of C, and none was found\n.*gcc or clang"):
            TvmEmitter().emit(program, other, silent, EmitOptions(sections=(TvmOptions(levels=("v3",)),)))


@pytest.mark.parametrize(
    ("name", "level"),
    [
        ("bf16", "v3"),
        pytest.param("fp8", "v3", marks=pytest.mark.soak),
        pytest.param("int8", "v3", marks=pytest.mark.soak),
        pytest.param("int8", "v2", marks=pytest.mark.soak),
        pytest.param("int8", "v4", marks=pytest.mark.soak),
        pytest.param("int8", "v4-vnni", marks=pytest.mark.soak),
        pytest.param("int4", "v4-vnni", marks=pytest.mark.soak),
        pytest.param("int4", "v2", marks=pytest.mark.matrix),
    ],
)
def test_weights_of_fewer_bits(name: str, level: LevelName, tmp_path: Path) -> None:
    if not FEATURES[level] <= set(processor_features()):
        pytest.skip(f"this processor isn't of x86-64-{level}")
    recipe = recipe_of(level, name=name)
    report = export(make_tiny_model("Llama"), tmp_path / "b", recipe=recipe, targets=("cpu", "tvm"))
    distances = {v.target: v.random_tokens.kl_mean for v in report.verification}
    assert 0 < distances["tvm"] < 1.1 * distances["cpu"]


@pytest.mark.parametrize("name", ["f32", *(pytest.param(n, marks=pytest.mark.soak) for n in ("bf16", "int8", "int4"))])
def test_our_kernels_in_the_place_of_tvm_s(name: str, tmp_path: Path) -> None:
    """Products and attention of a library are calls of ours, whose results are the same in any batch."""
    recipe = recipe_of("v3", name=name, kernels="enginewright")
    report = export(make_tiny_model("Llama"), tmp_path / "b", recipe=recipe, targets=("cpu", "tvm"))
    distances = {v.target: v.random_tokens.kl_mean for v in report.verification}
    assert distances["tvm"] < 1.1 * distances["cpu"] + 1e-9  # of f32 both are noise
    library = (tmp_path / "b/targets/tvm/step-v3.so").read_bytes()
    assert b"__tvm_ffi_rms_norm_" in library and not [op for op in OURS if f"__tvm_ffi_{op}_".encode() in library]
    rng = np.random.default_rng(5)
    prompts = [rng.integers(3, 250, n).tolist() for n in (1, 12, 13, 70)]
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    with (
        LLM(tmp_path / "b", target="tvm", trust="code", threads=2) as llm,
        LLM(tmp_path / "b", target="tvm", trust="code", threads=1) as other,
    ):
        assert llm.info()["executor"]["kernels"] == "enginewright"
        results, whole = llm.generate(prompts, params), [llm.logits(prompt) for prompt in prompts]
        assert results == [other.generate([prompt], params)[0] for prompt in prompts]  # both are open, and alternate
    with LLM(tmp_path / "b", target="tvm", trust="code", threads=3, prefill_chunk=7) as llm:
        for prompt, logits in zip(prompts, whole, strict=True):
            assert np.array_equal(llm.logits(prompt), logits)


def test_our_kernels_and_a_prefix_from_a_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    export(make_tiny_model("Llama"), tmp_path / "b", recipe=recipe_of("v3", kernels="enginewright"), targets=("tvm",))
    prompt = np.random.default_rng(3).integers(3, 256, 90).tolist()
    params = SamplingParams(max_tokens=6, ignore_eos=True, logprobs=2)
    results = []
    for threads in (1, 2):
        with LLM(tmp_path / "b", target="tvm", trust="code", threads=threads, prefix_folder=tmp_path / "kept") as llm:
            results.append(llm.generate([prompt], params))
            assert (llm.info()["prefix_cache"]["from_disk"] > 0) == (threads == 2)
    assert results[0] == results[1]


def test_sparse_weights_are_refused_by_name(tmp_path: Path) -> None:
    recipe = tmp_path / "sparse.toml"
    recipe.write_text(
        'name = "sparse"\n[weights]\ndefault = { storage = "f32", sparsity = "2:4" }\n[budget]\nmax_kl = 9.0\n'
    )
    with pytest.raises(UnsupportedModelError, match=r"the tvm target has none with weights of f32 in sparse32\n"):
        export(make_tiny_model("Llama"), tmp_path / "b", recipe=recipe, targets=("tvm",))


@pytest.mark.matrix
def test_its_program_is_the_one_that_it_was_compiled_from(bundle: Path, tmp_path: Path) -> None:
    """An edit that every hash agrees with, and one that the library would follow out of its memory."""
    copy = Path(shutil.copytree(bundle, tmp_path / "b"))
    path, listed = copy / "targets/tvm/programs/decode.json", copy / "targets/tvm/manifest.json"
    program = json.loads(path.read_bytes())
    manifest = TargetManifest.from_json(listed.read_bytes(), source="", sections=SECTIONS)
    section = manifest.section(TvmSection)
    assert section is not None and section.program == hashlib.sha256(path.read_bytes()).hexdigest()
    for arena in (program["arena_bytes"] | {"1": 1 << 20}, -1, 0, 7):
        path.write_text(text := json.dumps(program | {"arena_bytes": arena}))
        digest = hashlib.sha256(text.encode()).hexdigest()
        files = {**manifest.files, "programs/decode.json": FileSection(bytes=len(text), sha256=digest)}
        listed.write_text(manifest.model_copy(update={"files": files}).to_json())
        with pytest.raises(BundleError, match="compiled from another program"):
            LLM(copy, target="tvm", trust="code")
        if arena in (-1, 0, 7):
            unbound = section.model_copy(update={"program": None})  # as in older bundles
            listed.write_text(manifest.with_section(unbound).model_copy(update={"files": files}).to_json())
            with pytest.raises(EnginewrightError, match="arena"), LLM(copy, target="tvm", trust="code") as llm:
                llm.generate([5, 6, 7], SamplingParams(max_tokens=2))
