"""Runs the server: sockets, signals, logs, and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import ipaddress
import logging
import math
import signal
import socket
from collections.abc import Callable, Mapping
from functools import partial
from types import FrameType

import uvicorn

from ..shared.errors import EnginewrightError, RequestError
from ..shared.file_limit import raise_file_limit
from ..shared.memory import return_large_blocks_at_once
from .app import make_app
from .engines.engine_client import Model, UnavailableError
from .http.connection import Connection
from .http.front import Front
from .http.logs import set_up_logs
from .http.option_files import check_files
from .http.options import ServerOptions

_LOG = logging.getLogger("enginewright.server")


class _Server(uvicorn.Server):
    """A uvicorn server that lets running requests finish at the first signal to end, and stops at once at the
    second.
    """

    def __init__(self, config: uvicorn.Config, front: Front, stop: Callable[[], None]) -> None:
        super().__init__(config)
        self._front, self._stop = front, stop

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._front.stopping:
            self.force_exit = self.should_exit = True
        self._front.stopping = True
        self._stop()


def listening(options: ServerOptions) -> socket.socket:
    """Returns a socket that listens on the options' address. Raises RequestError if that fails."""
    try:
        addresses = socket.getaddrinfo(options.host, options.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as e:
        raise RequestError(f"host: {options.host}: {e.strerror}", hint="Pass an address of this machine.") from e
    family, _, _, _, address = addresses[0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(1024)
    except OSError as e:
        listener.close()
        hint = "Pass another --port, or end the server that has it." if e.errno == errno.EADDRINUSE else "Pass another."
        raise RequestError(f"address: {options.host}:{options.port}: {e.strerror}", hint=hint) from e
    return listener


def serve(
    options: ServerOptions,
    ready: Callable[[str, Front], None] = lambda url, front: None,
    models: dict[str, Model] | Callable[[], dict[str, Model]] | None = None,
    reread: Callable[[], ServerOptions] | None = None,
) -> None:
    """Serves until a signal ends it. At SIGHUP it reads its keys, options and certificate again.

    Args:
        options: the server's options.
        ready: called with the address once all models are ready.
        models: the models (see ``open_models``), or a function that opens them once the port is bound. The caller
            closes their engines.
        reread: returns the current options; called at SIGHUP. The log names those that need a restart, except the
            bundles of replicas, which are replaced.

    Raises:
        RequestError: an option is wrong, or the port is in use.
        BundleError: a model can't be opened.
    """
    options.check()
    check_files(options)
    set_up_logs(options.log_json)
    raise_file_limit()
    return_large_blocks_at_once()
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
    reread: Callable[[], ServerOptions] | None,
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
        ssl_certfile=options.tls_certificate,
        ssl_keyfile=options.tls_key,
    )
    _set_times(config, options)
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
        gc.collect()
        gc.freeze()  # what was imported isn't garbage: looking through it stalls streams
        ready(address(options, listener), front)

    async def drain() -> None:
        await stopping.wait()
        end = loop.time() + front.options.drain_seconds
        while front.running and loop.time() < end and not server.force_exit:
            await asyncio.sleep(0.05)
        await _end_answers(front)
        server.should_exit = True

    reloading = asyncio.Event()

    async def reload() -> None:
        while True:
            await reloading.wait()
            reloading.clear()
            await _reload(front, config, reread)

    tasks = [asyncio.create_task(one) for one in (tell(), drain(), reload())]
    loop.add_signal_handler(signal.SIGHUP, reloading.set)
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


def _set_times(config: uvicorn.Config, options: ServerOptions) -> None:
    config.timeout_keep_alive = max(1, math.ceil(options.idle_seconds))
    config.timeout_graceful_shutdown = max(1, int(options.drain_seconds))


async def _reload(front: Front, config: uvicorn.Config, reread: Callable[[], ServerOptions] | None) -> None:
    """Reads keys, options and the certificate again. Wrong ones are logged and not adopted."""
    try:
        front.tenants.reload()
        _LOG.info("keys are read again")
    except RequestError as e:
        _LOG.error("keys stay as they were: %s", e)
    models: Mapping[str, str] = {}
    try:
        if reread is not None:
            options = await asyncio.to_thread(reread)
            now, later = front.reload(options)
            if front.options.replicas and options.models.keys() == front.models.keys():
                models, later = options.models, [name for name in later if name != "models"]
            _set_times(config, front.options)
            _LOG.info("options are read again; changed: %s", ", ".join(now) or "none")
            if later:
                _LOG.warning("a restart is needed to change: %s", ", ".join(later))
        if front.options.tls_certificate is not None:
            check_files(front.options)
            assert config.ssl is not None
            config.ssl.load_cert_chain(front.options.tls_certificate, front.options.tls_key, password="")
            _LOG.info("the certificate is read again")
    except (EnginewrightError, OSError, ValueError) as e:
        _LOG.error("options stay as they were: %s", e)
    if not front.options.replicas:
        return
    try:
        for name, model in front.models.items():
            await model.replace(models.get(name, model.path))
    except EnginewrightError as e:
        _LOG.error("nothing is replaced: %s", e)


async def _end_answers(front: Front) -> None:
    """Ends running answers with an error, which clients get if they read it at once."""
    answers = dict(front.running)
    for cancel in answers.values():
        cancel(UnavailableError("the server stopped before the answer's end", _STOPPED_SECONDS))
    if answers:
        await asyncio.wait(answers, timeout=_FAREWELL_SECONDS)
    for answer in answers:
        answer.cancel()


_STOPPED_SECONDS = 5.0
"""The seconds after which clients of a stopped server may try again, where another server takes its place."""
_FAREWELL_SECONDS = 2.0
"""The seconds that clients have to read the last event of a stream when the server stops."""


def address(options: ServerOptions, listener: socket.socket) -> str:
    """Returns the server's URL for programs on the same machine, with a host name that the server accepts."""
    host, port = listener.getsockname()[:2]
    if (place := ipaddress.ip_address(host.partition("%")[0])).is_unspecified:
        host = "127.0.0.1" if place.version == 4 else "::1"
    elif options.fixed_hosts is not None and host not in options.fixed_hosts:
        host = options.host  # a name of this address
    scheme = "http" if options.tls_certificate is None else "https"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
