from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import agentgym.trainer.algorithms as algorithms
from agentgym import plugins
from agentgym.errors import RegistrationError, UnknownName
from agentgym.trainer.algorithms import (
    AlgorithmConfig,
    get_advantage,
    get_policy_loss,
    list_advantages,
    list_policy_losses,
    register_advantage,
    register_policy_loss,
)
from agentgym.trainer.algorithms.registry import ADVANTAGES, POLICY_LOSSES


@pytest.fixture
def clean_registries(monkeypatch: pytest.MonkeyPatch) -> None:
    for registry in (ADVANTAGES, POLICY_LOSSES):
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))


def test_what_ships() -> None:
    assert list_advantages() == [
        "gae",
        "gpg",
        "grpo",
        "grpo_passk",
        "opo",
        "reinforce_plus_plus",
        "reinforce_plus_plus_baseline",
        "remax",
        "rloo",
        "turn_level",
    ]
    assert list_policy_losses() == [
        "cispo",
        "clip_cov",
        "dro",
        "geo_mean",
        "gpg",
        "gspo",
        "kl_cov",
        "sapo",
        "vanilla",
    ]
    for name in list_advantages():
        assert callable(get_advantage(name))
    for name in list_policy_losses():
        assert callable(get_policy_loss(name))


def test_settings_and_lists_import_no_torch() -> None:
    program = (
        "import sys\n"
        "from agentgym.trainer.algorithms import AlgorithmConfig, GroupCollector\n"
        "from agentgym.trainer.algorithms import list_advantages, list_policy_losses, register_advantage\n"
        "AlgorithmConfig(); list_advantages(); list_policy_losses()\n"
        "sys.exit('torch' in sys.modules)\n"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=60).returncode == 0


def test_every_exported_name_resolves() -> None:
    assert sorted(algorithms._MODULES) == sorted(algorithms.__all__) == dir(algorithms)
    for name in algorithms.__all__:
        assert getattr(algorithms, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'grpoo'"):
        _ = algorithms.grpoo


def test_an_own_advantage_is_found_by_name(clean_registries: None) -> None:
    @register_advantage("constant")
    def constant(rewards: Tensor, mask: Tensor, index: object, **_: Any) -> tuple[Tensor, Tensor]:
        return mask.float(), rewards

    advantages, _ = get_advantage("constant")(torch.zeros(1, 2), torch.ones(1, 2), ["g"], config=AlgorithmConfig())
    assert advantages.tolist() == [[1.0, 1.0]]
    assert "constant" in list_advantages()


def test_an_own_loss_may_not_hide_a_known_one(clean_registries: None) -> None:
    def mine(*_: Any, **__: Any) -> tuple[Tensor, dict[str, Tensor]]:
        return torch.zeros(()), {}

    with pytest.raises(RegistrationError, match="override=True"):
        register_policy_loss("vanilla")(mine)
    register_policy_loss("vanilla", override=True)(mine)
    assert get_policy_loss("vanilla") is mine


def test_unknown_names_suggest_the_nearest() -> None:
    with pytest.raises(UnknownName, match="Did you mean 'grpo'"):
        get_advantage("grpoo")
    with pytest.raises(UnknownName, match="Did you mean 'vanilla'"):
        get_policy_loss("vanila")


def test_the_example_of_a_custom_algorithm(clean_registries: None) -> None:
    plugins.load([str(Path(__file__).parents[3] / "examples" / "custom_algorithm.py")])
    rewards = torch.tensor([[0.0, 1.0], [0.0, 0.0], [1.0, 0.0], [1.0, 7.0]])
    mask = torch.tensor([[1, 1], [1, 1], [1, 0], [1, 0]])
    config = AlgorithmConfig()
    advantages, _ = get_advantage("best-only")(rewards, mask, torch.tensor([0, 0, 1, 1]), config=config)
    assert advantages.tolist() == [[1, 1], [0, 0], [0, 0], [0, 0]]
    log_prob = torch.full((4, 2), -0.5)
    loss, metrics = get_policy_loss("pull")(log_prob, log_prob, advantages, mask, None, config)
    assert float(loss) == pytest.approx(2 * 0.5 / 6)
    assert float(metrics["pulled"]) == 0.25
