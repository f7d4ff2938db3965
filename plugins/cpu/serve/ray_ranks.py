"""Starts ranks on the machines of a Ray cluster: one actor each, in a placement group that spreads them.

Rank 0 is the calling process, on a machine of the cluster; its CPUs are reserved in the cluster too. The other ranks
are on separate machines if there are enough. Ranks exchange messages without Ray: see ``remote_rank``.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import warnings
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from enginewright.runtime.shared.errors import CapacityError
from enginewright.runtime.shared.ray_cluster import join_cluster, last_line

_ROOM_SECONDS = 60.0
"""The seconds that a cluster may take to reserve the ranks' CPUs, as some may only just have been freed."""


@ray.remote(max_restarts=0, max_concurrency=1)
class _Rank:
    """The actor in whose process a rank runs."""

    def machine(self) -> str:
        return str(ray.util.get_node_ip_address())

    def serve(self, address: str, rank: int) -> None:
        from .remote_rank import serve  # torch takes a while, and ``machine`` doesn't need it

        serve(address, rank)


class RayPlaces:
    """Ranks as actors of a Ray cluster. Implements `plugins.ranks.others.Places`.

    Args:
        address: HOST:PORT of a cluster that this machine belongs to, or "auto".
        ranks: the number of ranks, rank 0 included.
        threads: the number of threads of each rank, for which it reserves as many CPUs; 0 for the largest number that
            all ranks can have.

    Attributes:
        threads: the number of threads of each rank.

    Raises:
        RequestError: the cluster can't be reached.
        CapacityError: the cluster has too few CPUs.
    """

    def __init__(self, address: str, ranks: int, threads: int = 0) -> None:
        self._joined = not ray.is_initialized()
        if self._joined:
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            join_cluster(address)
        self._closing, self._closed = threading.Lock(), False
        self._actors: list[Any] = []
        self._runs: list[Any] = []
        self._group: Any = None
        try:
            self._place(ranks, threads)
        except BaseException:
            self.close()
            raise

    def _place(self, ranks: int, threads: int) -> None:
        nodes = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]
        address = str(ray.util.get_node_ip_address())
        spread = len(nodes) >= ranks
        if not spread:
            warnings.warn(
                f"ray: {ranks} ranks share the {len(nodes)} machines of the cluster, and some wait for each other "
                "on one; use as many machines as ranks",
                RuntimeWarning,
                stacklevel=2,
            )
        of_a_node = math.ceil(ranks / max(1, len(nodes)))
        cpus = min((int(node["Resources"]["CPU"]) for node in nodes), default=0)
        self.threads = threads or max(1, cpus // of_a_node)
        bundles = [{"CPU": float(self.threads)} for _ in range(ranks)]
        bundles[0][f"node:{address}"] = 0.001
        self._group = placement_group(bundles, strategy="STRICT_SPREAD" if spread else "SPREAD")
        if not self._group.wait(_ROOM_SECONDS):
            free, there = (int(of().get("CPU", 0)) for of in (ray.available_resources, ray.cluster_resources))
            raise CapacityError(
                f"ray: {ranks} ranks of {self.threads} CPUs each find no room on {len(nodes)} machines: "
                f"{free} of {there} CPUs are free",
                hint="Pass fewer --threads or ranks, end what else runs there, or add machines to the cluster.",
            )
        for rank in range(1, ranks):
            place = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=rank)
            options = {"num_cpus": self.threads, "scheduling_strategy": place}
            self._actors.append(_Rank.options(**options).remote())  # type: ignore[attr-defined]
        try:
            addresses = ray.get([actor.machine.remote() for actor in self._actors], timeout=_ROOM_SECONDS)
        except (RayError, GetTimeoutError) as e:
            raise CapacityError(
                f"ray: the process of a rank can't be started: {last_line(e)}",
                hint="Install the same version of Enginewright and Python on all machines of the cluster.",
            ) from e
        self.machines: tuple[str, ...] = (address, *addresses)

    def start(self, address: str) -> None:
        """Starts the ranks from 1 on in their actors. They connect to ``address``."""
        self._runs = [actor.serve.remote(address, rank) for rank, actor in enumerate(self._actors, 1)]

    def ended(self, rank: int) -> str:
        """Returns how a rank has ended; "" while it runs."""
        if self._closed:
            return "was ended"
        run = self._runs[rank - 1]
        if not ray.wait([run], timeout=0)[0]:
            return ""
        try:
            ray.get(run)
        except RayError as e:
            return f"is lost: its process or its machine has died ({type(e).__name__})"
        return "has ended"

    def close(self) -> None:
        """Ends the actors, and leaves the cluster if the constructor joined it."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
        if not ray.is_initialized():
            return
        with contextlib.suppress(RayError):
            for actor in self._actors:
                ray.kill(actor)
            if self._group is not None:
                remove_placement_group(self._group)
        if self._joined:
            ray.shutdown()
