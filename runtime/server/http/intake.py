"""Limits connections and the bytes of request bodies, in total and for each tenant.

Beyond a limit an old connection or body is dropped rather than the new one. The dropped connection is the oldest
without a tenant, or else the oldest idle one. The dropped body is the largest unfinished one of the tenant with the
most bytes. So one client can't fill the server and keep out the small requests of others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Protocol

from .errors import ApiError
from .options import ServerOptions
from .tenants import QuotaError, Tenant

FREE_BYTES = 64 << 10
"""The bytes of each body that aren't counted: the number of connections bounds them."""
GRACE_SECONDS = 10.0
"""The seconds by which a body may be later than its slowest rate allows."""


class Held(Protocol):
    """A connection, as ``Intake`` uses it."""

    @property
    def idle(self) -> bool: ...
    def drop(self) -> None: ...


class IncomingBody:
    """A body that is being read, or whose request is being answered.

    Args:
        tenant: the tenant that sends it.

    Attributes:
        size: bytes read so far.
        finished: True if all bytes were read.
        refused: the error with which the body ends if it was dropped; None otherwise.
        wake: called when ``refused`` is set.
    """

    def __init__(self, tenant: Tenant) -> None:
        self.tenant = tenant
        self.size = 0
        self.finished = False
        self.refused: ApiError | None = None
        self.wake: Callable[[], None] = lambda: None

    @property
    def counted(self) -> int:
        """The bytes of the body that count towards the limits: all beyond the first FREE_BYTES."""
        return max(0, self.size - FREE_BYTES)


class Intake:
    """The connections and bodies of all clients; see the module.

    Args:
        options: the server's options, with the limits.
        most_files: files that the process may open; None: any number.
    """

    def __init__(self, options: ServerOptions, most_files: int | None = None) -> None:
        self.options = options
        self._most_files = most_files
        self._strangers: dict[Held, None] = {}
        self._tenants: dict[Held, str] = {}
        self._bodies: defaultdict[str, dict[IncomingBody, None]] = defaultdict(dict)
        self._held: defaultdict[str, int] = defaultdict(int)
        self.bytes = 0

    @property
    def connections(self) -> int:
        """The number of open connections."""
        return len(self._strangers) + len(self._tenants)

    def connect(self, connection: Held) -> bool:
        """Registers a new connection; returns False if there are too many and none can be dropped."""
        if self.connections >= self._most_connections():
            oldest = next(iter(self._strangers), None) or next((one for one in self._tenants if one.idle), None)
            if oldest is None:
                return False
            self.disconnect(oldest)
            oldest.drop()
        self._strangers[connection] = None
        return True

    def _most_connections(self) -> int:
        if self._most_files is None:
            return self.options.max_connections
        return max(1, min(self.options.max_connections, self._most_files - _OTHER_FILES))  # a connection is a file

    def enter(self, connection: Held, tenant: Tenant) -> None:
        """Counts a connection for the tenant of its request. Raises ApiError if the tenant has too many."""
        if not self._knows(connection):
            return
        if self._tenants.get(connection) != tenant.name and tenant.key is not None:
            theirs = [one for one, name in self._tenants.items() if name == tenant.name]
            if len(theirs) >= self.options.max_tenant_connections:
                oldest = next((one for one in theirs if one.idle), None)
                if oldest is None:
                    raise ApiError(429, f"this tenant has {len(theirs)} connections already", retry_after=1.0)
                self.disconnect(oldest)
                oldest.drop()
        self.disconnect(connection)
        self._tenants[connection] = tenant.name  # the one that was used last comes last

    def disconnect(self, connection: Held) -> None:
        """Removes a connection that has closed."""
        self._strangers.pop(connection, None)
        self._tenants.pop(connection, None)

    def begin(self, tenant: Tenant) -> IncomingBody:
        """Returns the record of a body that begins to arrive. Raises ApiError if its key's quotas are used up.

        Unfinished bodies count towards the quotas.
        """
        try:
            tenant.begin_body()
        except QuotaError as e:
            raise ApiError(429, str(e), retry_after=e.retry_after) from e
        body = IncomingBody(tenant)
        self._bodies[tenant.name][body] = None
        return body

    def add(self, body: IncomingBody, size: int) -> None:
        """Counts bytes of a body that were read. Raises ApiError if the body is refused."""
        if body.refused is not None:
            raise body.refused
        before = body.counted
        body.size += size
        self._count(body.tenant.name, body.counted - before)
        if not body.counted:
            return
        most, theirs = (
            max(one, self.options.max_body) for one in (self.options.max_held, self.options.max_tenant_held)
        )
        while body.tenant.key is not None and body.refused is None and self._held[body.tenant.name] > theirs:
            self._refuse(body.tenant.name, ApiError(429, "this tenant's bodies take too much", retry_after=1.0))
        while body.refused is None and self.bytes > most:
            unfinished = {name: sum(one.counted for one in self._unfinished(name)) for name in self._bodies}
            name = max(unfinished, key=lambda name: unfinished[name])
            self._refuse(name, ApiError(503, "the bodies of all requests take too much", retry_after=1.0))
        if body.refused is not None:
            raise body.refused

    def finish(self, body: IncomingBody) -> None:
        """Notes that a body is whole: from now on its request counts towards the quotas instead."""
        if not body.finished:
            body.finished = True
            body.tenant.end_body()

    def end(self, body: IncomingBody) -> None:
        """Removes a body whose request has ended."""
        self.finish(body)
        self._forget(body)

    def _unfinished(self, name: str) -> list[IncomingBody]:
        return [one for one in self._bodies[name] if not one.finished]

    def _refuse(self, name: str, error: ApiError) -> None:
        """Refuses the largest unfinished body of a tenant. There is at least one: the body that just grew."""
        largest = max(self._unfinished(name), key=lambda one: one.size)
        largest.refused = error
        self._forget(largest)
        largest.wake()

    def _forget(self, body: IncomingBody) -> None:
        name = body.tenant.name
        if self._bodies[name].pop(body, body) is None:
            self._count(name, -body.counted)
        if not self._bodies[name]:
            del self._bodies[name]

    def _count(self, name: str, size: int) -> None:
        self.bytes += size
        self._held[name] += size
        if not self._held[name]:
            del self._held[name]

    def _knows(self, connection: Held) -> bool:
        return connection in self._strangers or connection in self._tenants


def body_deadline(received: int, rate: int, longest: float) -> float:
    """Returns the seconds after a body's begin by which its next bytes must arrive.

    Args:
        received: bytes received so far.
        rate: minimum bytes per second; 0 for none.
        longest: maximum seconds of the whole body.
    """
    return longest if not rate else min(longest, GRACE_SECONDS + received / rate)


_OTHER_FILES = 64
