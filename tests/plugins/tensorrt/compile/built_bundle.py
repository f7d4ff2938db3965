"""Builds a bundle's tensorrt target by ``optimize build`` and runs it, in a process with TensorRT's bindings."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from enginewright.plugins.engines import library as tensorrt_library
from enginewright.plugins.engines.section import TensorRtSection
from enginewright.plugins.gpu.compile_ahead import CompiledKernel
from enginewright.plugins.gpu.specs import KernelSpec
from enginewright.plugins.tensorrt.compile.build import build
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.engine.llm import LLM
from enginewright.runtime.requests.sampling import SamplingParams
from tests.plugins.engines import tiny_paged
from tests.plugins.gpu.fake_driver import ADA, FakeCuda
from tests.plugins.tensorrt.compile.test_build import READY


@dataclass
class Ran:
    """The results of a built bundle.

    Attributes:
        report: the build's report.
        plugins: counts by name, for each engine.
        layers: names, for each engine.
        outputs: number of outputs, for each engine.
        logits, tokens: of each prompt, and of all of them together.
        info: the executor's, after all prompts.
    """

    report: dict[str, Any]
    plugins: list[dict[str, int]]
    layers: list[list[str]]
    outputs: list[int]
    logits: list[np.ndarray]
    tokens: list[list[int]]
    info: dict[str, Any]


def compile_kernel(spec: KernelSpec) -> CompiledKernel:
    """In the place of Triton: what a launch must know, as PTX too."""
    kernel = tiny_paged.compile_kernel(spec)
    reads = {name: f"[{kernel.entry}_param_{i}]" for i, (name, _) in enumerate(spec.arguments)}
    reads = {name: where for name, where in reads.items() if not name.endswith("_before")}  # as the real code does
    return replace(kernel, ptx=json.dumps({**json.loads(kernel.cubin), "reads": reads}))


def build_and_run(path: str, prompts: list[list[int]], tokens: int, copies: bool, options: dict[str, Any]) -> Ran:
    """``copies``: whether TensorRT puts copies of the caches into its own memory; ``options``: of ``LLM``."""
    from tests.plugins.tensorrt.compile import numpy_tensorrt as fake

    tiny_paged.know_kernels()
    section = Bundle.open(path).targets["tensorrt"].section(TensorRtSection)
    assert section is not None and section.paged is not None
    cuda, before = FakeCuda(), len(fake.BUILT)
    profiles = section.paged.profiles * 2  # each is loaded when it was built, and when it is to run
    fake.install(cuda, {i: (profile,) for i, profile in enumerate(profiles)}, copies=copies)
    cuda.open(ADA)  # as TensorRT does it when it builds
    report = build(Bundle.open(path, "code"), "tensorrt", machine=READY)
    tensorrt_library.load_cuda = lambda: cuda  # type: ignore[assignment]
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    with LLM(path, target="tensorrt", trust="code", **options) as llm:
        logits = [llm.logits(prompt) for prompt in prompts]
        answers = [list(r.token_ids) for r in llm.generate(prompts, params)]
        info = llm.info()["executor"]
    networks = fake.BUILT[before:]
    of_each = [[layer for layer in network.layers if layer.kind == "plugin"] for network in networks]
    return Ran(
        report=json.loads(json.dumps(report.to_json())),
        plugins=[dict(Counter(layer.plugin.plugin_name for layer in layers)) for layers in of_each],
        layers=[[layer.name for layer in network.layers] for network in networks],
        outputs=[len(network.outputs) for network in networks],
        logits=logits,
        tokens=answers,
        info=dict(info),
    )
