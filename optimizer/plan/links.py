"""The links between ranks: those of links.toml, those with a stated rate, and the shared memory of this machine."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from enginewright.plugins.steps.planning import Gpu
from enginewright.runtime.shared.errors import RequestError, TargetError, meant

from .options import parse_seconds

MEMORY = "memory"
"""The name of this machine's shared memory as a link. Gathering copies nothing there."""


@dataclass(frozen=True)
class Link:
    """A kind of link.

    Attributes:
        name: the name.
        bandwidth: bytes per second in one direction, for each device; 0 if nothing is copied.
        base, hop: seconds of a collective without bytes: ``base + (ranks - 1) * hop``.
        source: the source of the figures.
        between: True if it joins machines.
        capability: the capability of the GPUs that have it, if there are several generations; "" otherwise.
        reached: True if programs reach all of its bandwidth, False if they reach a share.
    """

    name: str
    bandwidth: float
    base: float
    hop: float
    source: str
    between: bool = False
    capability: str = ""
    reached: bool = False

    def waited(self, ranks: int) -> float:
        """Predicts the seconds of a collective of a number of ranks, without the time for its bytes."""
        return self.base + (ranks - 1) * self.hop


@cache
def _table() -> tuple[float, dict[str, Link]]:
    data = tomllib.loads(files(__package__).joinpath("links.toml").read_text(encoding="utf-8"))
    return data["shares"]["bandwidth"], {_key(entry["name"]): Link(**entry) for entry in data["link"]}


def _key(name: str) -> str:
    """Returns a normalized name of a link, such as "ethernet100" for "Ethernet 100" and for its short names."""
    key = "".join(re.split(r"[\s_-]+", name.strip().lower()))
    key = re.sub(r"(gbit|gbe|gb|g)$", "", key)
    return re.sub(r"^(eth|roce)(?=\d)", "ethernet", re.sub(r"^(ib)?(hdr|ndr)$", r"infiniband\2", key))


_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmg])bit(?:/s)?(?:\+(.+))?")
_BITS = {"k": 1e3, "m": 1e6, "g": 1e9}


def _rated(text: str) -> Link | None:
    """Returns the link with a stated rate, such as "2.5gbit" or "100mbit+0.3ms" (with its one-way latency); None for
    other texts.
    """
    match = _RATE.fullmatch(text.strip().lower())
    if match is None:
        return None
    rate = float(match[1]) * _BITS[match[2]]
    if not rate:
        raise RequestError(f"link: {text.strip()!r} has no bandwidth", hint="Pass what it reaches, such as 2.5gbit.")
    delay = parse_seconds(match[3], "link") if match[3] else 0.0
    source, socket = (
        "as it was given; what a message takes besides is as assumed for Ethernet",
        _table()[1]["ethernet1"],
    )
    return Link(text.strip(), rate / 8, socket.base + delay, socket.hop, source, between=True, reached=True)


def default_share() -> float:
    """Returns the share of a link's bandwidth that programs reach, by links.toml."""
    return _table()[0]


def find_link(name: str, gpu: Gpu | None) -> Link | None:
    """Returns the link of a name or a rate; None is the memory of this machine.

    Args:
        name: the name or the rate; ``nvlink`` is that of the GPU's generation.
        gpu: the device of each rank; None for this machine.

    Raises:
        TargetError: the link isn't known, or the device doesn't have it; the message lists the known ones.
        RequestError: a rate or a time is impossible.
    """
    if (rated := _rated(name)) is not None:
        return rated
    key, links = _key(name), _table()[1]
    if key == MEMORY:
        if gpu is not None:
            raise TargetError(
                f"link: {MEMORY} joins ranks of this machine's processor, not {gpu.name}s",
                hint="Name the link of the GPUs, such as nvlink or pcie4.",
            )
        return None
    if key in links:
        return links[key]
    generations = [link for known, link in links.items() if re.fullmatch(rf"{re.escape(key)}\d", known)]
    if generations and gpu is not None:
        matching = [link for link in generations if link.capability == gpu.capability]
        if matching:
            return matching[0]
    if generations:
        raise TargetError(
            f"link: which {name.strip()} {gpu.name if gpu is not None else 'this machine'} has isn't known",
            hint=f"Name one: {', '.join(link.name for link in generations)}.",
        )
    near = meant(key, [*links, MEMORY])
    known = ", ".join([*(link.name for link in links.values()), MEMORY])
    raise TargetError(
        f"link: {name.strip()!r} isn't a known link",
        hint=f"{near}Known are {known} (of this machine). Or pass a rate, such as 2.5gbit, or 100mbit+0.3ms.",
    )


def split_links(names: Sequence[str]) -> tuple[str, ...]:
    """Returns the names of links of one or several texts, with commas between names. Raises RequestError for more than
    two.
    """
    parts = tuple(part for text in names for part in text.split(",") if part.strip())
    if len(parts) > 2:
        raise RequestError(
            f"link: {len(parts)} links are named", hint="Name one, or two: within a machine, then between machines."
        )
    return parts
