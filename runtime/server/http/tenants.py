"""Quotas: API keys, their tenants, and the limits of each."""

from __future__ import annotations

import asyncio
import hashlib
import heapq
import hmac
import itertools
import logging
import re
import time
import tomllib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Annotated

import msgspec

from ...bundle.regular_file import MOST_JSON_BYTES, read_regular
from ...requests.request_options import RequestOptions
from ...shared.errors import RequestError
from .options import ServerOptions

_HASH = re.compile(r"sha256:[0-9a-f]{64}")
_LOG = logging.getLogger("enginewright.server")
_LOOK_SECONDS = 2.0
_BYTES_A_TOKEN = 16
"""The bytes of a body that count as one token. It is used if the body has fewer tokens than that, or was refused.

In most texts a token has 3 to 5 bytes.
"""


class Key(msgspec.Struct, forbid_unknown_fields=True, frozen=True, rename={"of_class": "class"}):
    """An API key: one ``[[keys]]`` table of the file that ``--api-keys`` names.

    Attributes:
        hash: "sha256:" and the SHA-256 of the key, in hexadecimal.
        tenant: name of the key's tenant. Tenants share no prefixes, turns or quotas.
        of_class: ``request_class`` of the key's requests, which can't choose another; None lets requests choose. The
            file calls it ``class``.
        priority: priority of the key's requests, which can only choose a later one; None lets requests choose.
        requests: maximum requests at a time; None for no limit.
        tokens_per_minute: maximum tokens of prompts and answers in a minute; None for no limit.
        admin: True if the key's requests may read ``/live``, ``/metrics`` and ``/props``.
    """

    hash: str
    tenant: str
    of_class: str | None = None
    priority: int | None = None
    requests: Annotated[int, msgspec.Meta(ge=1)] | None = None
    tokens_per_minute: Annotated[int, msgspec.Meta(ge=1)] | None = None
    admin: bool = False


class _File(msgspec.Struct, forbid_unknown_fields=True):
    keys: list[Key] = []


class QuotaError(Exception):
    """A tenant has used up its quota. ``retry_after``: seconds after which to try again."""

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Tenant:
    """A tenant, and its use of its quotas.

    Attributes:
        name: name of the tenant, by which prefixes and turns are found.
        key: the key with the quotas; None if no keys are needed.
        running: number of its requests that run.
    """

    def __init__(self, name: str, key: Key | None = None) -> None:
        self.name, self.key = name, key
        self.running = self._bodies = 0
        self._tokens = float(key.tokens_per_minute) if key is not None and key.tokens_per_minute else 0.0
        self._filled = time.monotonic()

    def begin_body(self) -> None:
        """Counts a request whose body is about to be read.

        Raises QuotaError if a quota of the tenant's key is used up.
        """
        self._check(self.running + self._bodies)
        self._bodies += 1

    def end_body(self) -> None:
        """Stops counting a body, after it was read or dropped."""
        self._bodies -= 1

    def begin(self) -> None:
        """Counts a request of the tenant as running. Raises QuotaError if a quota of its key is used up."""
        self._check(self.running)
        self.running += 1

    def _check(self, requests: int) -> None:
        key = self.key
        if key is not None and key.requests is not None and requests >= key.requests:
            raise QuotaError(f"{requests} requests run, and this key may have {key.requests} at a time", 1.0)
        if key is not None and key.tokens_per_minute is not None:
            self._fill(key.tokens_per_minute)
            if self._tokens <= 0:
                wait = (1 - self._tokens) * 60 / key.tokens_per_minute
                raise QuotaError(f"this key may have {key.tokens_per_minute} tokens a minute", wait)

    def widen(self, more: int) -> None:
        """Counts ``more`` further requests of the same body, such as several prompts or answers. Raises QuotaError."""
        key = self.key
        if key is not None and key.requests is not None and self.running + more > key.requests:
            raise QuotaError(f"{self.running + more} requests, and this key may have {key.requests} at a time", 1.0)
        self.running += more

    def ranked(self, options: RequestOptions) -> RequestOptions:
        """Returns a request's options with the class and the priority of the tenant's key.

        A request may have a later priority than its key, but no earlier one. Raises RequestError for another class.
        """
        key = self.key
        if key is None:
            return options
        if key.of_class is not None and options.request_class not in (None, key.of_class):
            raise RequestError(
                f"request_class: this key's requests are of the class {key.of_class!r}", hint="Leave it out."
            )
        priorities = [number for number in (key.priority, options.priority) if number is not None]
        return msgspec.structs.replace(
            options,
            priority=max(priorities, default=None),
            request_class=key.of_class if options.request_class is None else options.request_class,
        )

    def end(self, tokens: int, requests: int = 1) -> None:
        """Stops counting ``requests`` requests of a body, and subtracts its ``tokens`` from the quota."""
        self.running -= requests
        self._tokens -= tokens

    def _fill(self, rate: int) -> None:
        now = time.monotonic()
        self._tokens = min(self._tokens + (now - self._filled) * rate / 60, rate)
        self._filled = now


