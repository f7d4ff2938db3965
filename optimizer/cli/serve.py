"""``optimize serve``: answers over HTTP."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from enginewright.runtime.bundle.hub_id import is_model, parse_hub_id
from enginewright.runtime.shared.errors import MissingDependencyError, RequestError

from .console import print_json, print_styled, reported
from .exported import exported
from .options import AsJson, ModelRecipe, Serving, grouped

if TYPE_CHECKING:
    from enginewright.runtime.server.engines.engine_client import Model
    from enginewright.runtime.server.http.front import Front
    from enginewright.runtime.server.http.options import ServerOptions

NAME = "serve"
EPILOG = (
    "Examples:\n\n"
    "  optimize serve smollm2.bundle\n\n"
    "  optimize serve model.gguf --recipe int4-awq\n\n"
    "  optimize serve --model chat=smollm2.bundle --model big=llama.bundle --port 9000\n\n"
    "  optimize serve --model chat=smollm2.bundle --alias gpt-4o-mini=chat\n\n"
    "  optimize serve smollm2.bundle --host 0.0.0.0 --api-keys keys.toml --allowed-host models.example.org\n\n"
    "  optimize serve smollm2.bundle --replicas 2 --threads 4\n\n"
    "  optimize serve smollm2.bundle --replicas 4 --max-replicas 8 --ray 10.0.0.1:6379\n\n"
    "  optimize serve --config server.toml --print-config\n\n"
    "  curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' "
    '-d \'{"messages": [{"role": "user", "content": "Write one sentence about the ocean."}], "temperature": 0}\''
)


@dataclass(frozen=True)
class Listening:
    """The server's address, and the clients it admits; None leaves a setting to the file, or the default."""

    host: Annotated[str | None, typer.Option(help="Address; default 127.0.0.1, which only this machine reaches.")] = (
        None
    )
    port: Annotated[int | None, typer.Option("--port", "-p", help="Port; default 8000; 0 takes a free one.")] = None
    api_keys: Annotated[Path | None, typer.Option(help="A TOML file of keys (hashed), their tenants and quotas.")] = (
        None
    )
    allowed_hosts: Annotated[
        list[str] | None,
        typer.Option("--allowed-host", help="A name that requests may use; * is any. May be repeated."),
    ] = None
    allowed_origins: Annotated[
        list[str] | None,
        typer.Option("--allowed-origin", help="A site whose pages may ask (CORS), such as https://example.org."),
    ] = None
    insecure: Annotated[
        bool | None, typer.Option("--insecure", help="Listen beyond this machine though nobody needs a key.")
    ] = None
    tls_certificate: Annotated[Path | None, typer.Option(help="A certificate (PEM): HTTPS.")] = None
    tls_key: Annotated[Path | None, typer.Option(help="Its key (PEM).")] = None


@dataclass(frozen=True)
class Bounds:
    """The server's limits; None leaves a setting to the file, or the default."""

    max_requests: Annotated[int | None, typer.Option(help="Requests of a model that run at a time; default 64.")] = None
    max_waiting: Annotated[int | None, typer.Option(help="More that may wait; the rest get 429. Default 256.")] = None
    max_body: Annotated[int | None, typer.Option(help="Bytes of a request's body; default 16 MiB.")] = None
    max_held: Annotated[int | None, typer.Option(help="Bytes of all bodies together; default 128 MiB.")] = None
    max_connections: Annotated[int | None, typer.Option(help="Open connections; default 1024.")] = None
    max_loaded: Annotated[int | None, typer.Option(help="Models loaded at a time; default: all.")] = None
    request_seconds: Annotated[float | None, typer.Option(help="Longest answer, in seconds; default: none.")] = None
    drain_seconds: Annotated[float | None, typer.Option(help="Given to answers when the server stops; default 30.")] = (
        None
    )
    splice: Annotated[
        bool | None,
        typer.Option("--splice/--no-splice", help="Put an answer's own tokens back in its conversation; default on."),
    ] = None
    log_json: Annotated[bool | None, typer.Option("--log-json", help="Logs as JSON, a line a request.")] = None
    tenant_metrics: Annotated[
        int | None, typer.Option(metavar="N", help="Show the usage of up to N tenants in /metrics; default: none.")
    ] = None
    otlp: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Send spans of requests there (OpenTelemetry): http://HOST:4318/v1/traces."),
    ] = None
    any_model: Annotated[
        bool | None, typer.Option("--any-model", help="Answer requests for models that are not there, by the first.")
    ] = None
    unknown_fields: Annotated[
        str | None,
        typer.Option(
            metavar="refuse|ignore", help="Fields of a body that nobody knows: 400 (default), or named in a header."
        ),
    ] = None


