"""Find out which process of a group this one is, from what its launcher has set.

``torchrun``, ``accelerate launch`` and ``strop train --num_processes`` set RANK, WORLD_SIZE,
LOCAL_RANK, MASTER_ADDR and MASTER_PORT; so may any script. Slurm's ``srun`` sets its own names in
each task of a step, which count where RANK is not set.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from strop.errors import OptionError

_SLURM_PORTS = (20_000, 20_000)  # the first, and how many: jobs that share a machine get others
_RESTARTS = "TORCHELASTIC_RESTART_COUNT"


@dataclass(frozen=True)
class GroupPlace:
    """Say where a process stands in its group, and where that meets (tcp://host:port). ``attempt``
    counts how often torchrun, or we, have started the group again."""

    rank: int = 0
    count: int = 1
    local_rank: int = 0
    address: str = ""
    attempt: int = 0


def place_of_this_process() -> GroupPlace:
    """Return the place that the environment gives; a process alone is rank 0 of 1."""
    return place_in(os.environ)  # noqa: TID251 (launchers have no other way to tell)


def place_in(given: Mapping[str, str]) -> GroupPlace:
    """Return the place that these variables give. Raises OptionError if they contradict each
    other, or if one is missing."""
    if "RANK" in given and "WORLD_SIZE" in given:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    elif "SLURM_STEP_ID" in given and "SLURM_PROCID" in given:  # a batch script has no step
        tasks = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in given else "SLURM_NTASKS"
        names = ("SLURM_PROCID", tasks, "SLURM_LOCALID")
    else:
        return GroupPlace()
    count = _number(given, names[1])
    attempt = _number(given, _RESTARTS) if _RESTARTS in given else 0
    if count == 1:
        return GroupPlace(attempt=attempt)
    rank = _number(given, names[0])
    if not 0 <= rank < count:
        raise OptionError(f"{names[0]} is {rank} and {names[1]} is {count}: ranks count from 0")
    local = _number(given, names[2]) if names[2] in given else rank
    return GroupPlace(rank, count, local, f"tcp://{_host(given)}:{_port(given)}", attempt)


def _host(given: Mapping[str, str]) -> str:
    host = given.get("MASTER_ADDR")
    if host:
        return host
    nodes = given.get("SLURM_STEP_NUM_NODES", given.get("SLURM_NNODES"))
    if nodes == "1":
        return "127.0.0.1"
    raise OptionError(
        "MASTER_ADDR is not set, so that the processes cannot meet: set it to the machine of rank "
        "0, under Slurm with MASTER_ADDR=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -1)"
    )


def _port(given: Mapping[str, str]) -> int:
    if given.get("MASTER_PORT"):
        return _number(given, "MASTER_PORT")
    if "SLURM_JOB_ID" in given:
        first, many = _SLURM_PORTS
        return first + _number(given, "SLURM_JOB_ID") % many
    raise OptionError(
        "MASTER_PORT is not set, so that the processes cannot meet: set it to a free port of the "
        "machine of rank 0, the same for all"
    )


def _number(given: Mapping[str, str], name: str) -> int:
    text = given.get(name, "")
    try:
        return int(text)
    except ValueError:
        raise OptionError(f"{name} is {text!r}: it must be a whole number") from None
