"""The result of ``plan``, and its JSON form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from enginewright.plugins.steps.planning import Gpu, Shares
from enginewright.runtime.shared.contracts import ModelInfo
from enginewright.runtime.shared.targets import PROCESSOR

from .options import PlanOptions

FORMAT_VERSION = 1


@dataclass(frozen=True)
class BatchSpeed:
    """The speed of so many requests at a time; None where they don't fit.

    Attributes:
        ttft: seconds to the first token of a prompt that comes while all others get tokens.
        tpot: seconds of a step in which all get a token, when each has grown to its context.
        tokens_per_second: of all together.
        bound: what most of such a step waits for: memory, products or kernels.
    """

    batch: int
    ttft: float | None = None
    tpot: float | None = None
    tokens_per_second: float | None = None
    bound: str = ""


@dataclass(frozen=True)
class StepTime:
    """A step in which ``rows`` requests of ``context`` tokens decode, and a prompt is read; schedulers take these."""

    rows: int
    prompt: int
    context: int
    seconds: float


@dataclass(frozen=True)
class DevicePlan:
    """One program on one device; bytes and seconds.

    Attributes:
        target: whose program it is.
        recipes: that make this program, but for the numbers in its weights.
        fits: whether one request fits into memory.
        room: that may be used of the device's memory.
        workspace: of a step with one prompt.
        needed: for one request.
        most_requests: of the asked context that fit, 4,096 at most.
        most_tokens: tokens of a single request that memory has room for, whatever the model's context; 0 if none.
        largest: the largest batch that fits and meets the goals; None if none does.
        largest_limit: what a larger one fails at: "memory", "tpot", "ttft", or "requests", more of which are not asked.
        advice: what would fit where this doesn't.
        steps: how long steps of some sizes take.
    """

    device: str
    target: str
    recipes: tuple[str, ...]
    fits: bool
    room: int
    weights: int
    kv_per_token: int
    workspace: int
    needed: int
    most_requests: int
    most_tokens: int
    speeds: tuple[BatchSpeed, ...] = ()
    largest: BatchSpeed | None = None
    largest_limit: str = ""
    advice: str = ""
    steps: tuple[StepTime, ...] = ()


@dataclass(frozen=True)
class DeviceSection:
    """The properties of a device that a plan assumes.

    Attributes:
        measured: True if they were measured on this machine, in this run; otherwise the device's maker states them.
        load: processes per core that wanted to run on this machine in the minute before.
    """

    name: str
    measured: bool
    room: int
    memory: int | None = None
    bandwidth: float | None = None
    peaks: dict[str, float] = field(default_factory=dict)
    shares: dict[str, float] = field(default_factory=dict)
    source: str = ""
    load: float = 0.0

    @classmethod
    def of(cls, gpu: Gpu | None, room: int, shares: Shares, load: float = 0.0) -> DeviceSection:
        """Describes a GPU, or this machine."""
        if gpu is None:
            return cls(PROCESSOR, True, room, load=round(load, 2))
        peaks = dict(gpu.peaks)
        return cls(gpu.name, False, room, int(gpu.memory), gpu.bandwidth, peaks, asdict(shares), gpu.source)


@dataclass(frozen=True)
class Omitted:
    """Recipes that weren't planned, on a device or (None) at all, and why."""

    recipes: tuple[str, ...]
    device: str | None
    why: str


@dataclass(frozen=True)
class PlanResult:
    """All of it."""

    model: str
    parameters: int
    context_length: int
    options: dict[str, Any]
    devices: tuple[DeviceSection, ...]
    plans: tuple[DevicePlan, ...]
    omitted: tuple[Omitted, ...]

    @classmethod
    def of(
        cls,
        info: ModelInfo,
        options: PlanOptions,
        devices: tuple[DeviceSection, ...],
        plans: Sequence[DevicePlan],
        omitted: Sequence[Omitted],
    ) -> PlanResult:
        """Makes the result for a model."""
        requested = {name: getattr(options, name) for name in ("batches", "context", "prompt", "tpot", "ttft")}
        return cls(info.name, info.parameters, info.context_length, requested, devices, tuple(plans), tuple(omitted))

    def to_json(self) -> dict[str, Any]:
        """Plain values: seconds, bytes, tokens a second."""
        return {"format_version": FORMAT_VERSION} | asdict(self)
