"""A replica: what runs in an actor of Ray Serve. It has an engine's process, as a server without replicas has.

A request comes as a call of Ray Serve, which lasts until the request has ended: so Ray Serve knows how many there are,
lets them end before it stops a replica, and has them tried elsewhere where it has died before it had them. What
a request gives goes back through a socket, all tokens of a step together: a call of Ray for each would cost more than
a step. The replica opens that socket to the front end that asks for it (``greet``), whose secret it got through Ray.
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
"""The results of a call: the request has ended, as the link has said; or this replica didn't take it."""
_MOST_ABORTED = 4096


class Replica:
    """An actor of Ray Serve with the process of an engine, whose requests come as calls.

    Args:
        name: the model's.
        path: its bundle, on the replica's machine.
        options: of ``LLM``.
        limits: of ``Limits``.
        version: the hash of the bundle that the front end has seen. Another one is another deployment.
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
        """Ray Serve asks it now and then; an error has it start another replica. An engine that has died isn't one: it
        is started again here, sooner."""
        if self._engine.state == "failed":
            self._engine.check()

    async def greet(self, number: int, host: str, port: int, key: bytes) -> bool:
        """Opens the socket to a front end; false where the engine doesn't answer now. ``number`` is for the router."""
        if self._engine.state != "ready":
            return False
        link = _ToFrontEnd(self, key)
        await asyncio.get_running_loop().create_connection(lambda: link, host, port)
        context = serve.get_replica_context()
        engine = self._engine
        opened = Opened(engine.hash, engine.target, asdict(engine.model), engine.info, engine.pid or 0)
        link.send(Greeting(key, context.replica_id.unique_id, _node(), os.getpid(), opened))
        # The front end closes the link from before: if it ended here, that could be seen first, and taken for a death.
        self._links[key] = link
        return True

    async def run(self, number: int, key: bytes, body: bytes) -> bytes:
        """Runs a request of the front end with that key to its end. ``body``: a packed ``Submit``; ``number``: what the
        front end calls it."""
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
        """Ray Serve awaits it once the last request has ended: what the engine keeps is written."""
        await self._engine.close()

    def take(self, link: _ToFrontEnd, message: ToEngine) -> None:
        """Does what a front end says."""
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
        """A front end is gone: nobody wants its requests."""
        if self._links.get(link.key) is link:
            del self._links[link.key]

    def _hang_up(self) -> None:
        """The engine has died: front ends see their links closed, and greet again."""
        for link in list(self._links.values()):
            link.close()
        self._links.clear()

    def _beat(self, beat: Beat) -> None:
        for link in self._links.values():
            link.send(beat)


class _Engine(Model):
    """The engine; ``lost`` is called when it has died, ``beats`` when it says how it is doing."""

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
    """A request of a front end: what it gives goes there."""

    def __init__(self, model: Model, number: int, digest: bytes, *, link: _ToFrontEnd, theirs: int) -> None:
        super().__init__(model, number, digest, Task(None))  # what comes is passed on as it is
        self._link, self._theirs = link, theirs
        self.over = asyncio.Event()

    def put(self, event: Piece | Ended | EnginewrightError) -> None:
        """Sends it. An error is the engine's end, and by then the link is closed."""
        if not isinstance(event, EnginewrightError):
            event.number = self._theirs
            self._link.add(event)
        if not isinstance(event, Piece):
            self.over.set()


class _ToFrontEnd(Link):
    """The link to a front end. What comes together goes together."""

    def __init__(self, replica: Replica, key: bytes) -> None:
        super().__init__(lambda message: replica.take(self, message), ToEngine)
        self.key = key
        self.running: dict[int, _Carried] = {}
        self.tasks: set[asyncio.Task[None]] = set()
        self._replica = replica
        self._news = Events()
        self._left: OrderedDict[int, None] = OrderedDict()  # requests that were given up before they came
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
        """Sends it with what else there is before the loop's next turn."""
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
        """Returns True, once, if the request ``number`` was aborted before it arrived."""
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
