"""The options of ``LLM`` for each engine of a server; threads and memory are divided among the engines.

The module imports little, because the command starts its engines before it imports the front end.
"""

from __future__ import annotations

import os
from typing import Any

from ...ranks.partition import Partition
from ...shared.memory import default_budget, parse_size
from ..engines.records import Engine
from .options import ServerOptions


def model_options(options: ServerOptions) -> dict[str, Any]:
    """Returns the options of each model's engine: its share of the threads, and of the memory for KV caches.

    Both are fixed before the first model is loaded. Raises RequestError where ``memory`` isn't a size.
    """
    llm, loaded = options.llm, min(len(options.models), options.max_loaded or len(options.models))
    if loaded == 1:
        return dict(llm)
    ranks = Partition.parse(str(llm.get("partition") or llm.get("ranks") or 1)).ranks
    threads = llm.get("threads") or len(os.sched_getaffinity(0)) // ranks
    memory = llm.get("memory")
    budget = default_budget() if memory is None else parse_size(memory)
    return {**llm, "threads": max(1, int(threads) // loaded), "memory": budget // loaded}


def replica_options(options: ServerOptions) -> dict[str, Any]:
    """Returns the options of each replica; ``threads`` and ``memory`` of ``llm`` are divided by the number of models.

    Without ``memory``, a replica gets a share of this machine's memory if Ray is started here; otherwise each machine
    decides. Raises RequestError if ``memory`` isn't a size.
    """
    llm, models = dict(options.llm), len(options.models)
    if llm.get("threads"):
        llm["threads"] = max(1, int(llm["threads"]) // models)
    if llm.get("memory") is not None:
        llm["memory"] = parse_size(llm["memory"]) // models
    elif options.ray == "local":
        llm["memory"] = default_budget() // (models * max(options.replicas, options.max_replicas))
    return llm


def begin_engines(options: ServerOptions) -> dict[str, Engine]:
    """Starts the processes of the models that are loaded first, and returns them by model. The caller must end
    them.
    """
    llm, first = model_options(options), list(options.models.items())[: options.max_loaded or None]
    return {name: Engine(path, llm) for name, path in first}
