"""The executor of the stablehlo target: modules of fixed sizes, with caches in slots, run by jaxlib's PJRT or IREE."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import util
from typing import Any, Protocol

import numpy as np

from enginewright.runtime.bundle.manifest import target_folder
from enginewright.runtime.bundle.reader import Bundle, Load
from enginewright.runtime.bundle.trust import read_code
from enginewright.runtime.shared.contracts import CacheGroup, FloatArray, Int32Array
from enginewright.runtime.shared.errors import BundleError, CapacityError

from ...doctor.machine import iree_version
from ...steps.host_arrays import Array, aligned, in_place
from ...steps.slot_executor import SlotExecutor
from ...steps.slot_steps import SlotSteps
from ...steps.slots import SlotRun
from ..section import BLOCK, ModuleSection, StableHloSection
from .iree_library import PROVIDER as IREE
from .iree_library import Iree
from .kept_modules import KeptModules
from .pjrt_library import Pjrt
from .runs import Part, Plan


class StableHloExecutor(SlotExecutor):
    """The executor of the stablehlo target. Each request has a slot. A step has either prompts or decodes.

    When a step first needs a module, XLA compiles it, which takes seconds for a large model, or reads it from a cache
    of compiled modules. IREE's modules are compiled at the export.

    Args:
        bundle: a bundle with a ready target of such modules.
        blocks: cache group -> the number of slots to allocate; equal for all groups.
        context: the most tokens of a request.
        threads: the number of threads of XLA's kernels and the sampler; 0 takes one per core.
        provider: "cpu", an installed PJRT plugin's name, or "iree"; None takes "cpu", or "iree" without jaxlib.
        target: the target's name.
        load: the way weights are loaded, "map" or "read".

    Raises:
        BundleError: the bundle has no such target, or is damaged.
        MissingDependencyError, TargetError: as for ``Pjrt`` and ``Iree``.
        CapacityError: there is no memory for the slots.
    """

    def __init__(
        self,
        bundle: Bundle,
        blocks: Mapping[str, int],
        context: int,
        *,
        threads: int = 0,
        provider: str | None = None,
        target: str = "stablehlo",
        load: Load = "map",
    ) -> None:
        section = self._section = stablehlo_section(bundle, target)
        super().__init__(bundle, target, blocks, slot_groups(section, context), threads)
        self._client = open_client(section, provider, self._threads)
        self._slots = ModuleSlots(bundle, target, section, self._client, slots=self._count, load=load)
        self._steps = SlotSteps(self._slots, self.cache_groups, self._count, self._threads, prompts_alone=True)

    def describe(self) -> dict[str, str | int]:
        return {
            "target": self._target,
            **self._client.describe(),
            "caches": "in place" if self._slots.in_place else "copied",
        }


class ModuleClient(Protocol):
    """The interface of clients that load and run modules: ``Iree`` and ``XlaModules``."""

    def describe(self) -> dict[str, str | int]: ...

    def load(self, bundle: Bundle, target: str, module: ModuleSection) -> Any:
        """Returns the executable of a module, for ``run``."""

    def view(self, array: Array, *, donated: bool = False) -> Any:
        """Returns a buffer on an array's memory. ``donated``: True if a run may write to it."""

    def run(self, executable: Any, arguments: Sequence[Any]) -> list[Any]:
        """Runs a module and returns the buffers of its results."""

    def array(self, buffer: Any) -> Array:
        """Returns the contents of a buffer."""

    def address(self, buffer: Any) -> int:
        """Returns a buffer's address."""


