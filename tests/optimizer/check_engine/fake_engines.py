"""Fake engines in a check's process: ``site`` is a ``sitecustomize`` that installs one of the functions here.

The functions of an engine run in a process without a GPU and without its library: onnxruntime or numpy computes.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from functools import partial
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

CHILD = "enginewright.optimizer.check_engine.child"


def site(folder: Path, function: str, *arguments: object) -> str:
    """Writes the ``sitecustomize`` to ``folder``; returns the PYTHONPATH that a check's process needs.

    ``arguments`` are those of the function.
    """
    text = f"""
import sys
if {CHILD!r} in sys.orig_argv:
    from tests.optimizer.check_engine import fake_engines
    fake_engines.{function}(*{arguments!r})
"""
    (folder / "sitecustomize.py").write_text(text)
    return f"{folder}:{Path(__file__).parents[3]}"


def _with_kernels() -> None:
    """Launches run numpy, and no kernel is compiled."""
    from enginewright.plugins.engines import emit_kernels
    from enginewright.plugins.gpu.compile_workers import KernelCompiler
    from tests.plugins.engines import tiny_paged

    tiny_paged.know_kernels()
    emit_kernels.KernelCompiler = partial(KernelCompiler, compiler=tiny_paged.compile_kernel)  # type: ignore[misc, assignment]


def _after_export(install: Callable[[Path], None]) -> None:
    """Calls ``install`` with the tiny model's bundle, once it is exported."""
    tiny_model: Any = importlib.import_module("enginewright.optimizer.check_engine.tiny_model")
    exported = tiny_model.export_tiny

    def export_tiny(*given: Any) -> Path:
        path: Path = exported(*given)
        install(path)
        return path

    tiny_model.export_tiny = export_tiny


def tensorrt_rtx(wrong: bool = False) -> None:
    """TensorRT-RTX, whose engines are ONNX files. ``wrong``: logits of the engine have another order."""
    from enginewright.plugins.engines import library
    from enginewright.plugins.engines.section import TensorRtSection
    from enginewright.plugins.tensorrt_rtx.compile import whole
    from enginewright.runtime.bundle.reader import Bundle
    from tests.plugins.engines import fake_tensorrt as fake
    from tests.plugins.engines.test_exported_engines import build
    from tests.plugins.gpu.fake_driver import FakeCuda

    _with_kernels()
    whole.build_engine = build  # type: ignore[assignment]

    def install(path: Path) -> None:
        cuda = FakeCuda()
        section = Bundle.open(path, "code").targets["tensorrt-rtx"].section(TensorRtSection)
        assert section is not None
        module = fake.fake_tensorrt(cuda, section.engines[0].profiles)
        module.__spec__ = ModuleSpec("tensorrt_rtx", None)
        sys.modules["tensorrt_rtx"] = module
        library.load_cuda = lambda: cuda  # type: ignore[assignment]

    _after_export(install)
    if wrong:
        of_onnx = fake.of_onnx

        def altered(model: bytes) -> fake.Model:
            engine = of_onnx(model)
            compute = engine.compute

            def reversed_logits(feeds: fake.Feeds) -> fake.Feeds:
                results = compute(feeds)
                return results | {"logits": results["logits"][..., ::-1].copy()}

            engine.compute = reversed_logits
            return engine

        fake.of_onnx = altered


def wrong_tensorrt_rtx() -> None:
    """TensorRT-RTX with wrong logits."""
    tensorrt_rtx(wrong=True)


def torch_tensorrt(wrong: bool = False) -> None:
    """Torch-TensorRT, which saves what it was given. ``wrong``: loaded steps give other logits."""
    import torch

    from enginewright.optimizer.export import stages as export_stages
    from tests.plugins.torch_tensorrt.compile.test_compile_step import Compiled, Library

    sys.modules["torch_tensorrt"] = Library()
    compile_step: Any = importlib.import_module("enginewright.plugins.torch_tensorrt.compile.compile_step")
    emitter: Any = importlib.import_module("enginewright.plugins.torch_tensorrt.compile.emitter")
    compile_step.DEVICE, emitter.check_machine = "cpu", lambda: None
    export_stages.version = lambda name: "0"  # type: ignore[assignment]
    if wrong:
        exported_program: Any = torch.export.ExportedProgram
        module = exported_program.module

        def install(path: Path) -> None:
            exported_program.module = lambda self: Compiled(module(self), torch.linspace(0, 9, 256))

        _after_export(install)


def wrong_torch_tensorrt() -> None:
    """Torch-TensorRT whose saved step gives other logits when it is loaded again."""
    torch_tensorrt(wrong=True)


def tensorrt(bundle: str, wrong: bool = False) -> None:
    """TensorRT, whose engines numpy computes, for the build of a bundle. ``wrong``: other tokens are the likeliest."""
    from enginewright.plugins.engines import library
    from enginewright.plugins.engines.section import TensorRtSection
    from enginewright.plugins.tensorrt.compile import build
    from enginewright.runtime.bundle.reader import Bundle
    from tests.plugins.engines import tiny_paged
    from tests.plugins.gpu.fake_driver import ADA, FakeCuda
    from tests.plugins.tensorrt.compile import numpy_tensorrt as fake
    from tests.plugins.tensorrt.compile.numpy_network import Network
    from tests.plugins.tensorrt.compile.test_build import READY

    tiny_paged.know_kernels()
    section = Bundle.open(bundle).targets["tensorrt"].section(TensorRtSection)
    assert section is not None and section.paged is not None
    cuda = FakeCuda()
    fake.install(cuda, {i: (profile,) for i, profile in enumerate(section.paged.profiles * 2)})
    cuda.open(ADA)  # as TensorRT does it when it builds
    build.look_at_machine = lambda: READY
    library.load_cuda = lambda: cuda  # type: ignore[assignment]
    if wrong:
        compute = Network.compute

        def reversed_logits(self: Network, feeds: Any) -> Any:
            results = compute(self, feeds)
            return results | {"logits": results["logits"][..., ::-1].copy()}

        Network.compute = reversed_logits  # type: ignore[method-assign]
