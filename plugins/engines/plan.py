"""Reads the first 64 bytes of a serialized TensorRT-RTX engine, called a plan, without TensorRT.

The format isn't documented; it was found by comparing engines that were built for one GPU and for several:

    at   type      value
     0   4 bytes   "vtrt"
    16   u64       bytes of the whole file
    24   4 bytes   version of the library that built it: major, minor, patch, build
    32   u32       compute capabilities that it was built for, a bit each: see ``CAPABILITY_BITS``

All integers are little-endian.
"""

from __future__ import annotations

import builtins
import struct
from dataclasses import dataclass
from pathlib import PurePosixPath

from enginewright.runtime.shared.errors import BundleError

HEADER_BYTES = 64
MAGIC = b"vtrt"

CAPABILITY_BITS: dict[str, int] = {
    "7.5": 1 << 0,
    "8.0": 1 << 1,
    "8.6": 1 << 2,
    "8.9": 1 << 3,
    "12.0": 1 << 4,
    "12.1": 1 << 5,
}
"""The bits of the compute capabilities that TensorRT-RTX builds for."""

_AGAIN = "Copy the bundle again, or export it again."


@dataclass(frozen=True)
class PlanHeader:
    """The header of a plan.

    Attributes:
        bytes: the size of the whole file.
        version: the version of the library that built it, such as "1.7.1.116"; only the same can run it.
        compute_capabilities: capabilities of the GPUs that it runs on, such as "8.9", ascending.
    """

    bytes: int
    version: str
    compute_capabilities: tuple[str, ...]

    @classmethod
    def parse(cls, data: builtins.bytes, source: str) -> PlanHeader:
        """Parses the first bytes of a plan.

        Args:
            data: the first ``HEADER_BYTES`` bytes, or more.
            source: the file, for errors.

        Raises:
            BundleError: the file isn't a plan, is truncated, or is for a GPU that this version doesn't know; names the
                field.
        """
        if len(data) < HEADER_BYTES:
            raise BundleError(
                f"{source}: {len(data)} bytes, and a plan's header alone has {HEADER_BYTES}: it was cut off",
                hint=_AGAIN,
            )
        if data[:4] != MAGIC:
            raise BundleError(
                f"{source}: magic: it begins with {data[:4]!r} instead of {MAGIC!r}: no TensorRT-RTX engine",
                hint=_AGAIN,
            )
        (size,) = struct.unpack_from("<Q", data, 16)
        (mask,) = struct.unpack_from("<I", data, 32)
        unknown = mask & ~sum(CAPABILITY_BITS.values())
        if unknown or not mask:
            raise BundleError(
                f"{source}: compute capabilities: the mask {mask:#x} has "
                f"{f'{unknown:#x}, which this Enginewright does not know' if unknown else 'none'}",
                hint="Install a newer enginewright, or export the bundle again.",
            )
        version = ".".join(map(str, data[24:28]))
        return cls(size, version, tuple(name for name, bit in CAPABILITY_BITS.items() if mask & bit))


def check_plan(
    header: PlanHeader, source: str, *, size: int, version: str, compute_capabilities: tuple[str, ...]
) -> None:
    """Compares a plan with its bundle's manifest.

    Raises BundleError naming ``source``, the field, both values, and the manifest's file.
    """
    manifest = (PurePosixPath(source).parent / "manifest.json").as_posix()
    in_header = {
        "bytes": header.bytes,
        "version": header.version,
        "compute capabilities": ", ".join(header.compute_capabilities),
    }
    in_manifest = {"bytes": size, "version": version, "compute capabilities": ", ".join(compute_capabilities)}
    for field, value in in_manifest.items():
        if in_header[field] != value:
            raise BundleError(
                f"{source}: {field}: the plan's header has {in_header[field]}, {manifest} {value}",
                hint=_AGAIN,
            )
