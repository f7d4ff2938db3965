"""Chooses the replica of a request: the one whose prefix cache has most of the prompt, unless that one is too busy.

The contents of a replica's prefix cache are estimated from the prompts that were sent to it, in whole blocks of 32
tokens. The name of a block is a digest of the tenant, the salt and all tokens up to its end; tenants share no blocks,
as in the prefix cache. The table of a replica has as many blocks as its KV cache, and drops the least recently used
block first.

Nothing here needs Ray: ``replica_router`` calls it from the thread in which Ray Serve routes.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from ..http.options import Policy

BLOCK_TOKENS = 32
MOST_BLOCKS = 1 << 16
"""The most blocks in the table of one replica: 2 million tokens."""
SPARE_REQUESTS = 2
"""The margin of requests with which a replica that has blocks of the prompt is preferred.

It is chosen while it has at most twice the requests of the least busy replica, plus this number.
"""


def block_names(scope: str, token_ids: Sequence[int]) -> tuple[bytes, ...]:
    """Returns the names of a prompt's whole blocks, in order; ``scope`` is the tenant and the salt of the request."""
    name = hashlib.blake2b(scope.encode("utf-8", "surrogatepass"), digest_size=16).digest()
    names = []
    for first in range(0, len(token_ids) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        block = msgspec.msgpack.encode(list(token_ids[first : first + BLOCK_TOKENS]))
        name = hashlib.blake2b(block, key=name, digest_size=16).digest()
        names.append(name)
    return tuple(names)


@dataclass
class Ticket:
    """A request for which a replica is chosen.

    Attributes:
        blocks: names of the blocks of its prompt.
        version: hash of the bundle whose tokenizer made the prompt; empty if any replica will do.
        avoid: replicas to choose only if there is no other.
        only: the one replica that may be chosen. If neither ``only`` nor ``version`` is set, any replica without a link
            is chosen.
        replica: the chosen replica; None for none yet.
        sent: True if ``replica`` has accepted the request.
    """

    blocks: tuple[bytes, ...] = ()
    version: str = ""
    avoid: frozenset[str] = frozenset()
    only: str | None = None
    replica: str | None = None
    sent: bool = False


@dataclass
class _Linked:
    """A linked replica.

    Attributes:
        version: hash of its bundle.
        most_blocks: the most blocks in its table.
        blocks: the table: names of blocks, the least recently used first.
        requests: number of requests for which it is chosen, whether it has accepted them or not.
        last: number of the last choice in which it was chosen.
    """

    version: str
    most_blocks: int
    blocks: OrderedDict[bytes, None]
    requests: int = 0
    last: int = 0

    def known(self, names: Sequence[bytes]) -> int:
        """Returns the number of blocks at the beginning of a prompt that are in the replica's table."""
        for count, name in enumerate(names):
            if name not in self.blocks:
                return count
        return len(names)

    def learn(self, names: Iterable[bytes]) -> None:
        # The last block first: the beginning of a prompt, which other prompts share, must be dropped after its end.
        for name in reversed(tuple(names)):
            self.blocks[name] = None
            self.blocks.move_to_end(name)
        while len(self.blocks) > self.most_blocks:
            self.blocks.popitem(last=False)


class Routes:
    """The linked replicas of one model, and the requests on their way to them. It is thread-safe.

    Args:
        policy: "prefix" chooses as the module describes; "load" the replica with the fewest requests; "round-robin"
            each replica in turn.

    Attributes:
        there: ids of the replicas that Ray Serve has, linked or not; ``replica_router`` sets them.
    """

    def __init__(self, policy: Policy = "prefix") -> None:
        self.policy = policy
        self.there: frozenset[str] = frozenset()
        self._lock = threading.Lock()
        self._linked: dict[str, _Linked] = {}
        self._tickets: dict[int, Ticket] = {}
        self._count = 0

    def link(self, replica: str, version: str, cache_tokens: int) -> None:
        """Adds a replica that takes requests from now on.

        Args:
            replica: id of the replica.
            version: hash of its bundle.
            cache_tokens: the most tokens in its KV cache; 0 if the number isn't known.
        """
        most = min(MOST_BLOCKS, cache_tokens // BLOCK_TOKENS or MOST_BLOCKS)
        with self._lock:
            self._linked[replica] = _Linked(version, most, OrderedDict())

    def unlink(self, replica: str) -> None:
        """Removes a replica and its table of blocks."""
        with self._lock:
            self._linked.pop(replica, None)
            for ticket in self._tickets.values():
                if ticket.replica == replica:
                    ticket.replica = None

    def versions(self) -> set[str]:
        """Returns the hashes of the bundles that replicas serve."""
        with self._lock:
            return {one.version for one in self._linked.values()}

    def requests(self, replica: str) -> int:
        """Returns the number of requests that a replica has taken, without those for which it is only chosen."""
        with self._lock:
            return sum(ticket.sent and ticket.replica == replica for ticket in self._tickets.values())

    def begin(self, number: int, ticket: Ticket) -> None:
        """Adds the request ``number``, for which a replica is to be chosen."""
        with self._lock:
            self._tickets[number] = ticket

    def end(self, number: int) -> None:
        """Removes the request ``number``, which has ended or was given up."""
        with self._lock:
            if (ticket := self._tickets.pop(number, None)) is not None:
                self._give(ticket, None)

    def sent(self, number: int, replica: str) -> None:
        """Notes that a replica has taken the request ``number``."""
        with self._lock:
            if (ticket := self._tickets.get(number)) is not None and ticket.version:
                self._give(ticket, replica)
                ticket.sent = True

    def order(self, number: int, candidates: Sequence[str]) -> list[str]:
        """Returns the replicas that may take the request ``number``, the best one first; an empty list if it has to
        wait.

        The request counts as one of the first replica's at once, so that requests at the same moment don't choose the
        same one.

        Args:
            number: number of the request's ticket.
            candidates: ids of the replicas that Ray Serve offers.
        """
        with self._lock:
            ticket = self._tickets.get(number)
            if ticket is None:
                return []
            if ticket.only is not None or not ticket.version:
                unlinked = [one for one in candidates if one not in self._linked]
                return unlinked if ticket.only is None else [one for one in candidates if one == ticket.only]
            self._give(ticket, None)
            fit = [one for one in candidates if one in self._linked and self._linked[one].version == ticket.version]
            ordered = self._sorted([one for one in fit if one not in ticket.avoid] or fit, ticket)
            if ordered:
                self._count += 1
                self._linked[ordered[0]].last = self._count
                self._give(ticket, ordered[0])
            return ordered

    def _sorted(self, fit: Sequence[str], ticket: Ticket) -> list[str]:
        rows = {name: self._linked[name] for name in fit}
        if self.policy == "round-robin" or not rows:
            return sorted(rows, key=lambda name: (rows[name].last, name))
        most = 2 * min(row.requests for row in rows.values()) + SPARE_REQUESTS

        def rank(name: str) -> tuple[bool, int, int, int, str]:
            row = rows[name]
            busy = row.requests > most
            known = 0 if busy or self.policy == "load" else row.known(ticket.blocks)
            return busy, -known, row.requests, row.last, name

        return sorted(rows, key=rank)

    def _give(self, ticket: Ticket, replica: str | None) -> None:
        """Assigns a request to ``replica``, or to none, and updates the replicas' numbers of requests."""
        if ticket.replica == replica:
            return
        if ticket.replica is not None and (before := self._linked.get(ticket.replica)) is not None:
            before.requests -= 1
        ticket.replica = replica
        if replica is not None and (row := self._linked.get(replica)) is not None:
            row.requests += 1
            row.learn(ticket.blocks)


ROUTES: dict[str, Routes] = {}
"""The routes of each Ray Serve application of this process, by name.

Ray Serve makes the routers, which look them up here.
"""
