"""The bundles that machines with and without GPUs can run; the machines are made up."""

from __future__ import annotations

from dataclasses import replace

import pytest

from enginewright.plugins.cuda.section import CudaSection
from enginewright.plugins.cuda.serve.doctor import check
from enginewright.plugins.doctor.examine import Examination, Finding, examine
from enginewright.plugins.doctor.machine import Machine
from enginewright.plugins.engines.section import TensorRtSection
from enginewright.plugins.gpu.cuda_driver import InstalledGpu
from enginewright.plugins.stablehlo.section import KERNELS, ModuleSection, StableHloSection
from enginewright.plugins.steps.linear_io import CONTRIB_FILE, KERNELS_FILE, LinearCacheGroup, LinearIo, VariantFile
from enginewright.plugins.steps.paged_section import PagedProfile, PagedSection
from enginewright.plugins.steps.x86_levels import FEATURES
from enginewright.plugins.tvm.section import TvmSection
from enginewright.runtime.bundle.manifest import Manifest, ModelSection, SourceSection, TargetManifest
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.bundle.weights import Blob, WeightsIndex
from enginewright.runtime.shared.errors import RequestError

ADA = InstalledGpu(0, "NVIDIA RTX 4090", "8.9", 24 << 30)
HOPPER = InstalledGpu(0, "NVIDIA H200", "9.0", 139 << 30)
PLAIN = Machine(
    system="Linux x86_64",
    processor="Some processor",
    instruction_sets=("avx2", "portable"),
    cores=4,
    memory_bytes=16 << 30,
    free_bytes=8 << 30,
    python="3.12.1",
    packages={"enginewright": "0.1.0", "onnxruntime": "1.31.0"},
    providers=("CPUExecutionProvider",),
    gpu_problem="there is no NVIDIA driver here: libcuda.so.1: cannot open shared object file",
)
WITH_GPU = replace(
    PLAIN,
    packages={**PLAIN.packages, "tensorrt_rtx": "1.7.1.116", "tensorrt": "11.4.0.106"},
    driver="580.95.05",
    cuda="13.0",
    gpus=(ADA,),
    gpu_problem="",
)

RTX = TensorRtSection(flavour="rtx", version="1.7.1.116", compute_capabilities=("8.6", "8.9"))
PAGED = PagedSection(
    library="11.0",
    cache_groups=(),
    profiles=(PagedProfile(phase="prefill", T=(1, 1, 1), B=(1, 1, 1), R=(1, 1, 1), M=(1, 1, 1), P=(1, 1, 1)),),
    kernel_capabilities=("8.9", "9.0"),
    split_keys=512,
)
PROPER = TensorRtSection(flavour="tensorrt", compute_capabilities=("8.9",), paged=PAGED)
IO = LinearIo(opset=24, onnxruntime="1.25.0", cache_groups=(), summed_products=1)
TARGETS = {
    "cpu": TargetManifest(),
    "onnx": TargetManifest(sections={"io": IO}),
    "tensorrt-rtx": TargetManifest(sections={"tensorrt": RTX}),
    "tensorrt": TargetManifest(state="needs-build", needs="TensorRT", sections={"tensorrt": PROPER}),
}


def bundle_of(tmp_path, targets: dict[str, TargetManifest], weights: int = 0) -> Bundle:
    model = ModelSection(name="tiny", architecture="Tiny", vocab_size=8, context_length=16)
    manifest = Manifest(model=model, source=SourceSection(kind="module", name="tiny"), targets=tuple(targets))
    bundle = Bundle(tmp_path / "tiny.bundle", manifest, targets)
    bundle.index = WeightsIndex(blobs=(Blob(file="weights/0.bin", bytes=weights),))
    return bundle


def found(examination: Examination) -> dict[str, Finding]:
    return {finding.target: finding for finding in examination.findings}


def test_a_machine_without_a_gpu(tmp_path) -> None:
    examination = examine(PLAIN, bundle_of(tmp_path, TARGETS))
    findings = found(examination)
    assert {name: f.verdict for name, f in findings.items()} == {
        "cpu": "runs",
        "onnx": "runs",
        "tensorrt-rtx": "can't",
        "tensorrt": "can't",
    }
    assert findings["cpu"].on == ("avx2 kernels, 4 cores",)
    assert findings["onnx"].on == ("onnxruntime 1.31.0, providers cpu",)
    rtx = findings["tensorrt-rtx"]
    assert rtx.reasons == (
        "TensorRT-RTX is not installed; the engines were built by 1.7.1.116",
        "it needs an NVIDIA GPU of compute capability 8.6 or 8.9, and there is no NVIDIA driver here: libcuda.so.1: "
        "cannot open shared object file",
    )
    assert "pip install 'tensorrt_rtx==1.7.1.116'" in rtx.todo[0]
    assert findings["tensorrt"].reasons[0] == "it is not built; it needs TensorRT"
    assert len(findings["tensorrt"].reasons) == 3
    assert examination.succeeds()
    assert examination.succeeds(["cpu", "onnx"])
    assert not examination.succeeds(["cpu", "tensorrt-rtx"])


