"""The questions that Ollama's clients ask of what there is, in its shapes, so that tools which look for it find us.

    /api/version, /api/tags, /api/show, /api/ps

What isn't served says why, in 404: ``NOT_SERVED``. Names may end with ":latest", which Ollama puts behind every one.
The shapes: https://github.com/ollama/ollama/blob/main/docs/api.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec

from ..shared.errors import RequestError
from .engine_client import Model

_CHAT = "Ollama's way to ask for answers isn't served; OpenAI's is: POST /v1/chat/completions or /v1/completions"
_EMBEDDINGS = "embeddings aren't served: the models here are compiled to write text"
_CHANGES = "models aren't changed by requests: `optimize export` makes a bundle, and `optimize serve` serves it"

NOT_SERVED: Mapping[str, str] = {
    **dict.fromkeys(("/api/generate", "/api/chat"), _CHAT),
    **dict.fromkeys(("/api/embeddings", "/api/embed", "/v1/embeddings"), _EMBEDDINGS),
    **dict.fromkeys(("/api/create", "/api/copy", "/api/pull", "/api/push", "/api/delete"), _CHANGES),
}
"""Path -> why there is nothing."""

_NEVER = "9999-12-31T23:59:59Z"
"""A model isn't unloaded because time has passed."""


class ShowBody(msgspec.Struct, forbid_unknown_fields=True):
    """The body of ``/api/show``. ``name`` is the older name of ``model``; all is told whether ``verbose`` or not."""

    model: str | None = None
    name: str | None = None
    verbose: bool | None = None

    def asked(self) -> str:
        """The model's name here. Raises RequestError."""
        name = self.model if self.model is not None else self.name
        if name is None:
            raise RequestError("model: it is missing", hint="Name a model of /api/tags.")
        return name.removesuffix(":latest")


def error_body(message: str) -> dict[str, Any]:
    """An error in Ollama's shape."""
    return {"error": message}


def tags(models: Iterable[Model]) -> dict[str, Any]:
    """The answer of ``/api/tags``: every model."""
    return {"models": [_row(model) | {"modified_at": _time(model.modified)} for model in models]}


def running(models: Iterable[Model]) -> dict[str, Any]:
    """The answer of ``/api/ps``: those that are loaded. How much of one is in a GPU's memory isn't known here."""
    return {
        "models": [
            _row(model) | {"expires_at": _NEVER, "context_length": model.model.context_length}
            for model in models
            if model.state == "ready"
        ]
    }


def shown(model: Model) -> dict[str, Any]:
    """The answer of ``/api/show``. The template is in Jinja, as the model has it; the license isn't in a bundle."""
    info, family = model.model, _family(model)
    about: dict[str, Any] = {
        "general.architecture": family,
        "general.basename": info.name,
        "general.parameter_count": info.parameters,
        f"{family}.context_length": info.context_length,
        f"{family}.vocab_size": info.vocab_size,
    }
    if info.bos_token_id is not None:
        about["tokenizer.ggml.bos_token_id"] = info.bos_token_id
    if info.eos_token_ids:
        about["tokenizer.ggml.eos_token_id"] = info.eos_token_ids[0]
    templates = {} if model.tokenizer is None else model.tokenizer.chat_templates
    return {
        "modelfile": "",
        "parameters": "\n".join(f"{name} {value}" for name, value in info.generation_defaults.items()),
        "template": templates.get("default", next(iter(templates.values()), "")),
        "details": _details(model),
        "model_info": about,
        "capabilities": ["completion"],
        "modified_at": _time(model.modified),
    }


def _row(model: Model) -> dict[str, Any]:
    digest = model.hash.removeprefix("sha256:")
    found = {"name": model.name, "model": model.name, "size": model.bytes, "digest": digest}
    return {**found, "details": _details(model)}


def _details(model: Model) -> dict[str, Any]:
    family = _family(model)
    return {
        "parent_model": "",
        "format": "bundle",
        "family": family,
        "families": [family],
        "parameter_size": _count(model.model.parameters),
        "quantization_level": model.recipe,
    }


def _family(model: Model) -> str:
    name = model.model.architecture
    for end in ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration"):
        name = name.removesuffix(end)
    return name.lower()


def _count(parameters: int) -> str:
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if parameters >= size:
            return f"{parameters / size:.2f}{unit}" if unit != "B" else f"{parameters / size:.1f}B"
    return str(parameters) if parameters else ""


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()
