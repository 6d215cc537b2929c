from __future__ import annotations

from typing import Any

import torch
from torch import nn

from agentgym.trainer.weight_transfer import EngineClient, TrainedWeights, free_port


class Tied(nn.Module):
    """Named like a `PolicyModel`: everything below ``lm``, and the head is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.lm = nn.Module()
        self.lm.model = nn.Linear(2, 3)
        self.lm.lm_head = nn.Linear(2, 3, bias=False)


def test_weights_have_the_names_of_the_checkpoint_and_each_pass_is_a_new_one() -> None:
    source = TrainedWeights(Tied(), {"lm.lm_head.weight"})
    first, second = dict(source), dict(source)
    assert list(first) == list(second) == ["model.weight", "model.bias"]
    assert torch.equal(first["model.bias"], second["model.bias"])
    assert not first["model.weight"].requires_grad


def test_each_engine_has_its_own_ranks_in_the_group(monkeypatch: Any) -> None:
    asked: list[dict[str, Any]] = []
    client = EngineClient(["a", "b", "c"], per_engine=2)
    monkeypatch.setattr(client, "_all", lambda method, arguments: asked.extend(arguments))
    client.init_weight_transfer_engine({"rank_offset": 1, "world_size": 7})
    assert [one["init_info"]["rank_offset"] for one in asked] == [1, 3, 5]
    assert {one["init_info"]["world_size"] for one in asked} == {7}


def test_ports_can_be_used() -> None:
    assert 1024 <= free_port() < 65536
