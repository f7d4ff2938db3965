"""Draws tokens on a GPU from logits in its memory, with kernels that a bundle contains. Only token ids are copied to
the CPU.

It doesn't need torch. The kernels implement the cpu target's sampler with the same random numbers, but add in another
order.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from enginewright.plugins.gpu.tiles import number_of
from enginewright.runtime.shared.contracts import Int32Array, SamplingBatch
from enginewright.runtime.shared.errors import TargetError

from .call import DeviceArray
from .carried_kernels import CarriedKernels
from .cuda_driver import Device
from .sampling import (
    chosen_rows,
    drawing_of,
    each_sampling_call,
    lacks_of,
    missing_kernels,
    option_arrays,
    option_words,
    packed_lists,
    places_of,
    write_masks,
    write_options,
)
from .sampling_calls import Drawing, SamplingMemory, sampling_calls
from .tiles import GPUS, code_for

MOST_BOUND = 256
"""The most combinations of a number of rows and options for which bound launches are cached."""

_FLOAT32 = np.dtype(np.float32)


class GpuSampler:
    """Draws tokens from rows of float32 logits.

    Args:
        device: the GPU, open for this thread.
        folder: the folder of the bundle's kernels.
        capability: the compute capability for which they were compiled; 80 for 8.0.
        rows: the most rows per launch; more rows are drawn in several launches.
        vocab: the number of tokens in the vocabulary (V).

    Attributes:
        lacks: the sampling parameters that can't be used, because the older bundle doesn't have their kernels.
        masks: True if the bundle has the kernel for masks of allowed tokens.

    Raises:
        BundleError: a kernel is missing or damaged.
        TargetError: the driver rejects a kernel.
        CapacityError: there is no memory for the kernels' intermediate results.
    """

    def __init__(self, device: Device, folder: Path, capability: int, rows: int, vocab: int) -> None:
        self._device, self._vocab = device, vocab
        self._rows = -(-rows // 4) * 4  # parts begin at multiples of 16 bytes
        self._kernels = CarriedKernels(device, folder, capability)
        missing = missing_kernels(folder, capability)
        self.lacks, self.masks = lacks_of(missing), "mask" not in missing
        for call in each_sampling_call(DeviceArray(0, _FLOAT32, (self._rows, vocab))):
            if call.kernel not in missing:
                self._kernels.bind(call)
        self._memory = SamplingMemory(self._rows, vocab, self._new)
        words = places_of(option_words(self._rows))[1]
        self._staged, self._options = device.pinned(4 * words), device.allocate(4 * words)
        self._staged_masks = device.pinned(4 * self._memory.masks.shape[0])
        self._lists = self._new((256,), "int32")
        self._bound: OrderedDict[tuple[int, int, Drawing], list[Callable[[], object]]] = OrderedDict()

    def draw(self, logits: int, sampling: SamplingBatch) -> Int32Array:
        """Draws a token for each row of the logits [R, V] at the address ``logits``; NO_TOKEN for a row that can't be
        drawn from.

        It waits for the stream. Raises RequestError for an option that is out of range, as the cpu target's sampler
        does.
        """
        count = len(sampling.temperature)
        tokens = np.empty(count, np.int32)
        for start in range(0, count, self._rows):
            some = np.arange(start, min(start + self._rows, count))
            rows = DeviceArray(logits + 4 * start * self._vocab, _FLOAT32, (len(some), self._vocab))
            tokens[some] = self._draw(rows, chosen_rows(sampling, some))
        return tokens

    def _draw(self, logits: DeviceArray, sampling: SamplingBatch) -> Int32Array:
        rows = logits.shape[0]
        places, words = places_of(option_words(rows))
        staged = self._staged[: 4 * words]
        write_options(staged.view(np.int32), places, sampling, rows)
        self._device.upload_pinned(self._options, staged)
        drawing = drawing_of(sampling)
        if drawing.penalties or drawing.edits:
            self._upload_lists(*packed_lists(sampling))
        if drawing.masks and sampling.masks is not None:  # the step is on the stream while they are computed
            words = write_masks(self._staged_masks.view(np.int32), sampling.masks)
            self._device.upload_pinned(self._memory.masks.address, self._staged_masks[: 4 * words])
        key = (logits.address, rows, drawing)
        if key not in self._bound:
            options = {**option_arrays(self._options, places, rows), "lists": self._lists}
            calls = sampling_calls(logits, options, self._memory, drawing)
            self._bound[key] = [self._kernels.bind(call) for call in calls]
            if len(self._bound) > MOST_BOUND:
                self._bound.popitem(last=False)
        self._bound.move_to_end(key)
        for launch in self._bound[key]:
            launch()
        tokens = np.empty(rows, np.int32)
        self._device.download(tokens, self._memory.tokens.address)
        return tokens

    def _upload_lists(self, lists: Int32Array, words: int) -> None:
        """Uploads the packed lists of tokens, with room for ``words`` 4-byte words.

        If their memory has to grow, launches that were bound to the old memory are dropped.
        """
        if words > self._lists.shape[0]:
            self._device.synchronize()
            self._device.free(self._lists.address)
            self._lists = self._new((1 << (words - 1).bit_length(),), "int32")
            for key in [key for key in self._bound if key[2].penalties or key[2].edits]:
                del self._bound[key]
        self._device.upload(self._lists.address, lists)

    def _new(self, shape: tuple[int, ...], dtype: str) -> DeviceArray:
        """Allocates a zeroed array on the device."""
        of = np.dtype(dtype)
        nbytes = of.itemsize * int(np.prod(shape, dtype=np.int64))
        address = self._device.allocate(nbytes)
        self._device.zero(address, nbytes)
        return DeviceArray(address, of, shape)


@dataclass(frozen=True)
class OpenedSampler:
    """The sampler of a target, and a note ``where`` on where tokens are drawn, and why. ``sampler`` is None if the CPU
    draws.
    """

    sampler: GpuSampler | None
    where: str

    @property
    def lacks(self) -> tuple[str, ...]:
        """The sampling parameters that can't be used with this sampler."""
        return () if self.sampler is None else self.sampler.lacks

    @property
    def masks(self) -> bool:
        """True if masks of allowed tokens can be used, which is always so on the CPU."""
        return self.sampler is None or self.sampler.masks


