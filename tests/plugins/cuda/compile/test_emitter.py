"""The content of the cuda target's bundle; it has every kernel that a step launches."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: pip install 'enginewright[cuda]'")

from enginewright import LLM, SamplingParams
from enginewright.passes.framework.manager import PassManager
from enginewright.plugins.cuda.compile import emitter as emitting
from enginewright.plugins.cuda.compile.emitter import CudaEmitter
from enginewright.plugins.cuda.section import CudaSection
from enginewright.plugins.cuda.serve.kernels import CarriedLauncher, SpecCollector, specs_of
from enginewright.plugins.emit.base import EmitOptions
from enginewright.plugins.emit.bundle_writer import BundleWriter
from enginewright.plugins.gpu.choose_tiles import Compile
from enginewright.plugins.gpu.compile_ahead import CompiledKernel, compile_kernel
from enginewright.plugins.gpu.compile_workers import KernelCompiler
from enginewright.plugins.gpu.cuda_driver import Argument, InstalledGpu
from enginewright.plugins.gpu.recipe import EnginesSection
from enginewright.plugins.gpu.sampling import lacks_of, missing_kernels
from enginewright.plugins.gpu.specs import SAMPLING_KERNELS, KernelSpec
from enginewright.plugins.gpu.step_calls import Stored, split_product_calls, split_scratch
from enginewright.plugins.gpu.tiles import gpu_of, product_tile
from enginewright.runtime.bundle.manifest import Manifest, ModelSection, SourceSection, target_folder
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.shared.errors import BundleError, TargetError
from tests.passes import small_programs
from tests.passes.small_programs import Steps
from tests.plugins.cuda.serve import cuda_cases as cases
from tests.triton_interpreter import interpreter as interpreter

SECTION = CudaSection(compute_capabilities=("9.0",), dtype="bf16", requests=8, chunk=128)


class StubDevice:
    """A driver that loads and launches nothing; it counts, and checks what a driver would choke on."""

    gpu = InstalledGpu(0, "stub", "9.0", 1 << 34)
    stream = 1

    def __init__(self) -> None:
        self.loaded: dict[int, str] = {}
        self.launched: list[str] = []

    def load_kernel(self, code: bytes, entry: str, shared_memory: int) -> int:
        assert code[:4] == b"\x7fELF"
        self.loaded[len(self.loaded) + 1] = entry
        return len(self.loaded)

    def launch(
        self, kernel: int, grid: tuple[int, int, int], threads: int, shared_memory: int, arguments: Sequence[Argument]
    ) -> None:
        assert all(0 < n < 1 << 31 for n in grid)
        assert threads % 32 == 0
        assert all(isinstance(a, (int, np.int32)) for a in arguments)
        self.launched.append(self.loaded[kernel])

    def launcher(self, *given: Any) -> Callable[[], None]:
        return lambda: self.launch(*given)


def stand_in(spec: KernelSpec) -> CompiledKernel:
    """In the place of Triton, which takes 15 seconds for all of a bundle's kernels."""
    return CompiledKernel(spec, f"{spec.kernel}_kernel", "", b"\x7fELF", 64, "none")


@pytest.mark.parametrize(
    ("case", "recipe", "some"),
    [
        ("Mixtral", "int4", {"product", "rope_kv_write"}),
        ("qwen3_5_text", "int4", {"product", "stored_convolution", "stored_delta_rule"}),
        ("jamba", "f32", {"product", "stored_convolution", "stored_scan"}),
    ],
)
def test_a_small_step_launches_what_was_collected(case: str, recipe: str, some: set[str]) -> None:
    """Sizes that no step was bound with need no other kernel."""
    program, context = cases.program_of(case, recipe)
    lowered = cases.lowered(program, context, "bf16")
    collected = specs_of(lowered.program, SECTION, SpecCollector(90, stand_in))
    assert {spec.kernel for spec in collected.found} >= {*SAMPLING_KERNELS, "norm", *some}
    assert len(collected.tiles) == 2
    missing: list[str] = []

    class Looking(cases.JitLauncher):
        def tile(self, shape, decode):  # type: ignore[no-untyped-def]
            return collected.tiles[shape, decode]

        def bind(self, call):  # type: ignore[no-untyped-def]
            if call.spec(90) not in collected.found:
                missing.append(call.kernel)
            return lambda: None

    steps = cases.steps_of(lowered, 256, launcher=Looking(), rows=SECTION.requests)
    steps_input = small_programs.steps_of(lowered.program.cache_groups, cases.BLOCKS)
    for chunks in cases.schedule():
        sampling = cases.as_options([{"temperature": 1.0, "top_p": 0.5} for _ in chunks])
        steps.start(cases.step_input(steps_input.step(chunks), sampling))
    assert missing == []


