"""Compute capabilities of NVIDIA's GPUs: how they are written, and which formats each can multiply."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from enginewright.plugins.errors import TargetError

KNOWN = ("7.5", "8.0", "8.6", "8.7", "8.9", "9.0", "10.0", "10.3", "11.0", "12.0", "12.1")
"""In rising order."""

_WRITTEN = re.compile(r"(?:sm_?)?(\d{1,2}?)\.?(\d)", re.IGNORECASE)

_LEAST: dict[str, str] = {"bf16": "8.0", "int4": "8.0", "fp8": "8.9", "fp4": "10.0"}
"""Formats, and the least compute capability that has them."""


def parse_capability(text: str) -> str:
    """ "8.9" of "8.9", "89", "sm89", "sm_89" or "SM89". Raises TargetError if there is no such GPU."""
    match = _WRITTEN.fullmatch(text.strip())
    name = f"{match[1]}.{match[2]}" if match else ""
    if name not in KNOWN:
        raise TargetError(
            f"gpu: {text!r} is no compute capability of a GPU that is known here",
            hint=f"Known are {', '.join(KNOWN)}, also written as sm89 or SM89.",
        )
    return name


def parse_capabilities(texts: Iterable[str]) -> tuple[str, ...]:
    """Each of them, also several in one text with commas between, in rising order and once. Raises TargetError."""
    given = {parse_capability(part) for text in texts for part in text.split(",")}
    return tuple(name for name in KNOWN if name in given)


def check_formats(capabilities: Sequence[str], formats: Iterable[str]) -> None:
    """Raises TargetError naming the GPU that lacks one of ``formats``, such as fp8 on 8.6."""
    for name in formats:
        least = _LEAST.get(name)
        lacking = [c for c in capabilities if least is not None and KNOWN.index(c) < KNOWN.index(least)]
        if lacking:
            left = ",".join(c for c in capabilities if c not in lacking) or least
            raise TargetError(
                f"gpu: compute capability {', '.join(lacking)} has no {name}, which begins with {least}",
                hint=f"Build for --gpu {left}, or take another format.",
            )
