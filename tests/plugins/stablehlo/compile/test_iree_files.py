"""Modules compiled ahead by IREE: what is in the bundle, byte for byte, whose tokens they give, and what is refused."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from enginewright.optimizer.check_bundle import check_bundle
from enginewright.optimizer.cli.app import app
from enginewright.optimizer.export import export
from enginewright.optimizer.recipes.bucket_section import BucketsSection
from enginewright.optimizer.recipes.recipe import Recipe
from enginewright.plugins.doctor.examine import examine
from enginewright.plugins.doctor.machine import Machine, look_at_machine
from enginewright.plugins.gpu.recipe import EnginesSection
from enginewright.plugins.stablehlo.compile import iree_files
from enginewright.plugins.stablehlo.compile.iree_files import compile_for_cuda, compile_for_level
from enginewright.plugins.stablehlo.recipe import StableHloOptions
from enginewright.plugins.stablehlo.section import IreeSection
from enginewright.plugins.stablehlo.serve import executor as stablehlo_slots
from enginewright.plugins.stablehlo.serve import iree_library
from enginewright.plugins.stablehlo.serve.executor import stablehlo_section
from enginewright.plugins.stablehlo.serve.iree_library import Iree
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.engine.llm import LLM
from enginewright.runtime.requests.sampling import SamplingParams
from enginewright.runtime.shared.errors import BundleError, MissingDependencyError, TargetError
from enginewright.runtime.shared.memory import format_bytes
from tests.conftest import make_tiny_model

pytest.importorskip("jaxlib", reason="jaxlib is not installed: pip install 'enginewright[stablehlo]'")
pytest.importorskip("iree.runtime", reason="iree-base-runtime is not installed: pip install 'enginewright[iree]'")
pytest.importorskip("iree.compiler", reason="iree-base-compiler is not installed: pip install 'enginewright[iree]'")

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    recipe = Recipe(
        name="f32",
        targets=("cpu", "stablehlo"),
        buckets=BucketsSection(tokens=(8,), batch=(2,)),
        engines=EnginesSection(context=63),
        stablehlo=StableHloOptions(iree=("v3",)),
    )
    folder = tmp_path_factory.mktemp("iree") / "tiny.bundle"
    export(make_tiny_model("Mistral"), folder, recipe=recipe)
    return folder


def test_what_is_written_and_that_it_is_the_same_again(path: Path) -> None:
    bundle = Bundle.open(path, trust="code")
    section = stablehlo_section(bundle, "stablehlo")
    assert section.iree is not None and section.iree.levels == ("v3",)
    files = {f"targets/stablehlo/{module.compiled('v3')}" for module in section.modules}
    assert files == {name for name in bundle.files if "/iree/" in name} and len(files) == 4
    module = section.modules[0]
    artifact = bundle.read_bytes(f"targets/stablehlo/{module.file}")
    written = (path / "targets/stablehlo" / module.compiled("v3")).read_bytes()
    assert compile_for_level(artifact, module.name, "v3") == written
    assert str(path).encode() not in written


def test_greedy_tokens_are_the_cpu_target_s(path: Path) -> None:
    """Alone and together, in chunks of 8; the window of 8 is passed."""
    prompts = [np.random.default_rng(3).integers(3, 256, length).tolist() for length in (1, 7, 21, 40)]
    results = []
    for target, provider in (("cpu", None), ("stablehlo", "iree")):
        with LLM(path, target=target, provider=provider, context=63, threads=2, trust="code") as llm:
            alone = [list(llm.generate(prompt, GREEDY)[0].token_ids) for prompt in prompts]
            together = [list(result.token_ids) for result in llm.generate(prompts, GREEDY)]
            about = llm.info()["executor"]
            results.append((alone, together, llm.logits(prompts[-1])))
    (tokens, _, expected), (alone, together, logits) = results
    assert alone == together == tokens
    np.testing.assert_allclose(logits, expected, atol=1e-4)  # two orders of summation over 2 layers
    assert (about["provider"], about["level"], about["caches"]) == ("iree", "x86-64-v3", "in place")


def test_a_machine_that_serves_needs_the_runtime_alone(path: Path) -> None:
    """Neither jax nor torch nor a compiler is imported, and the process ends well with all of it still open."""
    probe = (
        "import sys\nfrom enginewright.runtime.engine.llm import LLM\n"
        f"llm = LLM({str(path)!r}, target='stablehlo', provider='iree', trust='code', context=63, threads=1)\n"
        "logits = llm.logits([5, 9, 7])\nassert logits.shape == (3, 256)\n"
        "print({'jax', 'jaxlib', 'torch', 'onnx', 'iree.compiler'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, "set()"), done.stderr


def test_verify_runs_it_by_name(path: Path, tmp_path: Path) -> None:
    moved = shutil.copytree(path, tmp_path / "moved")
    (check,) = check_bundle(moved, targets=["stablehlo"], provider="iree", trust="code").targets
    assert check.why_not is None and check.runs_with["provider"] == "iree"


def test_what_is_damaged(path: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(path, tmp_path / "damaged")
    for file in (folder / "targets/stablehlo/iree/v3").iterdir():
        content = file.read_bytes()
        file.write_bytes(content[:-9] + bytes([content[-9] ^ 1]) + content[-8:])
    listed = pytest.raises(BundleError, match=r"iree/v3/.*\.vmfb: it isn't the file that the manifest lists")
    with LLM(folder, target="stablehlo", trust="code", provider="iree", context=63) as llm, listed:
        llm.generate([5, 9], GREEDY)


def test_a_file_that_is_no_module(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is replaced after the export."""
    bundle = Bundle.open(path, trust="code")
    section = stablehlo_section(bundle, "stablehlo")
    client = Iree(section, 1)
    for content in (b"", b"garbage" * 100):
        monkeypatch.setattr(iree_library, "read_code", lambda bundle, name, content=content: content)
        with pytest.raises(BundleError, match=r"decode-1x64\.vmfb: IREE [\d.]+ can't load it: \S"):
            client.load(bundle, "stablehlo", section.modules[0])