def test_a_machine_with_a_gpu(tmp_path) -> None:
    findings = found(examine(WITH_GPU, bundle_of(tmp_path, TARGETS)))
    assert findings["tensorrt-rtx"].verdict == "runs"
    assert findings["tensorrt-rtx"].on == ("TensorRT-RTX 1.7.1.116, NVIDIA RTX 4090 (8.9), 24.0 GiB",)
    built = findings["tensorrt"]
    assert built.verdict == "needs-build"
    assert built.todo == (f"Run `optimize build {tmp_path / 'tiny.bundle'} --target tensorrt` here.",)
    hopper = found(examine(replace(WITH_GPU, gpus=(HOPPER,)), bundle_of(tmp_path, TARGETS)))["tensorrt"]
    assert hopper.verdict == "needs-build"
    ampere = replace(WITH_GPU, gpus=(replace(ADA, capability="8.6"),), packages={"tensorrt": "10.14.1"})
    cant = found(examine(ampere, bundle_of(tmp_path, TARGETS)))["tensorrt"]
    assert cant.verdict == "can't"
    assert cant.reasons[1] == "building the engines needs TensorRT 11.0 or newer, and 10.14.1 is installed"
    assert "the attention kernels are for compute capability 8.9 or 9.0" in cant.reasons[2]


@pytest.mark.parametrize(
    ("machine", "reason", "todo"),
    [
        (replace(WITH_GPU, gpus=(HOPPER,)), "compute capability 8.6 or 8.9.*another: NVIDIA H200 .9.0.", "--gpu 9.0"),
        (
            replace(WITH_GPU, packages={"tensorrt_rtx": "1.8.0.3"}),
            "built by TensorRT-RTX 1.7.1.116, and 1.8.0.3 is installed",
            "tensorrt_rtx==1.7.1.116",
        ),
        (replace(WITH_GPU, gpus=(), gpu_problem="no GPU is shown"), "8.6 or 8.9, and no GPU is shown", "such a GPU"),
    ],
)
def test_engines_for_another_machine(tmp_path, machine: Machine, reason: str, todo: str) -> None:
    finding = found(examine(machine, bundle_of(tmp_path, TARGETS), ["tensorrt-rtx"]))["tensorrt-rtx"]
    assert finding.verdict == "can't"
    assert len(finding.reasons) == 1
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(finding.reasons[0])
    assert todo in finding.todo[0]


def test_the_second_gpu_is_the_right_one(tmp_path) -> None:
    machine = replace(WITH_GPU, gpus=(HOPPER, replace(ADA, index=1)))
    finding = found(examine(machine, bundle_of(tmp_path, TARGETS)))["tensorrt-rtx"]
    assert finding.verdict == "runs"
    assert "RTX 4090" in finding.on[0]


def test_onnxruntime(tmp_path) -> None:
    bundle = bundle_of(tmp_path, {"onnx": TARGETS["onnx"]})
    old = replace(PLAIN, packages={"onnxruntime": "1.24.2"})
    broken = replace(PLAIN, problems={"onnxruntime": "it can't be loaded: libfoo"})
    for machine, reason in (
        (replace(PLAIN, packages={}), "onnxruntime is not installed"),
        (old, "it needs onnxruntime 1.25.0 or newer, and 1.24.2 is installed"),
        (broken, "it can't be loaded: libfoo"),
    ):
        examination = examine(machine, bundle)
        assert found(examination)["onnx"].reasons == (reason,)
        assert not examination.succeeds()


def test_variants_of_the_onnx_target(tmp_path) -> None:
    with_operators = replace(PLAIN, onnx_operators=True)
    contrib, kernels = VariantFile(file=CONTRIB_FILE), VariantFile(file=KERNELS_FILE)
    missing = "variant kernels needs libenginewright_onnxruntime.so, which is missing"
    for io, machine, message in (
        (IO, with_operators, ()),
        (IO.model_copy(update={"contrib": contrib}), PLAIN, ("on a CPU its variant contrib runs",)),
        (IO.model_copy(update={"kernels": kernels}), with_operators, ("on a CPU its variant kernels runs",)),
        (IO.model_copy(update={"kernels": kernels}), PLAIN, (f"on a CPU its variant standard runs: {missing}",)),
        (
            IO.model_copy(update={"contrib": contrib, "kernels": kernels}),
            PLAIN,
            (f"on a CPU its variant contrib runs: {missing}",),
        ),
    ):
        finding = found(examine(machine, bundle_of(tmp_path, {"onnx": TargetManifest(sections={"io": io})})))["onnx"]
        assert finding.verdict == "runs"
        assert finding.on[1:] == message


