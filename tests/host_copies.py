"""Copies of an executor's blocks in main memory, made with ``read_block`` and ``write_block``."""

from __future__ import annotations

from collections.abc import Mapping

from enginewright.runtime.kv_cache.block_store import Payload


class CopiesInMemory:
    """A ``kv_cache.host_tier.HostCopies`` for executors whose blocks can be read and written."""

    copies: dict[str, list[Payload | None]]

    def read_block(self, group: str, block: int) -> Payload:
        raise NotImplementedError

    def write_block(self, group: str, block: int, payload: Payload) -> None:
        raise NotImplementedError

    def copy_bytes(self, group: str) -> int:
        return len(self.read_block(group, 0))

    def open_copies(self, counts: Mapping[str, int]) -> None:
        self.copies = {name: [None] * count for name, count in counts.items()}

    def save_copy(self, group: str, block: int, slot: int) -> None:
        self.copies[group][slot] = self.read_block(group, block)

    def load_copy(self, group: str, slot: int, block: int) -> None:
        self.write_block(group, block, self.read_copy(group, slot))

    def read_copy(self, group: str, slot: int) -> Payload:
        payload = self.copies[group][slot]
        assert payload is not None, "a copy is read that nobody made"
        return payload.copy()
