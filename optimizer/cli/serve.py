"""``optimize serve``: answers over HTTP."""

from __future__ import annotations

import signal
import sys
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from inspect import Parameter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from enginewright.runtime.bundle.hub_id import is_model, parse_hub_id
from enginewright.runtime.server.http.options import DECLARED, Option, ServerOptions
from enginewright.runtime.shared.errors import MissingDependencyError, RequestError

from .console import print_json, print_styled, reported
from .exported import exported
from .options import AsJson, Flags, ModelRecipe, Serving, grouped

if TYPE_CHECKING:
    from enginewright.runtime.server.engines.engine_client import Model
    from enginewright.runtime.server.http.front import Front

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


def _flag(name: str, option: Option, kind: Any) -> Parameter:
    """Returns a flag of the command for an option of the server; None leaves the option to the file, or its default.

    ``kind`` is the type of its field in ``ServerOptions``.
    """
    if typing.get_origin(kind) is typing.Literal:
        kind = str
    spelled = [flag or "--" + name.replace("_", "-") for flag in option.flags]
    default = getattr(ServerOptions(models={}), name)
    shown = f" Default: {_spelled(default)}." if default else ""
    declaration = typer.Option(*spelled, metavar=option.metavar, help=option.help + shown)
    return Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, declaration])


def _spelled(value: Any) -> str:
    """Returns a default value in the form that the help shows."""
    if value is True:
        return "on"
    whole = isinstance(value, int) and value >= 1 << 20 and value % (1 << 20) == 0
    return f"{value >> 20} MiB" if whole else f"{value:g}" if isinstance(value, float) else str(value)


_KINDS = typing.get_type_hints(ServerOptions)  # once: for each flag it would take half of the time of `--help`
ServerFlags = Annotated[
    Mapping[str, Any], Flags([_flag(name, option, _KINDS[name]) for name, option in DECLARED.items() if option.flags])
]
"""The options of the server that have flags, by their names; see ``ServerOptions``."""


@reported
@grouped
def command(
    bundle: Annotated[
        str | None,
        typer.Argument(
            metavar="BUNDLE|MODEL",
            help="A bundle, or a model that is exported to a cached bundle first: a GGUF file, a Hugging Face folder "
            "or an id on the Hub.",
        ),
    ] = None,
    *,
    model: Annotated[
        list[str] | None,
        typer.Option(
            "--model", "-m", metavar="NAME=BUNDLE|MODEL", help="Serve a model under this name; may be repeated."
        ),
    ] = None,
    alias: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=MODEL", help="Another name of a model, with the same engine; may be repeated."),
    ] = None,
    recipe: ModelRecipe = None,
    config: Annotated[
        Path | None, typer.Option(help="A TOML file with these options; flags override the file.")
    ] = None,
    max_requests: Annotated[
        int | None, typer.Option(help="Maximum requests of a model that run at the same time; default 64.")
    ] = None,
    server: ServerFlags,
    serving: Serving,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print all options in the format of --config.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Serves models over HTTP, by the protocols of OpenAI, Anthropic and Ollama, with a chat page and metrics."""
    _check_packages("httptools", "prometheus_client", "starlette", "uvicorn")
    flags = dict(server) | _named_models(bundle, model, alias)
    flags |= {} if serving.ray is None else {"ray": serving.ray}  # of replicas; without them, of ranks
    request = _Request(config, flags, _llm_flags(serving, max_requests), recipe)
    options = request.options()
    request.check(options)
    if print_config:
        from enginewright.runtime.server.http.option_files import as_toml

        print(as_toml(options), end="")
        return

    from enginewright.runtime.server.http.logs import set_up_logs
    from enginewright.runtime.server.http.option_files import check_files

    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the server reads its keys and options again at it, once it answers
    check_files(options)
    if options.log_json:
        set_up_logs(as_json=True)
    sources, options = options.models, request.exported(options)
    reread = partial(request.reread, dict(zip(sources.values(), options.models.values(), strict=True)))
    ready = partial(_print_ready, as_json)
    if options.replicas:
        _serve_replicas(options, ready, reread)
    else:
        _serve_engines(options, ready, reread)


def _check_packages(*names: str) -> None:
    """Raises MissingDependencyError for a package of the server that isn't installed."""
    if missing := next((name for name in names if find_spec(name) is None), None):
        hint = "Install it with: pip install 'enginewright[serve]'"
        raise MissingDependencyError(f"serve needs {missing}, which is not installed", hint=hint)


def _named_models(bundle: str | None, models: Sequence[str] | None, aliases: Sequence[str] | None) -> dict[str, Any]:
    """Returns the options ``models`` and ``aliases``, each if at least one argument sets it.

    A model that is passed as ``bundle`` is named after its path.
    """
    pairs = [_named(text, "--model", "NAME=BUNDLE", "chat=smollm2.bundle") for text in models or ()]
    named = _unique("--model", pairs if bundle is None else [(_name_of(bundle), bundle), *pairs])
    further = _unique("--alias", [_named(text, "--alias", "NAME=MODEL", "gpt-4o-mini=chat") for text in aliases or ()])
    return ({"models": named} if named else {}) | ({"aliases": further} if further else {})


