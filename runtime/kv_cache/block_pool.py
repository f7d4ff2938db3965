"""Counts the holders of the blocks of a KV cache, and keeps unused blocks for later. The executor has their memory.

If several ranks divide the keys, each rank owns some blocks (``DividedPool``), and all blocks of a split of
``SPLIT_TOKENS`` have one owner: the one with the most free blocks when a request begins the split. A window's blocks
are released in whole splits. So a request that runs alone can always finish a split that it has begun: its other splits
are whole, and an owner's blocks make whole splits. A ``BlockPool`` has one owner, and there a split is one block.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from enginewright.runtime.requests.block_tables import NO_BLOCK

from ..shared.errors import CapacityError

SPLIT_TOKENS = 512
"""Tokens of a split. If ranks divide the keys and values, one rank has all of a split, and computes its attention."""

TENANTS_SHARE = 2
"""A tenant keeps at least 1 / (TENANTS_SHARE * number of tenants) of the pool's blocks when others need blocks."""


class BlockPool:
    """Reference-counted blocks 0..blocks-1. A block is one of three:

    1. held, by one request or several (a shared prefix);
    2. kept: nobody holds it, but a later request may find a prefix in it; the one unused for longest is evicted first;
    3. free.

    If no block is free, a kept block of the tenant with the most kept blocks is evicted. ``available`` leaves each
    other tenant its share, so that one tenant can't evict all blocks of another. ``force`` ignores the shares, for the
    oldest request, which must advance. Every operation takes constant time for a given number of tenants.

    Args:
        blocks: the number of blocks.
        evicted: called with a kept block before it is given to somebody else.

    Attributes:
        split: the number of consecutive blocks of a table, from a multiple of it on, that have the same owner.
    """

    split = 1

    def __init__(self, blocks: int, evicted: Callable[[int], None] = lambda block: None) -> None:
        if blocks < 0:
            raise ValueError(f"blocks: {blocks} is negative")
        self.total_blocks = blocks
        self.evictions = 0
        self._evicted = evicted
        self._free = list(range(blocks - 1, -1, -1))  # the next one is last, so that the first are used first
        self._holders = [0] * blocks  # pins among them
        self._pins: dict[int, int] = {}  # block -> how often it is pinned
        self._tenant: list[str | None] = [None] * blocks  # of a block that is kept once nobody holds it
        self._kept: dict[str, OrderedDict[int, None]] = {}  # tenant -> blocks that nobody holds, oldest use first
        self.kept_blocks = 0  # that nobody holds, and that a later request may use

    @property
    def free_blocks(self) -> int:
        """The number of blocks that nobody holds, kept ones included."""
        return len(self._free) + self.kept_blocks

    @property
    def shared_blocks(self) -> int:
        """The number of blocks that more than one request holds. Reading it takes time for each block of the pool."""
        return sum(count > 1 for count in self._held_by_requests(0, self.total_blocks))

    def available(self, tenant: str = "", *, force: bool = False) -> int:
        """Returns the number of blocks that ``tenant`` can allocate now.

        ``force``: True if all blocks that other tenants keep may be evicted.
        """
        if not self._kept:
            return len(self._free)
        share = 0 if force else self._share(tenant)
        kept_blocks = sum(len(of) - (0 if name == tenant else min(len(of), share)) for name, of in self._kept.items())
        return len(self._free) + kept_blocks

    def allocate(self, tenant: str = "", owner: int = 0) -> int:
        """Takes a free or kept block of ``owner``, and returns it with one holder.

        Raises CapacityError if all are held.
        """
        block = self._free.pop() if self._free else self._evict(tenant)
        self._holders[block] = 1
        return block

    def owner_of(self, block: int) -> int:
        """Returns the index of the owner, such as a rank, that has a block; 0 in a pool with one owner."""
        return 0

    def available_like(self, block: int, tenant: str = "", *, force: bool = False) -> int:
        """Returns the number of blocks that ``tenant`` can allocate now from the owner of ``block``.

        ``force``: True if all blocks that other tenants keep may be evicted.
        """
        return self.available(tenant, force=force)

    def owners_of_next(
        self, table: Sequence[int], count: int, tenant: str = "", *, force: bool = False, owner: int | None = None
    ) -> list[int]:
        """Returns the owner of each block to append to a block table:

        ``count`` of them, or fewer if too few are available.

        Args:
            table: the blocks of the table so far.
            count: the number of blocks to append.
            tenant: the tenant that takes the blocks.
            force: True if all blocks that other tenants keep may be evicted.
            owner: the owner of the first of these blocks, if it is known.
        """
        return [0] * min(count, self.available(tenant, force=force))

    def certain(self, sequences: int) -> tuple[int, int]:
        """Returns (blocks, unit): the number of blocks that the pool can always give to ``sequences`` requests
        together.

        That number holds for any distribution of the blocks over owners. Each request takes a multiple of ``unit``
        blocks.
        """
        return self.total_blocks, 1

    def share(self, block: int) -> None:
        """Adds a holder to a block that is held or kept. Raises ValueError if the block is free."""
        if self._is_kept(block):
            self._take(block)
        else:
            self._check_held(block)
        self._holders[block] += 1

    def pin(self, block: int) -> None:
        """Adds a holder to a block, free ones included. Until ``unpin``, ``allocate`` doesn't return the block."""
        if not self._holders[block] and self._tenant[block] is None:
            self._free.remove(block)  # rare: what is pinned is mostly held, or kept
            self._holders[block] = 1
        else:
            self.share(block)
        self._pins[block] = self._pins.get(block, 0) + 1

    def unpin(self, block: int) -> None:
        """Removes a pin, and its holder, from a block. Raises KeyError if the block isn't pinned."""
        self._pins[block] -= 1
        if not self._pins[block]:
            del self._pins[block]
        self.release(block)

    def pins(self, block: int) -> int:
        """Returns the number of pins of ``block``; each pin is one of its holders."""
        return self._pins.get(block, 0)

    def release(self, block: int) -> None:
        """Removes a holder from a block. Raises ValueError if the block is free already."""
        self._check_held(block)
        self._holders[block] -= 1
        if self._holders[block]:
            return
        tenant = self._tenant[block]
        if tenant is None:
            self._free.append(block)
        else:
            self._kept.setdefault(tenant, OrderedDict())[block] = None
            self.kept_blocks += 1

    def keep(self, block: int, tenant: str) -> None:
        """Keeps a held block for a tenant after its last release. Raises ValueError if the block isn't held."""
        self._check_held(block)
        self._tenant[block] = tenant

    def drop(self, block: int) -> None:
        """Stops keeping a block: it becomes free now, or when its holders release it."""
        if self._is_kept(block):
            self._take(block)
            self._free.append(block)
        self._tenant[block] = None

    def holders(self, block: int) -> int:
        """Returns the number of holders of ``block``, pins among them; 0 if it is free or kept."""
        return self._holders[block]

    def requests(self, block: int) -> int:
        """Returns the number of requests that hold ``block``: its holders without its pins."""
        return self._holders[block] - self._pins.get(block, 0)

    def states(self, first: int, last: int) -> bytes:
        """Returns one byte for each of blocks first..last-1: 0 free, 1 held, 2 held by several, 3 kept.

        A block that is pinned and that no request holds counts as 0 or 3. Safe from any thread.
        """
        both = zip(self._held_by_requests(first, last), self._tenant[first:last], strict=True)
        return bytes(min(holders, 2) or (0 if tenant is None else 3) for holders, tenant in both)

    def _held_by_requests(self, first: int, last: int) -> list[int]:
        """Returns the number of requests that hold each of blocks first..last-1. Safe from any thread."""
        holders = self._holders[first:last]
        for block, pins in list(self._pins.items()):
            if first <= block < min(last, self.total_blocks):
                holders[block - first] = max(holders[block - first] - pins, 0)
        return holders

    def _share(self, tenant: str) -> int:
        """Returns the number of kept blocks that are protected for each tenant: ``tenant`` can evict another one's kept
        blocks only beyond this number.
        """
        tenants = len(self._kept) + (tenant not in self._kept)
        return self.total_blocks // (TENANTS_SHARE * tenants) if tenants > 1 else 0

    def _evict(self, tenant: str) -> int:
        if not self._kept:
            raise CapacityError(
                f"all {self.total_blocks} KV blocks are in use", hint="Release some, or enlarge the pool."
            )
        share = self._share(tenant)
        losing = [name for name, of in self._kept.items() if name == tenant or len(of) > share] or list(self._kept)
        block = next(iter(self._kept[max(losing, key=lambda name: (len(self._kept[name]), name == tenant))]))
        self._take(block)
        self._tenant[block] = None
        self.evictions += 1
        self._evicted(block)
        return block

    def _is_kept(self, block: int) -> bool:
        return 0 <= block < self.total_blocks and not self._holders[block] and self._tenant[block] is not None

    def _take(self, block: int) -> None:
        """Removes a block from the kept blocks."""
        tenant = self._tenant[block]
        assert tenant is not None
        blocks = self._kept[tenant]
        del blocks[block]
        self.kept_blocks -= 1
        if not blocks:
            del self._kept[tenant]

    def _check_held(self, block: int) -> None:
        if not 0 <= block < self.total_blocks or not self._holders[block]:
            raise ValueError(f"KV block {block} is not held")


