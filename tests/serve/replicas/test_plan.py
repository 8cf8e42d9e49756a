"""How many replicas there are, and what each has; no Ray is needed."""

from __future__ import annotations

import pytest

from strop.serve.replicas.plan import Machines, PlanError, ReplicaPlan, ReplicaWish

FOUR = Machines(4, 32)


def test_a_replica_for_each_gpu() -> None:
    plan = ReplicaWish().plan("cuda", FOUR)
    assert (plan.replicas, plan.most, plan.gpus, plan.cpus) == (4, 4, 1, 1)
    shared = ReplicaWish(replicas_per_gpu=2, replica_cpus=3).plan("cuda", FOUR)
    assert (shared.replicas, shared.gpus, shared.cpus) == (8, 0.5, 3)


@pytest.mark.parametrize(
    ("wish", "cores", "replicas", "each"),
    [
        (ReplicaWish(), 32, 8, 4),
        (ReplicaWish(), 2, 1, 2),
        (ReplicaWish(replicas=2), 32, 2, 16),
        (ReplicaWish(replicas=1, max_replicas=4), 32, 1, 8),
        (ReplicaWish(replica_cpus=1), 3, 3, 1),
        (ReplicaWish(replicas=3, replica_cpus=2), 32, 3, 2),
    ],
)
def test_a_share_of_the_cores(wish: ReplicaWish, cores: int, replicas: int, each: int) -> None:
    plan = wish.plan("cpu", Machines(0, cores))
    assert (plan.replicas, plan.cpus, plan.gpus) == (replicas, each, 0)
    plan.check_room(Machines(0, cores))


def test_a_fixed_number_in_the_words_of_ray() -> None:
    options = ReplicaWish(replicas=3, replica_cpus=2).plan("cuda", None).options()
    assert options["num_replicas"] == 3
    assert "autoscaling_config" not in options
    assert options["ray_actor_options"] == {"num_cpus": 2, "num_gpus": 1}
    assert options["max_ongoing_requests"] == 1  # a replica draws one batch at a time


def test_scaling_in_the_words_of_ray() -> None:
    wish = ReplicaWish(replicas=2, max_replicas=5, replica_cpus=1, scale_up_s=7, scale_down_s=90)
    options = wish.plan("cuda", None).options()
    assert "num_replicas" not in options
    assert options["autoscaling_config"] == {
        "min_replicas": 2,
        "initial_replicas": 2,
        "max_replicas": 5,
        "target_ongoing_requests": 1,
        "upscale_delay_s": 7,
        "downscale_delay_s": 90,
    }


@pytest.mark.parametrize(
    ("wish", "device", "machines", "part"),
    [
        (ReplicaWish(replicas=4, max_replicas=2), "cuda", FOUR, "--max-replicas 2 is less"),
        (ReplicaWish(replicas_per_gpu=2), "cpu", FOUR, "give --replica-cpus"),
        (ReplicaWish(), "cuda", None, "give --replicas"),
        (ReplicaWish(replicas=2), "cpu", None, "give --replica-cpus"),
        (ReplicaWish(), "cuda", Machines(0, 8), "0 GPUs"),
        (ReplicaWish(replica_cpus=16), "cpu", Machines(0, 8), "no replica with 16 cores"),
    ],
)
def test_what_cannot_be_had(
    wish: ReplicaWish, device: str, machines: Machines | None, part: str
) -> None:
    with pytest.raises(PlanError, match=part):
        wish.plan(device, machines)


def test_more_than_the_machines_have() -> None:
    with pytest.raises(PlanError, match=r"8 replicas with 1 GPU each: 8 are needed.* there are 4"):
        ReplicaPlan(8, 8, 1, 1).check_room(FOUR)
    with pytest.raises(PlanError, match="9 replicas with 4 cores each"):
        ReplicaPlan(9, 9, 4, 0).check_room(FOUR)
    ReplicaPlan(12, 12, 1, 1 / 3).check_room(FOUR)  # thirds add up in spite of rounding
