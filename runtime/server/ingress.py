"""The server as an application of Ray Serve: the front end is an actor too, and Ray Serve's proxies accept connections.

It is for clusters that are configured by a file, such as KubeRay's RayService: its ``import_path`` is
``enginewright.runtime.server.ingress:application``, and its ``args`` are fields of ``ServerOptions``. Streams are
cheaper with ``optimize serve --replicas``, where clients connect to the front end directly.
"""

from __future__ import annotations

from typing import Any

import msgspec
import ray
from ray import serve

from ..shared.errors import RequestError
from .app import make_app
from .engines.engine_client import Limits, Model
from .http.engine_options import options_for, replica_options
from .http.front import Front
from .http.gate import Gate
from .http.options import ServerOptions
from .replicas.cluster import LOGGING
from .replicas.replicas import Replicated, cpus_of, deployment_of


def application(args: dict[str, Any]) -> Any:
    """Returns the Ray Serve application with the server's front end and replicas.

    Args:
        args: fields of ``ServerOptions``; ``llm.threads`` is required.

    Raises RequestError naming the field that is wrong.
    """
    options = _options(args)
    limits, llm_options = _limits(options), replica_options(options)
    if not llm_options.get("threads"):
        raise RequestError("llm: how many threads a replica has isn't said", hint="Add llm: {threads: 4} to the args.")
    replicas = {
        name: deployment_of(
            name, path, options_for(path, llm_options, options), limits, options, cpus_of(llm_options), ""
        )
        for name, path in options.models.items()
    }
    door = serve.deployment(serve.ingress()(Door)).options(
        name="door",
        max_ongoing_requests=10_000,
        ray_actor_options={"num_cpus": 1},
        graceful_shutdown_timeout_s=options.drain_seconds,
        logging_config=LOGGING,
    )
    return door.bind(args, replicas)


class Door:
    """The front end of the server, in an actor of Ray Serve.

    Args:
        args: the arguments of ``application``.
        handles: the handles of the models' replicas, by the models' names.
    """

    async def __init__(self, args: dict[str, Any], handles: dict[str, Any]) -> None:  # type: ignore[misc]
        options = _options(args)
        limits, llm_options, host = _limits(options), replica_options(options), str(ray.util.get_node_ip_address())
        models: dict[str, Model] = {
            name: Replicated(
                name,
                path,
                options_for(path, llm_options, options),
                limits,
                options,
                cpus_of(llm_options),
                host,
                handles[name],
            )
            for name, path in options.models.items()
        }
        self._front = Front(options, models)
        await self._front.start()
        for model in models.values():
            await model.wait_until_ready()

    def __serve_build_asgi_app__(self) -> Gate:
        """Returns the ASGI application; Ray Serve calls this."""
        return make_app(self._front)

    async def __del__(self) -> None:
        """Closes the front end; Ray Serve awaits this method at the end."""
        await self._front.close()


def _options(args: dict[str, Any]) -> ServerOptions:
    """Returns the options of ``optimize serve``, with an address that Ray Serve's proxies can listen on."""
    try:
        options = msgspec.convert({"replicas": 1, **args, "ray": "auto", "host": "0.0.0.0"}, ServerOptions)  # noqa: S104
    except msgspec.ValidationError as e:
        raise RequestError(f"args: {e}", hint="They are fields of `optimize serve --print-config`.") from e
    options.check()
    return options


def _limits(options: ServerOptions) -> Limits:
    return Limits(step=options.step_seconds, silence=options.silence_seconds)
