"""The memory of slots, and runs of a session over it. The input and the output for a cache are the same memory."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from enginewright.runtime.shared.contracts import FloatArray, Int32Array
from enginewright.runtime.shared.dtypes import DTYPES
from enginewright.runtime.shared.errors import BundleError, CapacityError

from ...steps.linear_io import (
    INPUT_IDS,
    LOGITS,
    POSITION_IDS,
    ROWS,
    WRITE_INDEX,
    LinearIo,
    cache_names,
)
from ...steps.slots import SlotRun, mask
from .session import run_options, run_session

MOST_BINDINGS = 16
"""The most bindings that are cached for runs of the same slots and sizes, which are mostly decodes. A binding holds
small arrays, but no cache.
"""

LENGTH_STEP = 64
"""The least step of a slot's length. Slots grow by an eighth to a quarter: copying their tokens then costs less than
attention over unused positions would.
"""


class SlotCaches:
    """A session, and its caches [slots, Nkv, C, D] for the keys and the values of each layer. Implements
    ``slot_steps.Slots``.

    Masked attention computes all positions of a slot. So slots have only ``length`` positions, as many as the longest
    request needs; the length grows up to C and shrinks again. It is always C on a device other than the CPU, for files
    of a fixed size, and without a mask, since attention then reads only used positions.

    The memory is set to zero first, since masked values are multiplied by 0 and must be finite.

    Args:
        session: an ``onnxruntime.InferenceSession`` in the linear form.
        io: the file's inputs and outputs.
        path: the file's path.
        slots, capacity: the number of slots, and their positions (C).
        vocab: the columns of the logits.
        device: onnxruntime's name of the device for caches.
        module: onnxruntime.

    Raises:
        BundleError: the file's inputs or outputs differ from ``io``.
        CapacityError: there isn't enough memory, or the file needs slots of another fixed size.
    """

    def __init__(
        self,
        session: Any,
        io: LinearIo,
        path: Path,
        *,
        slots: int,
        capacity: int,
        vocab: int,
        device: str,
        module: ModuleType,
    ) -> None:
        self.session = session
        self.capacity = capacity
        self._vocab = vocab
        self._device = device
        self._module = module
        # Of prompts; decodes have none. onnxruntime's binding looks for an entry in options, and raises and catches.
        self._options = run_options(module)
        self._bindings: OrderedDict[tuple[int, int, int, int], _Bound] = OrderedDict()
        self._inputs = {value.name for value in session.get_inputs()}
        self._masks = {group.mask: group.window for group in io.cache_groups if group.mask in self._inputs}
        fixed = _check_names(session, io, path, capacity)
        self._fixed = fixed or device != "cpu" or not self._masks
        self.length = capacity if self._fixed else self._length_for(1)
        self._memory: list[_Memory] = []
        for group in io.cache_groups:
            for layer in group.layers:
                for (past, present), plane in zip(cache_names(layer), group.planes, strict=True):
                    shape = (slots, plane.heads, self.length, plane.size)
                    self._memory.append(_Memory(past, present, shape, group.dtype, device, module))

        self._held = np.zeros(slots, np.int64)  # tokens of each slot's latest request

    def fit(self, slot_of: Int32Array, kv_len: Int32Array) -> None:
        """Makes slots long enough for requests in ``slot_of`` [B] with ``kv_len`` [B] tokens.

        The caches in all other slots that were used are kept. Raises CapacityError if there isn't enough memory.
        """
        self._held[slot_of] = kv_len
        length = self.length if self._fixed else self._length_for(int(self._held.max()) + 1)
        if length <= self.length < 2 * length:
            return
        self._bindings.clear()
        held = [(slot, int(self._held[slot])) for slot in np.flatnonzero(self._held).tolist()]
        try:
            for memory in self._memory:
                memory.resize(length, held)
        except CapacityError:
            for memory in self._memory:  # of one length again; the engine's requests are lost
                memory.resize(self.length, ())
            raise
        self.length = length

    def _length_for(self, needed: int) -> int:
        """Returns the length of slots for ``needed`` tokens, rounded up so that it rarely changes."""
        step = max(LENGTH_STEP, 1 << max(needed.bit_length() - 3, 0))
        return min(-(-needed // step) * step, self.capacity)

    def run(self, run: SlotRun) -> FloatArray:
        """Runs the model. Returns the logits of the tokens ``run.wanted``, [R, V], valid until the next run."""
        batch, length = run.ids.shape
        key = (run.first, batch, length, len(run.wanted))
        bound = self._bindings.pop(key, None) or self._bind(*key)
        self._bindings[key] = bound
        if len(self._bindings) > MOST_BINDINGS:
            self._bindings.popitem(last=False)
        bound.arrays[INPUT_IDS][:] = run.ids
        # What isn't a request's may stand behind the last position that the model has.
        np.minimum(run.places, self.capacity - 2, out=bound.arrays[POSITION_IDS])
        bound.arrays[WRITE_INDEX][:] = run.places[:, 0]
        bound.arrays[ROWS][: len(run.wanted)] = run.wanted
        for name, window in self._masks.items():
            mask(run.places, self.length, window, out=bound.arrays[name])
        run_session(self.session, bound.binding, self._options if length > 1 else None, self._module)
        logits: FloatArray = bound.arrays[LOGITS][: len(run.wanted)]
        return logits

    def forget(self, slots: Int32Array) -> None:
        """Sets slots to zero, so that NaN or infinity in them doesn't affect their next requests."""
        for memory in self._memory:
            memory.forget(slots)

    def _bind(self, first: int, batch: int, length: int, rows: int) -> _Bound:
        """Binds the inputs and outputs of runs over ``batch`` slots from ``first`` on, with ``length`` tokens each and
        ``rows`` rows of logits.

        Without rows, one unused row is computed, because some providers refuse empty arrays.
        """
        rows = max(rows, 1)
        binding = self.session.io_binding()
        arrays: dict[str, npt.NDArray[Any]] = {
            INPUT_IDS: np.zeros((batch, length), np.int64),
            POSITION_IDS: np.zeros((batch, length), np.int64),
            WRITE_INDEX: np.zeros(batch, np.int64),
            ROWS: np.zeros(rows, np.int64),
        }
        for name in self._masks:
            arrays[name] = np.zeros((batch, 1, length, self.length), np.bool_)
        for name in self._inputs & set(arrays):
            array = arrays[name]
            binding.bind_input(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
        logits = np.empty((rows, self._vocab), np.float32)
        binding.bind_output(LOGITS, "cpu", 0, np.float32, logits.shape, logits.ctypes.data)
        for memory in self._memory:
            shape, address = (batch, *memory.row), memory.address(first)
            binding.bind_input(memory.past, self._device, 0, memory.type, shape, address)
            binding.bind_output(memory.present, self._device, 0, memory.type, shape, address)
        return _Bound(binding, arrays | {LOGITS: logits})


def _check_names(session: Any, io: LinearIo, path: Path, capacity: int) -> bool:
    """Checks that a file has the inputs and outputs of ``io``. Returns True if the file fixes the length of slots.

    The file may lack inputs, except for caches and token ids. Raises BundleError for other differences, CapacityError
    if it fixes another length than ``capacity``.
    """
    caches = [pair for group in io.cache_groups for layer in group.layers for pair in cache_names(layer)]
    pasts, presents = ({pair[i] for pair in caches} for i in range(2))
    small = {INPUT_IDS, POSITION_IDS, WRITE_INDEX, ROWS, *(group.mask for group in io.cache_groups)}
    inputs = {value.name: value.shape for value in session.get_inputs()}
    outputs = {value.name for value in session.get_outputs()}
    wrong = sorted((set(inputs) - small - pasts) | (outputs - presents - {LOGITS}))
    missing = sorted((pasts - set(inputs)) | (presents - outputs) | ({INPUT_IDS, ROWS, LOGITS} - set(inputs) - outputs))
    if wrong or missing:
        what = [f"has {', '.join(wrong)} of which it says nothing"] if wrong else []
        what += [f"lacks {', '.join(missing)}"] if missing else []
        raise BundleError(
            f"{path}: not what the target's io section says: it {' and '.join(what)}", hint="Export the bundle again."
        )
    sizes = {size for name in pasts if isinstance(size := inputs[name][2], int)}
    for size in sizes:
        if size != capacity:
            raise CapacityError(
                f"context: {path} was made for slots of {size} tokens, and {capacity} are asked for",
                hint=f"Open the model with a context of {size - 1} tokens.",
            )
    return bool(sizes)


class _Bound:
    """A binding, and the arrays other than caches that it reads and writes."""

    def __init__(self, binding: Any, arrays: dict[str, npt.NDArray[Any]]) -> None:
        self.binding = binding
        self.arrays = arrays


class _Memory:
    """The memory of one layer's keys or values: [slots, Nkv, length, D]."""

    def __init__(
        self, past: str, present: str, shape: tuple[int, ...], dtype: str, device: str, module: ModuleType
    ) -> None:
        self.past, self.present = past, present
        kind, self.type = DTYPES[dtype].numpy, DTYPES[dtype].onnx
        self._bytes_per_place = shape[3] * kind.itemsize
        self._shape = shape
        zeros = self._zeros()
        if device == "cpu":
            self._kept: Any = zeros
            self._address = int(zeros.ctypes.data)
        else:
            self._kept = module.OrtValue.ortvalue_from_numpy(zeros, device, 0)
            self._address = int(self._kept.data_ptr())

    @property
    def row(self) -> tuple[int, ...]:
        """The shape of one slot: [Nkv, length, D]."""
        return self._shape[1:]

    def forget(self, slots: Int32Array) -> None:
        if isinstance(self._kept, np.ndarray):
            self._kept[slots] = 0
            return
        there = self._kept.numpy().copy()  # onnxruntime copies a device's memory as a whole; bindings stay
        there[slots] = 0
        self._kept.update_inplace(there)

    def resize(self, length: int, held: Iterable[tuple[int, int]]) -> None:
        """Changes the length of slots, in the CPU's memory. ``held`` has (slot, number of tokens) for the slots whose
        contents stay.
        """
        old = self._kept
        most = min(length, self._shape[2]) - 1  # the last place is nobody's
        self._shape = (*self._shape[:2], length, self._shape[3])
        new = self._zeros()
        for slot, tokens in held:  # the others' memory isn't touched
            new[slot, :, : min(tokens, most)] = old[slot, :, : min(tokens, most)]
        self._kept, self._address = new, int(new.ctypes.data)

    def address(self, slot: int) -> int:
        """Returns the address of a slot's memory."""
        return self._address + slot * math.prod(self._shape[1:3]) * self._bytes_per_place

    def _zeros(self) -> npt.NDArray[np.uint8]:
        """Allocates zeros [slots, Nkv, length, bytes of D], whose memory is used only once it is written. Raises
        CapacityError.
        """
        try:
            return np.zeros((*self._shape[:3], self._bytes_per_place), np.uint8)
        except MemoryError as e:
            raise CapacityError(
                f"memory: {self._shape[0]} slots of {self._shape[2]} tokens don't fit into it",
                hint="Pass less memory, or a smaller context.",
            ) from e