def test_another_processor_and_another_version(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as m:
        m.setattr(iree_library, "processor_features", lambda: ("sse4_2",))
        with pytest.raises(TargetError, match="its modules for IREE are for x86-64-v3, whose instructions this"):
            LLM(path, target="stablehlo", trust="code", provider="iree", context=63)
    with monkeypatch.context() as m:
        m.setattr(iree_library, "iree_version", lambda: "9.9.9")
        with pytest.raises(TargetError, match=r"made by version [\d.]+, and 9\.9\.9 is installed") as raised:
            LLM(path, target="stablehlo", trust="code", provider="iree", context=63)
        assert "iree-base-runtime==" in str(raised.value.hint)
    monkeypatch.setattr(iree_library, "iree_version", lambda: None)
    with pytest.raises(MissingDependencyError, match=r"iree-base-runtime\) is not installed"):
        LLM(path, target="stablehlo", trust="code", provider="iree", context=63)


def test_a_bundle_without_modules_for_it(path: Path) -> None:
    section = stablehlo_section(Bundle.open(path, trust="code"), "stablehlo")
    for section_iree in (None, IreeSection(version="3.13.0", cuda=("9.0",))):
        with pytest.raises(TargetError, match="has no modules that IREE's runtime runs"):
            Iree(section.model_copy(update={"iree": section_iree}), 1)


def test_what_doctor_says(path: Path) -> None:
    bundle = Bundle.open(path, trust="code")
    machine = look_at_machine()

    def said(machine: Machine) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
        (finding,) = examine(machine, bundle, ["stablehlo"]).findings
        return finding.verdict, finding.reasons, finding.on

    version = machine.packages["iree"]
    here = f"IREE {version}, provider iree, for x86-64-v3"
    assert said(machine)[0] == "runs" and here in said(machine)[2]
    packages = {name: packages_found for name, packages_found in machine.packages.items() if name != "jaxlib"}
    without_xla = said(replace(machine, packages=packages))
    assert without_xla == ("runs", (), (here, "not by XLA: jaxlib is not installed"))
    other = said(replace(machine, packages=packages | {"iree": "9.9.9"}))
    assert other[0] == "can't" and f"made by version {version}, and 9.9.9 is installed" in other[1][1]
    old = said(replace(machine, features=("sse4_2",)))
    assert old[0] == "runs" and "whose instructions this processor doesn't have" in old[2][-1]


def test_what_inspect_says(path: Path) -> None:
    output = CliRunner().invoke(app, ["inspect", str(path)]).stdout
    version = metadata.version("iree-base-compiler")
    assert re.search(rf"4 modules of StableHLO 1\.9\.0, slots of 64 places\n +compiled by IREE {version} for ", output)
    files = [file.bytes for name, file in Bundle.open(path, trust="code").files.items() if name.endswith(".vmfb")]
    assert f"for x86-64-v3: 4 files, {format_bytes(sum(files))}\n" in output
    data = json.loads(CliRunner().invoke(app, ["inspect", str(path), "--json"]).stdout)
    assert data["targets"]["stablehlo"]["stablehlo"]["iree"]["levels"] == ["v3"]


def test_without_xla_iree_is_what_runs_by_default(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = stablehlo_slots.util.find_spec
    monkeypatch.setattr(stablehlo_slots.util, "find_spec", lambda name: None if name == "jaxlib" else find(name))
    client = stablehlo_slots.open_client(stablehlo_section(Bundle.open(path, trust="code"), "stablehlo"), None, 1)
    assert isinstance(client, Iree)


def test_what_the_compiler_refuses_and_that_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TargetError, match=r"IREE did not compile decode for x86-64-v3: .*error: "):
        compile_for_level(b"garbage", "decode", "v3")
    monkeypatch.setattr(iree_files.util, "find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match=r"iree-base-compiler\), which is not installed") as raised:
        iree_files.compiler_version()
    assert "enginewright[iree]" in str(raised.value.hint)


def test_our_kernels_are_not_iree_s() -> None:
    for changes in ({"iree": ("v3",)}, {"iree_cuda": ("9.0",)}):
        with pytest.raises(ValueError, match="leave out kernels, or iree and iree_cuda"):
            StableHloOptions.model_validate({"kernels": "enginewright", **changes})
    assert StableHloOptions.model_validate({"iree": ("v4", "v3", "v4")}).iree == ("v3", "v4")
    with pytest.raises(ValueError, match="v5"):
        StableHloOptions.model_validate({"iree": ("v5",)})


@pytest.mark.matrix
def test_files_for_cuda_are_made_without_a_gpu(path: Path) -> None:
    bundle = Bundle.open(path, trust="code")
    module = stablehlo_section(bundle, "stablehlo").modules[0]
    artifact = bundle.read_bytes(f"targets/stablehlo/{module.file}")
    files = compile_for_cuda(artifact, module.name, "8.0")
    assert files == compile_for_cuda(artifact, module.name, "8.0") and b"sm_80" in files
    with pytest.raises(TargetError, match=r"did not compile decode-1x64 for CUDA 77\.7: .*error: "):
        compile_for_cuda(artifact, module.name, "77.7")
