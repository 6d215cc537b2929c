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
| ``token_level_rewards`` | make_batch | [B, R] float32, the reward at the last model token | | advantages |
| ``valid`` | make_batch | [B] bool, False: no reward exists | | advantages |
| ``truncated`` | make_batch | [B] bool, a limit ended the rollout | | mask_truncated |
| ``group`` | make_batch | [B] int64, equal for samples of one drawn prompt | | advantages |
| ``rollout`` | make_batch | [B] int64, equal for segments of one rollout | | advantages |
| ``prompt_group`` | make_batch | [B] int64, equal where the prompt ids are equal | | packing |
| ``weight_version`` | make_batch | [B] int64, oldest version that sampled a token of the row | | metrics |
| ``old_log_probs`` | actor | [B, R] float32 | 0.0 outside | losses |
| ``ref_log_probs`` | reference | [B, R] float32 | 0.0 outside | KL |
| ``advantages``, ``returns`` | advantages | [B, R] float32 | 0.0 outside | losses |
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch
from tensordict import TensorDict
from torch import Tensor

from agentgym.errors import ConfigError
from agentgym.rollout import Rollout
from agentgym.tokens.output import AgentLoopOutput
from agentgym.trainer.algorithms import mask_truncated as clear_truncated
from agentgym.trainer.algorithms import place_rewards

Batch: TypeAlias = TensorDict


def make_batch(rollouts: Sequence[Rollout]) -> Batch:
    """Rows of all rollouts that take part in learning, in the order given.

    Failed rollouts have no rows: they are in no baseline and no loss. Segments without a model token have none either,
    for there is nothing to learn from.
    """
    rows: list[tuple[int, Rollout, AgentLoopOutput]] = [
        (i, rollout, segment)
        for i, rollout in enumerate(rollouts)
        if not rollout.status.failed
        for segment in rollout.segments
        if segment.num_model_tokens > 0
    ]
    groups = _number([rollout.group for _, rollout, _ in rows])
    prompts = _number([tuple(segment.prompt_ids) for _, _, segment in rows])
    segments = [segment for _, _, segment in rows]
    mask = _pad([s.response_mask for s in segments], torch.bool)
    # Each segment carries the rollout's reward, which counts once in a baseline.
    rewards, valid = place_rewards([rollout.reward for _, rollout, _ in rows], mask)
    return TensorDict(
        {
            "prompt_ids": _pad([s.prompt_ids for s in segments], torch.int64),
            "prompt_length": torch.tensor([len(s.prompt_ids) for s in segments], dtype=torch.int64),
            "response_ids": _pad([s.response_ids for s in segments], torch.int64),
            "response_length": torch.tensor([len(s.response_ids) for s in segments], dtype=torch.int64),
            "response_mask": mask,
            "loss_mask": mask.clone(),
            "rollout_log_probs": _pad([s.response_logprobs for s in segments], torch.float32),
            "token_level_rewards": rewards,
            "valid": valid,
            "truncated": torch.tensor([r.status.truncated for _, r, _ in rows], dtype=torch.bool),
            "group": torch.tensor(groups, dtype=torch.int64),
            "rollout": torch.tensor([i for i, _, _ in rows], dtype=torch.int64),
            "prompt_group": torch.tensor(prompts, dtype=torch.int64),
            "weight_version": torch.tensor([_oldest(s) for s in segments], dtype=torch.int64),
        },
        batch_size=[len(rows)],
    )


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