@dataclass(frozen=True)
class Replicas:
    """Engines of a model on Ray Serve, on this machine or on many."""

    replicas: Annotated[
        int | None, typer.Option(help="Engines of each model, on Ray Serve; default: one, without Ray.")
    ] = None
    max_replicas: Annotated[int | None, typer.Option(help="Up to so many where there is much to do.")] = None
    target_requests: Annotated[
        float | None, typer.Option(help="Requests of a replica beyond which there is to be another; default 16.")
    ] = None
    routing: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Who gets a request: prefix (knows most of the prompt; default), load, round-robin."
        ),
    ] = None


@reported
@grouped
def command(
    bundle: Annotated[
        str | None,
        typer.Argument(
            metavar="BUNDLE|MODEL",
            help="What `optimize export` wrote; or a GGUF file, a Hugging Face folder or an id on the Hub, which is "
            "exported first, once.",
        ),
    ] = None,
    *,
    model: Annotated[
        list[str] | None,
        typer.Option("--model", "-m", metavar="NAME=BUNDLE|MODEL", help="The same, by a name of its own."),
    ] = None,
    alias: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=MODEL", help="Another name of a model, with the same engine. May be repeated."),
    ] = None,
    recipe: ModelRecipe = None,
    config: Annotated[Path | None, typer.Option(help="A TOML file with these options; flags go before it.")] = None,
    listening: Listening,
    bounds: Bounds,
    replicas: Replicas,
    serving: Serving,
    print_config: Annotated[bool, typer.Option("--print-config", help="Print all options as such a file.")] = False,
    as_json: AsJson = False,
) -> None:
    """Serves models over HTTP, by the protocols of OpenAI, Anthropic and Ollama, with a page to chat and metrics."""
    from enginewright.runtime.server.http.options import as_toml

    if missing := next(
        (name for name in ("httptools", "prometheus_client", "starlette", "uvicorn") if find_spec(name) is None), None
    ):
        hint = "Install it with: pip install 'enginewright[serve]'"
        raise MissingDependencyError(f"serve needs {missing}, which is not installed", hint=hint)

    flags = {
        name: str(value) if isinstance(value, Path) else value
        for group in (listening, bounds, replicas)
        for name, value in vars(group).items()
        if value not in (None, [])
    }
    requests = flags.pop("max_requests", None)
    named = dict(_named(text, "--model", "NAME=BUNDLE", "chat=smollm2.bundle") for text in model or ())
    if bundle is not None:
        named = {_name_of(bundle): bundle} | named
    flags |= {"models": named} if named else {}
    aliases = dict(_named(text, "--alias", "NAME=MODEL", "gpt-4o-mini=chat") for text in alias or ())
    flags |= {"aliases": aliases} if aliases else {}
    flags |= {} if serving.ray is None else {"ray": serving.ray}  # of replicas; without them, of ranks
    plain = {name: str(value) if isinstance(value, Path) else value for name, value in serving.given().items()}
    default = Serving().given()
    llm = {name: value for name, value in plain.items() if value != default[name]}
    llm |= {} if requests is None else {"max_requests": requests}
    options = _options(config, flags, llm)
    if not options.models:
        raise typer.BadParameter("there is nothing to serve: name a BUNDLE, or --model NAME=BUNDLE")
    options.check()
    if options.replicas:
        _need_ray()
    elif "max_replicas" in flags:
        hint = "Pass --replicas N as well, or leave --max-replicas out."
        raise RequestError("max_replicas: it is of replicas, and there are none", hint=hint)
    elif "ray" in flags and "ray" not in options.llm:
        hint = "Pass --replicas N or --ranks N as well, or leave --ray out."
        raise RequestError("ray: it is of replicas or ranks, and there are none", hint=hint)
    if print_config:
        print(as_toml(options), end="")
        return

    from enginewright.runtime.server.http.logs import set_up_logs

    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the server reads its keys and options again at it, once it answers
    options.check_files()
    if options.log_json:
        set_up_logs(as_json=True)
    sources = dict(options.models)
    if recipe is not None and not any(map(is_model, sources.values())):
        hint = "Pass the model that a bundle was made from, or leave the recipe out."
        raise RequestError("recipe: it is of models that are exported first, and there are none", hint=hint)
    options = msgspec.structs.replace(options, models={n: _exported(p, recipe) for n, p in sources.items()})

    def reread() -> ServerOptions:
        """Returns the options as they are now. Models that weren't there are exported for replicas alone."""
        new = _options(config, flags, llm)
        bundles = {source: options.models[name] for name, source in sources.items()}
        paths = {
            name: _exported(path, recipe) if new.replicas else bundles.get(path, path)
            for name, path in new.models.items()
        }
        return msgspec.structs.replace(new, models=paths)

    def ready(url: str, front: Front) -> None:
        rows = {name: one.describe() for name, one in front.models.items()}
        if as_json:
            print_json({"url": url, "models": rows})
            sys.stdout.flush()
            return
        for name, row in rows.items():
            print_styled(f"{name}: {row['state']}, target {row['target'] or 'not loaded'}")
        print_styled(f"serving at {url} (OpenAI's API: {url}/v1); Ctrl-C ends it")

    if options.replicas:
        _serve_replicas(options, ready, reread)
        return
    engines = options.begin_engines()  # they open their bundles while this process imports what it needs
    try:
        from enginewright.runtime.server.http.front import open_models
        from enginewright.runtime.server.serve import serve

        serve(options, ready, open_models(options, engines), reread)
    finally:
        for one in engines.values():
            one.kill()


