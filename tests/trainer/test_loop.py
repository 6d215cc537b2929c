"""What a step does beside playing and updating: critic, KL in the reward, correction, filter, shaping, baselines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from runs import config, played, resumed, train

from agentgym.config import PRESETS, load_config
from agentgym.trainer.algorithms import FilterExhausted
from agentgym.trainer.config import TrainConfig
from agentgym.trainer.loop import Trainer
from agentgym.trainer.tracking import read_jsonl

SHORT = {"trainer.total_steps": 2, "trainer.warmup_steps": 0, "trainer.val_before": "false", "data.val_size": 1}
CORRECTED = {
    "algo.correction.weights": "truncate",
    "algo.correction.normalize": "true",
    "algo.correction.rejection": "seq_mean_k3",
}


def run(folder: Path, plugin: Path, name: str = "run", **settings: Any) -> Path:
    code, text = train(config(folder, plugin, **{"trainer.name": name, **settings}))
    assert code == 0, text
    return folder / name


def steps(run: Path) -> list[dict[str, float]]:
    return [row for row in read_jsonl(run / "metrics.jsonl") if row["step"] > 0]


def trained(run: Path, step: int = 1) -> list[dict[str, Any]]:
    return read_jsonl(run / "rollouts" / f"step-{step:06d}.jsonl")


def assert_same_course(one: Path, other: Path) -> None:
    """Same tokens, rewards and masks; same numbers to 1e-6."""
    assert played(one) == played(other)
    for a, b in zip(steps(one), steps(other), strict=True):
        for name in a:
            if not name.startswith(("time/", "throughput/", "memory/")):
                assert a[name] == pytest.approx(b[name], abs=1e-6), (a["step"], name)


PPO = {
    "algo": "ppo",
    "algo.epochs": 2,
    "trainer.mini_batch_size": 8,
    "critic.lr": 1e-3,
    "critic.warmup_steps": 1,
    "critic.epochs": 1,
    "algo.kl_reward.coef": 0.05,
    "algo.kl_reward.target": 0.001,
    "algo.kl_reward.horizon": 100,
    "algo.kl_loss.coef": 0.01,
}


def die_in_step(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    def die(self: Trainer, batch: Any) -> dict[str, float]:
        if self.step + 1 == step:
            raise KeyboardInterrupt
        return original(self, batch)

    original = Trainer.update_actor
    monkeypatch.setattr(Trainer, "update_actor", die)


def test_ppo_with_an_adaptive_kl_resumes_exactly(plugin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {**PPO, "trainer.total_steps": 3, "trainer.val_every": 0, "data.val_size": 1}
    whole = run(tmp_path, plugin, "whole", **settings)
    with monkeypatch.context() as patch:
        die_in_step(patch, 3)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path, plugin, "cut", **settings)
    assert train(resumed(tmp_path / "cut", plugin))[0] == 0
    assert_same_course(whole, tmp_path / "cut")

    rows = steps(whole)
    assert "actor/loss" not in rows[0]  # the critic warms up
    assert rows[0]["actor/skipped_updates"] == 1.0
    assert rows[0]["critic/explained_variance"] == 0.0  # its head starts at zero
    assert rows[0]["reward/kl"] == pytest.approx(rows[1]["reward/kl"], abs=1e-6) == pytest.approx(0.0, abs=1e-6)
    assert abs(rows[2]["reward/kl"]) > 1e-3
    assert rows[2]["actor/ref_kl"] > 1e-3  # the loss's own, over its updates
    # at a KL of 0 beta shrinks by a fifth of 16 rollouts / 100 a step
    coefs = [row["reward/kl_coef"] for row in rows]
    assert coefs == pytest.approx([0.05, 0.05 * (1 - 0.2 * 16 / 100), 0.05 * (1 - 0.2 * 16 / 100) ** 2])
    for row in rows[1:]:
        assert row["critic/grad_norm"] > 0
        assert row["critic/loss"] > 0
        assert row["return/std"] > 0


def test_a_run_without_critic_cannot_go_on_with_one(plugin: Path, tmp_path: Path) -> None:
    first = run(tmp_path, plugin, **SHORT)
    with pytest.raises(Exception, match=r"has no critic.pt"):
        train(resumed(first, plugin, **{"trainer.total_steps": 3, "algo.advantage": "gae"}))


def test_a_fixed_kl_in_the_reward_lowers_it(plugin: Path, tmp_path: Path) -> None:
    settings = {**SHORT, "algo": "reinforce_plus_plus", "algo.kl_reward.coef": 0.5, "trainer.total_steps": 3}
    rows = steps(run(tmp_path, plugin, **settings))
    assert [row["reward/kl_coef"] for row in rows] == [0.5] * 3
    assert rows[0]["actor/ref_kl"] == pytest.approx(0.0, abs=1e-6)
    assert abs(rows[2]["actor/ref_kl"]) > 1e-6
    by_rollout = [r["outcome"]["reward"] for r in trained(tmp_path / "run", 3)]
    assert len(by_rollout) == 16


def test_correction_does_nothing_where_engine_and_trainer_agree(plugin: Path, tmp_path: Path) -> None:
    plain = steps(run(tmp_path, plugin, "plain", **SHORT))
    corrected = steps(run(tmp_path, plugin, "corrected", **SHORT, **CORRECTED))
    for a, b in zip(plain, corrected, strict=True):
        assert a["actor/grad_norm"] == pytest.approx(b["actor/grad_norm"], rel=1e-4)
        assert b["correction/ess"] == pytest.approx(1.0, abs=1e-5)
        assert b["correction/rejected_fraction"] == 0.0
        assert abs(b["correction/kl"]) < 1e-5
        assert {"correction/k3", "correction/chi2_token", "correction/chi2_seq", "correction/ppl_ratio"} <= b.keys()
        assert b["correction/logprob_gap_max"] == pytest.approx(b["rollout/logprob_gap_max"], abs=1e-6)


def test_what_is_rejected_leaves_the_loss_and_its_row_the_baseline(plugin: Path, tmp_path: Path) -> None:
    # B9: masks before and after are recorded
    settings = {**SHORT, "algo.correction.rejection": "token_k2", "algo.correction.rejection_high": "[1e-17]"}
    done = run(tmp_path, plugin, **{**settings, "trainer.total_steps": 1})
    (row,) = steps(done)
    assert 0.0 < row["correction/rejected_fraction"] < 1.0
    after = before = 0
    for rollout in trained(done):
        (made,) = rollout["training"]
        mask = rollout["segments"][0]["response_mask"]
        assert all(kept <= given for kept, given in zip(made["response_mask_after"], mask, strict=True))
        after, before = after + sum(made["response_mask_after"]), before + sum(mask)
    assert row["correction/rejected_fraction"] == pytest.approx(1 - after / before)


def test_a_step_whose_groups_all_score_alike_ends_the_run_with_counts(plugin: Path, tmp_path: Path) -> None:
    # C16
    settings = {**SHORT, "env.constant": "true", "algo.filter_groups.enabled": "true"}
    with pytest.raises(FilterExhausted, match=r"0 of 4 groups had reward spread after 3 generation rounds \(12 had"):
        run(tmp_path, plugin, **settings)


def test_or_is_logged_as_skipped_and_the_data_go_on(plugin: Path, tmp_path: Path) -> None:
    # C16
    settings = {
        **SHORT,
        "env.constant": "true",
        "algo.filter_groups.enabled": "true",
        "algo.filter_groups.max_gen_batches": 2,
        "algo.filter_groups.when_exhausted": "skip",
    }
    done = run(tmp_path, plugin, **settings)
    rows = steps(done)
    assert [row["filter/skipped"] for row in rows] == [1.0, 1.0]
    assert [row["filter/without_spread"] for row in rows] == [8.0, 8.0]
    assert all(row["actor/skipped_updates"] == 1.0 for row in rows)
    assert all(row["sessions/opened"] == 32 for row in rows)
    assert all(rollout["training"] == [] for rollout in trained(done))
    draws = [int(r["group"].partition("@")[2]) for step in (1, 2) for r in trained(done, step)]
    assert draws == [i // 4 for i in range(64)]  # every draw once, in order


def test_groups_without_spread_are_replaced_and_a_resume_draws_what_comes_next(
    plugin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # C16
    settings = {
        "algo": "dapo",
        "rollout.n": 2,
        "rollout.temperature": 1.2,
        "algo.filter_groups.max_gen_batches": 6,
        "trainer.total_steps": 3,
        "trainer.save_every": 1,
        "trainer.val_every": 0,
        "data.val_size": 1,
    }
    whole = run(tmp_path, plugin, "whole", **settings)
    rows = steps(whole)
    assert max(row["filter/rounds"] for row in rows) > 1
    assert any(row["filter/skipped"] == 0.0 for row in rows)
    for step, row in enumerate(rows, start=1):
        learned = {r["group"] for r in trained(whole, step) if r["training"]}
        assert len(learned) == (0 if row["filter/skipped"] else 4)
    with monkeypatch.context() as patch:
        die_in_step(patch, 3)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path, plugin, "cut", **settings)
    assert train(resumed(tmp_path / "cut", plugin))[0] == 0
    assert_same_course(whole, tmp_path / "cut")


def test_long_answers_lose_reward(plugin: Path, tmp_path: Path) -> None:
    # C18
    overlong = {"enabled": "true", "max_length": 10, "buffer": 4, "factor": 2.0}
    settings = {
        **SHORT,
        **{f"algo.overlong.{k}": v for k, v in overlong.items()},
        "algo.advantage": "reinforce_plus_plus",
    }
    done = run(tmp_path, plugin, **{**settings, "trainer.total_steps": 1})
    (row,) = steps(done)
    lengths = [sum(r["segments"][0]["response_mask"]) for r in trained(done)]
    penalties = [min(-(n - 6) / 4 * 2.0, 0.0) for n in lengths]
    assert min(penalties) < 0
    assert row["reward/overlong_penalty"] == pytest.approx(sum(penalties) / len(penalties))
    shaped = [r["outcome"]["reward"] + p for r, p in zip(trained(done), penalties, strict=True)]
    weighted = sum(s * n for s, n in zip(shaped, lengths, strict=True)) / sum(lengths)
    assert row["return/mean"] == pytest.approx(weighted, abs=1e-5)


def test_truncated_answers_leave_the_loss(plugin: Path, tmp_path: Path) -> None:
    # B8
    settings = {**SHORT, "algo.mask_truncated": "true", "env.turns": 2, "trainer.total_steps": 1}
    done = run(tmp_path, plugin, **settings)
    kept: dict[bool, int] = {}
    for rollout in trained(done):
        cut = rollout["outcome"]["status"] == "truncated_tokens"
        kept[cut] = kept.get(cut, 0) + sum(rollout["training"][0]["response_mask_after"])
    assert kept[True] == 0
    assert kept.get(False, 1) > 0


def test_remax_compares_with_a_greedy_episode_of_the_same_prompt(plugin: Path, tmp_path: Path) -> None:
    done = run(tmp_path, plugin, **SHORT, algo="remax")
    greedy = {r["group"]: r["outcome"]["reward"] for r in read_jsonl(done / "rollouts" / "greedy-000001.jsonl")}
    assert len(greedy) == 4
    rollouts = trained(done)
    assert len(rollouts) == 16
    for rollout in rollouts:
        expected = rollout["outcome"]["reward"] - greedy[rollout["group"]]
        (made,) = rollout["training"]
        assert made["advantages"] == pytest.approx([expected * m for m in rollout["segments"][0]["response_mask"]])
    (row, _) = steps(done)
    assert row["sessions/opened"] == 20
    assert row["reward/mean"] == pytest.approx(sum(r["outcome"]["reward"] for r in rollouts) / 16)


def test_turns_are_compared_with_the_same_turns_of_the_group(plugin: Path, tmp_path: Path) -> None:
    settings = {
        **SHORT,
        "env.turns": 2,
        "algo.advantage": "turn_level",
        "algo.norm_by_std": "false",
        "rollout.max_response_length": 64,
        "rollout.max_turn_tokens": 16,
        "trainer.total_steps": 1,
    }
    done = run(tmp_path, plugin, **settings)
    groups: dict[str, list[dict[str, Any]]] = {}
    for rollout in trained(done):
        groups.setdefault(rollout["group"], []).append(rollout)
    checked = 0
    for members in groups.values():
        if any(len(r["outcome"]["turn_rewards"]) != 2 for r in members):
            continue
        to_go = [(sum(r["outcome"]["turn_rewards"]), r["outcome"]["turn_rewards"][1]) for r in members]
        for rollout, own in zip(members, to_go, strict=True):
            for span in rollout["segments"][0]["spans"]:
                if span["kind"] == "model":
                    turn = span["turn"]
                    expected = own[turn] - sum(t[turn] for t in to_go) / len(to_go)
                    got = rollout["training"][0]["advantages"][span["start"]]
                    assert got == pytest.approx(expected, abs=1e-5)
                    checked += 1
    assert checked > 4


@pytest.mark.parametrize("algo", sorted(path.stem for path in (PRESETS / "algo").glob("*.yaml")))
def test_every_preset_learns(plugin: Path, tmp_path: Path, algo: str) -> None:
    done = run(tmp_path, plugin, **SHORT, algo=algo)
    rows = steps(done)
    updated = [row for row in rows if "actor/grad_norm" in row]
    assert updated
    assert max(row["actor/grad_norm"] for row in updated) > 0
    assert ("critic/loss" in rows[0]) == (algo == "ppo")


@pytest.mark.parametrize("algo", sorted(path.stem for path in (PRESETS / "algo").glob("*.yaml")))
def test_an_algorithm_sets_only_itself(algo: str) -> None:
    # what fits a model and an environment stands in the presets of the model
    chosen = load_config(TrainConfig, overrides=["env=calculator-math", f"algo={algo}"]).model_dump()
    default = load_config(TrainConfig, overrides=["env=calculator-math"]).model_dump()
    assert [key for key in default if chosen[key] != default[key]] in ([], ["algo"])


CUSTOM = """
import torch
from agentgym.trainer.algorithms import aggregate_loss, register_advantage, register_policy_loss


