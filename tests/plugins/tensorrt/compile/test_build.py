from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from enginewright.optimizer.build_target import build_target
from enginewright.plugins.doctor.machine import Machine
from enginewright.plugins.emit.bundle_writer import BundleWriter
from enginewright.plugins.emit.engine_report import BuildReport, BuiltPlan
from enginewright.plugins.engines.section import TensorRtSection
from enginewright.plugins.gpu.cuda_driver import InstalledGpu
from enginewright.plugins.steps.paged_section import PagedProfile, PagedSection
from enginewright.plugins.tensorrt.compile.build import MakeEngines, build
from enginewright.runtime.bundle.manifest import Manifest, ModelSection, SourceSection, TargetManifest
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.shared.contracts import CacheGroup
from enginewright.runtime.shared.errors import BundleError, TargetError, TrustError

BARE = Machine(
    system="Linux x86_64",
    processor="",
    instruction_sets=(),
    cores=2,
    memory_bytes=1,
    free_bytes=1,
    python="3.11",
    gpu_problem="there is no NVIDIA driver here",
)
GPU = InstalledGpu(index=0, name="RTX 4090", capability="8.9", memory_bytes=24 << 30)
READY = replace(BARE, packages={"tensorrt": "11.4.0.106"}, gpus=(GPU,), gpu_problem="")
PLANS: dict[str, bytes] = {"decode": b"one token each", "prefill": b"prompts"}


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    sizes: dict[str, Any] = dict.fromkeys("TBRMP", (1, 1, 4))
    group = CacheGroup(
        name="full", layers=(0,), kv_heads=1, key_head_size=16, value_head_size=16, dtype="f16", block_size=32
    )
    paged = PagedSection(
        library="11.4",
        cache_groups=(group,),
        profiles=(PagedProfile(phase="decode", **sizes), PagedProfile(phase="prefill", **sizes)),
        kernel_capabilities=("8.6", "8.9"),
        split_keys=512,
    )
    section = TensorRtSection(flavour="tensorrt", compute_capabilities=("8.6", "8.9"), paged=paged)
    waiting = TargetManifest(state="needs-build", needs="a GPU", sections={"tensorrt": section})
    model = ModelSection(name="tiny", architecture="Tiny", vocab_size=8, context_length=8)
    with BundleWriter(tmp_path / "tiny.bundle") as writer:
        writer.write_text("targets/tensorrt/network.json", "{}")
        writer.commit(
            Manifest(model=model, source=SourceSection(kind="module", name="tiny"), targets=()),
            {"tensorrt": waiting, "onnx": TargetManifest()},
        )
    return tmp_path / "tiny.bundle"


def built(path: Path, **given: Any) -> BuildReport:
    return build(Bundle.open(path, "code"), "tensorrt", **given)


def engines_of(plans: dict[str, bytes], scratch: int = 1000) -> MakeEngines:
    def make(bundle: Bundle, target: str, paged: PagedSection, capability: int) -> Iterator[BuiltPlan]:
        assert (target, capability) == ("tensorrt", 89)
        yield from (BuiltPlan(phase, plan, scratch) for phase, plan in plans.items())  # type: ignore[arg-type]

    return make


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_a_target_is_finished_and_nothing_else_changes(bundle: Path) -> None:
    before = contents(bundle)
    report = built(bundle, machine=READY, make=engines_of(PLANS))
    assert report.built and report.gpu == "RTX 4090 (8.9)" and list(report.engines.values()) == [14, 7]
    after = contents(bundle)
    changed = {name for name in before | after if before.get(name) != after.get(name)}
    assert changed == {"targets/tensorrt/manifest.json", *(f"targets/tensorrt/{name}" for name in report.engines)}
    opened = Bundle.open(bundle)
    opened.verify_hashes()
    target = opened.target("tensorrt")
    section = target.section(TensorRtSection)
    assert section is not None and target.needs is None
    assert (section.version, section.compute_capabilities) == ("11.4.0.106", ("8.9",))
    assert [e.phase for e in section.engines] == ["decode", "prefill"]
    assert [e.sha256 for e in section.engines] == [hashlib.sha256(p).hexdigest() for p in PLANS.values()]


def test_engines_with_copies_of_the_caches_are_said(bundle: Path) -> None:
    """A cache of 4 blocks of 32 keys or values with 16 numbers of 16 bits each."""
    cache = 4 * 32 * 16 * 2
    report = built(bundle, machine=READY, make=engines_of(PLANS, cache - 1))
    assert list(report.scratch.values()) == [cache - 1] * 2 and report.copies == ()
    report = built(bundle, machine=READY, make=engines_of(PLANS, cache), again=True)
    assert report.copies == tuple(report.engines)


def test_a_ready_target_is_left_alone_unless_it_is_to_be_built_again(bundle: Path) -> None:
    first = built(bundle, machine=READY, make=engines_of(PLANS))
    before = contents(bundle)
    assert not built(bundle, machine=BARE).built
    assert contents(bundle) == before
    again = built(bundle, machine=READY, make=engines_of({**PLANS, "prefill": b"other"}), again=True)
    assert again.engines.keys() & first.engines.keys() == {next(iter(first.engines))}
    files = {path.name for path in (bundle / "targets/tensorrt").glob("*.engine")}
    assert files == set(again.engines)
    Bundle.open(bundle).verify_hashes()


def test_an_interrupted_build_leaves_the_bundle_as_it_was(bundle: Path) -> None:
    before = contents(bundle)

    def make(bundle: Bundle, target: str, paged: PagedSection, capability: int) -> Iterator[BuiltPlan]:
        yield BuiltPlan("decode", b"one", 0)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        built(bundle, machine=READY, make=make)
    assert contents(bundle) == before


@pytest.mark.parametrize(
    ("machine", "message"),
    [
        (BARE, "TensorRT, which builds the engines, is not installed; .*8.6 or 8.9, and there is no NVIDIA driver"),
        (replace(READY, packages={"tensorrt": "10.2.0"}), "needs TensorRT 11.4 or newer, and 10.2.0 is installed"),
        (replace(READY, gpus=(replace(GPU, capability="7.5"),)), "for compute capability 8.6 or 8.9, .*7.5"),
    ],
)
def test_what_is_missing_is_said(machine: Machine, message: str, bundle: Path) -> None:
    before = contents(bundle)
    with pytest.raises(TargetError, match=f"target 'tensorrt' can't be built here: .*{message}"):
        built(bundle, machine=machine, make=engines_of(PLANS))
    assert contents(bundle) == before


def test_a_damaged_bundle_isn_t_built(bundle: Path) -> None:
    (bundle / "targets/tensorrt/network.json").write_text("[]")
    with pytest.raises(BundleError, match=r"network\.json: SHA-256"):
        built(bundle, machine=READY, make=engines_of(PLANS))


def test_targets_that_are_never_built(bundle: Path) -> None:
    with pytest.raises(BundleError, match=r"nothing of target 'onnx' can be built on another machine\n.*: tensorrt"):
        build_target(bundle, "onnx")
    with pytest.raises(BundleError, match="no target 'cpu'; it has onnx, tensorrt"):
        build_target(bundle, "cpu")


def test_the_command_s_target_is_found(bundle: Path) -> None:
    built(bundle, machine=READY, make=engines_of(PLANS))
    for target in (None, "tensorrt"):
        report = build_target(bundle, target)
        assert (report.target, report.built, report.library) == ("tensorrt", False, "TensorRT")
    with pytest.raises(TrustError):
        build_target(bundle, again=True)
