"""Starts a Ray cluster for replicas, or joins an existing one."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import signal
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from ...shared.errors import RequestError
from ...shared.ray_cluster import QUIET, join_cluster, last_line
from ...shared.threads import available_threads

_LOG = logging.getLogger("enginewright.server")
LOGGING = {"log_level": "WARNING", "enable_access_log": False}
_STARTS = 4


class Cluster:
    """A Ray cluster that is started here, or joined.

    Args:
        address: "local" starts a cluster; HOST:PORT, or "auto", joins one.

    Attributes:
        local: True if the cluster was started here.
        host: address of this machine in the cluster.
        cpus: CPUs of the cluster.

    Raises:
        RequestError: the cluster can't be started or reached.
    """

    def __init__(self, address: str) -> None:
        self.local = address == "local"
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        if self.local:
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            _hold_token()
            cpus = available_threads()
            _start(num_cpus=cpus, include_dashboard=False, object_store_memory=100 << 20, **QUIET)
        else:
            join_cluster(address, "Or pass --ray local, which starts one here.")
        self.host = "127.0.0.1" if self.local else str(ray.util.get_node_ip_address())
        self.cpus = int(ray.cluster_resources().get("CPU", 0))
        serve.start(proxy_location="Disabled", logging_config=LOGGING)

    def close(self) -> None:
        """Leaves the cluster, or ends it if it was started here."""
        if ray.is_initialized():
            if self.local:
                with contextlib.suppress(RayError, RayServeException):
                    serve.shutdown()
            ray.shutdown()


def _hold_token() -> None:
    """Gives Ray a token that only Ray's processes know, unless the environment sets one.

    Ray's ports are open on all interfaces, and anybody with the token can run programs here. Ray itself would write a
    token to ~/.ray/auth_token, which other users may be able to read.
    """
    if not {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys():
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)  # by which Ray asks for it, too


def _start(**arguments: Any) -> None:
    """Starts Ray here, several times if needed: on a busy machine its own limit of 30 s is too short.

    Raises RequestError if the last attempt fails too. The arguments are those of ``ray.init``.
    """
    for left in reversed(range(_STARTS)):
        before = _children()
        try:
            ray.init("local", **arguments)
            return
        except Exception as e:  # Ray raises just that
            ray.shutdown()
            for pid in _children() - before:  # which Ray leaves behind
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if not left:
                hint = "See the folder that Ray keeps its logs in: /tmp/ray/session_latest/logs."
                raise RequestError(f"ray: it can't be started here: {last_line(e)}", hint=hint) from e
            _LOG.warning("ray can't be started: %s; it is tried again", last_line(e))


def _children() -> set[int]:
    """Returns the ids of this process's children that haven't been waited for."""
    return {int(pid) for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()}
