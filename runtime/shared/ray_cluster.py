"""Joins a Ray cluster. It needs the package ray."""

from __future__ import annotations

import logging
import socket
from typing import Any

import ray

from .errors import RequestError

QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
"""Arguments of ``ray.init`` that keep the logs of other processes out of this process's output."""

_REACH_SECONDS = 5.0
_HINT = (
    "Start one with `ray start --head`, join it with `ray start --address=HOST:PORT`, and pass that HOST:PORT. If it "
    "asks for a token, set RAY_AUTH_MODE=token where both are started."
)


def join_cluster(address: str, instead: str = "") -> None:
    """Connects to the cluster at an address (HOST:PORT, or "auto"). Raises RequestError if it can't be reached.

    ``instead``: an alternative, for the hint.
    """
    hint = f"{_HINT} {instead}".rstrip()
    if address != "auto":
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit() or "/" in host:
            raise RequestError(f"ray: {address} isn't an address of a cluster", hint=hint)
        try:  # Ray itself would wait for minutes
            socket.create_connection((host.strip("[]"), int(port)), _REACH_SECONDS).close()
        except (OSError, OverflowError) as e:
            raise RequestError(f"ray: {address} can't be reached: {e}", hint=hint) from e
    try:
        ray.init(address, **QUIET)
    except (ConnectionError, ValueError, RuntimeError) as e:
        raise RequestError(f"ray: {address}: {last_line(e)}", hint=hint) from e


def last_line(error: BaseException) -> str:
    """Returns the last line of an error's message that isn't empty, cut at 300 characters; else the error's type."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1][:300] if lines else type(error).__name__
