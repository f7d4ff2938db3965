"""The options of a server, from flags or from a TOML file whose keys are these fields."""

from __future__ import annotations

import os
import ssl
import tomllib
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec

from ...bundle.regular_file import MOST_JSON_BYTES, read_regular
from ...ranks.partition import Partition
from ...shared.errors import RequestError
from ...shared.memory import default_budget, parse_size
from ..engines.records import Engine

Policy = Literal["prefix", "load", "round-robin"]
POLICIES: tuple[Policy, ...] = get_args(Policy)
UNKNOWN_FIELDS = ("refuse", "ignore")
LOOPBACK = ("127.0.0.1", "::1", "localhost")


NEED_RESTART = frozenset(
    {
        *("models", "host", "port", "llm", "api_keys", "tls_certificate", "tls_key", "max_loaded", "log_json"),
        *("tenant_metrics", "otlp", "step_seconds", "silence_seconds", "replicas", "max_replicas"),
        *("target_requests", "ray", "routing"),
    }
)
"""Options that hold from a server's start to its end. The others may change while it runs."""


class ServerOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of ``optimize serve``.

    Attributes:
        models: name -> path of its bundle. A request that names no model gets the first.
        aliases: further name -> name of a model. Both use one engine.
        host, port: the address to listen at; port 0 takes a free one.
        llm: arguments of ``LLM`` for each model. Threads and memory are divided among the models.
        api_keys: a TOML file of keys; None: no key is needed.
        allowed_hosts: names that a request's Host may have, besides the address itself; "*" allows any.
        allowed_origins: sites whose pages may send requests (CORS); "*" allows any.
        insecure: allows a host that other machines reach, without keys.
        tls_certificate, tls_key: files in PEM.
        max_body: most bytes of a request's body.
        max_held: most bytes of all bodies that are read or answered, without the first 64 KiB of each.
        max_tenant_held: the same limit for the bodies of one tenant, where keys are needed.
        max_connections: most open connections.
        max_tenant_connections: most open connections of one tenant, where keys are needed.
        max_waiting: most requests of a model that wait, besides those that run; more get 429.
        max_loaded: models that are loaded at a time; 0: all. An idle one is unloaded for another.
        idle_seconds: time that a connection stays open between two requests. It is longer than load balancers' own.
        header_seconds, body_seconds: most time that a client may take to send them.
        body_rate: least bytes of a body that a client sends each second, after its first seconds; 0: any number.
        stall_seconds: most time that a client may read nothing, or hardly anything, of its answer.
        request_seconds: most time of an answer; 0: any time.
        drain_seconds: most time that running requests get when the server stops.
        keep_alive_seconds: time between two comments in a stream that has nothing else.
        step_seconds: time of a step after which its engine is killed, if it is also 20 times the expected time.
        silence_seconds: time without a message from an engine after which it is killed.
        splice: puts an assistant's turn back as the tokens that it was; a request may turn it off.
        log_json: writes logs as JSON, a line each.
        tenant_metrics: tenants whose usage ``/metrics`` shows by name. The others are counted together. 0: no usage.
        otlp: URL that spans of requests are sent to, by OTLP over HTTP; None: nowhere.
        any_model: answers requests for an unknown model by the first one.
        unknown_fields: "refuse": an unknown field of a body gets 400; "ignore": the answer's header names it.
        replicas: engines of each model on Ray Serve; 0: one engine, a process of this machine.
        max_replicas: most engines of each model under load; 0: always ``replicas``.
        target_requests: requests of a replica beyond which another one is started.
        ray: "local": Ray is started here; HOST:PORT or "auto": a cluster that is joined.
        routing: the choice of a replica for a request: "prefix", "load" or "round-robin".
    """

    models: dict[str, str]
    aliases: dict[str, str] = {}
    host: str = "127.0.0.1"
    port: int = 8000
    llm: dict[str, Any] = {}
    api_keys: str | None = None
    allowed_hosts: list[str] = []
    allowed_origins: list[str] = []
    insecure: bool = False
    tls_certificate: str | None = None
    tls_key: str | None = None
    max_body: int = 16 << 20
    max_held: int = 128 << 20
    max_tenant_held: int = 64 << 20
    max_connections: int = 1024
    max_tenant_connections: int = 512
    max_waiting: int = 256
    max_loaded: int = 0
    idle_seconds: float = 75.0
    header_seconds: float = 20.0
    body_seconds: float = 60.0
    body_rate: int = 4096
    stall_seconds: float = 60.0
    request_seconds: float = 0.0
    drain_seconds: float = 30.0
    keep_alive_seconds: float = 15.0
    step_seconds: float = 60.0
    silence_seconds: float = 60.0
    splice: bool = True
    log_json: bool = False
    tenant_metrics: int = 0
    otlp: str | None = None
    any_model: bool = False
    unknown_fields: Literal["refuse", "ignore"] = "refuse"
    replicas: int = 0
    max_replicas: int = 0
    target_requests: float = 16.0
    ray: str = "local"
    routing: Policy = "prefix"

    def check(self) -> None:
        """Raises RequestError naming the option."""
        if not self.models:
            raise RequestError("models: there is none", hint="Name a bundle.")
        for name, model in self.aliases.items():
            if model not in self.models:
                hint = f"There is {', '.join(self.models)}."
                raise RequestError(f"aliases: {name}: there is no model {model!r}", hint=hint)
            if name in self.models or not name:
                raise RequestError(f"aliases: {name!r} is a model's own name", hint="Take another.")
        if not 0 <= self.port < 1 << 16:
            raise RequestError(f"port: {self.port} is out of range", hint="It must be from 0 to 65535.")
        positive = (
            "max_body",
            "max_held",
            "max_tenant_held",
            "max_connections",
            "max_tenant_connections",
            "max_waiting",
        )
        for name in ("body_rate", "tenant_metrics"):
            if getattr(self, name) < 0:
                raise RequestError(f"{name}: {getattr(self, name)} is out of range", hint="It must be 0 or more.")
        for name in positive:
            if getattr(self, name) < 1:
                raise RequestError(f"{name}: {getattr(self, name)} is out of range", hint="It must be 1 or more.")
        for name in self.__struct_fields__:
            if name.endswith("_seconds") and not 0 <= getattr(self, name) <= 1e6:
                raise RequestError(f"{name}: {getattr(self, name)} is out of range", hint="It must be 0 or more.")
        if self.replicas < 0 or self.max_replicas < 0 or self.target_requests <= 0:
            hint = "--replicas and --max-replicas must be 0 or more, --target-requests more than 0."
            raise RequestError("replicas: one of their numbers is out of range", hint=hint)
        if self.max_replicas and not 0 < self.replicas <= self.max_replicas:
            hint = f"Pass --replicas from 1 to {self.max_replicas}: the number to begin with, and the least."
            raise RequestError(f"max_replicas: {self.max_replicas}, with {self.replicas} replicas", hint=hint)
        if self.unknown_fields not in UNKNOWN_FIELDS:
            hint = f"Pass one of {', '.join(UNKNOWN_FIELDS)}."
            raise RequestError(f"unknown_fields: there is no {self.unknown_fields!r}", hint=hint)
        if self.routing not in POLICIES:
            raise RequestError(f"routing: there is no {self.routing!r}", hint=f"Pass one of {', '.join(POLICIES)}.")
        if self.replicas and self.max_loaded:
            raise RequestError("max_loaded: replicas stay loaded", hint="Leave --max-loaded or --replicas out.")
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise RequestError("tls: a certificate needs its key, and a key its certificate", hint="Name both files.")
        if self.host not in LOOPBACK and self.api_keys is None and not self.insecure:
            raise RequestError(
                f"host: {self.host} can be reached by others, and nobody needs a key",
                hint="Pass --api-keys FILE; or --insecure if a gateway before it checks who asks.",
            )

    def check_files(self) -> None:
        """Raises RequestError naming a file of TLS that can't be used."""
        if self.tls_certificate is None or self.tls_key is None:
            return
        for name in ("tls_certificate", "tls_key"):
            try:
                read_regular(Path(getattr(self, name)), most=MOST_JSON_BYTES)
            except (OSError, ValueError) as e:
                why = getattr(e, "strerror", None) or e
                raise RequestError(f"{name}: {getattr(self, name)}: {why}", hint="Pass a file in PEM.") from e
        try:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(self.tls_certificate, self.tls_key, password="")  # nobody is asked for one
        except (OSError, ValueError) as e:
            pair = f"{self.tls_certificate} and {self.tls_key}"
            hint = "Pass a certificate in PEM and its own key, which isn't encrypted."
            raise RequestError(f"tls_certificate: {pair} aren't a certificate and its key", hint=hint) from e

    def reloaded(self, new: ServerOptions) -> tuple[ServerOptions, list[str], list[str]]:
        """Returns these options with what a running server can take over of others.

        Also returns the names of the options that it takes over, and of those that change at its next start.

        Raises RequestError naming an option that is wrong, also one that is wrong for the models that run.
        """
        new.check()
        changed = [name for name in self.__struct_fields__ if getattr(self, name) != getattr(new, name)]
        later = [name for name in changed if name in NEED_RESTART]
        now = {name: getattr(new, name) for name in changed if name not in NEED_RESTART}
        options = msgspec.structs.replace(self, **now)
        options.check()
        return options, [*now], later

    def for_each_model(self) -> dict[str, Any]:
        """Gives ``LLM``'s options for one model: its share of the threads, and of the memory for KV caches.

        Both are fixed before the first model is loaded. Raises RequestError where ``memory`` isn't a size.
        """
        loaded = min(len(self.models), self.max_loaded or len(self.models))
        if loaded == 1:
            return dict(self.llm)
        ranks = Partition.parse(str(self.llm.get("partition") or self.llm.get("ranks") or 1)).ranks
        threads = self.llm.get("threads") or len(os.sched_getaffinity(0)) // ranks
        memory = self.llm.get("memory")
        budget = default_budget() if memory is None else parse_size(memory)
        return {**self.llm, "threads": max(1, int(threads) // loaded), "memory": budget // loaded}

    def for_each_replica(self) -> dict[str, Any]:
        """Gives ``LLM``'s options for one replica: what was said is a replica's own, divided among the models alone.

        Memory that wasn't said is a share of this machine's where Ray is started here, and else left to each machine.
        """
        llm_options, models = dict(self.llm), len(self.models)
        if llm_options.get("threads"):
            llm_options["threads"] = max(1, int(llm_options["threads"]) // models)
        if llm_options.get("memory") is not None:
            llm_options["memory"] = parse_size(llm_options["memory"]) // models
        elif self.ray == "local":
            llm_options["memory"] = default_budget() // (models * max(self.replicas, self.max_replicas))
        return llm_options

    def begin_engines(self) -> dict[str, Engine]:
        """Begins the processes of the models that are loaded first. Who calls this kills them in the end."""
        llm_options = self.for_each_model()
        return {name: Engine(path, llm_options) for name, path in list(self.models.items())[: self.max_loaded or None]}

    @property
    def fixed_hosts(self) -> frozenset[str] | None:
        """Names that a Host header may have; None: any."""
        if "*" in self.allowed_hosts:
            return None
        if self.host in ("0.0.0.0", "::") and not self.allowed_hosts:  # noqa: S104  it is compared
            return None if self.api_keys is not None else frozenset(LOOPBACK)
        return frozenset(name.lower() for name in (self.host, *LOOPBACK, *self.allowed_hosts))


def options_from_file(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Fields of ServerOptions in a TOML file. Raises RequestError naming the file and the key."""
    file = Path(path)
    try:
        values = tomllib.loads(read_regular(file, most=MOST_JSON_BYTES).decode())
        known = ServerOptions.__struct_fields__
        unknown = next((name for name in values if name not in known), None)
        if unknown is not None:
            raise ValueError(f"there is no option {unknown!r}")
        msgspec.convert({"models": {}} | values, ServerOptions)
    except (OSError, ValueError, msgspec.ValidationError) as e:
        why = getattr(e, "strerror", None) or str(e)
        raise RequestError(f"config: {file}: {why}", hint="`optimize serve --print-config` shows all options.") from e
    return values


def as_toml(options: ServerOptions) -> str:
    """The options as such a file."""
    plain = msgspec.to_builtins(options)
    lines = [
        f"{name} = {_value(value)}"
        for name, value in plain.items()
        if not isinstance(value, dict) and value is not None
    ]
    for name in ("models", "aliases", "llm"):
        lines += ["", f"[{name}]"]
        lines += [f"{_key(key)} = {_value(value)}" for key, value in plain[name].items() if value is not None]
    return "\n".join(lines) + "\n"


def _key(name: str) -> str:
    return name if name.replace("-", "").replace("_", "").isalnum() and name.isascii() else _value(name)


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{_key(k)} = {_value(v)}" for k, v in value.items() if v is not None) + " }"
    return msgspec.json.encode(value).decode()