def test_kernels_that_do_not_load(tmp_path) -> None:
    machine = replace(PLAIN, instruction_sets=(), problems={"enginewright": "undefined symbol"})
    examination = examine(machine, bundle_of(tmp_path, {"cpu": TARGETS["cpu"]}))
    assert "undefined symbol" in found(examination)["cpu"].reasons[0]
    assert not examination.succeeds()


def test_torch_tensorrt() -> None:
    cases = (
        (PLAIN, ["PyTorch is not installed", "torch_tensorrt is not installed", "needs an NVIDIA GPU"]),
        (replace(WITH_GPU, packages={"torch": "2.13.0"}), ["build without CUDA", "torch_tensorrt is not"]),
    )
    for machine, reasons in cases:
        finding = found(examine(machine, None, ["torch-tensorrt"]))["torch-tensorrt"]
        assert finding.verdict == "can't"
        assert [part in reason for part, reason in zip(reasons, finding.reasons, strict=True)] == [True] * len(reasons)
    whole = replace(WITH_GPU, packages={"torch": "2.13.0", "torch_tensorrt": "2.13.0"}, torch_cuda="13.0")
    assert found(examine(whole, None))["torch-tensorrt"].verdict == "runs"


def test_a_driver_that_is_too_old() -> None:
    packages = {**WITH_GPU.packages, "torch": "2.14.0", "torch_tensorrt": "2.14.0"}
    libraries = {"tensorrt_rtx": "13", "tensorrt": "12"}
    machine = replace(WITH_GPU, packages=packages, torch_cuda="13.2", cuda="12.8", driver="570.1", cuda_of=libraries)
    findings = found(examine(machine, None))
    assert findings["tensorrt"].verdict == "runs"
    for target, what in (("torch-tensorrt", "PyTorch 2.14.0"), ("tensorrt-rtx", "TensorRT-RTX 1.7.1.116")):
        built = "13.2" if target == "torch-tensorrt" else "13"
        assert findings[target].reasons == (
            f"{what} is built for CUDA {built}, and NVIDIA's driver 570.1 runs CUDA 12.8 at most",
        )
        assert findings[target].todo[0].startswith("Install a newer driver, or ")


@pytest.mark.parametrize(
    ("capability", "cuda", "said"),
    [
        ("9.0", "13.0", ()),
        ("9.0", "12.8", ("kernels as PTX, which the driver translates: its machine code is of CUDA 13.4, and",)),
        ("8.9", "12.8", ()),
        ("10.3", "13.0", ("kernels as PTX of 8.0, which the driver translates: export with --gpu 10.3",)),
    ],
)
def test_cuda_needs_no_triton_and_says_what_the_driver_loads(capability: str, cuda: str, said: tuple[str, ...]) -> None:
    gpu = replace(WITH_GPU.gpus[0], capability=capability)
    machine = replace(WITH_GPU, packages={"torch": "2.13.0"}, torch_cuda=cuda, cuda=cuda, gpus=(gpu,))
    section = CudaSection(
        compute_capabilities=("8.0", "9.0"), dtype="bf16", requests=1, chunk=1, assemblers={"9.0": "13.4"}
    )
    checked = check(machine, TargetManifest(sections={"cuda": section}))
    assert checked.problems == ()
    assert checked.on[0].startswith("PyTorch 2.13.0, ")
    assert [line.startswith(part) for line, part in zip(checked.on[1:], said, strict=True)] == [True] * len(said)


def test_what_to_install_is_said_by_the_extras_names() -> None:
    findings = found(examine(PLAIN, None))
    for target, extra in (
        ("tensorrt", "tensorrt"),
        ("tensorrt-rtx", "tensorrt-rtx"),
        ("torch-tensorrt", "torch-tensorrt"),
    ):
        assert any(f"pip install 'enginewright[{extra}]'" in todo for todo in findings[target].todo), target
    idle = found(examine(WITH_GPU, None))["onnx"]
    assert (
        idle.verdict == "runs" and "NVIDIA RTX 4090 isn't used" in idle.on[1] and "enginewright[onnx-gpu]" in idle.on[1]
    )
    with_provider = replace(WITH_GPU, providers=("CUDAExecutionProvider", "CPUExecutionProvider"))
    assert found(examine(with_provider, None))["onnx"].on == ("onnxruntime 1.31.0, providers cpu, cuda",)


