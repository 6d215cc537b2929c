from __future__ import annotations

import pytest

from agentgym.errors import ConfigError
from agentgym.trainer.rollout.engines import places_of_engines
from agentgym.trainer.rollout.vllm_actors import Place


def places(*nodes: str) -> list[Place]:
    return [Place(node, str(i)) for i, node in enumerate(nodes)]


def test_the_gpus_of_an_engine_are_on_one_machine() -> None:
    found = places_of_engines(places("a", "b", "a", "b", "a", "b"), count=2, tensor_parallel=2)
    assert [[(p.node, p.device) for p in mine] for mine in found] == [
        [("a", "0"), ("a", "2")],
        [("b", "1"), ("b", "3")],
    ]
    assert [len(mine) for mine in places_of_engines(places("a", "a"), count=2, tensor_parallel=1)] == [1, 1]
    assert places_of_engines([], count=3, tensor_parallel=1) == []


def test_an_engine_that_no_machine_has_room_for_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"engines=2 with .*tensor_parallel=2.*\[2, 1\] GPUs, room for 1 engines"):
        places_of_engines(places("a", "a", "b"), count=2, tensor_parallel=2)
