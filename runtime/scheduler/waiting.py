"""The waiting requests in order: by priority, then the tenant with the least service, then the deadline."""

from __future__ import annotations

from bisect import insort_left, insort_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import attrgetter

from enginewright.runtime.requests.request import Request

LEAST_TENANTS = 1024
"""The number of tenants' counters from which on those without effect are dropped."""
_RANK = attrgetter("rank")


class Shares:
    """Counts the service that each tenant has received, divided by its weight, for fair scheduling.

    The method is that of virtual token counters (Sheng et al., OSDI 2024). Service is counted in prompt tokens. A
    tenant that returns after a pause begins with at least the least service of the waiting tenants.

    Args:
        weights: weight of each tenant; 1 for other tenants.

    Attributes:
        counted: for each request that has begun, the number of its new tokens counted so far.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = weights
        self._had: dict[str, float] = {}
        self.counted: dict[Request, int] = {}
        self._next_look = LEAST_TENANTS  # for counters that may go, when there are so many

    def had(self, tenant: str) -> float:
        """Returns the tenant's service so far, divided by its weight."""
        return self._had.get(tenant, 0.0)

    def joins(self, tenant: str, others: Sequence[str]) -> None:
        """Registers a tenant whose first waiting request has arrived.

        Its service becomes at least the least of ``others``.

        ``others``: the tenants with waiting requests; if there are none, the last one that had some.
        """
        least = min((self.had(other) for other in others), default=0.0)
        self._had[tenant] = max(self.had(tenant), least)
        if len(self._had) >= self._next_look:
            self._forget(least, {tenant, *others})

    def _forget(self, least: float, waiting: set[str]) -> None:
        """Drops the counters of tenants without requests that would begin with ``least`` anyway. ``least`` never falls.

        ``waiting``: the tenants with waiting requests.
        """
        here = waiting | {request.tenant for request in self.counted}
        self._had = {name: had for name, had in self._had.items() if had > least or name in here}
        self._next_look = max(2 * len(self._had), LEAST_TENANTS)

    def begins(self, request: Request) -> None:
        """Counts a request's tokens that aren't in the prefix cache, once for each request, even after preemptions."""
        if request not in self.counted:
            self.counted[request] = request.output_length
            self._count(request.tenant, request.remaining)

    def count(self, requests: Iterable[Request], row_tokens: float) -> None:
        """Counts the new tokens of requests since the last call.

        ``row_tokens``: prompt tokens that cost as much as one new token.
        """
        for request in requests:
            counted = self.counted.get(request)
            if counted is not None and request.output_length > counted:
                self._count(request.tenant, (request.output_length - counted) * row_tokens)
                self.counted[request] = request.output_length

    def ends(self, request: Request, row_tokens: float) -> None:
        """Counts the last new tokens of a request that ends."""
        self.count((request,), row_tokens)
        self.counted.pop(request, None)

    def _count(self, tenant: str, tokens: float) -> None:
        self._had[tenant] = self.had(tenant) + tokens / self._weights.get(tenant, 1.0)


class WaitingQueue:
    """Waiting requests in order of rank, with the methods of a deque. With ``shares`` the order is by priority, then by
    the tenants' service.

    Args:
        shares: the service of each tenant, which changes all the time (``look_again``); None orders by rank alone.
    """

    def __init__(self, shares: Shares | None = None) -> None:
        self._shares = shares
        self._of: dict[str, list[Request]] = {}  # tenant, or "" for all -> by rank; none is empty
        self._first: Request | None = None
        self._last_left: list[str] = []

    def append(self, request: Request) -> None:
        """Adds a request at the position of its rank, after those of equal rank."""
        insort_right(self._tenants(request), request, key=_RANK)

    def appendleft(self, request: Request) -> None:
        """Adds a request at the position of its rank, before those of equal rank.

        So the order of a search's sequences stays.
        """
        insort_left(self._tenants(request), request, key=_RANK)

    def _tenants(self, request: Request) -> list[Request]:
        tenant = self._tenant(request)
        if tenant not in self._of and self._shares is not None:
            self._shares.joins(tenant, list(self._of) or self._last_left)
        self._first = None
        return self._of.setdefault(tenant, [])

    def popleft(self) -> Request:
        """Removes and returns the first request."""
        request = self[0]
        self.remove(request)
        return request

    def remove(self, request: Request) -> None:
        """Removes a request. Raises ValueError if it isn't there."""
        tenant = self._tenant(request)
        self._of.get(tenant, []).remove(request)
        if not self._of[tenant]:
            del self._of[tenant]
            self._last_left = [tenant]
        self._first = None

    def look_again(self) -> None:
        """Chooses the first request again, after counters or its rank have changed."""
        self._first = None

    def by_rank(self) -> list[Request]:
        """Returns all waiting requests by rank."""
        lists = list(self._of.values())
        return list(lists[0]) if len(lists) == 1 else sorted(self, key=_RANK)

    def __getitem__(self, index: int) -> Request:
        if index or not self._of:
            raise IndexError(index)
        if self._first is None:
            firsts = [requests[0] for requests in self._of.values()]
            self._first = firsts[0] if len(firsts) == 1 else min(firsts, key=self._order)
        return self._first

    def _order(self, request: Request) -> tuple[float, float, tuple[float, ...]]:
        assert self._shares is not None
        return request.rank[0], self._shares.had(request.tenant), request.rank

    def _tenant(self, request: Request) -> str:
        return "" if self._shares is None else request.tenant

    def __iter__(self) -> Iterator[Request]:
        return (request for requests in list(self._of.values()) for request in requests)

    def __len__(self) -> int:
        return sum(map(len, self._of.values()))

    def __bool__(self) -> bool:
        return bool(self._of)

    def __contains__(self, request: object) -> bool:
        return any(request in requests for requests in self._of.values())
