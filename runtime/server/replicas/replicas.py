"""Replicas of a model on Ray Serve, as the front end sees them: their start, their links, and requests that are
retried.

The front end stays one process, which has the protocols, keys and metrics; a `Replicated` replaces a `Model` there. Ray
Serve places replicas on machines, checks their health, scales and restarts them. ``replica`` describes the messages,
and ``routing`` the choice of a replica.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import itertools
import logging
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import msgspec
from ray import serve
from ray.exceptions import RayActorError, RayError
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.exceptions import RayServeException

from ...engine.info import partition_of
from ...engine.pulse import Pulse
from ...shared.contracts import ModelInfo
from ...shared.errors import BundleError, EnginewrightError, RequestError
from ...shared.ray_cluster import last_line
from ...tasks.pooled import TextTask
from ..engines.engine_client import EngineLostError, Limits, Link, Model, ReplacedError, Running, UnavailableError
from ..engines.records import (
    LENGTH_BYTES,
    Abort,
    Answer,
    Ask,
    Beat,
    Events,
    Greeting,
    Submit,
    ToEngine,
    ToFrontEnd,
    packed,
)
from ..http.engine_options import options_for, replica_options
from ..http.options import ServerOptions
from .cluster import LOGGING, Cluster
from .replica import ELSEWHERE, Replica
from .routing import ROUTES, Routes, Ticket, block_names

_LOG = logging.getLogger("enginewright.server")
_ROUTER = "enginewright.runtime.server.replicas.replica_router.PrefixRouter"
_MOST_DEATHS = 2
_LOOK_SECONDS = 0.25
"""Seconds between two searches for replicas that have no link yet."""
_HANDSHAKE_SECONDS, _HANDSHAKE_BYTES = 10.0, 1 << 20
_FINISH_SECONDS = 3600.0
"""Seconds that running requests have to end before Ray Serve stops a replica that it removes."""


def open_replicas(options: ServerOptions, cluster: Cluster) -> dict[str, Model]:
    """Returns the models of a server by name, each with its replicas.

    Raises BundleError for a bundle that can't be opened, and RequestError if the cluster has too few CPUs.
    """
    llm_options = replica_options(options)
    engines = len(options.models) * options.replicas
    if not llm_options.get("threads"):
        llm_options["threads"] = max(1, cluster.cpus // engines)
    needed = cpus_of(llm_options)
    if engines * needed > cluster.cpus:
        raise RequestError(
            f"replicas: {engines} of {needed} CPUs each are {engines * needed}, and the cluster has {cluster.cpus}",
            hint="Pass fewer --replicas or --threads, or add machines to the cluster.",
        )
    limits = Limits(step=options.step_seconds, silence=options.silence_seconds)
    return {
        name: Replicated(name, path, options_for(path, llm_options, options), limits, options, needed, cluster.host)
        for name, path in options.models.items()
    }


def cpus_of(options: Mapping[str, Any]) -> int:
    """Returns the number of CPUs that a replica with these options of ``LLM`` needs: the threads of all its ranks."""
    return int(options["threads"]) * partition_of(options.get("ranks"), options.get("partition")).ranks


def app_name(model: str) -> str:
    """Returns the name of a model's application in Ray Serve; its routes have the same name."""
    return f"enginewright-{model}"


def deployment_of(
    name: str, path: str, options: dict[str, Any], limits: Limits, server: ServerOptions, cpus: int, version: str
) -> Any:
    """Returns the Ray Serve deployment of a model's replicas.

    The arguments are those of `Replicated`; ``version`` is the hash of the bundle.
    """
    scaling: dict[str, Any] = {"num_replicas": server.replicas}
    if server.max_replicas > server.replicas:
        config = AutoscalingConfig(
            min_replicas=server.replicas,
            max_replicas=server.max_replicas,
            target_ongoing_requests=server.target_requests,
        )
        scaling = {"autoscaling_config": config}
    deployment = serve.deployment(Replica).options(
        name=f"replica-{name}",
        **scaling,
        max_ongoing_requests=int(options.get("max_requests", 64)) + server.max_waiting,
        ray_actor_options={"num_cpus": cpus},
        request_router_config=RequestRouterConfig(
            request_router_class=_ROUTER, request_router_kwargs={"app": app_name(name)}
        ),
        health_check_period_s=5.0,
        health_check_timeout_s=60.0,
        graceful_shutdown_timeout_s=_FINISH_SECONDS,
        graceful_shutdown_wait_loop_s=0.2,
        logging_config=LOGGING,
    )
    return deployment.bind(name, path, options, msgspec.to_builtins(limits), version)