def open_sampler(device: Device, folder: Path, rows: int, vocab: int, logits: Iterable[np.dtype[Any]]) -> OpenedSampler:
    """Opens a sampler on the GPU, if logits and kernels allow it.

    Args:
        device, folder, rows, vocab: as for ``GpuSampler``.
        logits: the type of the logits of each engine.

    Raises:
        BundleError: a kernel is damaged.
        CapacityError: there is no memory for the kernels' intermediate results.
    """
    if any(of != _FLOAT32 for of in logits):
        return OpenedSampler(None, "on the CPU: logits aren't 32-bit floats")
    if (capability := _carried(folder, device.gpu.capability, vocab)) is None:
        return OpenedSampler(None, f"on the CPU: the bundle has no kernels for it on {device.gpu.capability}")
    try:
        return OpenedSampler(GpuSampler(device, folder, capability, rows, vocab), "on the GPU")
    except TargetError as e:
        return OpenedSampler(None, f"on the CPU: {e.message}")


def _carried(folder: Path, capability: str, vocab: int) -> int | None:
    """Returns the compute capability whose kernels in the folder run best on a GPU of ``capability``; None if none
    run.
    """
    any_call = next(each_sampling_call(DeviceArray(0, _FLOAT32, (1, vocab))))
    there = [of for of in GPUS if (folder / f"{any_call.spec(of).stem}.json").is_file()]
    return code_for(number_of(capability), there)
