"""The devices that can be planned for: GPUs by what their makers state (devices.toml), and this machine's processor."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib.resources import files

from enginewright.plugins.shared.errors import TargetError

CPU = "cpu"
"""The name of this machine's processor among the devices."""


@dataclass(frozen=True)
class Shares:
    """What is reached of a GPU's figures, and seconds that steps cost besides; devices.toml says where from.

    Attributes:
        bandwidth, compute: of what the memory and the cores do at most.
        memory: that may be used.
        kernel: seconds of a step of the program that has hardly any work.
        between_steps: seconds of the engine for which the GPU waits.
    """

    bandwidth: float
    compute: float
    memory: float
    kernel: float
    between_steps: float


@dataclass(frozen=True)
class Gpu:
    """A GPU: bytes, bytes a second, and operations a second by type (a multiply-add is two), with their source."""

    name: str
    capability: str
    memory: float
    bandwidth: float
    peaks: Mapping[str, float]
    source: str


@cache
def _table() -> tuple[Shares, dict[str, Gpu]]:
    data = tomllib.loads(files(__package__).joinpath("devices.toml").read_text(encoding="utf-8"))
    return Shares(**data["shares"]), {_key(entry["name"]): Gpu(**entry) for entry in data["gpu"]}


def _key(name: str) -> str:
    """rtx4090 of "NVIDIA GeForce RTX 4090". Words such as PCIe stay: such a card has other figures."""
    return "".join(w for w in re.split(r"[\s_-]+", name.strip().lower()) if w not in ("nvidia", "geforce", "tesla"))


def default_shares() -> Shares:
    """Those of devices.toml."""
    return _table()[0]


def known_gpus() -> list[Gpu]:
    """In the order of devices.toml."""
    return list(_table()[1].values())


def find_devices(names: Iterable[str]) -> list[Gpu | None]:
    """Each device once; None is this machine's processor. One text may name several, with commas between them.

    Raises TargetError for a name that isn't known; says which are, and which was probably meant.
    """
    gpus = _table()[1]
    found: dict[str, Gpu | None] = {}
    for name in (part for text in names for part in text.split(",")):
        key = _key(name)
        if key not in gpus and key != CPU:
            near = get_close_matches(key, [*gpus, CPU], 1, 0.6)
            meant = f"Did you mean {near[0]}? " if near else ""
            known = ", ".join([*(gpu.name for gpu in gpus.values()), CPU])
            raise TargetError(
                f"gpu: {name.strip()!r} isn't a known device", hint=f"{meant}Known are {known} (this machine)."
            )
        found[key] = gpus.get(key)
    return list(found.values())
