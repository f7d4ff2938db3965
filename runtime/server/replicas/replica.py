"""A replica: an actor of Ray Serve that runs an engine's process, as a server without replicas does.

Each request is a call of Ray Serve that lasts until the request ends. Ray Serve therefore knows the number of running
requests, waits for them before it stops a replica, and repeats a call elsewhere if a replica died before it took it.
Tokens are sent through a socket, all tokens of a step in one message, because a call of Ray for each token would take
longer than a step. The replica opens the socket to the front end that calls `Replica.greet`; the call contains the
secret key of the front end.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any, cast

import msgspec
import ray
from ray import serve

from ...shared.errors import EnginewrightError
from ...tasks.base import Task
from ..engines.engine_client import Limits, Link, Model, Running, UnavailableError
from ..engines.records import (
    Abort,
    Answer,
    Ask,
    Beat,
    Ended,
    Events,
    Greeting,
    Opened,
    Piece,
    Problem,
    Submit,
    ToEngine,
    ToFrontEnd,
    packed,
)

DONE, ELSEWHERE = b"", b"elsewhere"
"""Results of a call.

DONE: the request has ended, as the socket has told. ELSEWHERE: this replica didn't take the request.
"""
_MOST_ABORTED = 4096


class Replica:
    """An actor of Ray Serve that runs an engine's process, and takes requests as calls.

    Args:
        name: name of the model.
        path: path of its bundle on the replica's machine.
        options: options of ``LLM``.
        limits: fields of ``Limits``, in seconds.
        version: hash of the bundle that the front end has read. It is unused here: a new hash makes Ray Serve replace
            the replicas.
    """

    async def __init__(  # type: ignore[misc]  # Ray Serve awaits it
        self, name: str, path: str, options: dict[str, Any], limits: dict[str, float], version: str
    ) -> None:
        self._engine = _Engine(name, path, options, Limits(**limits))
        self._engine.lost = self._hang_up
        self._engine.beats = self._beat
        self._links: dict[bytes, _ToFrontEnd] = {}
        self._decode = msgspec.msgpack.Decoder(Submit).decode
        self._engine.start()
        await self._engine.wait_until_ready()

    async def check_health(self) -> None:
        """Raises an error if the engine can't be started, which has Ray Serve start another replica.

        Ray Serve calls it from time to time. An engine that has died is no error: this replica restarts it, which is
        faster.
        """
        if self._engine.state == "failed":
            self._engine.check()

    async def greet(self, number: int, host: str, port: int, key: bytes) -> bool:
        """Opens a socket to a front end, and returns True; returns False if the engine isn't ready.

        Args:
            number: number of the call's ticket, which the router reads.
            host: address of the front end.
            port: port of the front end.
            key: secret key of the front end, which the replica sends first.
        """
        if self._engine.state != "ready":
            return False
        link = _ToFrontEnd(self, key)
        await asyncio.get_running_loop().create_connection(lambda: link, host, port)
        context = serve.get_replica_context()
        engine = self._engine
        opened = Opened(engine.hash, engine.target, asdict(engine.model), engine.info, engine.pid or 0)
        link.send(Greeting(key, context.replica_id.unique_id, _node(), os.getpid(), opened))
        # The front end closes the earlier link. If it were closed here, the front end could take that for a death.
        self._links[key] = link
        return True

    async def run(self, number: int, key: bytes, body: bytes) -> bytes:
        """Runs a request until it ends, and returns `DONE`, or `ELSEWHERE` if this replica can't run it.

        Args:
            number: the front end's number of the request.
            key: secret key of the front end.
            body: a packed ``Submit``.
        """
        link = self._links.get(key)
        if link is None or self._engine.state != "ready":
            return ELSEWHERE
        if link.left(number):
            return DONE
        try:
            kind = partial(_Carried, link=link, theirs=number)
            carried = self._engine.submit(self._decode(body), kind)
        except UnavailableError:
            return ELSEWHERE
        except EnginewrightError as e:
            link.add(Ended(number, problem=Problem.from_error(e)))
            return DONE
        assert isinstance(carried, _Carried)
        link.running[number] = carried
        try:
            await carried.over.wait()
        finally:
            link.running.pop(number, None)
            self._engine.abort(carried.number)
        return DONE

    async def __del__(self) -> None:
        """Closes the engine, which writes its stored prefixes.

        Ray Serve awaits this method once the last request has ended.
        """
        await self._engine.close()

    def take(self, link: _ToFrontEnd, message: ToEngine) -> None:
        """Handles a message of a front end: aborts a request, or answers a question."""
        if isinstance(message, Abort):
            link.abort(message.number)
        elif isinstance(message, Ask):
            task = asyncio.create_task(self._answer(link, message))
            link.tasks.add(task)
            task.add_done_callback(link.tasks.discard)

    async def _answer(self, link: _ToFrontEnd, question: Ask) -> None:
        value: dict[str, Any] = {}
        with contextlib.suppress(EnginewrightError, TimeoutError):
            value = await self._engine.ask(question.topic)
        link.send(Answer(question.number, value))

    def gone(self, link: _ToFrontEnd) -> None:
        """Removes the link of a front end that has disconnected."""
        if self._links.get(link.key) is link:
            del self._links[link.key]

    def _hang_up(self) -> None:
        """Closes all links, as the engine has died; the front ends then call `greet` again."""
        for link in list(self._links.values()):
            link.close()
        self._links.clear()

    def _beat(self, beat: Beat) -> None:
        for link in self._links.values():
            link.send(beat)


class _Engine(Model):
    """The replica's engine.

    It calls ``lost`` when its process has died, and ``beats`` with each report of its state.
    """

    lost: Callable[[], None]
    beats: Callable[[Beat], None]

    def _take(self, message: ToFrontEnd) -> None:
        super()._take(message)
        if isinstance(message, Beat):
            self.beats(message)

    def _fail_all(self, error: EnginewrightError) -> None:
        self.lost()
        super()._fail_all(error)


class _Carried(Running):
    """A request of a front end; its tokens are sent through ``link``, under ``theirs``, the front end's number."""

    def __init__(self, model: Model, number: int, digest: bytes, *, link: _ToFrontEnd, theirs: int) -> None:
        super().__init__(model, number, digest, Task(None))  # the front end parses the tokens, not the replica
        self._link, self._theirs = link, theirs
        self.over = asyncio.Event()

    def put(self, event: Piece | Ended | EnginewrightError) -> None:
        """Sends a token or the end of the request. An error means that the engine has died and the link is closed."""
        if not isinstance(event, EnginewrightError):
            event.number = self._theirs
            self._link.add(event)
        if not isinstance(event, Piece):
            self.over.set()


