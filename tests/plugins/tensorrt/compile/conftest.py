"""Bundles with the tensorrt target, and a process in which TensorRT-RTX's library builds them."""

from __future__ import annotations

import importlib.util
import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from unittest.mock import DEFAULT, patch

import pytest

from enginewright.passes.framework.base import PassContext
from enginewright.passes.framework.manager import PassManager
from enginewright.passes.ir.program import Program
from enginewright.plugins.emit.base import EmitOptions
from enginewright.plugins.emit.bundle_writer import BundleWriter
from enginewright.plugins.gpu.recipe import EnginesSection
from enginewright.plugins.tensorrt.compile import emitter
from enginewright.plugins.tensorrt.compile.emitter import TensorRtEmitter
from enginewright.runtime.bundle.manifest import Manifest, ModelSection, SourceSection
from enginewright.runtime.shared.progress import silent
from tests.plugins.tensorrt.compile import cut_network

MakeBundle = Callable[..., Path]


@pytest.fixture(scope="session")
def rtx() -> Iterator[ProcessPoolExecutor]:
    if importlib.util.find_spec("tensorrt_rtx") is None:
        pytest.skip("TensorRT-RTX is not installed: pip install 'enginewright[tensorrt-rtx]'")
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, initializer=cut_network.use_rtx) as pool:
        yield pool


@pytest.fixture
def make_bundle(tmp_path: Path) -> MakeBundle:
    """A bundle of a lowered program's tensorrt target, without tokenizer and without kernels, which take seconds."""

    def make(program: Program, dtype: str = "f16", name: str = "made") -> Path:
        copy = program.copy()
        PassManager(TensorRtEmitter().passes(), PassContext()).run(copy)
        engines = EnginesSection.model_validate({"dtype": dtype, "gpus": ["8.9"], "requests": 4, "chunk": 32})
        folder = tmp_path / f"{name}.bundle"
        left_out = patch.multiple(emitter, emit_attention_kernels=DEFAULT, emit_sampling_kernels=DEFAULT)
        with BundleWriter(folder) as writer, left_out:
            target = TensorRtEmitter().emit(copy, writer, silent, EmitOptions(engines=engines, context_length=64))
            model = ModelSection(name="tiny", architecture="Tiny", vocab_size=256, context_length=64)
            source = SourceSection(kind="module", name="tiny")
            writer.commit(Manifest(model=model, source=source, targets=()), {"tensorrt": target})
        return folder

    return make
