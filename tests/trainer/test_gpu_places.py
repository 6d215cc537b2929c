"""Groups that share GPUs, placed by a Ray of its own that believes in two; nothing computes on them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from agentgym.trainer.cluster import Needs, RayCluster
from agentgym.trainer.groups import WorkerGroup


def placed() -> type:
    """A worker that tells where Ray put it; made in a function, so that Ray ships it without this module."""

    class Placed:
        def __init__(self, rank: int) -> None:
            self.rank = rank

        def gpu(self) -> str:
            import ray

            return str(ray.get_runtime_context().get_accelerator_ids()["GPU"][0])

    return Placed


@pytest.fixture
def gpu_cluster() -> Iterator[RayCluster]:
    """Two GPUs as far as Ray is concerned; nothing computes on them."""
    import ray

    ray.init(num_cpus=8, num_gpus=2, include_dashboard=False, log_to_driver=False)
    cluster = RayCluster(cpus=8, threads=1, plugins=[])
    yield cluster
    cluster.close()
    ray.shutdown()


@pytest.mark.slow
def test_models_share_gpus_rank_by_rank(gpu_cluster: RayCluster) -> None:
    worker_class = placed()

    def group(name: str, beside: WorkerGroup | None) -> WorkerGroup:
        needs = Needs(ranks=2, cpus=1.0, gpus=0.3333, room=3)
        return WorkerGroup(gpu_cluster, worker_class, (), needs, name=name, beside=beside)

    actor = group("actor", None)
    critic, reference = group("critic", actor), group("reference", actor)
    gpus = [model.broadcast("gpu") for model in (actor, critic, reference)]
    assert sorted(gpus[0]) == ["0", "1"]
    assert gpus[1] == gpus[0]
    assert gpus[2] == gpus[0]
    actor.close()
    assert critic.broadcast("gpu") == gpus[0]  # their place is still theirs
    critic.close()
    reference.close()
    assert sorted(group("another", None).broadcast("gpu")) == ["0", "1"]  # and is free when the last one has left
