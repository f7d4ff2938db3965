"""The front end: the models, tenants, limits and threads that all protocols share."""

from __future__ import annotations

import asyncio
import hashlib
import resource
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import metadata
from types import MappingProxyType
from typing import Any

from starlette.requests import Request

from ...scheduler.helpers import helper
from ...shared.counters import Counters
from ...shared.errors import EnginewrightError, RequestError
from ...tasks.context import GENERATE, Kind, kind_of
from ..engines.engine_client import Limits, Model, UnavailableError
from ..engines.records import Engine
from ..engines.turns import Turns
from .engine_options import model_options, options_for
from .errors import NO_MODEL, ApiError
from .fields import B, decoded
from .intake import FREE_BYTES, Intake
from .limits import LARGEST, Sizes
from .metrics import Metrics
from .options import ServerOptions
from .tenants import Charge, FairTurns, Tenants
from .tracing import Tracing, exporter_to

VERSION = metadata.version("enginewright")
_LATEST = ":latest"
_MOST_NAME = 80
"""The most characters of a model's name in the log."""
_PORTIONS = 4
"""The most portions of large bodies in an engine at a time. A small body waits for at most this number."""
_AT_ONCE = 16 << 10
"""The most bytes of a body that the event loop decodes itself, which is faster than a switch to a thread."""


