"""Launches the attention kernels that a bundle contains, for ``ew.kv_write`` and ``ew.paged_attention``.

Grids and arguments are those of TensorRT's plugins (``plugins.gpu.plugin_kernels``), which launch the same code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from enginewright.runtime.shared.contracts import CacheGroup
from enginewright.runtime.shared.step_schema import ATTENTION_PORTS, SLOTS, ports_in

from ..gpu.carried_kernels import load_carried, read_by_stem
from ..gpu.compile_ahead import CompiledKernel
from ..gpu.cuda_driver import Argument, Device
from ..gpu.plugin_kernels import Launch, attention_launch, combine_launch, write_launch
from ..gpu.specs import AttentionShape, splits_of
from ..gpu.tiles import SCALED_FORMATS, FloatType
from ..steps.packed_steps import StepShape
from ..steps.paged_section import cache_tensors
from .engine_steps import StepMemory
from .segments import AttentionKernels, AttentionStep


@dataclass(frozen=True)
class _Loaded:
    kernel: CompiledKernel
    handle: int


class AttentionLaunches:
    """The loaded attention kernels of some layers.

    Args:
        kernels: the stems of the kernels' files.
        folder: the folder of these files.
        device: the GPU, open for this thread.

    Raises:
        BundleError: a kernel can't be read.
        TargetError: the driver rejects a kernel.
    """

    def __init__(self, kernels: AttentionKernels, folder: Path, device: Device) -> None:
        self._device = device
        self._write, self._prefill, self._decode, self._combine = (
            self._load(folder, stem) for stem in (kernels.write, kernels.prefill[0], kernels.decode[0], kernels.combine)
        )

    def scratch_bytes(self, heads: int, group: CacheGroup, tokens: int, blocks: int) -> tuple[int, int]:
        """Returns the bytes of the partial results of splits for ``tokens`` tokens, and of their logarithms of sums.

        ``heads`` is the number of query heads, ``blocks`` the width of the block tables.
        """
        splits = self._splits(group, blocks)
        return 4 * tokens * heads * splits * group.value_head_size, 4 * tokens * heads * splits

    def launch(
        self,
        step: AttentionStep,
        shape: StepShape,
        heads: int,
        dtype: FloatType,
        group: CacheGroup,
        memory: StepMemory,
        buffers: Mapping[str, int],
    ) -> None:
        """Puts a write and an attention on the stream.

        Args:
            step: the attention step, with its layer.
            shape: the sizes of the whole step. Steps of one token a request attend to their contexts in parts.
            heads, dtype: the number of heads and the type of the queries.
            group: the layer's cache group.
            memory: the memory of all steps.
            buffers: addresses of activations, of "sinks" and "slopes", and of the scratch "parts" and "lse".
        """
        of = AttentionShape(
            heads, *group.sizes, dtype=dtype, cache=SCALED_FORMATS.get(group.dtype, dtype), scale=step.scale
        )
        inputs, pool = memory.addresses, memory.blocks[group.name]
        caches = {tensor.argument: memory.caches[tensor.name].address for tensor in cache_tensors(group, step.layer)}
        arrays = {
            **caches,
            **{f"{name}_before": address for name, address in caches.items()},
            **{"k": buffers[step.k], "v": buffers[step.v], "q": buffers[step.q], "out": buffers[step.out]},
            **{"sinks": buffers["sinks"], "slopes": buffers["slopes"]},
            **ports_in(inputs, (SLOTS, *ATTENTION_PORTS), group.name),
        }
        self._run(self._write, write_launch(self._write.kernel, of, shape.tokens, pool), arrays)
        if not shape.decodes:
            run = attention_launch(self._prefill.kernel, of, shape.tokens, shape.requests, shape.blocks, pool)
            self._run(self._prefill, run, arrays)
            return
        run = attention_launch(self._decode.kernel, of, shape.tokens, shape.requests, shape.blocks, pool)
        parts = {"parts": buffers["parts"], "lse": buffers["lse"]}
        self._run(self._decode, run, arrays | {"out": parts["parts"], "lse": parts["lse"]})
        combine = combine_launch(self._combine.kernel, heads, shape.tokens, self._splits(group, shape.blocks))
        self._run(self._combine, combine, arrays | parts)

    def _splits(self, group: CacheGroup, blocks: int) -> int:
        split_keys = self._decode.kernel.constant("SPLIT_KEYS")
        assert isinstance(split_keys, int)
        return splits_of(blocks, group.block_size, split_keys)

    def _load(self, folder: Path, stem: str) -> _Loaded:
        kernel = read_by_stem(folder, stem)
        return _Loaded(kernel, load_carried(self._device, folder, kernel)[0])

    def _run(self, loaded: _Loaded, run: Launch[int], given: Mapping[str, int]) -> None:
        integers = iter(run.integers)
        arguments: list[Argument] = [
            np.int32(next(integers)) if of == "i32" else given[name] for name, of in loaded.kernel.spec.arguments
        ]
        self._device.launch(loaded.handle, run.grid, run.threads, run.shared_memory, arguments)