class XlaModules(Pjrt):
    """A client that compiles modules by XLA, with a cache of compiled modules.

    Args:
        section: the target's section.
        provider: as for ``Pjrt``.
        threads: the number of threads of the CPU's kernels.
    """

    def __init__(self, section: StableHloSection, provider: str, threads: int) -> None:
        super().__init__(provider, threads)
        self.register(section.kernels)
        self._kernels, self._threads = "enginewright" if section.kernels else "xla", threads
        self._kept = KeptModules(self, threads)

    def describe(self) -> dict[str, str | int]:
        return {
            "jaxlib": self.version,
            "provider": self.provider,
            "threads": self._threads,
            "compiled": self._kept.compiled,
            "found": self._kept.found,
            "kernels": self._kernels,
        }

    def load(self, bundle: Bundle, target: str, module: ModuleSection) -> Any:
        """Returns the executable of a module, for ``run``. Raises the errors of ``compile``."""
        name = f"{target_folder(target)}/{module.file}"
        return self._kept.load(read_code(bundle, name), str(bundle.path / name))


def open_client(section: StableHloSection, provider: str | None, threads: int) -> ModuleClient:
    """Opens the client for a provider; None chooses one. Raises the errors of ``Pjrt`` and ``Iree``."""
    if provider is None:
        ahead = section.iree is not None and section.iree.levels and iree_version() is not None
        provider = IREE if ahead and util.find_spec("jaxlib") is None else "cpu"
    return Iree(section, threads) if provider == IREE else XlaModules(section, provider, threads)


