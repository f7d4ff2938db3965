"""Tokens drawn on a GPU from logits that lie there, by kernels that a bundle carries: only ids come back.

No torch is needed. Kernels mean what the cpu target's sampler means, and draw with the same random numbers; sums are
in another order.
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
    write_options,
)
from .sampling_calls import Drawing, SamplingMemory, sampling_calls
from .tiles import GPUS, code_for

MOST_BOUND = 256
"""The most combinations of rows and options whose launches are kept."""

_FLOAT32 = np.dtype(np.float32)


class GpuSampler:
    """Draws tokens from rows of float32 logits.

    Args:
        device: the GPU, open for this thread.
        folder: the folder of the bundle's kernels.
        capability: the capability that they were compiled for; 80 for 8.0.
        rows: the most rows that are drawn from at once; more are drawn from in parts.
        vocab: tokens of the vocabulary (V).

    Attributes:
        lacks: sampling parameters whose kernels are missing from the bundle, which is older.

    Raises:
        BundleError: a kernel is missing or damaged.
        TargetError: the driver refuses one.
        CapacityError: there is no memory for what the kernels leave for one another.
    """

    def __init__(self, device: Device, folder: Path, capability: int, rows: int, vocab: int) -> None:
        self._device, self._vocab = device, vocab
        self._rows = -(-rows // 4) * 4  # parts begin at multiples of 16 bytes
        self._kernels = CarriedKernels(device, folder, capability)
        missing = missing_kernels(folder, capability)
        self.lacks = lacks_of(missing)
        for call in each_sampling_call(DeviceArray(0, _FLOAT32, (self._rows, vocab))):
            if call.kernel not in missing:
                self._kernels.bind(call)
        self._memory = SamplingMemory(self._rows, vocab, self._new)
        words = places_of(option_words(self._rows))[1]
        self._staged, self._options = device.pinned(4 * words), device.allocate(4 * words)
        self._lists = self._new((256,), "int32")
        self._bound: OrderedDict[tuple[int, int, Drawing], list[Callable[[], object]]] = OrderedDict()

    def draw(self, logits: int, sampling: SamplingBatch) -> Int32Array:
        """A token for each row of logits at an address [R, V]; NO_TOKEN where there is none. Waits for the stream.

        Raises RequestError for an option out of range, as the cpu target's sampler does.
        """
        count = len(sampling.temperature)
        tokens = np.empty(count, np.int32)
        for start in range(0, count, self._rows):
            some = np.arange(start, min(start + self._rows, count))
            options = sampling if len(some) == count else chosen_rows(sampling, some)
            tokens[some] = self._draw(
                DeviceArray(logits + 4 * start * self._vocab, _FLOAT32, (len(some), self._vocab)), options
            )
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
        """Lists of tokens, in memory that grows; then what was bound to it is bound again."""
        if words > self._lists.shape[0]:
            self._device.synchronize()
            self._device.free(self._lists.address)
            self._lists = self._new((1 << (words - 1).bit_length(),), "int32")
            for key in [key for key in self._bound if key[2].penalties or key[2].edits]:
                del self._bound[key]
        self._device.upload(self._lists.address, lists)

    def _new(self, shape: tuple[int, ...], dtype: str) -> DeviceArray:
        """Allocates a zeroed array on the device, for `SamplingMemory`."""
        of = np.dtype(dtype)
        nbytes = of.itemsize * int(np.prod(shape, dtype=np.int64))
        address = self._device.allocate(nbytes)
        self._device.zero(address, nbytes)
        return DeviceArray(address, of, shape)


@dataclass(frozen=True)
class OpenedSampler:
    """``sampler`` is None where the CPU draws; ``where`` says for people where that is, and why."""

    sampler: GpuSampler | None
    where: str


def open_sampler(device: Device, folder: Path, rows: int, vocab: int, logits: Iterable[np.dtype[Any]]) -> OpenedSampler:
    """A sampler on the GPU, if there can be one.

    Args:
        device, folder, rows, vocab: see ``GpuSampler``.
        logits: their types, of each engine.

    Raises BundleError for a kernel that is damaged, and CapacityError.
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
    """The capability that has kernels there which run best on a GPU of ``capability``; see ``tiles.code_for``."""
    any_call = next(each_sampling_call(DeviceArray(0, _FLOAT32, (1, vocab))))
    there = [of for of in GPUS if (folder / f"{any_call.spec(of).stem}.json").is_file()]
    return code_for(number_of(capability), there)
