"""The options of a server. Each is declared once: type, range, default, flag, help, and if it may change at runtime.

They come from flags or from a TOML file, whose keys are the fields of ``ServerOptions``. The command makes its flags
from these fields too, so this module imports little.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_type_hints

import msgspec
from msgspec import Meta

from ...shared.errors import RequestError, field_first, shown

LOOPBACK = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True)
class Option:
    """The declaration of an option, besides its type and default.

    Attributes:
        help: description for ``--help``.
        flags: its flags on the command line; "" stands for a flag of the option's own name. Empty: only option files
            have it.
        metavar: name of its value in ``--help``; None for that of its type.
        restart: True if a change needs a restart. Others may change while the server runs.
    """

    help: str
    flags: tuple[str, ...] = ("",)
    metavar: str | None = None
    restart: bool = False


Count = Annotated[int, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(ge=0, le=1e6)]
Policy = Literal["prefix", "load", "round-robin"]
_FILE = ()
"""The flags of an option without any."""


class ServerOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of ``optimize serve``; each has its description in its declaration."""

    models: Annotated[
        dict[str, str],
        Option("Table of models: name -> path of the bundle. The first model is the default.", _FILE, restart=True),
    ]
    aliases: Annotated[dict[str, str], Option("Table of aliases: further name -> name of a model.", _FILE)] = {}
    llm: Annotated[
        dict[str, Any],
        Option(
            "Table of arguments of LLM, for all models; threads and memory are divided among the models.",
            _FILE,
            restart=True,
        ),
    ] = {}
    host: Annotated[
        str, Option("Address to listen on; with the default, only this machine can connect.", restart=True)
    ] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535), Option("Port; 0 chooses a free port.", ("", "-p"), restart=True)] = 8000
    api_keys: Annotated[
        str | None, Option("A TOML file of keys (hashed), their tenants and quotas.", metavar="PATH", restart=True)
    ] = None
    allowed_hosts: Annotated[
        list[str],
        Option(
            "A name that a Host header may have, in addition to the address; * allows any. May be repeated.",
            ("--allowed-host",),
        ),
    ] = []
    allowed_origins: Annotated[
        list[str],
        Option(
            "A site whose pages may send requests (CORS), as https://example.org; * allows any.", ("--allowed-origin",)
        ),
    ] = []
    insecure: Annotated[bool, Option("Let other machines connect without API keys.")] = False
    tls_certificate: Annotated[
        str | None, Option("A certificate (PEM), which enables HTTPS.", metavar="PATH", restart=True)
    ] = None
    tls_key: Annotated[str | None, Option("The certificate's key (PEM).", metavar="PATH", restart=True)] = None
    max_waiting: Annotated[Positive, Option("Maximum waiting requests of a model; further requests get 429.")] = 256
    max_texts: Annotated[
        Positive, Option("Maximum texts, or pairs of texts, in a request for embeddings, scores or classes.")
    ] = 2048
    max_body: Annotated[Positive, Option("Maximum bytes of a request's body.")] = 16 << 20
    max_held: Annotated[
        Positive,
        Option("Maximum bytes of all bodies of unfinished requests; the first 64 KiB of each don't count."),
    ] = 128 << 20
    max_tenant_held: Annotated[
        Positive,
        Option("Maximum bytes of all bodies of a tenant's unfinished requests, if the server has keys.", _FILE),
    ] = 64 << 20
    max_connections: Annotated[Positive, Option("Maximum open connections.")] = 1024
    max_tenant_connections: Annotated[
        Positive, Option("Maximum open connections of a tenant, if the server has keys.", _FILE)
    ] = 512
    max_loaded: Annotated[
        Count,
        Option("Maximum loaded models; 0 means all. If needed, an idle model is unloaded for another.", restart=True),
    ] = 0
    idle_seconds: Annotated[
        Seconds,
        Option("Seconds after which an idle connection is closed. Set a shorter time in load balancers.", _FILE),
    ] = 75.0
    header_seconds: Annotated[Seconds, Option("Seconds in which a client must send its headers.", _FILE)] = 20.0
    body_seconds: Annotated[Seconds, Option("Seconds in which a client must send its body.", _FILE)] = 60.0
    body_rate: Annotated[
        Count,
        Option("Least bytes per second at which a client must send its body after 10 seconds; 0 sets no limit.", _FILE),
    ] = 4096
    stall_seconds: Annotated[
        Seconds,
        Option(
            "Seconds after which a client is disconnected if it reads its answer at less than 256 bytes per second.",
            _FILE,
        ),
    ] = 60.0
    request_seconds: Annotated[Seconds, Option("Maximum seconds for an answer; 0 means no limit.")] = 0.0
    drain_seconds: Annotated[Seconds, Option("Maximum seconds that running requests get when the server stops.")] = 30.0
    keep_alive_seconds: Annotated[
        Seconds, Option("Seconds without data after which a stream sends a comment.", _FILE)
    ] = 15.0
    step_seconds: Annotated[
        Seconds,
        Option(
            "An engine is killed if a step takes more seconds than this, and more than 20 times its expected time.",
            _FILE,
            restart=True,
        ),
    ] = 60.0
    silence_seconds: Annotated[
        Seconds, Option("Seconds after which an engine that sends no messages is killed.", _FILE, restart=True)
    ] = 60.0
    splice: Annotated[
        bool,
        Option(
            "In a later turn, reuse the generated token ids of an answer instead of tokenizing its text.",
            ("--splice/--no-splice",),
        ),
    ] = True
    log_json: Annotated[bool, Option("Write logs as JSON, one line per request.", restart=True)] = False
    tenant_metrics: Annotated[
        Count,
        Option("Show the usage of up to N tenants in /metrics, and the sum of the others.", metavar="N", restart=True),
    ] = 0
    otlp: Annotated[
        str | None,
        Option(
            "Send spans of requests (OpenTelemetry) to this address, such as http://HOST:4318/v1/traces.",
            metavar="URL",
            restart=True,
        ),
    ] = None
    any_model: Annotated[bool, Option("Answer requests for an unknown model with the first model.")] = False
    unknown_fields: Annotated[
        Literal["refuse", "ignore"],
        Option(
            "Answer an unknown field of a body with 400, or ignore it and name it in a header.", metavar="refuse|ignore"
        ),
    ] = "refuse"
    replicas: Annotated[
        Count, Option("Engines of each model on Ray Serve; 0 means one engine, without Ray.", restart=True)
    ] = 0
    max_replicas: Annotated[
        Count, Option("Maximum engines of each model under load; 0 means always --replicas.", restart=True)
    ] = 0
    target_requests: Annotated[
        float, Meta(gt=0), Option("Requests per replica above which another replica is started.", restart=True)
    ] = 16.0
    ray: Annotated[
        str,
        Option(
            'The Ray cluster that runs replicas: "local" starts one on this machine; HOST:PORT or "auto" joins one.',
            _FILE,
            restart=True,
        ),
    ] = "local"
    routing: Annotated[
        Policy,
        Option(
            "How a replica is chosen: prefix (its cache has most of the prompt), load or round-robin.",
            metavar="NAME",
            restart=True,
        ),
    ] = "prefix"

    def check(self) -> None:
        """Checks the options, each and together. Raises RequestError naming the wrong one."""
        try:
            msgspec.convert(msgspec.structs.asdict(self), ServerOptions)
        except msgspec.ValidationError as e:
            problem = field_first(str(e), "the options")
            value = getattr(self, re.split(r"\W", problem)[0], None)
            raise RequestError(problem, hint=f"It is {shown(value)}.") from e
        if not self.models:
            raise RequestError("models: there is none", hint="Name a bundle.")
        for name, model in self.aliases.items():
            if model not in self.models:
                hint = f"There is {', '.join(self.models)}."
                raise RequestError(f"aliases: {name}: there is no model {model!r}", hint=hint)
            if name in self.models or not name:
                raise RequestError(f"aliases: {name!r} is a model's own name", hint="Take another.")
        if self.max_replicas and not 0 < self.replicas <= self.max_replicas:
            hint = f"Pass --replicas from 1 to {self.max_replicas}: the number to begin with, and the least."
            raise RequestError(f"max_replicas: {self.max_replicas}, with {self.replicas} replicas", hint=hint)
        if self.replicas and self.max_loaded:
            raise RequestError("max_loaded: replicas stay loaded", hint="Leave --max-loaded or --replicas out.")
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise RequestError("tls: a certificate needs its key, and a key its certificate", hint="Name both files.")
        if self.host not in LOOPBACK and self.api_keys is None and not self.insecure:
            raise RequestError(
                f"host: {self.host} can be reached by others, and nobody needs a key",
                hint="Pass --api-keys FILE; or --insecure if a gateway before it checks who asks.",
            )

    def reloaded(self, new: ServerOptions) -> tuple[ServerOptions, list[str], list[str]]:
        """Returns these options updated by those of ``new`` that may change while the server runs.

        Also returns the names of the options that were updated, and of those that change at the next start.

        Raises RequestError naming an option that is wrong, or doesn't fit the running models.
        """
        new.check()
        changed = [name for name in self.__struct_fields__ if getattr(self, name) != getattr(new, name)]
        later = [name for name in changed if DECLARED[name].restart]
        now = {name: getattr(new, name) for name in changed if not DECLARED[name].restart}
        options = msgspec.structs.replace(self, **now)
        options.check()
        return options, [*now], later

    @property
    def fixed_hosts(self) -> frozenset[str] | None:
        """The names that a request's Host header may have; None if any name is accepted."""
        if "*" in self.allowed_hosts:
            return None
        if self.host in ("0.0.0.0", "::") and not self.allowed_hosts:  # noqa: S104  it is compared
            return None if self.api_keys is not None else frozenset(LOOPBACK)
        return frozenset(name.lower() for name in (self.host, *LOOPBACK, *self.allowed_hosts))


_TYPES = get_type_hints(ServerOptions, include_extras=True)
DECLARED: Mapping[str, Option] = {
    name: next(one for one in _TYPES[name].__metadata__ if isinstance(one, Option))
    for name in ServerOptions.__struct_fields__
}
"""Option -> its declaration."""
