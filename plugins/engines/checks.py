"""Compares the requirements of a TensorRT engine with a machine, before the library is called.

The library itself says "plugin not found", or nothing, if a library, a driver or a GPU is the wrong one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from enginewright.plugins.doctor.checks import Problem, is_older
from enginewright.runtime.shared.contracts import CacheGroup
from enginewright.runtime.shared.dtypes import BYTES_PER_ELEMENT

from ..steps.paged_section import PagedProfile
from .plan import CAPABILITY_BITS


@dataclass(frozen=True)
class Flavour:
    """One of the two libraries that run engines, TensorRT and TensorRT-RTX.

    Attributes:
        name: the library's name in messages.
        module: the name by which Python imports it.
        install: the command that installs it; ``{version}`` is replaced by a version.
        extra: the extra of enginewright that installs a suitable version.
        capabilities: the compute capabilities that it supports; empty if it has no list.
    """

    name: str
    module: str
    install: str
    extra: str
    capabilities: tuple[str, ...] = ()


FLAVOURS = {
    "rtx": Flavour(
        "TensorRT-RTX", "tensorrt_rtx", "pip install 'tensorrt_rtx{version}'", "tensorrt-rtx", tuple(CAPABILITY_BITS)
    ),
    "tensorrt": Flavour("TensorRT", "tensorrt", "pip install 'tensorrt{version}'", "tensorrt"),
}
"""The libraries, by the name in a target's manifest."""


def library_problem(flavour: Flavour, found: str | None, built_by: str) -> Problem | None:
    """Returns the problem of a library that is missing or didn't build the engines; None if there is no problem.

    Args:
        flavour: the library.
        found: the installed version; None if it isn't installed.
        built_by: the version that built the engines; "" accepts any.
    """
    extra = f"pip install 'enginewright[{flavour.extra}]'"
    install = flavour.install.format(version=f"=={built_by}") if built_by else extra
    if found is None:
        needed = f"; the engines were built by {built_by}" if built_by else ""
        return Problem(f"{flavour.name} is not installed{needed}", f"Install it with: {install}", missing=True)
    if built_by and _release(found) != _release(built_by):
        return Problem(
            f"the engines were built by {flavour.name} {built_by}, and {found} is installed; engines run in the "
            "version that built them",
            f"Install that one ({install}), or export again with the one that is here.",
        )
    return None


def build_problem(flavour: Flavour, found: str | None, oldest: str) -> Problem | None:
    """Returns the problem of a library that is missing or too old to build engines; None if there is no problem.

    Args:
        flavour: the library.
        found: the installed version; None if it isn't installed.
        oldest: the minimum version.
    """
    install = flavour.install.format(version=f">={oldest}")
    if found is None:
        message = f"{flavour.name}, which builds the engines, is not installed"
        hint = f"Install it with: {install}, or pip install 'enginewright[{flavour.extra}]'"
        return Problem(message, hint, missing=True)
    if is_older(found, oldest):
        return Problem(
            f"building the engines needs {flavour.name} {oldest} or newer, and {found} is installed",
            f"Install a newer one: {install}",
        )
    return None


def holds_copies(scratch_bytes: int, groups: Sequence[CacheGroup], profile: PagedProfile) -> bool:
    """Returns True if an engine's scratch memory is large enough to contain a copy of a cache.

    TensorRT may insert copies of aliased tensors. A cache with the profile's maximum of blocks (4 million by default)
    is far larger than all activations, so ``scratch_bytes``, the engine's ``device_memory_size_v2``, shows such a copy.
    """
    smallest = min(
        profile.P[2] * group.block_size * math.prod(plane.shape) * BYTES_PER_ELEMENT[group.dtype]
        for group in groups
        for plane in group.planes
    )
    return scratch_bytes >= smallest


def _release(version: str) -> tuple[str, ...]:
    """Returns the release of a version as a tuple, ("1", "7", "1") for "1.7.1.116". Builds of one release can run each
    other's engines.
    """
    return tuple(version.partition("+")[0].split(".")[:3])
