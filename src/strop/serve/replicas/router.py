"""Let Ray Serve send a batch to a replica that is warm for it."""

from __future__ import annotations

import time
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from strop.serve.replicas.turns import WaitingTurns
from strop.serve.replicas.warmth import WarmReplicas, Warmth, warmth_of
from strop.serve.studio import PictureBatch


class WarmRouter(RequestRouter):  # type: ignore[misc]
    """Rank replicas by what they have drawn for this front. Ray passes over those that are busy,
    and asks again while all are.

    Source: https://docs.ray.io/en/latest/serve/advanced-guides/custom-request-router.html
    """

    def initialize_state(self, **given: Any) -> None:
        """Begin without knowing what any replica has drawn."""
        self._warm, self._turns = WarmReplicas(), WaitingTurns()

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return the candidates in ranks, the best ones first; none for a batch whose turn it is
        not."""
        wanted = _warmth(pending_request)
        if pending_request is None or wanted is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True  # else Ray asks again at once
        name, since = pending_request.metadata.internal_request_id, pending_request.created_at
        if not self._turns.is_next(name, since, pending_request.future.done, time.time()):
            return []
        by_id = {replica.replica_id: replica for replica in candidate_replicas}
        return [[by_id[name] for name in rank] for rank in self._warm.ranks([*by_id], wanted)]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        """Remember what a replica has been given."""
        given = _warmth(pending_request)
        if given is not None:
            self._warm.keep(self.curr_replicas)
            self._warm.note(replica_id, given)


def _warmth(request: PendingRequest | None) -> Warmth | None:
    """Return what a request leaves warm; None for one that draws nothing."""
    if request is None or not request.args or not isinstance(request.args[0], PictureBatch):
        return None
    return warmth_of(request.args[0])
