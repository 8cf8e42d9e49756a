"""Say how many replicas there are, and what each has of the machines."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from strop.errors import StropError
from strop.wording import counted, plural

_USUAL_CORES = 4
_FINISH_S = 120.0  # a replica that is taken away may go on drawing so long
_LOOK_S = 0.5  # and Ray looks so often whether it has done


class PlanError(StropError, ValueError):
    """Replicas cannot be had as they were asked for; the message says what to change."""


@dataclass(frozen=True)
class Machines:
    """Hold the GPUs and processor cores of all machines together."""

    gpus: float
    cores: float


@dataclass(frozen=True)
class ReplicaPlan:
    """Hold how many replicas there are, ``most`` if more of them are started when pictures wait,
    and the share of each: ``gpus`` may be a part of one. Raises PlanError."""

    replicas: int
    most: int
    cpus: int
    gpus: float
    scale_up_s: float = 30.0
    scale_down_s: float = 600.0

    def __post_init__(self) -> None:
        if self.most < self.replicas:
            raise PlanError(
                f"--max-replicas {self.most} is less than --replicas {self.replicas}; give a larger"
                " one, or leave it out for a fixed number"
            )

    def options(self) -> dict[str, Any]:
        """Return the options of the replicas' deployment, in Ray Serve's words. A replica draws one
        batch at a time, so Ray counts one ongoing request for each batch that wants a replica."""
        count: dict[str, Any] = {"num_replicas": self.replicas}
        if self.most > self.replicas:
            scaling = {
                "min_replicas": self.replicas,
                "initial_replicas": self.replicas,
                "max_replicas": self.most,
                "target_ongoing_requests": 1,
                "upscale_delay_s": self.scale_up_s,
                "downscale_delay_s": self.scale_down_s,
            }
            count = {"autoscaling_config": scaling}
        return count | {
            "max_ongoing_requests": 1,
            "graceful_shutdown_timeout_s": _FINISH_S,
            "graceful_shutdown_wait_loop_s": _LOOK_S,
            "ray_actor_options": {"num_cpus": self.cpus, "num_gpus": self.gpus},
        }

    def check_room(self, machines: Machines) -> None:
        """Raise PlanError unless as many replicas as there are from the start have room."""
        wanted = ((self.gpus, machines.gpus, "GPU"), (self.cpus, machines.cores, "core"))
        for each, there, name in wanted:
            if round(each * self.replicas, 6) > there:
                raise PlanError(
                    f"{counted(self.replicas, 'replica')} with {each:g} {_of(each, name)} each:"
                    f" {each * self.replicas:g} are needed, and there are {there:g};"
                    " give a smaller --replicas"
                )


@dataclass(frozen=True)
class ReplicaWish:
    """Hold what the options of these names say, as plain values: they stand in deployment files.
    0 leaves a number open."""

    replicas: int = 0
    max_replicas: int = 0
    replicas_per_gpu: int = 1
    replica_cpus: int = 0
    scale_up_s: float = 30.0
    scale_down_s: float = 600.0

    def plan(self, device: str, machines: Machines | None) -> ReplicaPlan:
        """Fill in what is open: a replica for each GPU (``replicas_per_gpu`` of them), or on a CPU
        for each ``replica_cpus`` cores. ``machines``: None where nobody knows them yet. Raises
        PlanError."""
        if device == "cpu" and self.replicas_per_gpu > 1:
            raise PlanError("--replicas-per-gpu has no meaning on a CPU; give --replica-cpus")
        cpus = self.replica_cpus or (1 if device == "cuda" else self._cores(machines))
        if self.replicas:
            replicas = self.replicas
        elif machines is None:
            raise PlanError("the machines are not known yet; give --replicas")
        else:
            room = (
                machines.gpus * self.replicas_per_gpu
                if device == "cuda"
                else machines.cores // cpus
            )
            if room < 1:
                raise PlanError(
                    f"no replica with {counted(cpus, 'core')} has room;"
                    f" there are {machines.cores:g} cores and {machines.gpus:g} GPUs"
                )
            replicas = int(room)
        gpus = 1 / self.replicas_per_gpu if device == "cuda" else 0
        most = self.max_replicas or replicas
        return ReplicaPlan(replicas, most, cpus, gpus, self.scale_up_s, self.scale_down_s)

    def _cores(self, machines: Machines | None) -> int:
        """Return a replica's cores on a CPU: an even share of all, or a usual number."""
        if machines is None:
            raise PlanError("the machines are not known yet; give --replica-cpus")
        wanted = max(self.replicas, self.max_replicas)
        share = machines.cores / wanted if wanted else min(_USUAL_CORES, machines.cores)
        return max(1, math.floor(share))


def _of(number: float, noun: str) -> str:
    return noun if number == 1 else plural(noun)