class DividedPool(BlockPool):
    """Blocks of several owners: block b belongs to owner ``b % owners``, and each owner's blocks are a pool.

    Args:
        blocks: the number of blocks, a multiple of ``owners``.
        owners: the number of owners.
        evicted, split: see ``BlockPool``.
    """

    def __init__(
        self, blocks: int, owners: int, evicted: Callable[[int], None] = lambda block: None, split: int = 1
    ) -> None:
        if blocks % owners:
            raise ValueError(f"blocks: {blocks} isn't a multiple of {owners} owners")
        self.total_blocks = blocks
        self.owners = owners
        self.split = split

        def telling(owner: int) -> Callable[[int], None]:
            return lambda block: evicted(block * owners + owner)

        self.parts = tuple(BlockPool(blocks // owners, telling(owner)) for owner in range(owners))

    @property
    def evictions(self) -> int:  # type: ignore[override]
        """The number of blocks that were evicted so far."""
        return sum(part.evictions for part in self.parts)

    @property
    def kept_blocks(self) -> int:  # type: ignore[override]
        """The number of blocks that nobody holds, and that a later request may use."""
        return sum(part.kept_blocks for part in self.parts)

    @property
    def free_blocks(self) -> int:
        """The number of blocks of all owners that nobody holds, kept ones included."""
        return sum(part.free_blocks for part in self.parts)

    @property
    def shared_blocks(self) -> int:
        """The number of blocks of all owners that more than one request holds."""
        return sum(part.shared_blocks for part in self.parts)

    def available(self, tenant: str = "", *, force: bool = False) -> int:
        """Returns the number of blocks that ``tenant`` can allocate now from all owners together; see ``BlockPool``."""
        return sum(self.available_of(tenant, force=force))

    def available_of(self, tenant: str = "", *, force: bool = False) -> list[int]:
        """Returns the number of blocks that ``tenant`` can allocate now from each owner, in the order of owners.

        ``force``: True if all blocks that other tenants keep may be evicted.
        """
        return [part.available(tenant, force=force) for part in self.parts]

    def owner_of(self, block: int) -> int:
        """Returns the owner of a block: ``block % owners``."""
        return block % self.owners

    def available_like(self, block: int, tenant: str = "", *, force: bool = False) -> int:
        """Implements ``BlockPool.available_like``: counts only the blocks of the owner of ``block``."""
        return self.parts[block % self.owners].available(tenant, force=force)

    def owners_of_next(
        self, table: Sequence[int], count: int, tenant: str = "", *, force: bool = False, owner: int | None = None
    ) -> list[int]:
        """Returns the owner of each block to append to ``table``, with the arguments of ``BlockPool.owners_of_next``.

        A split that has been begun keeps its owner. A new split goes to the owner with the most free blocks; among
        equals, to the owner whose number is nearest to the last split's. So an empty pool gives 0 1 2 2 1 0 0 1 2: all
        owners then have the same work for a prompt, whose later tokens see more splits.
        """
        left, owners, at = self.available_of(tenant, force=force), list[int](), len(table)
        last = table[-1] % self.owners if at and table[-1] != NO_BLOCK else 0
        if owner is None and at % self.split and table[-1] != NO_BLOCK:
            owner = last
        while len(owners) < count:
            if owner is None:
                most = max(left)
                owner = min((abs(last - i), i) for i, n in enumerate(left) if n == most)[1]
            rest = min(count - len(owners), self.split - at % self.split)
            blocks = min(rest, left[owner])
            owners += [owner] * blocks
            if blocks < rest:
                break
            left[owner] -= blocks
            at += blocks
            last, owner = owner, None
        return owners

    def certain(self, sequences: int) -> tuple[int, int]:
        """Implements ``BlockPool``: for one sequence, whole splits of all owners; for several, one owner's blocks."""
        if sequences > 1:  # all sequences of a search may have their blocks of one owner
            return self.total_blocks // self.owners, 1
        return self.total_blocks, self.split

    def allocate(self, tenant: str = "", owner: int = 0) -> int:
        """Takes a block of an owner; see ``BlockPool``."""
        return self.parts[owner].allocate(tenant) * self.owners + owner

    def share(self, block: int) -> None:
        """Adds a holder to a block; see ``BlockPool``."""
        self.parts[block % self.owners].share(block // self.owners)

    def pin(self, block: int) -> None:
        """Adds a holder to a block, free ones included; see ``BlockPool``."""
        self.parts[block % self.owners].pin(block // self.owners)

    def unpin(self, block: int) -> None:
        """Removes a pin, and its holder, from a block; see ``BlockPool``."""
        self.parts[block % self.owners].unpin(block // self.owners)

    def pins(self, block: int) -> int:
        """Returns the number of pins of ``block``."""
        return self.parts[block % self.owners].pins(block // self.owners)

    def release(self, block: int) -> None:
        """Removes a holder from a block; see ``BlockPool``."""
        self.parts[block % self.owners].release(block // self.owners)

    def keep(self, block: int, tenant: str) -> None:
        """Keeps a held block for a tenant after its last release; see ``BlockPool``."""
        self.parts[block % self.owners].keep(block // self.owners, tenant)

    def drop(self, block: int) -> None:
        """Stops keeping a block; see ``BlockPool``."""
        self.parts[block % self.owners].drop(block // self.owners)

    def holders(self, block: int) -> int:
        """Returns the number of holders of ``block``, pins among them."""
        return self.parts[block % self.owners].holders(block // self.owners)

    def requests(self, block: int) -> int:
        """Returns the number of requests that hold ``block``; see ``BlockPool``."""
        return self.parts[block % self.owners].requests(block // self.owners)

    def states(self, first: int, last: int) -> bytes:
        """Returns one byte for each of blocks first..last-1: 0 free, 1 held, 2 held by several requests, 3 kept."""
        owners = self.owners
        return b"".join(
            self.parts[b % owners].states(b // owners, b // owners + 1)
            for b in range(first, min(last, self.total_blocks))
        )


def pool_of(name: str, block_size: int, blocks: int, owners: int, evicted: Callable[[int], None]) -> BlockPool:
    """Makes the pool of a cache group's blocks.

    Args:
        name: the group's name, for the error.
        block_size: the number of tokens of a block.
        blocks: the number of blocks.
        owners: the number of owners among which the blocks are divided.
        evicted: called with a kept block before it is given to somebody else.

    Raises ValueError if the blocks of several owners don't make whole splits for each of them.
    """
    if owners == 1:
        return BlockPool(blocks, evicted)
    split = SPLIT_TOKENS // block_size
    if SPLIT_TOKENS % block_size or blocks % (split * owners):
        raise ValueError(f"blocks: {blocks} of {name} aren't whole splits of {owners} owners")
    return DividedPool(blocks, owners, evicted, split)
