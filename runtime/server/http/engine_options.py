"""The options of ``LLM`` for each engine of a server; threads and memory are divided among the engines.

The module imports little, because the command starts its engines before it imports the front end.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from ...bundle import MANIFEST_PATH
from ...bundle.regular_file import MOST_JSON_BYTES, read_regular
from ...ranks.partition import Partition
from ...shared.memory import default_budget, parse_size
from ...shared.threads import available_threads
from ..engines.records import Engine
from .options import ServerOptions

_OF_ANSWERS = frozenset(
    {
        *("context", "speculate", "states_memory", "prefix_cache", "prefix_memory", "prefix_folder"),
        *("prefix_folder_size", "prefix_folder_days", "offload_folder", "offload_size"),
    }
)
"""Options of ``LLM`` that only models which generate text have."""


class _Model(msgspec.Struct):
    pooling: Any = None


class _Manifest(msgspec.Struct):
    model: _Model


def _pools(path: str) -> bool:
    """Returns True if a bundle's model computes vectors, scores or classes of texts; False if its manifest can't be
    read.
    """
    try:
        data = read_regular(Path(path) / MANIFEST_PATH, most=MOST_JSON_BYTES)
        return msgspec.json.decode(data, type=_Manifest).model.pooling is not None
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return False


def options_for(path: str, llm: Mapping[str, Any], options: ServerOptions) -> dict[str, Any]:
    """Returns the options of ``LLM`` for a model.

    A model that generates no text gets no options of caches and contexts if other models of the server generate text.

    Args:
        path: the model's bundle.
        llm: the options of all models' engines.
        options: the server's options.
    """
    if all(map(_pools, options.models.values())) or not _pools(path):
        return dict(llm)
    return {name: value for name, value in llm.items() if name not in _OF_ANSWERS}


def model_options(options: ServerOptions) -> dict[str, Any]:
    """Returns the options of all models' engines: a share of the threads, and of the memory for KV caches.

    Both shares are fixed before the first model is loaded. Raises RequestError if ``memory`` isn't a size.
    """
    llm, loaded = options.llm, min(len(options.models), options.max_loaded or len(options.models))
    if loaded == 1:
        return dict(llm)
    ranks = Partition.parse(str(llm.get("partition") or llm.get("ranks") or 1)).ranks
    threads = llm.get("threads") or available_threads() // ranks
    memory = llm.get("memory")
    budget = default_budget() if memory is None else parse_size(memory)
    return {**_divided(llm, loaded), "threads": max(1, int(threads) // loaded), "memory": budget // loaded}


def replica_options(options: ServerOptions) -> dict[str, Any]:
    """Returns the options of each replica; ``threads`` and memory of ``llm`` are divided by the number of models.

    Without ``memory``, a replica gets a share of this machine's memory if Ray is started here; otherwise each machine
    decides. Raises RequestError if ``memory`` isn't a size.
    """
    models = len(options.models)
    llm = _divided(options.llm, models)
    if llm.get("threads"):
        llm["threads"] = max(1, int(llm["threads"]) // models)
    if llm.get("memory") is not None:
        llm["memory"] = parse_size(llm["memory"]) // models
    elif options.ray == "local":
        llm["memory"] = default_budget() // (models * max(options.replicas, options.max_replicas))
    return llm


def _divided(llm: Mapping[str, Any], models: int) -> dict[str, Any]:
    """Returns the options of a model's engine, with its share of ``prefix_memory``."""
    size = llm.get("prefix_memory")
    return dict(llm) if size is None else {**llm, "prefix_memory": parse_size(size, "prefix_memory") // models}


def begin_engines(options: ServerOptions) -> dict[str, Engine]:
    """Starts the processes of the models that are loaded first, and returns them by model. The caller must end
    them.
    """
    llm, first = model_options(options), list(options.models.items())[: options.max_loaded or None]
    return {name: Engine(path, options_for(path, llm, options)) for name, path in first}
