"""`Batch`: the rollouts of one training step as tensors.

A TensorDict with B rows, one per segment of a scored or scorable rollout. P and R are the longest prompt and response.

| field | created by | shape, dtype | mask meaning | consumed by |
|---|---|---|---|---|
| ``prompt_ids`` | make_batch | [B, P] int64, right-padded | ``prompt_length`` | actor |
| ``prompt_length`` | make_batch | [B] int64 | | packing |
| ``response_ids`` | make_batch | [B, R] int64, right-padded | ``response_length`` | actor |
| ``response_length`` | make_batch | [B] int64, model and environment tokens | | packing |
| ``response_mask`` | make_batch | [B, R] bool, True where the model sampled the token | loss, advantages | algorithms |
| ``loss_mask`` | make_batch | [B, R] bool, ``response_mask`` before rejection | normalisation | losses |
| ``rollout_log_probs`` | make_batch | [B, R] float32, 0.0 outside the mask | | correction, metrics |
| ``token_level_rewards`` | make_batch, shaping | [B, R] float32, the reward at the last model token | | advantages |
| ``turn_index`` | make_batch | [B, R] int64, assistant turn of each token | ``response_length`` | advantages |
| ``valid`` | make_batch | [B] bool, False: no reward exists | | advantages |
| ``truncated`` | make_batch | [B] bool, a limit ended the rollout | | mask_truncated |
| ``group`` | make_batch | [B] int64, equal for samples of one drawn prompt | | advantages |
| ``rollout`` | make_batch | [B] int64, equal for segments of one rollout | | advantages |
| ``prompt_group`` | make_batch | [B] int64, equal where the prompt ids are equal | | packing |
| ``weight_version`` | make_batch | [B] int64, oldest version that sampled a token of the row | | metrics |
| ``config.extra_fields`` | make_batch | [B, R] or [B] float32 | ``response_length`` | custom advantages, losses |
| ``reward_baselines`` | baselines | [B] float32, score of the greedy rollout; NaN: none | | advantages |
| ``old_log_probs`` | actor | [B, R] float32 | 0.0 outside | losses |
| ``ref_log_probs`` | reference | [B, R] float32 | 0.0 outside | KL |
| ``values`` | critic | [B, R] float32 | 0.0 outside | advantages, critic |
| ``rollout_is_weights`` | correction | [B, R] float32 | 0.0 outside the mask | losses |
| ``advantages``, ``returns`` | advantages | [B, R] float32 | 0.0 outside | losses |
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TypeAlias

import torch
from tensordict import TensorDict
from torch import Tensor

from agentgym.errors import ConfigError, EnvError
from agentgym.rewards.overlong import overlong_penalty
from agentgym.rewards.scorer import TOKEN_REWARDS
from agentgym.rollout import Rollout
from agentgym.tokens.output import AgentLoopOutput
from agentgym.trainer.algorithms import mask_truncated as clear_truncated
from agentgym.trainer.algorithms import place_rewards, place_turn_rewards

Batch: TypeAlias = TensorDict


Row: TypeAlias = tuple[Rollout, AgentLoopOutput]


def make_batch(
    rollouts: Sequence[Rollout],
    *,
    groups: Collection[str] | None = None,
    turn_rewards: bool = False,
    extra_fields: Sequence[str] = (),
) -> Batch:
    """Rows of all rollouts that take part in learning, in the order given.

    Failed rollouts have no rows: they are in no baseline and no loss. Segments without a model token have none either,
    for there is nothing to learn from.

    Args:
        rollouts: of the step.
        groups: only rollouts of these groups have rows; None: all.
        turn_rewards: the reward of each turn stands at the turn's last model token; else their sum at the last one.
        extra_fields: further fields, see `extra_field`.

    Raises:
        ConfigError: an extra field that some row does not have.
    """
    listed: list[tuple[int, Rollout, AgentLoopOutput]] = [
        (i, rollout, segment)
        for i, rollout in enumerate(rollouts)
        if not rollout.status.failed and (groups is None or rollout.group in groups)
        for segment in rollout.segments
        if segment.num_model_tokens > 0
    ]
    rows: list[Row] = [(rollout, segment) for _, rollout, segment in listed]
    segments = [segment for _, segment in rows]
    mask = _pad([s.response_mask for s in segments], torch.bool)
    turn_index = _pad([_turns(s) for s in segments], torch.int64)
    # Each segment carries the rollout's reward, which counts once in a baseline.
    rewards, valid = place_rewards([rollout.reward for rollout, _ in rows], mask)
    if turn_rewards:
        per_turn = [_rewards_by_turn(*row) if ok else [] for row, ok in zip(rows, valid.tolist(), strict=True)]
        rewards = place_turn_rewards(per_turn, turn_index, mask)
    for row, (rollout, segment) in enumerate(rows):
        if TOKEN_REWARDS in segment.extra_fields and valid[row]:
            rewards[row] = _placed(segment, rollout.task_id, width=mask.shape[1])
    batch: Batch = TensorDict(
        {
            "prompt_ids": _pad([s.prompt_ids for s in segments], torch.int64),
            "prompt_length": torch.tensor([len(s.prompt_ids) for s in segments], dtype=torch.int64),
            "response_ids": _pad([s.response_ids for s in segments], torch.int64),
            "response_length": torch.tensor([len(s.response_ids) for s in segments], dtype=torch.int64),
            "response_mask": mask,
            "loss_mask": mask.clone(),
            "rollout_log_probs": _pad([s.response_logprobs for s in segments], torch.float32),
            "token_level_rewards": rewards,
            "turn_index": turn_index,
            "valid": valid,
            "truncated": torch.tensor([r.status.truncated for r, _ in rows], dtype=torch.bool),
            "group": torch.tensor(_number([r.group for r, _ in rows]), dtype=torch.int64),
            "rollout": torch.tensor([i for i, _, _ in listed], dtype=torch.int64),
            "prompt_group": torch.tensor(_number([tuple(s.prompt_ids) for s in segments]), dtype=torch.int64),
            "weight_version": torch.tensor([_oldest(s) for s in segments], dtype=torch.int64),
        },
        batch_size=[len(rows)],
    )
    for name in extra_fields:
        if name not in batch.keys() and name not in LATER_FIELDS:  # noqa: SIM118 - a TensorDict iterates rows
            batch[name] = extra_field(name, rows)
    return batch


LATER_FIELDS = frozenset(
    {"reward_baselines", "old_log_probs", "ref_log_probs", "values", "rollout_is_weights", "advantages", "returns"}
)
"""Fields that the steps after `make_batch` add."""


def extra_field(name: str, rows: Sequence[Row]) -> Tensor:
    """A field that nothing here knows, for a custom loss or advantage.

    It is looked for, in this order, in what the agent loop left on the segment (``extra_fields``), among the reward
    components, and among the metrics of the episode. A number gives [B], a list with one number per response token
    [B, R], float32.

    Raises:
        ConfigError: a row does not have it, or it has the wrong length.
    """
    values = [_find(name, *row) for row in rows]
    numbers = [value for value in values if isinstance(value, int | float)]
    if len(numbers) == len(values):
        return torch.tensor(numbers, dtype=torch.float32)
    for value, (rollout, segment) in zip(values, rows, strict=True):
        if not isinstance(value, Sequence) or len(value) != len(segment.response_ids):
            raise ConfigError(
                f"algo.extra_fields: field {name!r} of task {rollout.task_id!r} is {str(value)[:60]}; expected a "
                f"number, or {len(segment.response_ids)} numbers, one for each response token"
            )
    return _pad([value for value in values if isinstance(value, Sequence)], torch.float32)


def _find(name: str, rollout: Rollout, segment: AgentLoopOutput) -> object:
    places = (segment.extra_fields, rollout.outcome.reward_components, rollout.outcome.metrics, segment.metrics)
    for place in places:
        if name in place:
            return place[name]
    known = sorted({key for place in places for key in place})
    raise ConfigError(
        f"algo.extra_fields: the rollout of task {rollout.task_id!r} has no field {name!r}; "
        f"it has {', '.join(known) or 'none'}, and the batch its own fields"
    )


def add_overlong_penalty(batch: Batch, *, max_length: int, buffer: int, factor: float) -> float:
    """Take a growing penalty off the reward of long rollouts; their length is that of all segments together.

    Returns:
        The mean penalty over rollouts (0 or below).
    """
    mask = batch["response_mask"]
    lengths = torch.zeros(int(batch["rollout"].max()) + 1, dtype=torch.int64)
    lengths.index_add_(0, batch["rollout"], mask.sum(-1))
    row_penalty = [
        overlong_penalty(length, max_length=max_length, buffer=buffer, factor=factor)
        for length in lengths[batch["rollout"]].tolist()
    ]
    penalty, _ = place_rewards(row_penalty, mask & batch["valid"][:, None])
    batch["token_level_rewards"] = batch["token_level_rewards"] + penalty
    by_rollout = dict(zip(batch["rollout"].tolist(), row_penalty, strict=True))
    return sum(by_rollout.values()) / len(by_rollout)


def _placed(segment: AgentLoopOutput, task_id: str, *, width: int) -> Tensor:
    """Token rewards as a reward manager placed them. Raises `EnvError` where they do not fit the response."""
    placed = segment.extra_fields[TOKEN_REWARDS]
    if len(placed) != len(segment.response_ids):
        raise EnvError(
            f"the reward manager's assemble gave {len(placed)} rewards for {len(segment.response_ids)} response tokens",
            task_id=task_id,
        )
    outside = [i for i, (reward, m) in enumerate(zip(placed, segment.response_mask, strict=True)) if reward and not m]
    if outside:
        raise EnvError(
            f"the reward manager's assemble put a reward at position {outside[0]}, which the model did not sample",
            task_id=task_id,
        )
    return torch.tensor([*placed, *[0.0] * (width - len(placed))], dtype=torch.float32)


def mask_truncated(batch: Batch) -> Batch:
    """Take the rows of truncated rollouts out of loss, lengths, KL and entropy.

    Called after the advantages: their rewards stay in the group baselines.
    """
    batch["response_mask"], batch["loss_mask"] = clear_truncated(
        batch["truncated"], batch["response_mask"], batch["loss_mask"]
    )
    return batch


def union(batch: Batch, fields: dict[str, Tensor]) -> Batch:
    """``batch`` with further fields. Raises `ConfigError` where a field exists with other values."""
    for name, value in fields.items():
        if name in batch.keys() and not torch.equal(batch[name], value):  # noqa: SIM118 - a TensorDict iterates rows
            raise ConfigError(f"batch field {name!r} exists with other values; choose another name")
        batch[name] = value
    return batch


def _pad(rows: Sequence[Sequence[float]], dtype: torch.dtype) -> Tensor:
    width = max((len(row) for row in rows), default=0)
    out = torch.zeros((len(rows), width), dtype=dtype)
    for i, row in enumerate(rows):
        out[i, : len(row)] = torch.tensor(row, dtype=dtype)
    return out


def _number(keys: Sequence[object]) -> list[int]:
    seen: dict[object, int] = {}
    return [seen.setdefault(key, len(seen)) for key in keys]


def _oldest(segment: AgentLoopOutput) -> int:
    return min((s.weight_version for s in segment.spans if s.weight_version is not None), default=0)


def _turns(segment: AgentLoopOutput) -> list[int]:
    return [span.turn for span in segment.spans for _ in range(span.start, span.stop)]


def _rewards_by_turn(rollout: Rollout, segment: AgentLoopOutput) -> list[float]:
    """Reward of turn 0, 1, ... as a segment sees them.

    What falls on a turn that has no model token here counts for the turn before it: the rewards of a later segment are
    earned by what was done in this one too.
    """
    own = sorted({span.turn for span in segment.spans if span.kind == "model"})
    earned = list(rollout.outcome.turn_rewards)
    earned += [0.0] * (own[-1] + 1 - len(earned))
    earned[-1] += (rollout.reward or 0.0) - sum(earned)
    rewards = [0.0] * (own[-1] + 1)
    for turn, reward in enumerate(earned):
        reached = [t for t in own if t <= turn]
        if reached:
            rewards[reached[-1]] += reward
    return rewards
