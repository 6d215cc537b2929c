from __future__ import annotations

from agentgym.generation import Generation
from agentgym.trainer.rollout.counters import COUNTERS, count_turn


def test_turns_add_up() -> None:
    counters = dict.fromkeys(COUNTERS, 0.0)
    turn = Generation(token_ids=[1, 2, 3], logprobs=[0.0] * 3, finish_reason="stop", cached_tokens=8, preemptions=2)
    count_turn(counters, 10, turn)
    count_turn(counters, 5, Generation(token_ids=[], logprobs=[], finish_reason="length"))
    assert counters == {
        "requests": 2,
        "generated_tokens": 3,
        "prefill_tokens": 7,
        "cached_tokens": 8,
        "preemptions": 2,
    }
