from __future__ import annotations

from pathlib import Path

from agentgym import SessionManager, ToolCall, plugins, registration
from agentgym.checks import check_env
from agentgym.types import AssistantTurn

EXAMPLE = Path(__file__).parents[2] / "examples" / "stateful_tool.py"


def test_the_example_keeps_the_contract() -> None:
    plugins.load([str(EXAMPLE)])
    report = check_env("my-counter")
    assert [finding for finding in report.findings if finding.level == "error"] == []


async def test_its_counters_are_gone_after_the_episode() -> None:
    plugins.load([str(EXAMPLE)])
    add = AssistantTurn(tool_calls=(ToolCall(name="counter", arguments={"add": 1}),))
    async with SessionManager() as manager, manager.open("my-counter", task_id="101") as session:
        texts = [(await session.step(add)).observation[0]["content"] for _ in range(2)]
        (tool,) = session.env.tools
        assert len(tool.values) == 1  # type: ignore[attr-defined]
    assert texts == ["start: 737\nnow: 738", "now: 739"]
    assert tool.values == {}  # type: ignore[attr-defined]
    assert registration.spec("my-counter").max_turns == 4
