"""Runs engines of TensorRT in the paged form: the whole model, with attention over blocks as a plugin.

Each engine has one profile. This hasn't run on a GPU yet; tests run it with fake engines and a fake driver.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from enginewright.runtime.shared.contracts import ExecutorCaps
from enginewright.runtime.shared.errors import BundleError, RequestError, TargetError
from enginewright.runtime.shared.step_schema import port_names

from ..steps.packed_steps import StepLimits, StepShape, bucketed, rounded
from ..steps.paged_section import (
    LOGITS,
    PagedProfile,
    PagedSection,
    cache_tensors,
)
from .checks import holds_copies
from .engine_steps import PackedProgram, StepMemory
from .library import Context, Engine, check_tensors, describe_engines
from .section import TensorRtSection

MOST_CONTEXTS = 64
"""The most contexts of steps that aren't graphs. There is one for each size, which is never bound to another size:
TensorRT 11.1 and 11.2 leak memory at each change (github.com/NVIDIA/TensorRT/issues/4849).
"""


def profile_of_each(section: TensorRtSection) -> tuple[PagedProfile, ...]:
    """Returns the profile of each engine: the one with the engine's phase. Raises BundleError if an engine has none."""
    assert section.paged is not None
    by_phase = {profile.phase: profile for profile in section.paged.profiles}
    profiles = []
    for engine in section.engines:
        if engine.phase == "both" or engine.phase not in by_phase:
            raise BundleError(
                f"tensorrt.paged.profiles: there is none of the phase {engine.phase}, which {engine.file} has",
                hint="Export the bundle again.",
            )
        profiles.append(by_phase[engine.phase])
    if not any(profile.phase == "prefill" for profile in profiles):
        raise BundleError("tensorrt.engines: there is none for prompts", hint="Export the bundle again.")
    return tuple(profiles)


def caps_of(profiles: Sequence[PagedProfile]) -> ExecutorCaps:
    """Returns the scheduler's limits, which are those of steps with prompts."""
    tokens = max(profile.T[2] for profile in profiles if profile.phase == "prefill")
    return ExecutorCaps(max_tokens=tokens, max_requests=max(profile.B[2] for profile in profiles), shared_blocks=True)


def limits_of(profiles: Sequence[PagedProfile]) -> StepLimits:
    """Returns the sizes of the largest step that a profile allows."""
    most = {name: max(getattr(p, name)[2] for p in profiles) for name in ("T", "B", "R", "M")}
    return StepLimits(tokens=most["T"], requests=most["B"], rows=most["R"], blocks=most["M"])


class PagedEngines(PackedProgram):
    """Engines in the paged form.

    Args:
        engines: loaded engines.
        profiles: the profile of each engine.
        section: the engines' inputs and outputs.
        memory: the memory of all steps, with its cache groups.

    Raises:
        BundleError: an engine's inputs or outputs differ from ``section``.
        CapacityError: there is too little memory for the engines' scratch memory.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        profiles: Sequence[PagedProfile],
        section: PagedSection,
        memory: StepMemory,
    ) -> None:
        self._engines = engines
        self._profiles = profiles
        self.memory = memory
        self._contexts: OrderedDict[StepShape, Context] = OrderedDict()
        self._pools: dict[str, tuple[int, ...]] = {}
        self._addresses: dict[str, int] = {}
        groups, written = memory.groups, list[str]()
        for group in groups:
            for tensor in (tensor for layer in group.layers for tensor in cache_tensors(group, layer)):
                written.append(tensor.written)
                self._pools[tensor.name] = (memory.blocks[group.name], group.block_size, *tensor.of_slot)
                address = memory.caches[tensor.name].address
                self._addresses |= {tensor.name: address, tensor.written: address}
        small = list(port_names(group.name for group in groups))
        outputs = [LOGITS, *(written if section.caches == "aliased" else ())]
        for engine in engines:
            check_tensors(engine, list(self._pools), outputs, small)
            if engine.tensors[LOGITS].dtype != np.float32:
                raise BundleError(f"{engine.path}: its logits aren't 32-bit floats", hint="Build it again.")
        self._copies = [
            engine
            for engine, profile in zip(engines, profiles, strict=True)
            if holds_copies(engine.scratch_bytes, groups, profile)
        ]
        scratch, free = max(engine.scratch_bytes for engine in engines), memory.device.free_bytes()
        if self._copies and scratch > free:
            raise TargetError(
                f"{self._copies[0].path}: TensorRT put copies of the caches into this engine: it needs {scratch:,} "
                f"bytes beside them, and {free:,} are free",
                hint='Export with caches = "ordered" in [engines], and build again; and please report it.',
            )
        self._scratch = memory.device.allocate(scratch)

    def shape_of(self, tokens: int, requests: int, rows: int, blocks: int, decodes: bool) -> StepShape:
        for index in sorted(range(len(self._profiles)), key=lambda i: self._profiles[i].phase != "decode"):
            profile = self._profiles[index]
            single = profile.phase == "decode"
            sizes = ((tokens, profile.T), (requests, profile.B), (rows, profile.R), (blocks, profile.M))
            if (decodes or not single) and all(n <= most for n, (_, _, most) in sizes):
                batch = rounded(requests, profile.B) if single else profile.B[2]
                least_rows = min(batch, profile.R[2])
                return StepShape(  # steps with prompts have few sizes: of T, and of R where many logits are wanted
                    profile=index,
                    tokens=rounded(tokens, profile.T) if single else bucketed(tokens, profile.T),
                    requests=batch,
                    rows=least_rows if single else rounded(max(rows, least_rows), profile.R),
                    blocks=rounded(blocks, profile.M) if single else profile.M[2],
                    decodes=single,
                )
        raise RequestError(
            f"step: no engine holds {tokens} tokens of {requests} requests with {blocks} blocks each",
            hint="Plan steps by the executor's caps, and requests by its context.",
        )

    def most(self, *, decodes: bool) -> tuple[int, int]:
        fitting = [profile for profile in self._profiles if decodes or profile.phase == "prefill"]
        largest = max(fitting, key=lambda profile: profile.B[2] if decodes else profile.T[2])
        return largest.T[2], largest.B[2]

    def most_rows(self, shape: StepShape) -> int:
        return self._profiles[shape.profile].R[2]

    def bound(self, shape: StepShape, keep: bool) -> Context:
        context = self._contexts.pop(shape, None) or self._context(shape)
        if not keep:
            self._contexts[shape] = context  # the latest one comes last
            if len(self._contexts) > MOST_CONTEXTS:
                self.memory.device.synchronize()
                self._contexts.popitem(last=False)[1].close()
        return context

    def describe(self) -> dict[str, str | int]:
        return describe_engines(self._engines) | {"caches": "copied by TensorRT" if self._copies else "in place"}

    def close(self) -> None:
        while self._contexts:
            self._contexts.popitem()[1].close()
        for engine in self._engines:
            engine.close()

    def _context(self, shape: StepShape) -> Context:
        """Creates a context that is bound to a step's sizes and addresses."""
        engine = self._engines[shape.profile]
        context, inputs = engine.context(0, self.memory.device, self._scratch), self.memory.inputs
        shapes = {name: array.shape for name, array in inputs.items() if name in engine.tensors} | self._pools
        addresses = self._addresses | self.memory.addresses
        context.bind(shapes, {name: addresses[name] for name in engine.tensors})
        return context
