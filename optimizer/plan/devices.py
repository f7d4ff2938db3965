"""The devices of plans: GPUs with the figures that their makers state (devices.toml), and this machine's processor."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType
from typing import Any

from enginewright.plugins.steps.planning import Gpu, Shares
from enginewright.runtime.bundle.regular_file import MOST_JSON_BYTES, read_regular
from enginewright.runtime.shared.errors import TargetError, meant
from enginewright.runtime.shared.targets import PROCESSOR


@cache
def _table() -> tuple[Shares, dict[str, Gpu]]:
    data = tomllib.loads(files(__package__).joinpath("devices.toml").read_text(encoding="utf-8"))
    return Shares(**data["shares"]), {_key(entry["name"]): Gpu(**entry) for entry in data["gpu"]}


def _key(name: str) -> str:
    """Returns a normalized name of a GPU, such as "rtx4090" for "NVIDIA GeForce RTX 4090".

    Words such as PCIe stay, because such a card has other figures.
    """
    return "".join(w for w in re.split(r"[\s_-]+", name.strip().lower()) if w not in ("nvidia", "geforce", "tesla"))


def read_devices(path: Path) -> dict[str, Gpu]:
    """Reads the GPUs of a file in the format of devices.toml, by their keys. Raises TargetError for an invalid file."""
    try:
        entries = tomllib.loads(read_regular(path, most=MOST_JSON_BYTES, piped=True).decode()).get("gpu", [])
        listed = [_own_gpu({"source": str(path), **entry}) for entry in entries]
    except (OSError, ValueError, TypeError, KeyError) as e:
        raise TargetError(f"devices: {path} can't be read: {getattr(e, 'strerror', None) or e}", hint=_OWN) from e
    if not listed:
        raise TargetError(f"devices: {path} has no [[gpu]]", hint=_OWN)
    return {_key(gpu.name): gpu for gpu in listed}


_OWN = (
    "Write it as Enginewright's own devices.toml: [[gpu]] with name, capability, memory, bandwidth, "
    "multiprocessors and peaks = { bf16 = ..., f32 = ... }."
)


def _own_gpu(entry: Mapping[str, Any]) -> Gpu:
    """Returns the GPU of an entry. Raises ValueError, TypeError or KeyError for an invalid one."""
    gpu = Gpu(**entry)
    if not re.fullmatch(r"\d{1,2}\.\d", gpu.capability) or _key(gpu.name) in ("", PROCESSOR):
        raise ValueError(f"{gpu.name!r} of capability {gpu.capability!r}: such a GPU can't be")
    numbers = {"memory": gpu.memory, "bandwidth": gpu.bandwidth}
    numbers |= {f"peaks.{name}": gpu.peaks[name] for name in ("bf16", "f32")}
    for name, number in numbers.items():
        if type(number) not in (int, float) or not 0 < number < float("inf"):
            raise ValueError(f"{name} of {gpu.name!r} is {number!r}, not a number above 0")
    if type(gpu.multiprocessors) is not int or gpu.multiprocessors < 0:
        raise ValueError(f"multiprocessors of {gpu.name!r} is {gpu.multiprocessors!r}, not a number from 0 on")
    return gpu


def default_shares() -> Shares:
    """Returns the default shares of devices.toml."""
    return _table()[0]


def known_gpus() -> list[Gpu]:
    """Returns the GPUs of devices.toml, in its order."""
    return list(_table()[1].values())


def find_devices(names: Iterable[str], own: Mapping[str, Gpu] = MappingProxyType({})) -> list[Gpu | None]:
    """Returns each named device once; None is this machine's processor.

    Args:
        names: the names; a text may have several, with commas between them.
        own: the GPUs of ``read_devices``, which take precedence over those of devices.toml with the same name.

    Raises:
        TargetError: a name isn't known; the message lists the known names and the most similar one.
    """
    gpus = {**_table()[1], **own}
    by_key: dict[str, Gpu | None] = {}
    for name in (part for text in names for part in text.split(",")):
        key = _key(name)
        if key not in gpus and key != PROCESSOR:
            near = meant(key, [*gpus, PROCESSOR])
            known = ", ".join([*(gpu.name for gpu in gpus.values()), PROCESSOR])
            raise TargetError(
                f"gpu: {name.strip()!r} isn't a known device",
                hint=f"{near}Known are {known} (this machine). Others can be named in a file: --devices FILE.",
            )
        by_key[key] = gpus.get(key)
    return list(by_key.values())
