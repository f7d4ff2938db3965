"""Runs the server: sockets, signals, logs, and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import json
import logging
import resource
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from functools import partial
from types import FrameType
from typing import Any

import uvicorn

from ..shared.errors import EnginewrightError, RequestError
from .app import make_app
from .connection import Connection
from .engine_client import Model
from .front import Front
from .options import ServerOptions

_LOG = logging.getLogger("enginewright.server")


class _Server(uvicorn.Server):
    """The first signal to end has what runs come to its end; the second ends it at once."""

    def __init__(self, config: uvicorn.Config, front: Front, stop: Callable[[], None]) -> None:
        super().__init__(config)
        self._front, self._stop = front, stop

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._front.stopping:
            self.force_exit = self.should_exit = True
        self._front.stopping = True
        self._stop()


def listening(options: ServerOptions) -> socket.socket:
    """A socket that listens where the options say. Raises RequestError where it can't."""
    try:
        found = socket.getaddrinfo(options.host, options.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as e:
        raise RequestError(f"host: {options.host}: {e.strerror}", hint="Pass an address of this machine.") from e
    family, _, _, _, address = found[0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(1024)
    except OSError as e:
        listener.close()
        hint = "Pass another --port, or end the server that has it." if e.errno == errno.EADDRINUSE else "Pass another."
        raise RequestError(f"port: {options.host}:{options.port}: {e.strerror}", hint=hint) from e
    return listener


def serve(
    options: ServerOptions,
    ready: Callable[[str, Front], None] = lambda url, front: None,
    models: dict[str, Model] | Callable[[], dict[str, Model]] | None = None,
    reread: Callable[[], Mapping[str, str]] | None = None,
) -> None:
    """Serves until a signal ends it.

    Args:
        options: see there.
        ready: is called with the address once all models answer.
        models: that were opened already (``open_models``), or what opens them once the port is taken; who opened them
            ends what is left of them.
        reread: says where bundles are now, by the models' names: at SIGHUP their replicas are replaced.

    Raises:
        RequestError: an option is wrong, or the port is taken.
        BundleError: a model can't be opened.
    """
    options.check()
    _set_up_logs(options.log_json)
    _raise_file_limit()
    listener = listening(options)
    try:
        front = Front(options, models() if callable(models) else models)
        asyncio.run(_serve(options, front, listener, ready, reread))
    finally:
        listener.close()


async def _serve(
    options: ServerOptions,
    front: Front,
    listener: socket.socket,
    ready: Callable[[str, Front], None],
    reread: Callable[[], Mapping[str, str]] | None,
) -> None:
    await front.start()
    config = uvicorn.Config(
        make_app(front),
        http=partial(Connection, front.intake),  # type: ignore[arg-type]
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=max(1, int(options.header_seconds)),
        timeout_graceful_shutdown=max(1, int(options.drain_seconds)),
        ssl_certfile=options.tls_certificate,
        ssl_keyfile=options.tls_key,
    )
    stopping = asyncio.Event()
    server = _Server(config, front, stopping.set)
    loop = asyncio.get_running_loop()
    failed: list[EnginewrightError] = []

    async def tell() -> None:
        for model in front.models.values():
            if model.state == "unloaded":
                continue
            try:
                await model.wait_until_ready()
            except EnginewrightError as e:
                failed.append(e)
                server.should_exit = True
                return
        host, port = listener.getsockname()[:2]
        scheme = "http" if options.tls_certificate is None else "https"
        gc.collect()
        gc.freeze()  # what was imported isn't garbage: looking through it stalls streams
        ready(f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}", front)

    async def drain() -> None:
        await stopping.wait()
        end = loop.time() + options.drain_seconds
        while front.running and loop.time() < end and not server.force_exit:
            await asyncio.sleep(0.05)
        for task in list(front.running):
            task.cancel()
        server.should_exit = True

    replacing = asyncio.Event()

    async def replace() -> None:
        while True:
            await replacing.wait()
            replacing.clear()
            try:
                paths = {} if reread is None else await asyncio.to_thread(reread)
                for name, model in front.models.items():
                    await model.replace(paths.get(name, model.path))
            except EnginewrightError as e:
                _LOG.error("nothing is replaced: %s", e)

    tasks = [asyncio.create_task(tell()), asyncio.create_task(drain())]
    if options.replicas:
        loop.add_signal_handler(signal.SIGHUP, replacing.set)
        tasks.append(asyncio.create_task(replace()))
    try:
        await server.serve(sockets=[listener])
    finally:
        for task in tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        await front.close()
    if failed:
        raise failed[0]


class _JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        found: dict[str, Any] = {"time": round(record.created, 3), "level": record.levelname.lower()}
        fields = getattr(record, "fields", None)
        found |= fields if fields is not None else {"message": record.getMessage()}
        if record.exc_info:
            found["error"] = self.formatException(record.exc_info)
        return json.dumps(found)


def _set_up_logs(as_json: bool) -> None:
    """Logs go to stderr: a line each, without prompts or answers. A full disk loses lines, and no request."""
    logging.raiseExceptions = False
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonLines() if as_json else logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    root = logging.getLogger("enginewright")
    root.setLevel(logging.INFO)
    for one in (root, logging.getLogger("uvicorn")):
        one.handlers[:] = [handler]
        one.propagate = False
    logging.getLogger("enginewright.access").setLevel(logging.INFO if as_json else logging.WARNING)


def _raise_file_limit() -> None:
    """Each connection is a file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(hard, 65536) if hard != resource.RLIM_INFINITY else 65536
    if soft < wanted:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
