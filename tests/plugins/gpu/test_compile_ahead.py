"""Kernels compiled for GPUs that aren't there: what comes out, that it is the same again, and what is refused."""

from __future__ import annotations

import re
import struct
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("triton", reason="Triton is not installed: pip install 'enginewright[triton]'")

from enginewright.plugins.gpu.call import DeviceArray
from enginewright.plugins.gpu.choose_tiles import choose_tile, compile_attention, compile_layer
from enginewright.plugins.gpu.compile_ahead import CompiledKernel, compile_kernel, read_kernel, write_kernels
from enginewright.plugins.gpu.placing import PLACED, place_call
from enginewright.plugins.gpu.specs import (
    ARGUMENTS,
    AttentionShape,
    attention_spec,
    combine_spec,
    kernel_function,
    write_spec,
)
from enginewright.plugins.gpu.tiles import GPUS, Tile
from enginewright.runtime.shared.errors import BundleError, MissingDependencyError, TargetError
from tests.plugins.gpu import step_specs

SMOLLM2 = AttentionShape(9, 3, 64, 64, 32, "f16", "f16", 0.125)
EM_CUDA = 190  # of an ELF header


def check(kernel: CompiledKernel) -> None:
    """The rules for every kernel; ptxas has accepted the code, or there was none."""
    spec = kernel.spec
    assert re.search(rf"^\.target sm_{spec.capability}a?$", kernel.ptx, re.MULTILINE)
    (version,) = re.findall(r"^\.version (\d+)\.(\d+)$", kernel.ptx, re.MULTILINE)
    assert int("".join(version)) == GPUS[spec.capability].ptx <= 87  # a driver of CUDA 13.0 takes 9.0 at most
    assert f".visible .entry {kernel.entry}(" in kernel.ptx
    parameters = re.findall(rf"\.param \.([a-z]\d+)[^\n]* {kernel.entry}_param_(\d+)", kernel.ptx)
    expected = ["u32" if of == "i32" else "u64" for _, of in spec.arguments]
    assert [of for of, _ in parameters] == expected
    assert [int(i) for _, i in parameters] == list(range(len(expected)))
    assert f".reqntid {kernel.threads}" in kernel.ptx
    assert kernel.architecture == GPUS[spec.capability].architecture
    assert kernel.cubin[:4] == b"\x7fELF" and struct.unpack_from("<H", kernel.cubin, 18) == (EM_CUDA,)
    assert kernel.shared_memory <= GPUS[spec.capability].shared_memory
    here = str(Path(__file__).resolve().parents[3]).encode()
    for code in (kernel.ptx.encode(), kernel.cubin):
        assert here not in code and b"attention_kernels.py" not in code and b"/tmp" not in code


def test_a_layer_s_kernels(tmp_path):
    kernels = compile_layer(SMOLLM2, 90)
    for kernel in kernels.all():
        check(kernel)
    assert [k.spec.kernel for k in kernels.all()] == [
        "kv_write",
        "paged_attention",
        "paged_attention",
        "combine_splits",
    ]
    (prefill,), (decode,) = kernels.prefill, kernels.decode
    assert prefill.constant("SPLIT_KEYS") == 0 and decode.constant("SPLIT_KEYS") == 512
    assert "mma" in prefill.ptx and "mma" in decode.ptx
    again = compile_kernel(decode.spec)
    assert again == decode  # byte for byte

    written = write_kernels(tmp_path, kernels.all())
    assert sorted({p.suffix for p in written}) == [".cubin", ".json", ".ptx"] and len(written) == 12
    for kernel in kernels.all():
        assert read_kernel(tmp_path, kernel.spec.stem) == kernel
    (tmp_path / f"{again.spec.stem}.json").write_text("{}")
    with pytest.raises(BundleError, match="can't be read"):
        read_kernel(tmp_path, again.spec.stem)
    with pytest.raises(BundleError, match="can't be read"):
        read_kernel(tmp_path, replace(again.spec, capability=80).stem)
    other = f"{kernels.write.spec.stem}.json"
    (tmp_path / f"{again.spec.stem}.json").write_bytes((tmp_path / other).read_bytes())
    with pytest.raises(BundleError, match="something else"):
        read_kernel(tmp_path, again.spec.stem)


@pytest.mark.parametrize(("capability", "pointer"), [(80, "*u8"), (120, "*fp8e4nv")])
def test_an_fp8_cache_is_read_by_instructions_where_there_are_some(capability, pointer):
    shape = replace(SMOLLM2, dtype="bf16", cache="fp8", softcap=30.0, sinks=True, slopes=True, window=64)
    (kernel,) = compile_attention(shape, capability, split_keys=512)
    check(kernel)
    assert dict(kernel.spec.arguments)["k_cache"] == pointer
    assert ("e4m3x2" in kernel.ptx) == (capability == 120)
    check(compile_kernel(write_spec(shape, capability)))


SHAPES = [
    SMOLLM2,
    AttentionShape(32, 8, 128, 128, 32, "bf16", "fp8", 0.1, window=4096, softcap=50.0, sinks=True, slopes=True),
    AttentionShape(8, 1, 80, 80, 32, "f16", "int8", 0.1),
    AttentionShape(4, 4, 192, 128, 16, "bf16", "bf16", 0.1),
    AttentionShape(8, 2, 128, 128, 32, "f32", "f32", 0.1),
    AttentionShape(71, 1, 64, 64, 32, "bf16", "bf16", 0.1),
    AttentionShape(8, 2, 256, 256, 32, "bf16", "int8", 0.1),
]