@dataclass
class _Attempt:
    """One attempt to have a replica run a request.

    Attributes:
        submit: the request's message to the engine.
        running: the request, as the server's endpoints see it.
        ticket: the request, as the router sees it.
        again: True if an earlier attempt failed.
        streamed: True if tokens have arrived.
        task: the task that waits for the call of Ray Serve.
    """

    submit: Submit
    running: Running
    ticket: Ticket
    again: bool
    streamed: bool = False
    task: asyncio.Task[None] | None = None


class Replicated(Model):
    """A model with replicas.

    Args:
        name, path, options, limits: the arguments of `Model`.
        server: number of replicas, their scaling, and the policy of routing.
        cpus: CPUs of each replica.
        host: address of this machine, to which replicas connect.
        handle: handle of a deployment that something else started; by default the model starts and stops one itself.
    """

    def __init__(
        self,
        name: str,
        path: str,
        options: dict[str, Any],
        limits: Limits,
        server: ServerOptions,
        cpus: int,
        host: str,
        handle: Any = None,
    ) -> None:
        super().__init__(name, path, options, limits)
        self.app = app_name(name)
        self._server, self._cpus, self._host = server, cpus, host
        self._routes = ROUTES[self.app] = Routes(server.routing)
        self._key = secrets.token_bytes(32)
        self._port = 0
        self._links: dict[str, _FromReplica] = {}
        self._attempts: dict[int, _Attempt] = {}
        self._wires = itertools.count()
        self._asked: dict[int, int] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._greeting: set[str | None] = set()
        self._next: Model | None = None
        self._alone_since = time.monotonic()
        self._handle, self._given = handle, handle is not None

    @property
    def slots(self) -> int:
        """Returns the most requests that may run at a time, on all replicas together."""
        return super().slots * max(1, len(self._links))

    @property
    def replicas(self) -> int:
        """The number of replicas with a link to this front end."""
        return len(self._links)

    @property
    def pid(self) -> int | None:
        """Returns None, as the engines' processes belong to the replicas."""
        return None

    @property
    def overdue(self) -> bool:
        """Returns False, as each replica watches its own engine."""
        return False

    def describe(self) -> dict[str, Any]:
        """Returns the state of the model as a JSON object, with a row for each replica."""
        rows = [
            {
                "replica": name,
                "node": link.greeting.node,
                "pid": link.greeting.pid,
                "engine_pid": link.greeting.opened.pid,
                "bundle": link.greeting.opened.hash,
                "requests": self._routes.requests(name),
                "kv_cache_used": link.beat.blocks_used,
            }
            for name, link in self._links.items()
            if link.greeting is not None
        ]
        return super().describe() | {"replicas": rows, "retried": self.retried}

    async def replace(self, path: str) -> None:
        """Serves the bundle at ``path`` from now on, by replacing the replicas one after the other.

        Running requests end on the replicas where they run. The method returns once all replicas are replaced.

        Raises BundleError for a bundle that can't be opened, after which the earlier one is still served; RequestError
        if something else started the deployment; EngineLostError if no new replica answers in time.
        """
        if self._given:
            raise RequestError(f"model {self.name!r} is deployed from elsewhere", hint="Deploy it anew there.")
        fresh = await asyncio.to_thread(Model, self.name, path, self.options)
        if fresh.hash == self.hash:
            return
        _LOG.info("%s: bundle %s takes the place of %s", self.name, fresh.hash, self.hash)
        self._next = fresh
        try:
            await _beside(partial(self._deploy, path, fresh.hash))
            self.path = path
            async with asyncio.timeout(self.limits.loading):
                while self._next is fresh:  # until the first replica of the new bundle has greeted
                    await asyncio.sleep(_LOOK_SECONDS)
        except TimeoutError as e:
            raise EngineLostError(f"{path}: no replica of it answers", hint="See Ray's logs.") from e
        finally:
            self._next = None
            if not self._links and self.state == "ready":
                self.state = "restarting"
                self._ready.clear()

    async def close(self, unload: bool = False) -> None:
        """Stops the replicas, fails their requests, and closes the links."""
        self.state = "closed"
        self._fail_all(EngineLostError("the server is stopping", hint="Try again."))
        for task in [*self._tasks, *([self._task] if self._task is not None else [])]:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        for link in list(self._links.values()):
            link.close()
        if not self._given:
            with contextlib.suppress(RayError, RayServeException):
                await _beside(partial(serve.delete, self.app))
        ROUTES.pop(self.app, None)

    def kill(self) -> None:
        """Does nothing: each replica stops its own engine."""

    # Starting, and looking for replicas

    def start(self) -> None:
        """Has Ray Serve start the replicas, and opens links to them."""
        super().start()
        assert self._task is not None
        self._task.add_done_callback(self._stopped)

    def _stopped(self, task: asyncio.Task[None]) -> None:
        """Sets the model's state to "failed" if the task that looks for replicas raised an error."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self.error, self.state = EnginewrightError(f"replicas of {self.name!r} failed: {error}"), "failed"
            _LOG.error("replicas of %s failed", self.name, exc_info=error)
            self._ready.set()

    async def _supervise(self) -> None:
        server = await asyncio.get_running_loop().create_server(lambda: _FromReplica(self), self._host, 0)
        self._port = server.sockets[0].getsockname()[1]
        async with server:
            try:
                if not self._given:
                    self._handle = await _beside(partial(self._deploy, self.path, self.hash))
            except EnginewrightError as e:
                self.error, self.state = e, "failed"
                _LOG.error("%s: %s", self.name, e)
                self._ready.set()
                return
            while True:
                self._greet_all()
                self._look_after()
                await asyncio.sleep(_LOOK_SECONDS)

    def _deploy(self, path: str, version: str) -> Any:
        """Deploys the bundle at ``path``, whose hash is ``version``, and waits until replicas run.

        Raises BundleError on failure.
        """
        app = deployment_of(self.name, path, self.options, self.limits, self._server, self._cpus, version)
        try:
            return serve.run(app, name=self.app, route_prefix=None)
        except (RuntimeError, RayError, RayServeException) as e:
            hint = "See `ray logs`, or the folder that Ray keeps its logs in."
            raise BundleError(f"{path}: its replicas didn't start: {last_line(e)}", hint=hint) from e

    def _greet_all(self) -> None:
        if None in self._greeting:  # this call may reach any replica; a second call could greet the same one
            return
        missing: list[str | None] = [one for one in self._routes.there if one not in self._links]
        if not self._routes.there:
            missing = [None]  # Ray Serve makes the router with the first call
        for one in missing:
            if one not in self._greeting:
                self._greeting.add(one)
                self._keep(self._greet(one))

    async def _greet(self, replica: str | None) -> None:
        number = next(self._wires)
        self._routes.begin(number, Ticket(only=replica))
        response = self._handle.greet.remote(number, self._host, self._port, self._key)
        try:
            async with asyncio.timeout(_HANDSHAKE_SECONDS):
                await response
        except (RayError, RayServeException, OSError, TimeoutError) as e:
            _LOG.debug("%s: replica %s doesn't answer yet: %s", self.name, replica, e)
            response.cancel()
        finally:
            self._routes.end(number)
            self._greeting.discard(replica)

    def _look_after(self) -> None:
        """Closes links that were silent for too long, and fails requests that have waited too long for a replica."""
        now = time.monotonic()
        for link in list(self._links.values()):
            if now - link.heard > self.limits.silence:
                _LOG.error("%s: nothing was heard of replica %s for %.0f s", self.name, link.name, now - link.heard)
                link.abort()
        if self._links or self._next is not None:
            self._alone_since = now
        elif self._attempts and now - self._alone_since > self.limits.silence:
            self._fail_all(UnavailableError(f"model {self.name!r} has no replica that answers", 5.0))

    # Links to replicas

    def greeted(self, link: _FromReplica, greeting: Greeting) -> bool:
        """Links a replica, and returns True; returns False if the replica's key is wrong or its bundle isn't served."""
        if self.state == "closed" or not hmac.compare_digest(greeting.key, self._key):
            return False
        version = greeting.opened.hash
        if version != self.hash:
            if self._next is None or self._next.hash != version:
                _LOG.warning("%s: replica %s has another bundle: %s", self.name, greeting.replica, version)
                if self._next is None and not any(task.get_name() == "replace" for task in self._tasks):
                    self._keep(self._replace_again(), "replace")
                return False
            self._switch(self._next)
        if (before := self._links.get(greeting.replica)) is not None:
            before.abort()
        self._links[greeting.replica] = link
        self._routes.link(greeting.replica, version, int(greeting.opened.info.get("kv_cache_tokens", 0)))
        self.info, self.target = greeting.opened.info, greeting.opened.target
        self.model = msgspec.convert(greeting.opened.model, ModelInfo)
        self.state = "ready"
        self.starts += 1
        self._ready.set()
        return True

    def take_from(self, link: _FromReplica, message: ToFrontEnd) -> None:
        """Handles ``message``, which the replica of ``link`` has sent: events of requests, its load, or an answer."""
        if isinstance(message, Events):
            self._carry_on(message)
        elif isinstance(message, Beat):
            link.beat = message.pulse
            self.beat = Pulse.merged([one.beat for one in self._links.values()])
        elif isinstance(message, Answer):
            self._take(Answer(self._asked.pop(message.number, -1), message.value))

    def left(self, link: _FromReplica) -> None:
        """Removes a replica whose link has closed, and retries or fails its requests."""
        name = link.name
        if self._links.get(name) is not link:
            return
        del self._links[name]
        mine = [
            (wire, one)
            for wire, one in self._attempts.items()
            if one.ticket.replica == name and (one.ticket.sent or one.streamed)
        ]
        self._routes.unlink(name)
        if self.state == "closed":
            return
        if mine or link.died or name in self._routes.there:
            self.deaths += 1
            _LOG.error("%s: replica %s was lost, with %d requests", self.name, name, len(mine))
        if not self._links and self._next is None:
            self.state = "restarting"
            self._ready.clear()
        for wire, one in mine:
            self._lost(wire, one, name, "its process ended")
        self._release()

    def _switch(self, fresh: Model) -> None:
        """Serves the bundle of ``fresh`` from now on, as its first replica is ready."""
        for name in ("path", "tokenizer", "hash", "recipe", "bytes", "modified", "model"):
            setattr(self, name, getattr(fresh, name))
        self._next = None
        asyncio.get_running_loop().call_soon(self._release)

    def _release(self) -> None:
        """Fails waiting requests whose prompt was made for a bundle that no replica serves any more; the front end
        repeats them.
        """
        served = self._routes.versions()
        for wire, one in list(self._attempts.items()):
            version = one.ticket.version
            if version != self.hash and version not in served and not (one.ticket.sent or one.streamed):
                self._drop(wire, abort=True)
                if self._requests.pop(one.running.number, None) is not None:
                    one.running.put(ReplacedError("the bundle was replaced under the request", hint="Try again."))

    async def _replace_again(self) -> None:
        try:
            await self.replace(self.path)
        except EnginewrightError as e:
            _LOG.error("%s: %s", self.name, e)

    # Requests

    def _send(self, message: ToEngine) -> None:
        if isinstance(message, Submit):
            self._begin(message, self._requests[message.number])
        elif isinstance(message, Abort):
            for wire, one in list(self._attempts.items()):
                if one.running.number == message.number:
                    self._drop(wire, abort=True)
        elif isinstance(message, Ask):
            self._ask(message)

    def _begin(
        self, submit: Submit, running: Running, avoid: frozenset[str] = frozenset(), again: bool = False
    ) -> None:
        wire = next(self._wires)
        prompt = submit.task.prompt
        # A text is tokenized there, and models that compute texts whole have no prefix cache.
        by_prefix = self._server.routing == "prefix" and not isinstance(prompt, str)
        by_prefix = by_prefix and not isinstance(submit.task, TextTask)
        blocks = block_names(submit.options.tenant, prompt) if by_prefix else ()
        ticket = Ticket(blocks, submit.version or self.hash, avoid)
        attempt = self._attempts[wire] = _Attempt(submit, running, ticket, again)
        self._routes.begin(wire, ticket)
        attempt.task = self._keep(self._carry(wire, attempt))
        if not again and ticket.version != self.hash:
            asyncio.get_running_loop().call_soon(self._release)

    async def _carry(self, wire: int, attempt: _Attempt) -> None:
        """Makes a replica run a request, whose tokens arrive through the link; retries it if the replica can't
        run it.
        """
        response = self._handle.run.remote(wire, self._key, packed(attempt.submit)[LENGTH_BYTES:])
        try:
            answer = await response
        except asyncio.CancelledError:
            response.cancel()
            raise
        except (RayError, RayServeException) as e:
            replica = attempt.ticket.replica or ""
            if isinstance(e, RayActorError) and (link := self._links.get(replica)) is not None:
                link.died = True
            if self._attempts.get(wire) is attempt:
                self._lost(wire, attempt, replica, last_line(e))
            return
        if answer == ELSEWHERE and self._attempts.get(wire) is attempt:
            self._drop(wire)
            avoid = attempt.ticket.avoid | {attempt.ticket.replica or ""}
            await asyncio.sleep(_LOOK_SECONDS / 5)
            if attempt.running.number in self._requests:
                self._begin(attempt.submit, attempt.running, avoid, attempt.again)

    def _carry_on(self, events: Events) -> None:
        ours = Events()
        for piece in events.pieces:
            if (attempt := self._attempts.get(piece.number)) is not None:
                attempt.streamed = True
                piece.number = attempt.running.number
                ours.pieces.append(piece)
        for ended in events.ended:
            if (attempt := self._attempts.pop(ended.number, None)) is not None:
                self._routes.end(ended.number)
                ended.number = attempt.running.number
                ours.ended.append(ended)
        self._take(ours)

    def _lost(self, wire: int, attempt: _Attempt, replica: str, why: str) -> None:
        """Retries a request whose replica was lost, once, and only if no tokens have arrived; fails it otherwise.

        Args:
            wire: number of the attempt.
            attempt: the attempt.
            replica: id of the replica.
            why: the reason, for the error's message.
        """
        self._drop(wire)
        running = attempt.running
        if running.number not in self._requests:
            return
        deaths = self._suspects[running.digest] = self._suspects.pop(running.digest, 0) + 1
        self._trim_suspects()
        if not attempt.streamed and not attempt.again and deaths < _MOST_DEATHS:
            self.retried += 1
            self._begin(attempt.submit, running, frozenset({replica}), again=True)
            return
        del self._requests[running.number]
        running.put(EngineLostError(f"a replica of model {self.name!r} was lost: {why}", hint="Try again."))

    def _drop(self, wire: int, abort: bool = False) -> None:
        """Removes the attempt ``wire``; ``abort`` tells its replica to stop the request."""
        attempt = self._attempts.pop(wire, None)
        if attempt is None:
            return
        replica = attempt.ticket.replica
        self._routes.end(wire)
        if abort:
            if replica is not None and (link := self._links.get(replica)) is not None:
                link.send(Abort(wire))
            if attempt.task is not None and not attempt.ticket.sent:
                attempt.task.cancel()

    def _fail_all(self, error: EnginewrightError) -> None:
        for wire in list(self._attempts):
            self._drop(wire, abort=True)
        super()._fail_all(error)

    # Questions

    def _ask(self, question: Ask) -> None:
        """Passes a question on to one of the replicas, under a number of its own."""
        for link in list(self._links.values())[:1]:
            wire = next(self._wires)
            self._asked[wire] = question.number
            link.send(Ask(wire, question.topic))

    def _keep(self, work: Any, name: str = "") -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work, name=name or None)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


class _FromReplica(Link):
    """A connection of a replica to the front end. It may send nothing but a `Greeting` until it has shown the key.

    Attributes:
        greeting: the first message of the replica; None before it arrives.
        beat: the newest state that the replica reported.
        heard: time of the last message, in seconds of the monotonic clock.
        died: True if a call has failed because the replica's process died, which Ray may report before the link ends.
    """

    def __init__(self, model: Replicated) -> None:
        super().__init__(self._first, Greeting)
        self._model = model
        self.greeting: Greeting | None = None
        self.beat = Pulse()
        self.heard = time.monotonic()
        self.died = False
        self._transport: asyncio.Transport | None = None
        self._limit: asyncio.TimerHandle | None = None

    @property
    def name(self) -> str:
        """Returns the id of the replica; empty before its greeting."""
        return "" if self.greeting is None else self.greeting.replica

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._limit = asyncio.get_running_loop().call_later(_HANDSHAKE_SECONDS, self.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._limit is not None:
            self._limit.cancel()
        if self.greeting is not None:
            self._model.left(self)

    def data_received(self, data: bytes) -> None:
        self.heard = time.monotonic()
        stranger = self.greeting is None
        if stranger and len(self._data) + len(data) > _HANDSHAKE_BYTES:
            self.abort()
            return
        try:
            super().data_received(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as e:
            _LOG.warning("%s: what came through a link can't be read, and it is closed: %s", self._model.name, e)
            self.abort()

    def _first(self, greeting: Greeting) -> None:
        if self._limit is not None:
            self._limit.cancel()
        self.greeting = greeting
        if not self._model.greeted(self, greeting):
            self.greeting = None
            self.abort()
            return
        self._take = partial(self._model.take_from, self)
        self._decode = msgspec.msgpack.Decoder(ToFrontEnd).decode

    def send(self, message: ToEngine) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(packed(message))

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()


async def _beside(work: Callable[[], Any]) -> Any:
    """Runs ``work`` in a daemon thread, and returns its result.

    Ray Serve may wait for machines for a long time, and such a thread doesn't keep the process from exiting.
    """
    future: Future[Any] = Future()

    def run() -> None:
        future.set_running_or_notify_cancel()
        try:
            future.set_result(work())
        except BaseException as e:  # noqa: BLE001  who awaits it gets it
            future.set_exception(e)

    threading.Thread(target=run, daemon=True).start()
    return await asyncio.wrap_future(future)
