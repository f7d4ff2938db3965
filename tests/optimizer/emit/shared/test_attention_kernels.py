"""The kernels that a program's attention needs: which shapes there are, and what is in the bundle for them."""

from __future__ import annotations

import sys

import pytest

from enginewright.optimizer.emit.shared.attention_kernels import attention_shapes, emit_attention_kernels
from enginewright.optimizer.emit.shared.bundle_writer import BundleWriter
from enginewright.optimizer.shared.progress import silent
from enginewright.passes.attention.lower_attention import LowerAttention
from enginewright.passes.framework.base import PassContext
from enginewright.plugins.shared.errors import MissingDependencyError, TargetError
from enginewright.plugins.tensorrt.kernels import layer_specs
from enginewright.plugins.triton.compile_ahead import read_kernel
from tests.passes.small_programs import Shape, decoder


def lowered(**shape):
    program = decoder(Shape(**shape))
    LowerAttention().run(program, PassContext())
    return program


@pytest.mark.parametrize(("windows", "heads", "kv_heads", "size"), [((0, 0), 4, 2, 8), ((0, 16, 0, 16), 6, 1, 16)])
def test_layers_of_one_shape_are_together(windows, heads, kv_heads, size):
    program = lowered(windows=windows, heads=heads, kv_heads=kv_heads, head_size=size, hidden=heads * size)
    shapes = attention_shapes(program, "bf16", "fp8")
    layers = {shape.window: of for shape, of in shapes.items()}
    assert layers == {w: tuple(i for i, x in enumerate(windows) if x == w) for w in set(windows)}
    for shape in shapes:
        assert (shape.heads, shape.kv_heads, shape.head_size, shape.value_size) == (heads, kv_heads, size, size)
        assert (shape.dtype, shape.cache, shape.block_size) == ("bf16", "fp8", 32)
        assert shape.scale == pytest.approx(size**-0.5) and not shape.sinks and not shape.slopes


def test_a_bundle_holds_every_kernel_that_the_plugins_ask_for(tmp_path):
    pytest.importorskip("triton", reason="Triton is not installed: pip install 'enginewright[triton]'")
    program = lowered(windows=(0, 0))
    events = []
    with BundleWriter(tmp_path / "small.bundle") as writer:
        kernels = emit_attention_kernels(program, (86,), "f16", "f16", "targets/x/kernels", writer, events.append)
        folder = writer.folder / "targets" / "x" / "kernels"
        assert len(kernels) == 1 and kernels[0].layers == (0, 1) and kernels[0].capability == 86
        specs = layer_specs(kernels[0].shape, 86)
        assert kernels[0].stems == tuple(spec.stem for spec in specs)
        for spec in specs:
            assert read_kernel(folder, spec).spec == spec
        assert len(list(folder.iterdir())) == 3 * len(specs)
    assert [(e.stage, e.done, e.total) for e in events] == [("kernels", i + 1, len(specs)) for i in range(len(specs))]


def test_an_unknown_gpu_is_refused_before_anything_is_compiled(tmp_path):
    with BundleWriter(tmp_path / "small.bundle") as writer, pytest.raises(TargetError, match="capability 75"):
        emit_attention_kernels(lowered(), (90, 75), "f16", "f16", "x", writer, pytest.fail)


def test_without_triton_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    with BundleWriter(tmp_path / "small.bundle") as writer, pytest.raises(MissingDependencyError):
        emit_attention_kernels(lowered(), (90,), "f16", "f16", "x", writer, silent)