@pytest.mark.parametrize("capability", list(GPUS))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_gpu(shape, capability):
    for kernel in compile_layer(shape, capability, shared_memory=48 * 1024).all():
        check(kernel)
        assert kernel.shared_memory <= 48 * 1024


@pytest.mark.parametrize("capability", list(GPUS))
@pytest.mark.parametrize("name", ["convolution, 4 taps", "scan, Mamba", "scan, Mamba-2", "delta rule 128", "KDA 128"])
def test_recurrences_on_every_gpu(name, capability):
    kernel = compile_kernel(step_specs.spec_of(name, capability))
    check(kernel)
    assert kernel.stack == 0


@pytest.mark.parametrize("capability", list(GPUS))
def test_the_kernel_in_front_of_a_step_on_every_gpu(capability):
    words = DeviceArray(0, np.dtype(np.int32), (1,))
    kernel = compile_kernel(place_call(dict.fromkeys(PLACED, words), 1, 1).spec(capability))
    check(kernel)
    assert kernel.stack == 0


@pytest.mark.parametrize("capability", list(GPUS))
def test_every_gpu_s_largest_tile(capability):
    for split_keys in (512, 0):
        check(compile_attention(SHAPES[1], capability, split_keys=split_keys)[0])


@pytest.mark.matrix
@pytest.mark.parametrize("capability", list(GPUS))
def test_a_kernel_for_each_gpu(capability):
    check(compile_kernel(attention_spec(SMOLLM2, capability, Tile(1, 16, 32, 4, 2), 512)))


@pytest.mark.matrix
@pytest.mark.parametrize("capability", list(GPUS))
def test_kernels_of_two_caches_for_each_gpu(capability):
    shape = AttentionShape(8, 2, 128, 96, 32, "bf16", "k4v4", 0.1)
    check(compile_kernel(write_spec(shape, capability)))
    for tile, split_keys in ((Tile(1, 16, 32, 4, 2), 512), (Tile(8, 32, 32, 4, 2), 0)):
        check(compile_kernel(attention_spec(shape, capability, tile, split_keys)))


@pytest.mark.parametrize("capability", [100, 120])
def test_machine_code_is_for_the_family_and_ptx_is_not(capability):
    """Tensor cores of 10.0 are in it; the PTX keeps an old version, for drivers that know no families."""
    kernel = compile_attention(SMOLLM2, capability, split_keys=0)[0]
    assert ("tcgen05.mma" in kernel.ptx) == (capability == 100)
    assert kernel.for_family and f"sm_{capability}f".encode() in kernel.cubin  # the assembler's arguments are in it
    assert f".target sm_{capability}a" in kernel.ptx


def test_an_unknown_gpu_is_refused_with_those_known():
    for make in (lambda: compile_layer(SMOLLM2, 75), lambda: combine_spec(SMOLLM2, 75)):
        with pytest.raises(TargetError, match=r"capability 75: .* known are 80, 86, 89, 90, 100, 120") as refused:
            make()
        assert "bfloat16" in str(refused.value.hint)


def test_what_does_not_fit_is_refused():
    shape = replace(SMOLLM2, head_size=1024, value_size=1024, dtype="f32", cache="f32")
    calls = []

    def too_large(spec):
        calls.append(spec)
        return CompiledKernel(spec, "kernel", "", b"", 100 * 1024, "a stand-in: the real one takes a minute")

    with pytest.raises(TargetError, match=r"1024 elements of f32 don't fit \d+ bytes"):
        compile_attention(shape, 86, split_keys=0, compiler=too_large)
    assert len(calls) > 1 and len(set(calls)) == len(calls)


@pytest.mark.parametrize(("capability", "keys"), [(80, 16), (86, 16), (90, 32)])
def test_code_for_8_0_fits_8_6_and_8_9(capability, keys):
    """A head of 256 took 102,400 bytes of shared memory for 8.0, and 8.6 has 101,376."""

    def stand_in(spec):
        shared_bytes = {64: 200_000, 32: 102_400, 16: 60_000}[spec.tile.keys]
        return CompiledKernel(
            spec, "kernel", "", b"", shared_bytes if capability != 90 else shared_bytes * 2, "a stand-in"
        )

    shape = replace(SMOLLM2, head_size=256, value_size=256)
    assert choose_tile(shape, capability, decode=False, compiler=stand_in).keys == keys


def test_without_triton_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(MissingDependencyError, match="needs triton") as refused:
        compile_kernel(combine_spec(SMOLLM2, 90))
    assert "enginewright[cuda]" in str(refused.value.hint)


def test_an_interpreter_compiles_nothing(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(TargetError, match="interprets kernels"):
        compile_kernel(combine_spec(SMOLLM2, 90))


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_are_said_in_the_order_of_the_kernel(name):
    declared = [name for name in kernel_function(name).arg_names if name.islower()]  # constants are in capitals
    assert declared == list(ARGUMENTS[name])
