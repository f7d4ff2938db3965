"""The router that Ray Serve calls to choose the replica of a call. The module ``routing`` decides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from . import routing


class PrefixRouter(RequestRouter):
    """Chooses the replicas of a call by its ticket. Ray Serve calls the methods from an event loop of its own."""

    queue_len_response_deadline_s = 5.0  # a machine that computes may answer late
    max_queue_len_response_deadline_s = 20.0

    @property
    def max_num_routing_tasks(self) -> int:
        """Returns the most calls that Ray routes at a time.

        The limit is high, since a call may wait long for its bundle.
        """
        return 1 << 16

    def initialize_state(self, app: str) -> None:
        """Finds the routes of the Ray Serve application ``app``."""
        self._routes = routing.ROUTES.setdefault(app, routing.Routes())

    def update_replicas(self, replicas: Sequence[RunningReplica]) -> None:
        """Stores the ids of the replicas that Ray Serve has. Ray Serve calls it after a change."""
        super().update_replicas(list(replicas))
        self._note()

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Notes that the replica ``replica_id`` has died."""
        super().on_replica_actor_died(replica_id)
        self._note()

    async def choose_replicas(
        self, candidate_replicas: Sequence[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Returns the replicas to try, the best one first; if the list is empty, Ray Serve calls again after a
        pause.
        """
        if pending_request is None:
            return []
        pending_request.routing_context.should_backoff = True  # otherwise Ray asks again without a pause
        by_name = {one.replica_id.unique_id: one for one in candidate_replicas}
        return [[by_name[name]] for name in self._routes.order(pending_request.args[0], list(by_name))]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Records that the replica ``replica_id`` accepted the request."""
        self._routes.sent(pending_request.args[0], replica_id.unique_id)

    def _note(self) -> None:
        self._routes.there = frozenset(one.unique_id for one in self.curr_replicas)
