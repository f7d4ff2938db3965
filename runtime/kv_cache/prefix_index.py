"""A tree of the blocks of known tokens, in which a block is found by comparing the items of its key.

A node stands for the K items of a block after those of its parent, in one namespace. Items are compared, not their
hashes, so that two prefixes are never confused (vLLM #54727 shows what a collision does). A node's serial number is
never used again. The nodes under an evicted node are never found again, because their block ids are reused for other
tokens.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import msgspec

from enginewright.runtime.requests.block_keys import Item, Namespace, common_items
from enginewright.runtime.requests.block_tables import NO_BLOCK

Items = tuple[Item, ...]


class Node(msgspec.Struct, eq=False):
    """The items of a block, after those of its parent.

    Attributes:
        serial: the node's number, which no other node ever has.
        namespace: the tenant and adapter of the tokens.
        parent: the node of the block before; None for a root.
        items: K items; fewer in a block that was filled in part. A root has none.
        blocks: the block of each cache group; NO_BLOCK where it is lost, and for groups of states.
        states: snapshots of recurrent states: the number of items that they include -> the block of each cache group;
            NO_BLOCK for groups that hold no states.
        children: the nodes after this one, sorted by their items.
        users: the number of requests that will add a child. A node with users stays, even without blocks.
        detached: True if the index doesn't find the node any more.
        name: the key of ``RecordNames``, and the name of the block's record; None if it wasn't computed yet.
    """

    serial: int
    namespace: Namespace
    parent: Node | None
    items: Items
    blocks: list[int]
    states: dict[int, list[int]] = msgspec.field(default_factory=dict)
    children: list[Node] = msgspec.field(default_factory=list)
    users: int = 0
    detached: bool = False
    name: tuple[bytes, bytes] | None = None


@dataclass(frozen=True)
class Match:
    """The longest known beginning of some tokens.

    Attributes:
        nodes: the nodes of the tokens in their order. The last node may have more tokens than match.
        tokens: the number of tokens that match.
    """

    nodes: tuple[Node, ...]
    tokens: int


class PrefixIndex:
    """The tree of blocks in which prefixes are found by the items of their keys.

    Args:
        block_size: tokens of a block (K), the same in every group.
        may_lose: for each cache group, True if blocks after a lost block are still usable.
        drop: called with a group's number and a block that can't be found any more.
    """

    def __init__(self, block_size: int, may_lose: Sequence[bool], drop: Callable[[int, int], None]) -> None:
        self.block_size = block_size
        self._may_lose = tuple(may_lose)
        self._drop = drop
        self._serials = itertools.count()
        self._roots: dict[Namespace, Node] = {}
        self._node_of: list[dict[int, Node]] = [{} for _ in may_lose]  # of each group: block -> node

    def root(self, namespace: Namespace) -> Node:
        """Returns the root of a namespace's nodes, after which a prefix begins; makes it if there is none."""
        if namespace not in self._roots:
            self._roots[namespace] = self._node(namespace, None, (), [NO_BLOCK] * len(self._may_lose))
        return self._roots[namespace]

    def find(self, namespace: Namespace, items: Sequence[Item], most: int) -> Match:
        """Returns the longest known beginning of ``items[:most]``. It may end within a block."""
        node, nodes, size = self._roots.get(namespace), [], self.block_size
        matched = 0
        while node is not None and node.children and matched < most:
            next_items = tuple(items[matched : min(matched + size, most)])
            at = bisect_left(node.children, next_items, key=_items)
            near = node.children[max(at - 1, 0) : at + 1]  # of a sorted list, one of these shares the most with it
            node = max(near, key=lambda child: common_items(child.items, next_items))
            common = common_items(node.items, next_items)
            if not common:
                break
            nodes.append(node)
            matched += common
            if common < size:
                break
        return Match(tuple(nodes), matched)

    def add(self, parent: Node, items: Items, blocks: Sequence[int]) -> Node:
        """Returns the node of ``items`` after ``parent``; makes it if there is none.

        Args:
            parent: a node that isn't detached.
            items: the items of the block.
            blocks: the held block of each group, or NO_BLOCK. The node takes those for groups where it has none.

        Returns:
            The node; or ``parent`` if another child begins with ``items`` and has more. Then nothing is added.
        """
        at = bisect_left(parent.children, items, key=_items)
        after = parent.children[at] if at < len(parent.children) else None
        if after is None or after.items != items:
            if after is not None and after.items[: len(items)] == items:
                return parent
            before = parent.children[at - 1] if at else None
            after = self._node(parent.namespace, parent, items, [NO_BLOCK] * len(blocks))
            if before is not None and len(before.items) < len(items) and items[: len(before.items)] == before.items:
                self._move_states(before, after)
                self._detach(before)
                at -= 1
            parent.children.insert(at, after)
        for group, block in enumerate(blocks):
            if after.blocks[group] == NO_BLOCK != block and block not in self._node_of[group]:
                after.blocks[group] = block
                self._node_of[group][block] = after
        return after

    def add_state(self, parent: Node, items: Items, blocks: Sequence[int]) -> bool:
        """Adds a snapshot of the states after ``items``, which follow ``parent``.

        Args:
            parent: a node, which isn't detached.
            items: the first items of a child of it.
            blocks: the held block of each group of states; NO_BLOCK of other groups.

        Returns:
            False if there is such a snapshot, or no such child.
        """
        at = bisect_left(parent.children, items, key=_items)
        node = parent.children[at] if at < len(parent.children) else None
        if node is None or node.items[: len(items)] != items or self._state(node, items) is not None:
            return False
        node.states[len(items)] = list(blocks)
        for group, block in _of_groups(blocks):
            self._node_of[group][block] = node
        return True

    def snapshots(self, match: Match) -> Iterator[tuple[int, Sequence[int]]]:
        """Yields the number of tokens and the blocks of each snapshot within a match, the longest snapshot first.

        A snapshot may belong to a child of a node that isn't the best match.
        """
        for at in range(len(match.nodes) - 1, -1, -1):
            node, before = match.nodes[at], at * self.block_size
            if not node.states and node.parent is not None and len(node.parent.children) == 1:
                continue
            items = node.items[: match.tokens - before]
            for count in range(len(items), 0, -1):
                if (blocks := self._state(node, items[:count])) is not None:
                    yield before + count, blocks

    def _state(self, node: Node, items: Items) -> Sequence[int] | None:
        """Returns the blocks of the snapshot after ``items``, the first items of ``node``; None if there is none.

        The snapshot may be in another child of the node's parent.
        """
        if (blocks := node.states.get(len(items))) is not None or node.parent is None:
            return blocks
        siblings = node.parent.children
        for child in siblings[bisect_left(siblings, items, key=_items) :] if len(siblings) > 1 else ():
            if child.items[: len(items)] != items:
                break
            if (blocks := child.states.get(len(items))) is not None:
                return blocks
        return None

    def node(self, group: int, block: int) -> Node:
        """Returns the node that a group's block belongs to. Raises KeyError if ``find`` doesn't find the block."""
        return self._node_of[group][block]

    def nodes(self) -> list[Node]:
        """Returns all nodes except the roots, each after its parent."""
        nodes = list(self._roots.values())
        for node in nodes:
            nodes += node.children
        return [node for node in nodes if node.parent is not None]

    def discard(self, group: int, block: int) -> None:
        """Removes a block of cache group number ``group`` from the index, as `forget` does, if the index has it."""
        if block in self._node_of[group]:
            self.forget(group, block)

    def forget(self, group: int, block: int) -> None:
        """Removes a block, which is about to get other tokens, from the index.

        If its group may not lose blocks, later nodes are removed too. ``group`` is the number of the cache group.
        """
        node = self._node_of[group][block]
        if node.blocks[group] != block:
            self._forget_state(node, group, block)
            return
        del self._node_of[group][block]
        node.blocks[group] = NO_BLOCK
        if self._may_lose[group]:
            self.prune(node)
        else:
            self._detach(node)

    def clear(self, tenant: str | None) -> None:
        """Removes all nodes of a tenant; of all tenants if ``tenant`` is None."""
        for root in list(self._roots.values()):
            if tenant in (None, root.namespace.tenant):
                for child in list(root.children):
                    self._detach(child)
                self.prune(root)

    def prune(self, node: Node) -> None:
        """Removes a node if it has no use any more, and then each of its ancestors that has none."""
        while node.parent is not None and not node.detached and not self._needed(node):
            parent = node.parent
            self._detach(node)
            node = parent
        if node.parent is None and not self._needed(node):
            self._roots.pop(node.namespace, None)
            node.detached = True

    def _needed(self, node: Node) -> bool:
        return bool(node.users or node.children or node.states) or any(block != NO_BLOCK for block in node.blocks)

    def _forget_state(self, node: Node, group: int, block: int) -> None:
        """Removes the snapshot that has ``block``, and drops the snapshot's blocks of other groups."""
        count = next(count for count, blocks in node.states.items() if blocks[group] == block)
        for other, one in _of_groups(node.states.pop(count)):
            del self._node_of[other][one]
            if other != group:
                self._drop(other, one)
        self.prune(node)

    def _move_states(self, before: Node, after: Node) -> None:
        """Moves the snapshots of the node ``before`` to ``after``, whose items begin with the same."""
        after.states, before.states = before.states, {}
        for blocks in after.states.values():
            for group, block in _of_groups(blocks):
                self._node_of[group][block] = after

    def _detach(self, node: Node) -> None:
        """Removes a node and all nodes below it."""
        assert node.parent is not None
        siblings = node.parent.children
        at = bisect_left(siblings, node.items, key=_items)
        assert siblings[at] is node
        del siblings[at]
        left = [node]
        while left:
            gone = left.pop()
            gone.detached = True
            left += gone.children
            gone.children = []
            lost = [pair for blocks in (gone.blocks, *gone.states.values()) for pair in _of_groups(blocks)]
            gone.blocks, gone.states = [NO_BLOCK] * len(gone.blocks), {}
            for group, block in lost:
                del self._node_of[group][block]
                self._drop(group, block)

    def _node(self, namespace: Namespace, parent: Node | None, items: Items, blocks: list[int]) -> Node:
        return Node(next(self._serials), namespace, parent, items, blocks)


def _of_groups(blocks: Sequence[int]) -> list[tuple[int, int]]:
    """Returns (index of the group, block) for each entry of ``blocks`` that isn't NO_BLOCK."""
    return [(group, block) for group, block in enumerate(blocks) if block != NO_BLOCK]


def _items(node: Node) -> Items:
    return node.items
