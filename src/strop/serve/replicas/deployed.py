"""Put replicas and a front on Ray Serve. This module needs ray."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from ray import serve
from ray.exceptions import (
    NodeDiedError,
    ObjectLostError,
    RayActorError,
    RayTaskError,
    WorkerCrashedError,
)
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle

from strop.serve.app import build_app
from strop.serve.guard import App, GuardRules
from strop.serve.limits import ServeLimits
from strop.serve.logs import log_as_json
from strop.serve.metrics import ServeMetrics
from strop.serve.order import ModelCard
from strop.serve.replicas.drawer import Drawer, Introduction
from strop.serve.replicas.painter import ReplicaPainter, Stream
from strop.serve.replicas.plan import ReplicaPlan
from strop.serve.replicas.router import WarmRouter
from strop.serve.service import Service
from strop.serve.studio import PictureBatch, Studio

REPLICA, FRONT = "PictureReplica", "PictureFront"
_MOST_REQUESTS = 1000  # of a front at once, as of a server without Ray
_MOST_BACKOFF_S = 0.1  # a replica that becomes free stays idle for at most so long
_FINISH_S = 600.0  # in which a front that is to end may finish what it has accepted


class PictureReplica(Drawer):
    """Draw under the name that Ray has given."""

    def __init__(self, load: Callable[[], Studio]) -> None:
        super().__init__(load, serve.get_replica_context().replica_id.unique_id)


class RayReplicas:
    """Reach replicas by a handle of Ray Serve."""

    losses: tuple[type[Exception], ...] = (
        RayActorError,
        WorkerCrashedError,
        ObjectLostError,
        NodeDiedError,
    )

    def __init__(self, handle: DeploymentHandle) -> None:
        self._handle = handle

    def draw(self, batch: PictureBatch) -> Stream:
        """Send a batch to a replica; wait in the stream until one is free."""
        return cast(Stream, self._handle.options(stream=True).draw.remote(batch))

    def report(self) -> str:
        """Return the report of one replica; blocks."""
        return cast(str, self._handle.report.remote().result())

    def introduction(self) -> Introduction:
        """Return what the model of the replicas takes, when one has loaded it; blocks."""
        return cast(Introduction, self._handle.introduce.remote().result())

    def cause_of(self, error: Exception) -> Exception:
        """Return what a replica raised, out of what carries it here."""
        is_carrier = isinstance(error, RayTaskError) and isinstance(error.cause, Exception)
        return cast(Exception, error.cause) if is_carrier else error  # type: ignore[attr-defined]


def replicas_of(plan: ReplicaPlan, load: Callable[[], Studio]) -> Any:
    """Return the application of the replicas, each of which loads a model."""
    router = RequestRouterConfig(
        request_router_class=WarmRouter, initial_backoff_s=0.01, max_backoff_s=_MOST_BACKOFF_S
    )
    made = serve.deployment(
        PictureReplica, name=REPLICA, request_router_config=router, **plan.options()
    )
    return made.bind(load)


def service_of(
    introduction: Introduction,
    handle: DeploymentHandle,
    limits: Callable[[ModelCard], ServeLimits],
    lanes: int,
) -> Service:
    """Return the service of a front, which draws as many batches at once as replicas may be
    there: Ray counts those that wait for a replica, and starts more."""
    metrics = ServeMetrics()
    painter = ReplicaPainter(introduction, RayReplicas(handle), metrics)
    return Service(painter, limits(introduction.card), metrics, lanes=lanes)


class PictureFront:
    """Answer over HTTP in a process of Ray's, where ``serve run`` and ``serve deploy`` start it."""

    async def __init__(  # type: ignore[misc]  # Ray awaits it
        self,
        handle: DeploymentHandle,
        limits: Callable[[ModelCard], ServeLimits],
        lanes: int,
        rules: Callable[[], GuardRules],
    ) -> None:
        log_as_json(names=("strop",))  # the rest is logged as Ray is told to
        introduction: Introduction = await handle.introduce.remote()
        self._service = service_of(introduction, handle, limits, lanes)
        self._rules = rules()

    def __serve_build_asgi_app__(self) -> App:
        return build_app(self._service, self._rules)


def front_of(
    plan: ReplicaPlan,
    load: Callable[[], Studio],
    limits: Callable[[ModelCard], ServeLimits],
    rules: Callable[[], GuardRules],
) -> Any:
    """Return the application of a front and its replicas. There is one front, as an order is known
    where it was accepted."""
    made = serve.deployment(
        serve.ingress()(PictureFront),
        name=FRONT,
        num_replicas=1,
        max_ongoing_requests=_MOST_REQUESTS,
        graceful_shutdown_timeout_s=_FINISH_S,
        ray_actor_options={"num_cpus": 0},
    )
    return made.bind(replicas_of(plan, load), limits, plan.most, rules)
