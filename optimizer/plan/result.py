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
    """The speed of a number of requests at a time; None if they don't fit.

    Attributes:
        batch: the number of requests.
        ttft: seconds to the first token of a prompt, while all other requests get tokens.
        tpot: seconds of a step in which all requests get a token, when each has grown to its context.
        tokens_per_second: tokens of all requests together.
        bound: the main limit of such a step: memory, products or kernels.
    """

    batch: int
    ttft: float | None = None
    tpot: float | None = None
    tokens_per_second: float | None = None
    bound: str = ""


@dataclass(frozen=True)
class StepTime:
    """The time of a step in which ``rows`` requests of ``context`` tokens decode and ``prompt`` prompt tokens are read.

    Schedulers read it from the JSON of a plan.
    """

    rows: int
    prompt: int
    context: int
    seconds: float


@dataclass(frozen=True)
class DevicePlan:
    """The plan of one program on one device, in bytes and seconds.

    Attributes:
        device: the name of the device.
        target: the target of the program.
        recipes: the recipes that make this program, except for the numbers in its weights.
        fits: True if one request fits into memory.
        room: the bytes of the device's memory that may be used.
        weights: the bytes of the weights.
        kv_per_token: the bytes of keys and values of a token.
        states_per_request: the bytes of a request's recurrent states, and of as many for its snapshots.
        workspace: the bytes of the values of a step with one prompt.
        needed: all bytes for one request.
        most_requests: the number of requests with the planned context that fit, at most 4,096.
        most_tokens: tokens of a single request that memory has room for, whatever the model's context; 0 if none.
        speeds: the speed of each batch.
        largest: the largest batch that fits and meets the goals; None if none does.
        largest_limit: the limit of a larger batch: "memory", "tpot", "ttft", or "requests" for more than 4,096, or than
            can have recurrent states.
        advice: changes with which the model would fit, if it doesn't.
        steps: the times of steps of some sizes.
    """

    device: str
    target: str
    recipes: tuple[str, ...]
    fits: bool
    room: int
    weights: int
    kv_per_token: int
    states_per_request: int
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
        name: the name of the device.
        measured: True if they were measured on this machine, in this run; False if the device's maker states them.
        room: the bytes of memory that may be used.
        memory, bandwidth, peaks: bytes, bytes per second, and multiply-adds per second by type; None or empty if
            unknown.
        shares: the shares of these figures that programs reach.
        source: the source of the figures.
        load: processes per core that were ready to run on this machine in the minute before.
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
        """Returns the properties of a GPU, or of this machine if ``gpu`` is None.

        Args:
            gpu: the GPU.
            room: bytes of its memory for weights, caches and the values of a step.
            shares: the shares of a GPU's peak speeds that programs reach.
            load: this machine's load average per core.
        """
        if gpu is None:
            return cls(PROCESSOR, True, room, load=round(load, 2))
        peaks = dict(gpu.peaks)
        return cls(gpu.name, False, room, int(gpu.memory), gpu.bandwidth, peaks, asdict(shares), gpu.source)


@dataclass(frozen=True)
class Omitted:
    """Recipes that weren't planned on a device, or on any device if it is None, and the reason."""

    recipes: tuple[str, ...]
    device: str | None
    why: str


@dataclass(frozen=True)
class PlanResult:
    """The result of ``plan``: the model, options and devices, the plan of each program, and the recipes without one."""

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
        """Returns the result of planning a model.

        The arguments are the fields; ``info`` has the model's name and sizes.
        """
        requested = {name: getattr(options, name) for name in ("batches", "context", "prompt", "tpot", "ttft")}
        return cls(info.name, info.parameters, info.context_length, requested, devices, tuple(plans), tuple(omitted))

    def to_json(self) -> dict[str, Any]:
        """Returns plain values: seconds, bytes, tokens per second."""
        return {"format_version": FORMAT_VERSION} | asdict(self)