def test_the_largest_step_has_its_kernels_too() -> None:
    """A chunk that isn't a power of 2 gives experts more rows than the last power of 2 does."""
    program, context = cases.program_of("Mixtral")
    lowered = cases.lowered(program, context, "bf16").program
    tiles = {}
    for chunk in (512, 1000):
        section = SECTION.model_copy(update={"chunk": chunk, "requests": 6})
        collected = specs_of(lowered, section, SpecCollector(90, stand_in))
        products = [dict(spec.constants) for spec in collected.found if spec.kernel == "product"]
        tiles[chunk] = {(of["ROWS"], of["COLUMNS"]) for of in products if of["GROUPED"]}
    experts, chosen = 6, 2
    assert product_tile(512 * chosen // experts, "float") != product_tile(1000 * chosen // experts, "float")
    assert len(tiles[1000]) == len(tiles[512]) + 1


def test_kernels_of_mixed_steps_and_of_many_rows_are_carried() -> None:
    program, context = cases.program_of("Llama", "int4")
    lowered = cases.lowered(program, context, "bf16").program
    kernels = {}
    for chunk in (64, 1024):
        section = SECTION.model_copy(update={"chunk": chunk})
        collected = specs_of(lowered, section, SpecCollector(90, stand_in))
        kernels[chunk] = {(spec.kernel, "MIXED" in dict(spec.constants)) for spec in collected.found}
    for name in ("decode_work", "listed_attention", "combine_splits"):
        assert {(name, False), (name, True)} <= kernels[64]
    assert kernels[1024] - kernels[64] == {("unpack", False)}


@pytest.mark.matrix
@pytest.mark.parametrize("capability", [80, 90])
def test_kernels_of_both_ways_compile(capability: int) -> None:
    program, context = cases.program_of("Llama", "int4")
    lowered = cases.lowered(program, context, "bf16").program
    section = SECTION.model_copy(update={"chunk": 1024})
    collected = specs_of(lowered, section, SpecCollector(capability, stand_in))
    unpacks = [spec for spec in collected.found if spec.kernel == "unpack"]
    specs = [spec for spec in collected.found if {"MIXED", "SKIP_SINGLES"} & set(dict(spec.constants))] + unpacks
    weight = Stored(torch.empty(4096, 2048, dtype=torch.uint8), "int4", torch.empty(4096, 32).half(), None, 128)
    x, out = torch.empty(8, 4096, dtype=torch.bfloat16), torch.empty(8, 4096, dtype=torch.bfloat16)
    gpu = gpu_of(capability)
    calls = split_product_calls(x, weight, None, out, gpu, torch.empty(split_scratch(4096, 4096, "int4", 128, "bf16")))
    specs += [call.spec(capability) for call in calls]
    assert {spec.kernel for spec in specs} == {
        *("paged_attention", "decode_work", "listed_attention", "combine_splits", "product", "sum_parts", "unpack")
    }
    for spec in specs:
        compiled = compile_kernel(spec)
        assert compiled.stack == 0 and compiled.shared_memory <= gpu.portable_memory


def generated(bundle: Path) -> list[list[int]]:
    """Generates tokens as users do, with kernels interpreted by Triton; a warning is an error."""
    warnings.simplefilter("error")
    with LLM(bundle, context=64, max_requests=2, trust="code") as llm:
        options = SamplingParams(max_tokens=3, temperature=0.8, seed=3, ignore_eos=True)
        assert llm.info()["executor"]["target"] == "cuda"
        return [list(result.token_ids) for result in llm.generate([[1, 5, 9], [1, 200], [1, 5, 9]], options)]


@pytest.mark.parametrize(
    "compiler", [pytest.param(stand_in, marks=pytest.mark.matrix), pytest.param(None, marks=pytest.mark.soak)]
)
def test_a_bundle_carries_every_kernel(
    compiler: Compile | None, tmp_path: Path, interpreter: ProcessPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(emitting, "KernelCompiler", partial(KernelCompiler, compiler=compiler))
    program, context = cases.program_of("Llama", "int8", "int8")
    emitter = CudaEmitter()
    PassManager([p for p in emitter.passes() if p.wanted(context)], context).run(program)
    engines = EnginesSection(gpus=("9.0",), requests=8, chunk=128)
    with BundleWriter(tmp_path / "b") as writer:
        target = emitter.emit(program, writer, lambda event: None, EmitOptions(engines=engines))
        writer.write_text("tokenizer/special_tokens.json", "{}\n")
        model = ModelSection(name="m", architecture="a", vocab_size=256, context_length=256)
        writer.commit(
            Manifest(model=model, source=SourceSection(kind="module", name="m"), targets=()), {"cuda": target}
        )
    bundle = Bundle.open(tmp_path / "b", trust="code")
    section = bundle.target("cuda").section(CudaSection)
    assert section is not None
    assert section.model_copy(update={"assemblers": {}}) == SECTION
    assert set(section.assemblers) == ({"9.0"} if compiler is None else set())
    assert {group.dtype for group in bundle.program("cuda").cache_groups} == {"i8"}
    kernels = bundle.path / target_folder("cuda") / "kernels"
    device = StubDevice()
    launcher = CarriedLauncher(device, kernels, 90)  # type: ignore[arg-type]
    lowered = cases.Lowering(bundle.program("cuda"), cases.lower_for_gpus(program, "bf16").weights)
    steps, inputs = cases.steps_of(lowered, 256, launcher=launcher), Steps(["full"], cases.BLOCKS)
    for chunks in cases.schedule():
        sampling = cases.as_options([{"temperature": 1.0, "top_k": 4, "min_p": 0.1} for _ in chunks])
        sampling.typical_p = np.full(len(chunks), 0.5, np.float32)
        sampling.allowed_start = np.arange(len(chunks) + 1, dtype=np.int32)
        sampling.allowed = np.full(len(chunks), 7, np.int32)
        steps.start(cases.step_input(inputs.step(chunks), sampling))
    assert {name.removesuffix("_kernel") for name in device.launched} >= {"norm", "product", "paged_attention", "draw"}
    assert {name.removesuffix("_kernel") for name in device.launched} >= {"edit", "spread", "nearest"}
    assert missing_kernels(kernels, 90) == ()

    first, other, again = interpreter.submit(generated, bundle.path).result()
    assert first == again  # after it, alone
    assert len(first) == len(other) == 3

    for path in (*kernels.glob("edit-*.json"), *kernels.glob("nearest-*.json")):
        path.unlink()
    assert set(lacks_of(missing_kernels(kernels, 90))) == {
        *("typical_p", "frequency_penalty", "presence_penalty"),
        *("logit_bias", "allowed_token_ids", "bad_words", "min_tokens", "dry_multiplier"),
        *("top_n_sigma", "xtc_probability"),  # which no kernel has
    }

    (stem,) = set(kernels.glob("rope_kv_write*.json"))
    stem.unlink()
    with pytest.raises(BundleError, match=r"rope_kv_write.*can't be read"):
        again = cases.steps_of(lowered, 256, launcher=CarriedLauncher(StubDevice(), kernels, 90))  # type: ignore[arg-type]
        again.start(cases.step_input(Steps(["full"], cases.BLOCKS).step({"a": [1, 2]})))


def test_a_gpu_that_nothing_is_compiled_for_is_refused(tmp_path: Path) -> None:
    program, _ = cases.program_of("Llama")
    with BundleWriter(tmp_path / "b") as writer, pytest.raises(TargetError, match=r"no kernels .* 7\.5"):
        CudaEmitter().emit(program, writer, print, EmitOptions(engines=EnginesSection(gpus=("7.5",))))


@pytest.mark.parametrize(
    ("capability", "found"),
    [("9.0", "9.0"), ("8.9", "8.6"), ("8.0", "8.0"), ("10.3", "8.6"), ("12.0", "12.0"), ("12.1", "8.6"), ("7.5", None)],
)
def test_code_that_is_bound_to_its_gpu_is_taken_for_no_other(capability: str, found: str | None) -> None:
    """Without families code for 9.0 and later is sm_90a's, sm_100a's, sm_120a's: 10.3 and 12.1 take the PTX of 8.6."""
    section = CudaSection(compute_capabilities=("8.0", "8.6", "9.0", "12.0"), dtype="bf16", requests=1, chunk=1)
    assert section.kernels_for(capability) == found
    alone = CudaSection(compute_capabilities=("10.0", "12.0"), dtype="bf16", requests=1, chunk=1)
    assert alone.kernels_for(capability) == (found if found == "12.0" else None)
    family = alone.model_copy(update={"families": ("10.0", "12.0")})
    assert family.kernels_for(capability) == {"10.3": "10.0", "12.0": "12.0", "12.1": "12.0"}.get(capability)


def test_activations_are_narrow_and_tables_are_not() -> None:
    program, context = cases.program_of("Mixtral")
    lowered = cases.lowered(program, context, "f16").program
    narrow = ("linear", "grouped_linear", "add_rms_norm", "rope_kv_write", "paged_attention")
    types = {
        op: {o.dtype for s in lowered.steps if s.op == op for o in s.outputs}
        for op in (
            "linear",
            "grouped_linear",
            "add_rms_norm",
            "rope_table",
            "rope_kv_write",
            "paged_attention",
            "top_k",
        )
    }
    assert types["rope_table"] == {"f32"}
    assert types["top_k"] == {"f32", "i32"}
    for op in narrow:
        assert types[op] == {"f16"}, op
    assert {use.dtype for use in lowered.weights if len(use.shape) > 1} == {"f16"}