def _llm_flags(serving: Serving, max_requests: int | None) -> dict[str, Any]:
    """Returns the options of ``LLM`` that flags set: those that differ from the defaults."""
    plain = {name: str(value) if isinstance(value, Path) else value for name, value in serving.given().items()}
    default = Serving().given()
    llm = {name: value for name, value in plain.items() if value != default[name]}
    return llm | ({} if max_requests is None else {"max_requests": max_requests})


@dataclass(frozen=True)
class _Request:
    """The arguments of the command, from which the options are made at the start and at SIGHUP.

    Attributes:
        config: file of options; None if there is none.
        flags: options of the server from flags. They take precedence over the file's.
        llm: options of ``LLM`` from flags.
        recipe: recipe of models that are exported first; None for the default.
    """

    config: Path | None
    flags: Mapping[str, Any]
    llm: Mapping[str, Any]
    recipe: str | None

    def options(self) -> ServerOptions:
        """Returns the options of the file and the flags. They aren't checked together yet.

        Raises RequestError naming the file.
        """
        fields: dict[str, Any] = {"models": {}}
        if self.config is not None:
            from enginewright.runtime.server.http.option_files import options_from_file

            fields |= options_from_file(self.config)
        fields |= self.flags
        engine = dict(self.llm)
        if fields.get("replicas") or not (engine.get("ranks") or engine.get("partition")):
            engine.pop("ray", None)
        return ServerOptions(**fields | {"llm": fields.get("llm", {}) | engine})

    def check(self, options: ServerOptions) -> None:
        """Raises RequestError for wrong options, and for flags that need another flag."""
        if not options.models:
            raise typer.BadParameter("there is nothing to serve: name a BUNDLE, or --model NAME=BUNDLE")
        options.check()
        if options.replicas:
            _need_ray()
        elif "max_replicas" in self.flags:
            hint = "Pass --replicas N as well, or leave --max-replicas out."
            raise RequestError("max_replicas: it is of replicas, and there are none", hint=hint)
        elif "ray" in self.flags and "ray" not in options.llm:
            hint = "Pass --replicas N or --ranks N as well, or leave --ray out."
            raise RequestError("ray: it is of replicas or ranks, and there are none", hint=hint)

    def exported(self, options: ServerOptions) -> ServerOptions:
        """Returns the options with exported bundles in place of models.

        Raises RequestError for a recipe if no model has to be exported, and the errors of exports.
        """
        if self.recipe is not None and not any(map(is_model, options.models.values())):
            hint = "Pass the model that a bundle was made from, or leave the recipe out."
            raise RequestError("recipe: it is of models that are exported first, and there are none", hint=hint)
        paths = {name: _exported(path, self.recipe) for name, path in options.models.items()}
        return msgspec.structs.replace(options, models=paths)

    def reread(self, bundles: Mapping[str, str]) -> ServerOptions:
        """Returns the present options of the file and the flags.

        Args:
            bundles: path of a model at the start -> path of its bundle. New models are exported only for replicas.
        """
        new = self.options()
        paths = {
            name: _exported(path, self.recipe) if new.replicas else bundles.get(path, path)
            for name, path in new.models.items()
        }
        return msgspec.structs.replace(new, models=paths)


def _print_ready(as_json: bool, url: str, front: Front) -> None:
    """Prints the server's address and its models. ``as_json``: as one document."""
    rows = {name: one.describe() for name, one in front.models.items()}
    if as_json:
        print_json({"url": url, "models": rows})
        sys.stdout.flush()
        return
    for name, row in rows.items():
        print_styled(f"{name}: {row['state']}, target {row['target'] or 'not loaded'}")
    print_styled(f"serving at {url} (OpenAI's API: {url}/v1); Ctrl-C ends it")


def _need_ray() -> None:
    if find_spec("ray") is None:
        hint = "Install it with: pip install 'enginewright[ray]'"
        raise MissingDependencyError("--replicas needs ray, which is not installed", hint=hint)


def _serve_engines(
    options: ServerOptions, ready: Callable[[str, Front], None], reread: Callable[[], ServerOptions]
) -> None:
    """Serves models by processes on this machine, which open their bundles while this process still imports."""
    from enginewright.runtime.server.http.engine_options import begin_engines

    engines = begin_engines(options)
    try:
        from enginewright.runtime.server.http.front import open_models
        from enginewright.runtime.server.serve import serve

        serve(options, ready, open_models(options, engines), reread)
    finally:
        for one in engines.values():
            one.kill()


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


def _unique(flag: str, pairs: Sequence[tuple[str, str]]) -> dict[str, str]:
    """Returns the pairs by their names. Raises typer.BadParameter naming ``flag`` for a name with two values."""
    named: dict[str, str] = {}
    for name, value in pairs:
        if named.setdefault(name, value) != value:
            raise typer.BadParameter(f"{flag}: two are called {name}, {named[name]} and {value}; rename one of them")
    return named


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