class Charge:
    """A body's use of its tenant's quotas, from before it is decoded until its answer ends.

    As a context manager it ends with the block, unless ``handed_on`` was set.

    Args:
        tenant: the sender of the body.
        size: bytes of the body. They count even if the body is refused.

    Attributes:
        size: bytes of the body.
        tokens: tokens of its prompts and answers.
        requests: number of its requests that run at a time.
        handed_on: True if other code calls ``end``.

    Raises QuotaError if the quota is used up.
    """

    def __init__(self, tenant: Tenant, size: int) -> None:
        tenant.begin()
        self.tenant, self.size = tenant, size
        self.tokens, self.requests = 0, 1
        self.handed_on = False

    def widen(self, more: int) -> None:
        """Counts ``more`` further requests of the same body. Raises QuotaError."""
        self.tenant.widen(more)
        self.requests += more

    def end(self) -> None:
        """Subtracts the tokens from the quota, and stops counting the requests."""
        self.tenant.end(max(self.tokens, self.size // _BYTES_A_TOKEN), self.requests)

    def __enter__(self) -> Charge:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.handed_on:
            self.end()


class Tenants:
    """The tenants by their keys, whose file is read again when it changes.

    Args:
        options: the server's options, of which ``api_keys`` is the file of keys, with a ``[[keys]]`` for each. Without
            one no key is needed, and all clients are one tenant.
    """

    def __init__(self, options: ServerOptions) -> None:
        self.options = options
        self._path = None if options.api_keys is None else Path(options.api_keys)
        self._everybody = Tenant("")
        self._tenants: dict[str, Tenant] = {}
        self._stamp: tuple[int, int] | None = None
        self._looked = 0.0
        self.problem: str | None = None
        if self._path is not None:
            self._read()

    @property
    def needed(self) -> bool:
        """True if requests need a key."""
        return self._path is not None

    def find(self, key: str | None) -> Tenant | None:
        """Returns the tenant of a key; None if the key is unknown, or missing where one is needed."""
        if self._path is None:
            return self._everybody
        self._look()
        digest = "sha256:" + hashlib.sha256((key or "").encode("utf-8", "surrogateescape")).hexdigest()
        match = None
        for known, tenant in self._tenants.items():  # all of them, so that the time doesn't tell which
            if hmac.compare_digest(known, digest):
                match = tenant
        return match if key else None

    def reload(self) -> None:
        """Reads the file of keys again. Raises RequestError for a wrong file; then the keys stay as they are."""
        if self._path is not None:
            self._read()
            self.problem = None

    def _look(self) -> None:
        """Reads the file of keys again if it has changed. After a wrong file the keys stay as they are."""
        assert self._path is not None
        if time.monotonic() - self._looked < _LOOK_SECONDS:
            return
        self._looked = time.monotonic()
        try:
            if self._stamp_of() != self._stamp:
                self._read()
                self.problem = None
        except (RequestError, OSError) as e:
            if str(e) != self.problem:
                _LOG.error("keys stay as they were: %s", e)
            self.problem = str(e)

    def _stamp_of(self) -> tuple[int, int]:
        assert self._path is not None
        status = self._path.stat()
        return status.st_mtime_ns, status.st_size

    def _read(self) -> None:
        assert self._path is not None
        try:
            stamp = self._stamp_of()
            document = tomllib.loads(read_regular(self._path, most=MOST_JSON_BYTES).decode())
            keys = msgspec.convert(document, _File).keys
        except (OSError, ValueError, msgspec.ValidationError) as e:
            why = getattr(e, "strerror", None) or e
            hint = "docs/use/server-access.md shows such a file."
            raise RequestError(f"api keys: {self._path}: {why}", hint=hint) from e
        wrong = next((key for key in keys if not _HASH.fullmatch(key.hash)), None)
        if wrong is not None or not keys:
            what = "it has no [[keys]]" if wrong is None else f"the hash of tenant {wrong.tenant!r} isn't sha256:..."
            raise RequestError(f"api keys: {self._path}: {what}", hint='printf %s "$KEY" | sha256sum')
        tenants: dict[str, Tenant] = {}
        for key in keys:
            old = self._tenants.get(key.hash)
            tenants[key.hash] = old if old is not None and old.key == key else Tenant(key.tenant, key)
        self._tenants, self._stamp = tenants, stamp


class FairTurns:
    """Shares time fairly between callers of several tenants.

    The tenant that has used the least time is next. So other tenants, however many or long their tasks, delay its short
    task by one task at most. A tenant's small tasks go before its large ones.

    Args:
        at_once: number of callers that run at a time.
        clock: function that returns the time in seconds.
    """

    def __init__(self, at_once: int = 1, clock: Callable[[], float] = time.monotonic) -> None:
        self._free, self._clock = at_once, clock
        self._waiting: dict[str, list[tuple[int, int, asyncio.Future[None]]]] = {}
        self._numbers = itertools.count()
        self._taken: dict[str, float] = {}
        self._least = 0.0  # what the tenant had taken whose turn came last: nobody saves up more

    @asynccontextmanager
    async def turn(self, tenant: str, size: int = 0) -> AsyncIterator[None]:
        """Waits for a turn of ``tenant``, which lasts as long as the block. ``size``: bytes of the work."""
        if self._free:
            self._free -= 1
        else:
            future = asyncio.get_running_loop().create_future()
            size_class = (size >> 16).bit_length()  # works below 64 KiB are alike
            heapq.heappush(self._waiting.setdefault(tenant, []), (size_class, next(self._numbers), future))
            try:
                await future
            except asyncio.CancelledError:
                if future.done() and not future.cancelled():
                    self._next()
                raise
        began = self._clock()
        try:
            yield
        finally:
            self._taken[tenant] = self._taken_by(tenant) + self._clock() - began
            self._next()

    def _taken_by(self, tenant: str) -> float:
        return max(self._taken.get(tenant, 0.0), self._least)

    def _next(self) -> None:
        while self._waiting:
            tenant = min(self._waiting, key=self._taken_by)
            _, _, future = heapq.heappop(self._waiting[tenant])
            if not self._waiting[tenant]:
                del self._waiting[tenant]
            if not future.done():
                self._least = self._taken_by(tenant)
                future.set_result(None)
                return
        self._free += 1
        self._taken = {name: count for name, count in self._taken.items() if count > self._least}
