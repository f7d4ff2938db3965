"""Blocks of a KV cache: who holds which. Numbers only; the memory is the executor's."""

from __future__ import annotations

from enginewright.plugins.shared.errors import CapacityError


class BlockPool:
    """Reference-counted blocks 0..blocks-1 with a free list. Every operation takes constant time.

    A block that several requests hold (a shared prefix) is free once all of them released it.
    """

    def __init__(self, blocks: int) -> None:
        if blocks < 0:
            raise ValueError(f"blocks: {blocks} is negative")
        self.total_blocks = blocks
        self._free = list(range(blocks - 1, -1, -1))  # the next one is last, so that the first are used first
        self._holders = [0] * blocks

    @property
    def free_blocks(self) -> int:
        """Number of free blocks."""
        return len(self._free)

    def allocate(self) -> int:
        """A free block, now held once. Raises CapacityError if there is none."""
        if not self._free:
            raise CapacityError(
                f"all {self.total_blocks} KV blocks are in use", hint="Release some, or enlarge the pool."
            )
        block = self._free.pop()
        self._holders[block] = 1
        return block

    def share(self, block: int) -> None:
        """One more holder of a block that is held. Raises ValueError if it is free."""
        self._check_held(block)
        self._holders[block] += 1

    def release(self, block: int) -> None:
        """One holder less. Raises ValueError if the block is free already."""
        self._check_held(block)
        self._holders[block] -= 1
        if not self._holders[block]:
            self._free.append(block)

    def holders(self, block: int) -> int:
        """How many hold ``block``; 0 if it is free."""
        return self._holders[block]

    def _check_held(self, block: int) -> None:
        if not 0 <= block < self.total_blocks or not self._holders[block]:
            raise ValueError(f"KV block {block} is not held")
