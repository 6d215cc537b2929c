from __future__ import annotations

import math
from typing import Any

import pytest

from agentgym.errors import TokenAlignmentError
from agentgym.tokens import AgentLoopOutput, Span


def output(**changes: Any) -> AgentLoopOutput:
    """Model ``[7, 9]``, an end that the loop appended, a tool's ``[8]``, model ``[2]``."""
    given: dict[str, Any] = {
        "prompt_ids": [5, 6],
        "response_ids": [7, 9, 3, 8, 2],
        "response_mask": [1, 1, 0, 0, 1],
        "response_logprobs": [-0.1, 0.0, 0.0, 0.0, -0.2],
        "spans": [
            Span(start=0, stop=2, kind="model", turn=0, weight_version=4),
            Span(start=2, stop=3, kind="template", turn=0),
            Span(start=3, stop=4, kind="environment", turn=0),
            Span(start=4, stop=5, kind="model", turn=1, weight_version=4),
        ],
    }
    return AgentLoopOutput(**{**given, **changes})


def test_only_sampled_tokens_count() -> None:  # B5, B9
    assert output().num_model_tokens == 3


def test_a_response_may_be_empty() -> None:  # B16
    empty = output(response_ids=[], response_mask=[], response_logprobs=[], spans=[])
    assert empty.num_model_tokens == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"response_mask": [1, 1, 0, 0]}, "equal lengths"),
        ({"response_logprobs": [-0.1, 0.0, 0.0, 0.0]}, "equal lengths"),
        ({"response_mask": [1, 1, 0, 0, 2]}, r"response_mask\[4\] is 2"),
        (
            {"response_logprobs": [-0.1, 0.0, 0.0, 1.0, -0.2]},
            r"response_logprobs\[3\] is 1.0 where the mask is 0",
        ),  # B9
        ({"response_logprobs": [-0.1, 0.0, -0.5, 0.0, -0.2]}, r"response_logprobs\[2\]"),  # B5
        ({"response_logprobs": [math.nan, 0.0, 0.0, 0.0, -0.2]}, r"response_logprobs\[0\] is nan"),
        ({"response_logprobs": [0.5, 0.0, 0.0, 0.0, -0.2]}, r"response_logprobs\[0\] is 0.5"),
        ({"spans": [Span(start=0, stop=2, kind="model", turn=0)]}, "cover 2 of 5"),
        ({"spans": [Span(start=1, stop=5, kind="model", turn=0)]}, "position 0"),
        ({"spans": [Span(start=0, stop=5, kind="model", turn=0)]}, "needs response_mask 1"),
        ({"spans": [Span(start=0, stop=2, kind="environment", turn=0)]}, "needs response_mask 0"),
    ],
)
def test_what_does_not_line_up_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(TokenAlignmentError, match=message):
        output(**changes)
