"""Engines of TensorRT proper in the paged form: the whole model, with attention over blocks as a plugin.

Each engine has one profile. No GPU has run this yet; the tests run it with engines and a driver in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from enginewright.plugins.shared.contracts import CacheGroup, ExecutorCaps
from enginewright.plugins.shared.errors import BundleError, RequestError
from enginewright.runtime.bundle.paged_section import (
    IDS,
    KV_LEN,
    LOGITS,
    POSITIONS,
    Q_START,
    ROWS,
    PagedProfile,
    PagedSection,
    paged_cache_names,
    slots_name,
    table_name,
)
from enginewright.runtime.bundle.tensorrt_section import TensorRtSection

from .packed_steps import StepLimits, StepShape, rounded
from .tensorrt_block_runs import StepMemory
from .tensorrt_library import Context, Engine, check_tensors


def profile_of_each(section: TensorRtSection) -> tuple[PagedProfile, ...]:
    """The profile of each engine: that of its phase. Raises BundleError if it has none."""
    assert section.paged is not None
    by_phase = {profile.phase: profile for profile in section.paged.profiles}
    found = []
    for engine in section.engines:
        if engine.phase == "both" or engine.phase not in by_phase:
            raise BundleError(
                f"tensorrt.paged.profiles: there is none of the phase {engine.phase}, which {engine.file} has",
                hint="Export the bundle again.",
            )
        found.append(by_phase[engine.phase])
    if not any(profile.phase == "prefill" for profile in found):
        raise BundleError("tensorrt.engines: there is none for prompts", hint="Export the bundle again.")
    return tuple(found)


def caps_of(profiles: Sequence[PagedProfile]) -> ExecutorCaps:
    """What a scheduler may plan: steps in which prompts have room."""
    tokens = max(profile.T[2] for profile in profiles if profile.phase == "prefill")
    return ExecutorCaps(max_tokens=tokens, max_requests=max(profile.B[2] for profile in profiles))


def limits_of(profiles: Sequence[PagedProfile]) -> StepLimits:
    """The largest step that any of them holds."""
    most = {name: max(getattr(p, name)[2] for p in profiles) for name in ("T", "B", "R", "M")}
    return StepLimits(tokens=most["T"], requests=most["B"], rows=most["R"], blocks=most["M"])


class PagedEngines:
    """See ``tensorrt_blocks.PackedProgram``.

    Args:
        engines: loaded.
        profiles: of each.
        section: what they take and give.
        memory: of all steps, with its cache groups.

    Raises:
        BundleError: an engine takes or gives something else than ``section`` says.
        CapacityError: there is no memory for what engines need while they run.
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
        self._memory = memory
        self._contexts: dict[int, Context] = {}
        self._pools: dict[str, tuple[int, ...]] = {}
        self._addresses = dict(memory.inputs) | {LOGITS: memory.logits}
        groups = memory.groups
        for group in groups:
            sizes = (group.key_head_size, group.value_head_size)
            for layer in group.layers:
                for (cache, written), size in zip(paged_cache_names(layer), sizes, strict=True):
                    self._pools[cache] = (memory.blocks[group.name], group.block_size, group.kv_heads, size)
                    self._addresses |= {cache: memory.caches[cache], written: memory.caches[cache]}
        small = [IDS, POSITIONS, Q_START, KV_LEN, ROWS]
        small += [name_of(g.name) for g in groups for name_of in (slots_name, table_name)]
        outputs = [LOGITS, *(written for layer in _layers(groups) for _, written in paged_cache_names(layer))]
        for engine in engines:
            check_tensors(engine, list(self._pools), outputs, small)
            if engine.tensors[LOGITS].dtype != np.float32:
                raise BundleError(f"{engine.path}: its logits aren't 32-bit floats", hint="Build it again.")
        self._scratch = memory.device.allocate(max(engine.scratch_bytes for engine in engines))

    def shape_of(self, tokens: int, requests: int, rows: int, blocks: int, decodes: bool) -> StepShape:
        for index in sorted(range(len(self._profiles)), key=lambda i: self._profiles[i].phase != "decode"):
            profile = self._profiles[index]
            single = profile.phase == "decode"
            sizes = ((tokens, profile.T), (requests, profile.B), (rows, profile.R), (blocks, profile.M))
            if (decodes or not single) and all(n <= most for n, (_, _, most) in sizes):
                batch = rounded(requests, profile.B)
                return StepShape(
                    profile=index,
                    tokens=rounded(tokens, profile.T) if single else max(tokens, profile.T[0]),
                    requests=batch,
                    rows=min(batch, profile.R[2]) if single else rounded(rows, profile.R),
                    blocks=rounded(blocks, profile.M),
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

    def bound(self, shape: StepShape, *, keep: bool) -> Callable[[], None]:
        engine = self._engines[shape.profile]
        context = None if keep else self._contexts.get(shape.profile)
        if context is None:
            context = engine.context(0, self._memory.device, self._scratch)
            if not keep:
                self._contexts[shape.profile] = context
        shapes: dict[str, tuple[int, ...]] = {
            IDS: (shape.tokens,),
            POSITIONS: (shape.tokens,),
            Q_START: (shape.requests + 1,),
            KV_LEN: (shape.requests,),
            ROWS: (shape.rows,),
        }
        for group in self._memory.groups:
            shapes[slots_name(group.name)] = (shape.tokens,)
            shapes[table_name(group.name)] = (shape.requests, shape.blocks)
        known = {name: dims for name, dims in (shapes | self._pools).items() if name in engine.tensors}
        context.bind(known, {name: self._addresses[name] for name in engine.tensors})
        return context.enqueue


def _layers(groups: Sequence[CacheGroup]) -> list[int]:
    return [layer for group in groups for layer in group.layers]
