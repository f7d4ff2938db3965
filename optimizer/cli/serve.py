"""``optimize serve``: answers over HTTP."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from enginewright.runtime.shared.errors import MissingDependencyError, RequestError

from .console import print_json, print_styled, reported
from .options import AsJson, Serving, grouped
from .progress import stage_bars

if TYPE_CHECKING:
    from enginewright.optimizer.capture.hub_id import HubId
    from enginewright.runtime.server.app import Front

NAME = "serve"
EPILOG = (
    "Examples:\n\n"
    "  optimize serve smollm2.bundle\n\n"
    "  optimize serve model.gguf --recipe int4-awq\n\n"
    "  optimize serve --model chat=smollm2.bundle --model big=llama.bundle --port 9000\n\n"
    "  optimize serve smollm2.bundle --host 0.0.0.0 --api-keys keys.toml --allowed-host models.example.org\n\n"
    "  optimize serve --config server.toml --print-config\n\n"
    "  curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' "
    '-d \'{"messages": [{"role": "user", "content": "Name a colour."}]}\''
)


@dataclass(frozen=True)
class Listening:
    """Where the server listens, and who may ask; None leaves it to the file, or the default."""

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
    """What the server takes on."""

    max_requests: Annotated[int | None, typer.Option(help="Requests of a model that run at a time; default 64.")] = None
    max_waiting: Annotated[int | None, typer.Option(help="More that may wait; the rest get 429. Default 256.")] = None
    max_body: Annotated[int | None, typer.Option(help="Bytes of a request's body; default 16 MiB.")] = None
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
    otlp: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Send spans of requests there (OpenTelemetry): http://HOST:4318/v1/traces."),
    ] = None
    any_model: Annotated[bool | None, typer.Option("--any-model", hidden=True)] = None


@reported
@grouped
def command(
    bundle: Annotated[
        str | None,
        typer.Argument(
            metavar="[BUNDLE|MODEL]",
            help="What `optimize export` wrote; or a GGUF file, a Hugging Face folder or an id on the Hub, which is "
            "exported first, once.",
        ),
    ] = None,
    *,
    model: Annotated[
        list[str] | None,
        typer.Option("--model", "-m", metavar="NAME=BUNDLE|MODEL", help="The same, by a name of its own."),
    ] = None,
    recipe: Annotated[
        str | None, typer.Option("--recipe", "-r", help="Of a model that is exported first; default int8.")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="A TOML file with these options; flags go before it.")] = None,
    listening: Listening,
    bounds: Bounds,
    serving: Serving,
    print_config: Annotated[bool, typer.Option("--print-config", help="Print all options as such a file.")] = False,
    as_json: AsJson = False,
) -> None:
    """Serves bundles over HTTP, by OpenAI's protocol: chat, completions, models, metrics."""
    from enginewright.runtime.server.engine_client import open_models
    from enginewright.runtime.server.options import ServerOptions, as_toml, options_from_file

    if missing := next((name for name in ("fastapi", "prometheus_client", "uvicorn") if find_spec(name) is None), None):
        hint = "Install it with: pip install 'enginewright[serve]'"
        raise MissingDependencyError(f"serve needs {missing}, which is not installed", hint=hint)

    given: dict[str, Any] = {} if config is None else options_from_file(config)
    said = {name: value for group in (listening, bounds) for name, value in vars(group).items() if value is not None}
    requests = said.pop("max_requests", None)
    given |= {name: str(value) if isinstance(value, Path) else value for name, value in said.items() if value != []}
    named = dict(_named(text) for text in model or ())
    if bundle is not None:
        named = {_name_of(bundle): bundle} | named
    given["models"] = named or given.get("models", {})
    if not given["models"]:
        raise typer.BadParameter("there is nothing to serve: name a BUNDLE, or --model NAME=BUNDLE")
    plain = {name: str(value) if isinstance(value, Path) else value for name, value in serving.given().items()}
    default = Serving().given()
    own = {name: value for name, value in plain.items() if value != default[name]}
    given["llm"] = given.get("llm", {}) | own | ({} if requests is None else {"max_requests": requests})
    options = ServerOptions(**given)
    options.check()
    if print_config:
        print(as_toml(options), end="")
        return

    options = msgspec.structs.replace(options, models={n: _exported(p, recipe) for n, p in options.models.items()})

    def ready(url: str, front: Front) -> None:
        rows = {name: one.describe() for name, one in front.models.items()}
        if as_json:
            print_json({"url": url, "models": rows})
            sys.stdout.flush()
            return
        for name, row in rows.items():
            print_styled(f"{name}: {row['state']}, target {row['target'] or 'not loaded'}")
        print_styled(f"serving at {url} (OpenAI's API: {url}/v1); Ctrl-C ends it")

    models = open_models(options, ahead=True)  # the engines import what they need while this process does
    try:
        from enginewright.runtime.server.serve import serve

        serve(options, ready, models)
    finally:
        for one in models.values():
            one.kill()


def _named(text: str) -> tuple[str, str]:
    name, equals, path = text.partition("=")
    if not equals or not name or not path:
        raise typer.BadParameter(f"--model {text}: not of the form NAME=BUNDLE, such as chat=smollm2.bundle")
    return name, path


def _exported(path: str, recipe: str | None) -> str:
    """The path of a bundle: of a model's, which is exported first where that wasn't done before on this machine."""
    from enginewright.runtime.bundle.manifest import MANIFEST_PATH

    place = Path(path)
    source = not (place / MANIFEST_PATH).exists() and (place.exists() or _hub_id(path) is not None)
    if not source:
        return path
    with MissingDependencyError.of_export(f"serve: {path} isn't a bundle, and exporting it", "serve a bundle"):
        from enginewright.optimizer.export import export_once

        with stage_bars() as show:
            return str(export_once(path, recipe=recipe, progress=show))


def _hub_id(text: str) -> HubId | None:
    with MissingDependencyError.of_export(f"serve: {text} isn't a bundle, and exporting it", "serve a bundle"):
        from enginewright.optimizer.capture.hub_id import parse_hub_id

        return parse_hub_id(text)


def _name_of(bundle: str) -> str:
    name = Path(bundle).name.removesuffix(".bundle").removesuffix(".gguf")
    if not Path(bundle).exists() and _hub_id(bundle) is not None:
        name = bundle  # as its users call it
    if not name:
        raise RequestError(f"{bundle}: it has no name", hint="Pass --model NAME=BUNDLE.")
    return name