def _need_ray() -> None:
    if find_spec("ray") is None:
        hint = "Install it with: pip install 'enginewright[ray]'"
        raise MissingDependencyError("--replicas needs ray, which is not installed", hint=hint)


def _options(config: Path | None, flags: Mapping[str, Any], llm: Mapping[str, Any]) -> ServerOptions:
    """Returns the options of a file with those of flags before them. They aren't checked together yet.

    Args:
        flags: options of the server that flags name.
        llm: options of ``LLM`` that flags name.

    Raises RequestError naming the file.
    """
    from enginewright.runtime.server.http.options import ServerOptions, options_from_file

    fields: dict[str, Any] = {"models": {}} | ({} if config is None else options_from_file(config)) | dict(flags)
    engine = dict(llm)
    if fields.get("replicas") or not (engine.get("ranks") or engine.get("partition")):
        engine.pop("ray", None)
    return ServerOptions(**fields | {"llm": fields.get("llm", {}) | engine})


def _serve_replicas(
    options: ServerOptions, ready: Callable[[str, Front], None], reread: Callable[[], ServerOptions]
) -> None:
    from enginewright.runtime.server.replicas.cluster import Cluster
    from enginewright.runtime.server.replicas.replicas import open_replicas
    from enginewright.runtime.server.serve import serve

    clusters: list[Cluster] = []

    def opened() -> dict[str, Model]:
        clusters.append(Cluster(options.ray))
        return open_replicas(options, clusters[0])

    try:
        serve(options, ready, opened, reread)
    finally:
        for cluster in clusters:
            cluster.close()


def _named(text: str, flag: str, form: str, example: str) -> tuple[str, str]:
    """Splits a flag's NAME=VALUE. Raises typer.BadParameter naming the flag, its form and an example."""
    name, equals, value = text.partition("=")
    if not equals or not name or not value:
        raise typer.BadParameter(f"{flag} {text}: not of the form {form}, such as {example}")
    return name, value


def _exported(path: str, recipe: str | None) -> str:
    """Returns the path of a bundle; ``recipe`` is for those of the server's models that must be exported first."""
    return str(exported(path, recipe=recipe if is_model(path) else None))


def _name_of(bundle: str) -> str:
    name = Path(bundle).name.removesuffix(".bundle").removesuffix(".gguf")
    if not Path(bundle).exists() and parse_hub_id(bundle) is not None:
        name = bundle  # as its users call it
    if not name:
        raise RequestError(f"{bundle}: it has no name", hint="Pass --model NAME=BUNDLE.")
    return name
