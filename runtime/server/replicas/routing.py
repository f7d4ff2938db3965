"""Which replica gets a request: the one that knows most of its prompt, unless it has far more to do than another.

What a replica knows is guessed from what it was sent: whole blocks of 32 tokens, as its prefix cache has them. A block
is named by a digest of the tenant, the salt and all tokens up to its end, so that tenants share nothing here either.
The table has as many blocks of a replica as its KV cache, and forgets the one that was used least recently.

Nothing here needs Ray: ``replica_router`` asks, from the thread that Ray Serve routes in.
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
"""The most blocks of one replica that are remembered: 2 million tokens."""
SPARE_REQUESTS = 2
"""A replica that knows the prompt may have so many requests more than twice those of the replica with the fewest."""


def block_names(scope: str, token_ids: Sequence[int]) -> tuple[bytes, ...]:
    """The names of a prompt's whole blocks, in order. ``scope``: its tenant and salt."""
    name = hashlib.blake2b(scope.encode("utf-8", "surrogatepass"), digest_size=16).digest()
    names = []
    for first in range(0, len(token_ids) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        block = msgspec.msgpack.encode(list(token_ids[first : first + BLOCK_TOKENS]))
        name = hashlib.blake2b(block, key=name, digest_size=16).digest()
        names.append(name)
    return tuple(names)


@dataclass
class Ticket:
    """A request for which a replica is chosen, with the facts that decide.

    Attributes:
        blocks: names of its prompt's blocks.
        version: the hash of the bundle that its prompt was made for; empty: any.
        avoid: replicas that are taken only where there is no other.
        only: the one replica that may be taken. With neither this nor a version, any that isn't linked yet.
        replica: the one that it is meant for so far.
        sent: whether that one has it.
    """

    blocks: tuple[bytes, ...] = ()
    version: str = ""
    avoid: frozenset[str] = frozenset()
    only: str | None = None
    replica: str | None = None
    sent: bool = False


@dataclass
class _Linked:
    version: str
    most_blocks: int
    blocks: OrderedDict[bytes, None]
    requests: int = 0
    last: int = 0

    def known(self, names: Sequence[bytes]) -> int:
        """Returns the number of blocks at the beginning of a prompt that the replica knows."""
        for count, name in enumerate(names):
            if name not in self.blocks:
                return count
        return len(names)

    def learn(self, names: Iterable[bytes]) -> None:
        # The last block first: so a prompt's begin, which others share, is forgotten after its end.
        for name in reversed(tuple(names)):
            self.blocks[name] = None
            self.blocks.move_to_end(name)
        while len(self.blocks) > self.most_blocks:
            self.blocks.popitem(last=False)


class Routes:
    """The replicas of one model that answer, and the requests that are on their way to them. Any thread may call it.

    Args:
        policy: "prefix": see the module; "load": the one with the fewest requests; "round-robin": one after the other.

    Attributes:
        there: the replicas that Ray Serve has, linked or not; ``replica_router`` says so.
    """

    def __init__(self, policy: Policy = "prefix") -> None:
        self.policy = policy
        self.there: frozenset[str] = frozenset()
        self._lock = threading.Lock()
        self._linked: dict[str, _Linked] = {}
        self._tickets: dict[int, Ticket] = {}
        self._count = 0

    def link(self, replica: str, version: str, cache_tokens: int) -> None:
        """A replica answers from now on. ``cache_tokens``: that its KV cache holds; 0: that isn't known."""
        most = min(MOST_BLOCKS, cache_tokens // BLOCK_TOKENS or MOST_BLOCKS)
        with self._lock:
            self._linked[replica] = _Linked(version, most, OrderedDict())

    def unlink(self, replica: str) -> None:
        """A replica is gone, with all that it knew."""
        with self._lock:
            self._linked.pop(replica, None)
            for ticket in self._tickets.values():
                if ticket.replica == replica:
                    ticket.replica = None

    def versions(self) -> set[str]:
        """The hashes of the bundles that replicas serve."""
        with self._lock:
            return {one.version for one in self._linked.values()}

    def requests(self, replica: str) -> int:
        """Returns the number of a replica's requests; 0 if it isn't linked."""
        with self._lock:
            linked = self._linked.get(replica)
            return 0 if linked is None else linked.requests

    def begin(self, number: int, ticket: Ticket) -> None:
        """A request needs a replica."""
        with self._lock:
            self._tickets[number] = ticket

    def end(self, number: int) -> None:
        """A request is over, or was given up."""
        with self._lock:
            if (ticket := self._tickets.pop(number, None)) is not None:
                self._give(ticket, None)

    def sent(self, number: int, replica: str) -> None:
        """A replica has taken a request."""
        with self._lock:
            if (ticket := self._tickets.get(number)) is not None and ticket.version:
                self._give(ticket, replica)
                ticket.sent = True

    def order(self, number: int, candidates: Sequence[str]) -> list[str]:
        """The replicas that may take a request, the best one first; none where it has to wait.

        The request counts as the first one's at once: of many that come together each sees those before it.
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
        """Counts a request as a replica's, or as nobody's."""
        if ticket.replica == replica:
            return
        if ticket.replica is not None and (before := self._linked.get(ticket.replica)) is not None:
            before.requests -= 1
        ticket.replica = replica
        if replica is not None and (row := self._linked.get(replica)) is not None:
            row.requests += 1
            row.learn(ticket.blocks)


ROUTES: dict[str, Routes] = {}
"""The routes of each Ray Serve application of this process, by its name: Ray Serve makes its routers by itself."""
