"""The CUDA driver through ctypes, beside torch in one process: memory, graphs, and kernels that were compiled ahead.

Not run yet: no GPU was at hand.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from enginewright.plugins.gpu.cuda_driver import Device, load_cuda
from enginewright.plugins.gpu.plugin_kernels import write_launch
from enginewright.plugins.gpu.specs import AttentionShape, write_spec


@pytest.fixture
def device() -> Iterator[Device]:
    cuda = load_cuda()
    opened = cuda.open(cuda.gpus[0])
    yield opened
    opened.close()


def test_the_gpu_is_the_one_that_torch_sees(device: Device, capability: int) -> None:
    assert device.gpu.name == torch.cuda.get_device_name(0)
    assert device.gpu.capability == f"{capability // 10}.{capability % 10}"
    assert device.gpu.memory_bytes == torch.cuda.get_device_properties(0).total_memory
    assert 0 < device.free_bytes() <= device.gpu.memory_bytes


def test_memory(device: Device) -> None:
    values = np.random.default_rng(0).standard_normal(1 << 20, np.float32)
    address = device.allocate(values.nbytes)
    for start in range(0, len(values), 1 << 18):  # the array may change as soon as it was uploaded
        part = values[start : start + (1 << 18)].copy()
        device.upload(address + 4 * start, part)
        part[:] = 0
    device.zero(address + 400, 400)
    copied = np.empty_like(values)
    device.download(copied, address)
    values[100:200] = 0
    np.testing.assert_array_equal(copied, values)
    device.free(address)


def test_a_kernel_in_a_graph(device: Device, capability: int) -> None:
    """Keys and values go to their slots, once by a launch and then by a graph that reads what has changed."""
    pytest.importorskip("triton", reason="Triton is not installed: pip install 'enginewright[triton]'")
    from enginewright.plugins.gpu.compile_ahead import compile_kernel

    shape = AttentionShape(3, 3, 64, 64, 32, "f16", "f16", 1.0)
    kernel = compile_kernel(write_spec(shape, capability))
    tokens, blocks = 5, 2
    rng = np.random.default_rng(1)
    run = write_launch(kernel, shape, tokens, blocks)
    sizes = {"k": tokens * 192, "v": tokens * 192, "slots": 2 * tokens}
    sizes |= {"k_cache": blocks * 32 * 192, "v_cache": blocks * 32 * 192}
    at = {name: device.allocate(2 * n) for name, n in sizes.items()}
    at |= {f"{name}_before": at[name] for name in ("k_cache", "v_cache")}
    handle = device.load_kernel(kernel.cubin, kernel.entry, kernel.shared_memory)
    integers = iter(run.integers)
    arguments = [np.int32(next(integers)) if of == "i32" else at[name] for name, of in kernel.spec.arguments]

    def launch() -> None:
        device.launch(handle, run.grid, run.threads, run.shared_memory, arguments)

    graph = None
    for _ in range(3):
        new = {name: rng.standard_normal((tokens, 192)).astype(np.float16) for name in "kv"}
        slots = rng.permutation(blocks * 32)[:tokens].astype(np.int32)
        for name, array in {**new, "slots": slots}.items():
            device.upload(at[name], array)
        for name in ("k_cache", "v_cache"):
            device.zero(at[name], 2 * sizes[name])
        if graph is None:
            launch()
            graph = device.capture(launch)
        else:
            graph.launch()
        for name in "kv":
            products = np.empty((blocks * 32, 192), np.float16)
            device.download(products, at[f"{name}_cache"])
            expected = np.zeros_like(products)
            expected[slots] = new[name]
            np.testing.assert_array_equal(products, expected)
    assert graph is not None
    graph.close()