class ModuleSlots:
    """The memory of all slots: [slots, Nkv, C, D] for the keys and the values of each layer. Implements
    `slot_steps.Slots`.

    C is the shortest of the modules' lengths that the longest request fits into. A module writes to the part of the
    memory with its slots. Raises the errors of ``StableHloExecutor``.
    """

    def __init__(
        self,
        bundle: Bundle,
        target: str,
        section: StableHloSection,
        client: ModuleClient,
        *,
        slots: int,
        load: Load,
    ) -> None:
        self._bundle, self._target, self._section, self._client = bundle, target, section, client
        sizes = sorted({m.requests for m in section.modules if m.tokens == 1})
        # A module of more requests than there are slots needs memory for the rows that rest.
        self._count = next((size for size in sizes if size >= slots), slots)
        self._held = np.zeros(self._count, np.int64)
        self._executables: dict[str, Any] = {}
        self._inputs: dict[str, tuple[list[Array], list[Any]]] = {}
        self._memory: dict[str, Array] = {}
        self._caches: dict[tuple[int, int], list[Any]] = {}  # of the latest run: (first slot, slots) -> its results
        self.in_place = True
        self._weights = [client.view(array) for array in (self._weight(name, load) for name in section.weights)]
        self._shapes = {
            f"past_{kind}_{layer}": plane.shape
            for group in section.cache_groups
            for layer in group.layers
            for kind, plane in zip(("key", "value"), group.planes, strict=True)
        }
        if set(self._shapes) != set(section.caches):
            raise BundleError(f"{bundle.path}: target {target!r}: its caches aren't those of its cache groups")
        self.length = section.lengths[0]
        self._allocate(self.length)

    def fit(self, slot_of: Int32Array, kv_len: Int32Array) -> None:
        """Lengthens or shortens the slots to the length that running requests need. Implements
        `slot_steps.Slots.fit`.
        """
        self._held[slot_of] = kv_len
        needed = int(self._held.max()) + 1
        length = next((n for n in self._section.lengths if n >= needed), None)
        if length is None:
            raise CapacityError(
                f"context: a request has {needed - 1:,} tokens, and slots were made for "
                f"{self._section.lengths[-1] - 1:,}",
                hint="Export the model with a longer context in [engines].",
            )
        if length == self.length or (length < self.length and 2 * needed > length):
            return
        old, self.length = self._memory, length
        self._allocate(length)
        for name, before in old.items():
            for slot in np.flatnonzero(self._held).tolist():
                tokens = min(int(self._held[slot]), before.shape[2] - 1, length - 1)
                if self._section.in_blocks:
                    blocks = -(-tokens // BLOCK)
                    _blocks(self._memory[name][slot])[:blocks] = _blocks(before[slot])[:blocks]
                else:
                    self._memory[name][slot, :, :tokens] = before[slot, :, :tokens]

    def run(self, run: SlotRun) -> FloatArray:
        """Runs the model. Returns the logits [R, V] of the tokens ``run.wanted``; they are valid until the next run."""
        parts = list(self._plan.parts(run))
        if len(parts) == 1 and len(parts[0].order) == len(run.wanted):
            return self._run(parts[0])[: len(run.wanted)]
        logits: FloatArray | None = None
        for part in parts:
            part_logits = self._run(part)
            if logits is None:
                logits = np.empty((max(len(run.wanted), 1), part_logits.shape[1]), np.float32)
            logits[part.order] = part_logits[: len(part.order)]
        assert logits is not None
        return logits[: len(run.wanted)]

    def forget(self, slots: Int32Array) -> None:
        """Sets slots to zero, so that NaN or infinity in them doesn't affect their next requests."""
        for memory in self._memory.values():
            memory[slots] = 0

    def _run(self, part: Part) -> FloatArray:
        module = part.module
        executable = self._executable(module)
        arrays, buffers = self._inputs[module.name]
        for array, values in zip(arrays, (part.ids, part.index, part.wanted), strict=True):
            array[...] = values
        key = part.first, module.requests
        if (caches := self._caches.pop(key, None)) is None:
            rows = slice(part.first, part.first + module.requests)
            caches = [self._client.view(_flat(memory[rows]), donated=True) for memory in self._memory.values()]
        before = self._client.address(caches[0]) if caches else 0
        logits, *presents = self._client.run(executable, [*buffers, *caches, *self._weights])
        if caches and self._client.address(presents[0]) != before:
            self.in_place = False
            for memory, present in zip(self._memory.values(), presents, strict=True):
                _flat(memory[part.first : part.first + module.requests])[...] = self._client.array(present)
        else:
            self._caches = {key: presents}
        result: FloatArray = self._client.array(logits)
        return result

    def _executable(self, module: ModuleSection) -> Any:
        if module.name not in self._executables:
            self._executables[module.name] = self._client.load(self._bundle, self._target, module)
            shapes = ((module.requests, module.tokens), (module.requests,), (module.rows,))
            arrays = [aligned(shape, np.int64) for shape in shapes]
            self._inputs[module.name] = arrays, [self._client.view(array) for array in arrays]
        return self._executables[module.name]

    def _allocate(self, length: int) -> None:
        self._caches = {}
        try:
            self._memory = {
                name: aligned((self._count, heads, length, size), np.float32)
                for name in self._section.caches
                for heads, size in (self._shapes[name],)
            }
        except MemoryError as e:
            raise CapacityError(
                f"memory: {self._count} slots of {length} tokens don't fit into it",
                hint="Pass less memory, or a smaller context.",
            ) from e
        self._plan = Plan(self._section.modules, length, self._count)

    def _weight(self, name: str, load: Load) -> Array:
        """Returns a weight as it is stored. Floats that NumPy doesn't have are integers with the same bits."""
        stored = in_place(self._bundle.weight(name, load))
        return stored if stored.dtype.isbuiltin == 1 else stored.view(f"u{stored.dtype.itemsize}")


def _flat(memory: Array) -> Array:
    """Returns a view of memory [B, Nkv, C, D] as [B*Nkv, C, D]."""
    return memory.reshape(-1, *memory.shape[2:])


def _blocks(slot: Array) -> Array:
    """Returns a view of a slot [Nkv, C, D] as the kernels' blocks, [C / 32, ..]."""
    return slot.reshape(slot.shape[1] // BLOCK, -1)


def stablehlo_section(bundle: Bundle, target: str) -> StableHloSection:
    """Returns a target's section. Raises BundleError if the target doesn't exist, isn't ready, or has no modules."""
    return bundle.section(target, StableHloSection, "modules")


def slot_groups(section: StableHloSection, context: int) -> tuple[CacheGroup, ...]:
    """Returns the cache groups, with slots of ``context`` + 1 positions as their blocks."""
    return tuple(group.to_group(context + 1) for group in section.cache_groups)