@register_advantage("length-bonus")
def length_bonus(token_level_rewards, response_mask, index, *, length, config, **_):
    assert length.shape == (len(response_mask),)
    advantages = response_mask * (length[:, None] - length.mean())
    return advantages, advantages


@register_policy_loss("plain")
def plain(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights=None, *,
          loss_mask=None, totals=None, length, turn_index, **_):
    assert turn_index.shape == log_prob.shape
    loss = aggregate_loss(-log_prob * advantages, response_mask, "token-mean", loss_mask=loss_mask, totals=totals)
    return loss, {"longest": length.max()}
"""


def test_a_users_advantage_and_loss_are_found_in_ray_workers_and_get_their_fields(plugin: Path, tmp_path: Path) -> None:
    # F1
    (tmp_path / "custom_algorithms.py").write_text(CUSTOM)
    settings = {
        **SHORT,
        "plugins": f"[{plugin},{tmp_path / 'custom_algorithms.py'}]",
        "trainer.cluster": "ray",
        "algo.advantage": "length-bonus",
        "algo.policy_loss": "plain",
        "algo.extra_fields": "[length,turn_index]",
        "trainer.total_steps": 1,
    }
    done = run(tmp_path, plugin, **settings)
    (row,) = steps(done)
    longest = max(r["outcome"]["reward_components"]["length"] for r in trained(done))
    assert 0 < row["actor/longest"] <= longest
    assert row["actor/grad_norm"] > 0


def test_a_field_that_no_rollout_has_is_named(plugin: Path, tmp_path: Path) -> None:
    with pytest.raises(Exception, match=r"has no field 'lenght'; it has .*length"):
        run(tmp_path, plugin, **SHORT, **{"algo.extra_fields": "[lenght]"})
