from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from agentgym.trainer.algorithms import AlgorithmConfig
from agentgym.trainer.algorithms import config as config_module


def test_every_field_has_a_default_and_scalars_have_a_description() -> None:
    sections = [v for v in vars(config_module).values() if isinstance(v, type) and issubclass(v, config_module.Section)]
    assert AlgorithmConfig in sections
    for section in sections:
        for name, field in section.model_fields.items():
            assert not field.is_required(), f"{section.__name__}.{name}"
            assert field.description or isinstance(field.default, BaseModel), f"{section.__name__}.{name}"


@pytest.mark.parametrize(
    "settings",
    [
        {"gama": 0.9},
        {"gamma": 1.5},
        {"lam": -0.1},
        {"loss_agg_mode": "token_mean"},
        {"kl_loss": {"kind": "k4"}},
        {"clip_ratio_c": 1.0},
        {"norm_length": 0},
        {"policy_loss": "dro"},
        {"policy_loss": "dro", "dro_beta": 0.0},
        {"filter_groups": {"max_gen_batches": 0}},
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        AlgorithmConfig(**settings)


def test_settings_survive_a_round_trip() -> None:
    config = AlgorithmConfig(policy_loss="dro", dro_beta=0.1, kl_loss={"coef": 0.01})  # type: ignore[arg-type]
    assert AlgorithmConfig.model_validate(config.model_dump()) == config
    assert config.kl_loss.coef == 0.01
