"""KV blocks in memory that numpy can address, for executors that keep their caches there."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ..bundle.manifest import target_folder
from ..bundle.reader import Bundle

Array = npt.NDArray[Any]


class HostBlocks:
    """The base class of executors whose KV caches are numpy arrays; it implements
    ``kv_cache.disk_tier.BlockMemory``.
    """

    def memory_of(self, group: str) -> Iterable[npt.NDArray[np.uint8]]:
        """Returns the memory of each layer's keys, values or states in the group ``group``, [P, ...] of bytes each."""
        raise NotImplementedError

    def memory_with(self, group: str, block: int) -> Iterable[npt.NDArray[np.uint8]]:
        """Returns those memories of `memory_of` that contain the block ``block``."""
        return self.memory_of(group)

    def read_block(self, group: str, block: int) -> npt.NDArray[np.uint8]:
        """Returns the bytes of a block; implements ``BlockMemory``."""
        return np.concatenate([memory[block].reshape(-1) for memory in self.memory_with(group, block)])

    def write_block(self, group: str, block: int, payload: npt.NDArray[np.uint8]) -> None:
        """Copies the payload of one block into a group's caches. Implements ``BlockMemory``."""
        at = 0
        for memory in self.memory_with(group, block):
            size = memory[block].size
            memory[block] = payload[at : at + size].reshape(memory[block].shape)
            at += size

    def copy_blocks(self, copies: Mapping[str, Array]) -> None:
        """Copies the blocks that a step lists, in order: cache group -> (source, destination) of each copy, [n, 2]."""
        for group, pairs in copies.items():
            source, to = pairs.T
            chained = np.isin(source, to).any()
            for memory in self.memory_of(group):
                if not chained:
                    memory[to] = memory[source]
                    continue
                for first, second in pairs.tolist():
                    memory[second] = memory[first]


def cache_identity(bundle: Bundle, target: str, *versions: object) -> bytes:
    """Returns bytes that name the target's files and ``versions``, the versions of the software that runs them."""
    folders = ("weights/", target_folder(target) + "/")
    files = [(name, file.sha256) for name, file in bundle.files.items() if name.startswith(folders)]
    return json.dumps([*versions, sorted(files)]).encode()