class _ToFrontEnd(Link):
    """The link to a front end, which sends all events of one turn of the event loop in one message."""

    def __init__(self, replica: Replica, key: bytes) -> None:
        super().__init__(lambda message: replica.take(self, message), ToEngine)
        self.key = key
        self.running: dict[int, _Carried] = {}
        self.tasks: set[asyncio.Task[None]] = set()
        self._replica = replica
        self._news = Events()
        self._left: OrderedDict[int, None] = OrderedDict()  # requests that were aborted before they arrived
        self._transport: asyncio.WriteTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)  # uvloop's has it by its methods alone

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        for carried in list(self.running.values()):
            carried.over.set()
        self._replica.gone(self)

    def send(self, message: ToFrontEnd | Greeting) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(packed(message))

    def add(self, event: Piece | Ended) -> None:
        """Sends an event, together with the others of this turn of the event loop."""
        if not self._news.pieces and not self._news.ended:
            asyncio.get_running_loop().call_soon(self._flush)
        if isinstance(event, Ended):
            self._news.ended.append(event)
        else:
            self._news.pieces.append(event)

    def abort(self, number: int) -> None:
        if (carried := self.running.get(number)) is not None:
            carried.over.set()
            return
        self._left[number] = None
        while len(self._left) > _MOST_ABORTED:
            self._left.popitem(last=False)

    def left(self, number: int) -> bool:
        """Returns True if the request ``number`` was aborted before it arrived; a second call for it returns False."""
        return self._left.pop(number, 0) is None

    def close(self) -> None:
        if self._transport is not None:
            self._flush()
            self._transport.close()

    def _flush(self) -> None:
        if self._news.pieces or self._news.ended:
            news, self._news = self._news, Events()
            self.send(news)


def _node() -> str:
    return str(ray.util.get_node_ip_address())