class Front:
    """The front end of a server: its models, tenants and options, and the threads that work on bodies.

    Args:
        options: the server's options.
        models: the models by their names; None opens them.

    Attributes:
        models: the models by their names. An alias isn't among them.
        tenants: the tenants by their keys.
        intake: the connections and bodies of all clients.
        stopping: True from the first signal that ends the server.
    """

    def __init__(self, options: ServerOptions, models: dict[str, Model] | None = None) -> None:
        self.options = options
        self.models = open_models(options) if models is None else models
        self.tenants = Tenants(options)
        self.intake = Intake(options, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        counters = Counters()
        self.metrics = helper("metrics", Metrics(self.models, options, counters), counters)
        self._turns_of_small, self._turns_of_large = FairTurns(), FairTurns()
        self.tracing = None if options.otlp is None else Tracing(exporter_to(options.otlp))
        self.stopping = False
        self.running: dict[asyncio.Future[Any], Callable[[EnginewrightError], None]] = {}
        """The answers that are being sent -> the function that ends each of them with an error."""
        self._pool = ThreadPoolExecutor(2, "text")  # one for small bodies, one for large ones
        self._turns: dict[str, Turns] = {}
        self._portions: dict[str, FairTurns] = {}
        self._loading = asyncio.Lock()

    async def start(self) -> None:
        """Starts the engines, without waiting for them."""
        for model in list(self.models.values())[: self.options.max_loaded or None]:
            model.start()

    async def close(self) -> None:
        await asyncio.gather(*(model.close() for model in self.models.values()))
        self._pool.shutdown(wait=False, cancel_futures=True)
        if self.tracing is not None:
            await asyncio.to_thread(self.tracing.close)

    def reload(self, options: ServerOptions) -> tuple[list[str], list[str]]:
        """Adopts the options that may change while the server runs.

        Returns the names of the changed options that take effect now, and of those that need a restart. Raises
        RequestError for wrong options, and then changes none.
        """
        self.options, now, later = self.options.reloaded(options)
        self.intake.options = self.tenants.options = self.options
        return now, later

    def model(self, name: str | None, *kinds: Kind) -> Model:
        """Returns the model with a name or an alias. Raises ApiError for an unknown name.

        Args:
            name: the name in the request; None for the first model of one of ``kinds``, or else the first model.
            kinds: the kinds of bundles that the request is for; by default, models that generate text.
        """
        name = self.options.aliases.get(name or "", name)
        if name is None or self.options.any_model:
            fitting = (one for one in self.models.values() if kind_of(one.model) in (kinds or (GENERATE,)))
            return self.models.get(name or "") or next(fitting, next(iter(self.models.values())))
        if name not in self.models:
            values = {"model": name[:80], "models": ", ".join(self.models)}
            raise ApiError(404, f"there is no model {name[:80]!r}", param="model", problem=NO_MODEL, values=values)
        return self.models[name]

    @property
    def names(self) -> dict[str, Model]:
        """Returns every name that requests may use -> its model: the models' own names, then the aliases."""
        return self.models | {name: self.models[model] for name, model in self.options.aliases.items()}

    def name(self, asked: str | None, model: Model) -> str:
        """Returns the model's name for an answer: the alias if the request used one.

        ``asked``: the name in the request.
        """
        return asked if asked is not None and asked in self.options.aliases else model.name

    def sizes(self, name: Any, *kinds: Kind) -> Sizes:
        """Returns the sizes of the model that a body names; ``name`` is any JSON. Raises ApiError if unknown.

        ``kinds``: the kinds of bundles that the body is for, by which the model is chosen if ``name`` is None.
        """
        if name is not None and not isinstance(name, str):
            return LARGEST  # what is wrong with the name is said where its type is checked
        about = self.model(name if name is None or name in self.names else name.removesuffix(_LATEST), *kinds).model
        return Sizes(about.vocab_size, about.context_length)

    async def body(self, request: Request, kind: type[B]) -> tuple[B, list[str], Charge]:
        """Returns a request's body, the names of its harmless fields, and its share of the tenant's quotas.

        ``kind`` is the class of the body. The caller ends the charge. Raises RequestError, and QuotaError.
        """
        data = await request.body()
        charge = Charge(request.state.tenant, len(data))

        def sizes(name: Any) -> Sizes:
            if isinstance(name, str):
                request.state.log["model"] = name[:_MOST_NAME]
            return self.sizes(name, *kind.of_kinds)

        try:
            work = partial(decoded, data, kind, sizes, self.options.unknown_fields == "ignore")
            body, ignored = (
                work() if len(data) <= _AT_ONCE else await self.in_thread(charge.tenant.name, work, len(data))
            )
        except BaseException:
            charge.end()
            raise
        return body, ignored, charge

    async def loaded(self, model: Model) -> Model:
        """Returns the model once it is loaded. If ``max_loaded`` models are loaded, an idle one is unloaded first.

        Raises UnavailableError if no model is idle, or this one is starting again.
        """
        if model.state != "unloaded":
            return model
        async with self._loading:
            others = [one for one in self.models.values() if one.state not in ("unloaded", "failed", "closed")]
            if model.state == "unloaded" and self.options.max_loaded and len(others) >= self.options.max_loaded:
                idle = [one for one in others if one.state == "ready" and not one.running]
                if not idle:
                    raise UnavailableError(f"model {model.name!r} isn't loaded, and those that are are busy", 5.0)
                await min(idle, key=lambda one: one.last_used).close(unload=True)
            if model.state == "unloaded":
                model.start()
            await model.wait_for_start()
        return model

    async def ready(self, name: str | None, *kinds: Kind) -> Model:
        """Returns the model of a name, loaded, for a body that is for bundles of these kinds; see ``model``.

        Raises RequestError if the model is of another kind, and UnavailableError if it doesn't answer now.
        """
        model = self.model(name, *kinds)
        if (other := kind_of(model.model)) not in kinds:
            fitting = [each for each, one in self.models.items() if kind_of(one.model) in kinds]
            these = " or ".join(map(repr, kinds))
            hint = f"Name one that is: {', '.join(fitting)}." if fitting else f"Serve a bundle of the kind {these} too."
            raise RequestError(f"model: {model.name!r} is of the kind {other!r}, and this is for {these}", hint=hint)
        await self.loaded(model)
        model.check()
        return model

    def turns(self, model: Model) -> Turns:
        """Returns the store of finished conversation turns for a model's bundle, whose tokens later prompts reuse."""
        if model.hash not in self._turns:
            ends, tokenizer = list[str](), model.tokenizer
            if tokenizer is not None:
                ends = [tokenizer.guarded(tokenizer.spelled(index)) for index in model.model.eos_token_ids]
            self._turns[model.hash] = Turns([end for end in ends if end])
        return self._turns[model.hash]

    def portions(self, model: Model) -> FairTurns:
        """Returns the turns in which portions of large bodies enter a model's engine. Small bodies need no turn."""
        return self._portions.setdefault(model.name, FairTurns(_PORTIONS))

    async def in_thread(self, tenant: str, work: Callable[[], Any], size: int = 0) -> Any:
        """Runs ``work`` on a thread, and returns its result. The tenants take turns (``FairTurns``).

        Small bodies have turns and a thread of their own, so that they never wait for a large one.

        Args:
            tenant: name of the tenant that the work is for.
            work: the function to run.
            size: bytes of the request's body.
        """
        async with (self._turns_of_small if size <= FREE_BYTES else self._turns_of_large).turn(tenant, size):
            return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    def fingerprint(self, model: Model) -> str | None:
        """Returns a text that changes whenever a request's tokens might change; None for a model that was never
        loaded.
        """
        if not model.info:
            return None
        executor = model.info.get("executor", {})
        how = executor.get("isa"), executor.get("numerics")
        about = (model.hash, model.target, *how, VERSION)
        return "fp_" + hashlib.sha256(repr(about).encode()).hexdigest()[:16]

    def exact(self, model: Model) -> bool:
        """Returns True if, on the model's target, a request's tokens depend only on the request."""
        return model.target in model.exact_targets


def open_models(options: ServerOptions, engines: Mapping[str, Engine] = MappingProxyType({})) -> dict[str, Model]:
    """Returns the models of a server by their names.

    Args:
        options: the server's options.
        engines: the engines that already run, by model.

    Raises BundleError if a bundle can't be opened, and RequestError for a wrong option.
    """
    limits = Limits(step=options.step_seconds, silence=options.silence_seconds)
    llm_options = model_options(options)
    return {
        name: Model(name, path, options_for(path, llm_options, options), limits, engines.get(name))
        for name, path in options.models.items()
    }
