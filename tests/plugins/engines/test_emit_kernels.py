"""The kernels that a program's attention needs: which shapes there are, and what is in the bundle for them."""

from __future__ import annotations

import sys
from functools import partial

import numpy as np
import pytest

from enginewright.passes.attention.lower_attention import LowerAttention
from enginewright.passes.framework.base import PassContext
from enginewright.plugins.emit.bundle_writer import BundleWriter
from enginewright.plugins.engines import emit_kernels as attention_kernels
from enginewright.plugins.engines.emit_kernels import (
    attention_shapes,
    emit_attention_kernels,
    emit_sampling_kernels,
)
from enginewright.plugins.gpu.carried_sampling import open_sampler
from enginewright.plugins.gpu.compile_ahead import read_attention, read_kernel
from enginewright.plugins.gpu.compile_workers import KernelCompiler
from enginewright.plugins.gpu.plugin_kernels import SHARED_MEMORY, plugin_kernels
from enginewright.plugins.gpu.specs import SAMPLING_KERNELS, AttentionShape
from enginewright.runtime.shared.errors import BundleError, MissingDependencyError, TargetError
from enginewright.runtime.shared.progress import silent
from tests.passes.small_programs import Shape, decoder
from tests.plugins.engines.tiny_paged import compile_kernel
from tests.plugins.gpu.fake_driver import FakeDevice, InstalledGpu


def lowered(**shape):
    program = decoder(Shape(**shape))
    LowerAttention().run(program, PassContext())
    return program


@pytest.mark.parametrize(("windows", "heads", "kv_heads", "size"), [((0, 0), 4, 2, 8), ((0, 16, 0, 16), 6, 1, 16)])
def test_layers_of_one_shape_are_together(windows, heads, kv_heads, size):
    program = lowered(windows=windows, heads=heads, kv_heads=kv_heads, head_size=size, hidden=heads * size)
    program.cache_groups = tuple(group.model_copy(update={"dtype": "fp8"}) for group in program.cache_groups)
    shapes = attention_shapes(program, "bf16")
    layers = {shape.window: of for shape, of in shapes.items()}
    assert layers == {w: tuple(i for i, x in enumerate(windows) if x == w) for w in set(windows)}
    for shape in shapes:
        assert (shape.heads, shape.kv_heads, shape.head_size, shape.value_size) == (heads, kv_heads, size, size)
        assert (shape.dtype, shape.cache, shape.block_size) == ("bf16", "fp8", 32)
        assert shape.scale == pytest.approx(size**-0.5) and not shape.sinks and not shape.slopes


@pytest.mark.parametrize("vocab", [50, 3000])  # of one piece, and of three
def test_kernels_of_sampling_are_compiled_once_for_a_major_number(vocab, tmp_path, monkeypatch):
    monkeypatch.setattr(attention_kernels, "KernelCompiler", partial(KernelCompiler, compiler=compile_kernel))
    program = lowered(windows=(0,), vocabulary=vocab)
    with BundleWriter(tmp_path / "small.bundle") as writer:
        emit_sampling_kernels(program, ("7.5", "8.6", "8.9", "12.0"), "kernels", writer, silent)
        folder = writer.folder / "kernels"
        gpus = {path.stem.split("-")[1] for path in folder.iterdir()}
        assert gpus == {"sm86", "sm120"}
        for capability in ("8.6", "8.9", "12.0", "12.1"):
            device = FakeDevice(InstalledGpu(0, "some", capability, 1 << 30))
            opened = open_sampler(device, folder, 3, vocab, ())
            assert opened.sampler is not None and opened.where == "on the GPU"
            assert opened.sampler.lacks == ("top_n_sigma", "xtc_probability")  # which no kernel has
            assert {entry for _, entry in device.kernels} == set(SAMPLING_KERNELS)
        device = FakeDevice(InstalledGpu(0, "some", "9.0", 1 << 30))  # nothing is for it, but it takes the PTX of 8.6
        assert open_sampler(device, folder, 3, vocab, ()).where == "on the GPU"
        for capability in ("7.5", "8.0"):
            opened = open_sampler(FakeDevice(InstalledGpu(0, "some", capability, 1 << 30)), folder, 3, vocab, ())
            assert opened.sampler is None and "has no kernels for it on" in opened.where
        other = FakeDevice(InstalledGpu(0, "some", "8.9", 1 << 30))
        other = open_sampler(other, folder, 3, vocab, (np.dtype(np.float16),))
        assert other.sampler is None


def test_a_bundle_holds_every_kernel_that_the_plugins_ask_for(tmp_path):
    pytest.importorskip("triton", reason="Triton is not installed: pip install 'enginewright[triton]'")
    program = lowered(windows=(0, 0))
    events = []
    with BundleWriter(tmp_path / "small.bundle") as writer:
        (kernels,) = emit_attention_kernels(
            program, (86,), "f16", "targets/x/kernels", writer, events.append, for_plugins=True
        )
        folder = writer.folder / "targets" / "x" / "kernels"
        assert kernels.layers == (0, 1) and kernels.capability == 86
        expected = plugin_kernels(kernels.shape, 86)
        stems = {kernel.spec.stem for kernel in expected.all()}
        assert {kernels.write, *kernels.prefill, *kernels.decode, kernels.combine} == stems
        for kernel in (expected.write, expected.combine):
            assert read_kernel(folder, kernel.spec.stem) == kernel
        for split_keys, written, of in ((0, kernels.prefill, expected.prefill), (512, kernels.decode, expected.decode)):
            assert written == tuple(kernel.spec.stem for kernel in of)
            kernels_read = read_attention(folder, kernels.shape, 86, split_keys, clamp=True)
            assert sorted(kernels_read, key=repr) == sorted(of, key=repr) and len(kernels_read) == 1
        with pytest.raises(BundleError, match="no attention kernel for compute capability 89"):
            read_attention(folder, kernels.shape, 89, 0)
        assert len(list(folder.iterdir())) == 3 * len(stems)
    assert [(e.stage, e.done, e.total) for e in events] == [("kernels", 1, 1)]


@pytest.mark.matrix
def test_large_tiles_use_more_than_a_launch_may_without_asking():
    pytest.importorskip("triton", reason="Triton is not installed: pip install 'enginewright[triton]'")
    shape = AttentionShape(8, 2, head_size=128, value_size=128, block_size=16, dtype="f16", cache="f16", scale=0.1)
    small, large = (plugin_kernels(shape, 90, large_tiles=large) for large in (False, True))
    assert max(kernel.shared_memory for kernel in small.all()) <= SHARED_MEMORY
    assert min(kernel.shared_memory for kernel in large.prefill) > SHARED_MEMORY


def test_an_unknown_gpu_is_refused_before_anything_is_compiled(tmp_path):
    with BundleWriter(tmp_path / "small.bundle") as writer, pytest.raises(TargetError, match="capability 75"):
        emit_attention_kernels(lowered(), (90, 75), "f16", "x", writer, pytest.fail, for_plugins=True)


def test_without_triton_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    with BundleWriter(tmp_path / "small.bundle") as writer, pytest.raises(MissingDependencyError):
        emit_attention_kernels(lowered(), (90,), "f16", "x", writer, silent, for_plugins=True)