def test_jaxlib_is_there_of_a_version_that_was_tested() -> None:
    missing = found(examine(PLAIN))["stablehlo"]
    assert missing.verdict == "can't" and missing.reasons == ("jaxlib is not installed",)
    assert "pip install 'enginewright[stablehlo]'" in missing.todo[0]
    old = found(examine(replace(PLAIN, packages={"jaxlib": "0.9.2"})))["stablehlo"]
    assert old.reasons == ("it runs on jaxlib 0.10, and 0.9.2 is installed",)
    there = replace(PLAIN, packages={"jaxlib": "0.10.2"}, pjrt_plugins=("xla_cuda13",))
    assert found(examine(there))["stablehlo"].on == ("jaxlib 0.10.2, providers cpu, xla_cuda13",)


def test_modules_that_call_our_kernels_need_their_library(tmp_path) -> None:
    module = ModuleSection(requests=1, tokens=1, places=32, rows=1)
    group = LinearCacheGroup(name="full", layers=(0,), kv_heads=1, key_head_size=8, value_head_size=8, mask="mask")
    section = StableHloSection(
        version="1.9.0",
        jaxlib="0.10.2",
        modules=(module,),
        caches=("past_key_0", "past_value_0"),
        weights=(),
        cache_groups=(group,),
        summed_products=1,
        kernels=KERNELS,
    )
    bundle = bundle_of(tmp_path, {"stablehlo": TargetManifest(sections={"stablehlo": section})})
    machine = replace(PLAIN, packages={"jaxlib": "0.10.2"})
    message = "its modules call our kernels, and libenginewright_xla.so is missing"
    assert found(examine(machine, bundle))["stablehlo"].reasons == (message,)
    assert found(examine(replace(machine, xla_handlers=True), bundle))["stablehlo"].verdict == "runs"


def test_weights_larger_than_memory_are_said(tmp_path) -> None:
    finding = found(examine(PLAIN, bundle_of(tmp_path, {"cpu": TARGETS["cpu"]}, 20 << 30)))["cpu"]
    assert finding.verdict == "runs"
    assert finding.on[1] == "its weights, 20.0 GiB, are more than the 8.0 GiB that are free"


def test_targets_that_are_not_there(tmp_path) -> None:
    bundle = bundle_of(tmp_path, {"cpu": TARGETS["cpu"], "other": TargetManifest()})
    findings = found(examine(PLAIN, bundle, ["onnx", "other"]))
    assert findings["onnx"].reasons == ("the bundle has no such target; it has cpu, other",)
    assert findings["other"].reasons == ("this Enginewright can't run it",)
    with pytest.raises(RequestError, match=r"there is no 'gpu'\n.*cpu, onnx, tensorrt-rtx"):
        examine(PLAIN, bundle, ["gpu"])
    assert list(found(examine(PLAIN))) == [
        *("cpu", "onnx", "tensorrt-rtx", "tensorrt", "cuda", "stablehlo", "torch-tensorrt", "tvm")
    ]


def test_a_machine_without_a_bundle() -> None:
    rtx = found(examine(replace(WITH_GPU, gpus=(HOPPER,))))["tensorrt-rtx"]
    assert "TensorRT-RTX's engines are for compute capability 7.5, 8.0, 8.6" in rtx.reasons[0]
    assert found(examine(replace(WITH_GPU, gpus=(HOPPER,))))["tensorrt"].verdict == "runs"


def test_libraries_of_another_tvm_or_for_another_processor_are_said(tmp_path) -> None:
    section = TvmSection(version="0.27.0", levels=("v3", "v4"))
    bundle = bundle_of(tmp_path, {"tvm": TargetManifest(sections={"tvm": section})})
    assert found(examine(PLAIN, bundle))["tvm"].reasons == ("TVM (apache-tvm) is not installed",)
    other = replace(PLAIN, packages={"tvm": "0.28.0"}, features=tuple(FEATURES["v4"]))
    finding = found(examine(other, bundle))["tvm"]
    assert finding.reasons == ("its libraries were made by TVM 0.27.0, and 0.28.0 is installed",)
    assert "pip install 'apache-tvm==0.27.0'" in finding.todo[0]
    old = replace(PLAIN, packages={"tvm": "0.27.0"}, features=tuple(FEATURES["v2"]))
    assert found(examine(old, bundle))["tvm"].reasons == (
        "its libraries are for x86-64-v3 and x86-64-v4, whose instructions this processor doesn't have",
    )
    for level in ("v3", "v4"):
        machine = replace(old, features=tuple(FEATURES[level]))
        assert found(examine(machine, bundle))["tvm"].on[0] == f"TVM 0.27.0, kernels for x86-64-{level}"
    assert found(examine(other))["tvm"].on == ("TVM 0.28.0",)
