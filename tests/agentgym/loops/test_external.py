"""Agents of other frameworks, unchanged: evaluated and trained through the recording endpoint."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from agentgym.config import load_config
from agentgym.console import Console
from agentgym.errors import ConfigError
from agentgym.evaluation import evaluate
from agentgym.evaluation_config import EvalConfig
from agentgym.trainer import main
from agentgym.trainer.config import TrainConfig
from agentgym.trainer.preflight import check_run
from agentgym.trainer.tracking import read_jsonl

AGENTS = '''
import openai
from openai import AsyncOpenAI

import agentgym
from agentgym import Env, Task
from agentgym.messages import openai_messages, turn_from_openai


async def plain(session, endpoint):
    """A loop around the plain client, as anyone would write it."""
    async with AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client:
        messages = openai_messages(session.conversation)
        while not session.done:
            reply = await client.chat.completions.create(
                model=endpoint.model, messages=messages, tools=session.tools or openai.NOT_GIVEN
            )
            choice = reply.choices[0]
            messages.append(choice.message.model_dump(exclude_none=True))
            turn = turn_from_openai(choice.message.model_dump(), finish_reason=choice.finish_reason)
            messages += openai_messages((await session.step(turn)).observation)


async def answers(session, endpoint):
    """Asks twice, with a history of its own, and returns its answer."""
    async with AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client:
        text = ""
        for question in (session.task.prompt, f"Check: {session.task.prompt}"):
            reply = await client.chat.completions.create(
                model=endpoint.model, messages=[{"role": "user", "content": question}], max_tokens=12
            )
            text = reply.choices[0].message.content
        return text


async def greedy(session, endpoint):
    """Goes on until the endpoint refuses."""
    async with AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client:
        messages = openai_messages(session.conversation)
        while True:
            reply = await client.chat.completions.create(model=endpoint.model, messages=messages)
            messages += [reply.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "more"}]


async def broken(session, endpoint):
    raise KeyError("nothing")


async def silent(session, endpoint):
    return None


async def stranger(session, endpoint):
    async with AsyncOpenAI(base_url=endpoint.base_url, api_key="guessed", max_retries=0) as client:
        await client.chat.completions.create(model=endpoint.model, messages=[{"role": "user", "content": "x"}])


async def alone(session):
    return "7"


class EvenLength(Env):
    """Rewards turns of an even length: an untrained model has both kinds."""

    def tasks(self, split):
        return [Task(id=f"{split}-{i}", prompt=f"What is {i} + {i}?") for i in range(8)]

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.task = next(t for t in self.tasks(options["split"]) if t.id == options["task_id"])
        return ({"role": "user", "content": self.task.prompt},), {}

    def step(self, action):
        return (), float(len(self.to_turn(action).content) % 2 == 0), True, False, {}


agentgym.register("even-test", EvenLength, max_turns=2)
'''


@pytest.fixture(scope="module")
def agents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("agents") / "own_agents.py"
    path.write_text(AGENTS)
    return path


def evaluated(output: Path, *overrides: str) -> tuple[Any, list[Any]]:
    settings = ["env=calculator-math", "model=tiny", "threads=1", f"output={output}", *overrides]
    report = evaluate(load_config(EvalConfig, overrides=settings), Console(file=io.StringIO()))
    return report, [json.loads(line) for line in (output / "rollouts.jsonl").read_text().splitlines()]


def tokens(rollout: dict[str, Any]) -> list[Any]:
    return [
        (s["prompt_ids"], s["response_ids"], s["response_mask"], s["response_logprobs"]) for s in rollout["segments"]
    ]


def test_an_agent_around_the_plain_client_is_recorded_as_the_own_loop_is(agents: Path, tmp_path: Path) -> None:
    _, own = evaluated(tmp_path / "own", "tasks=4")
    report, through = evaluated(tmp_path / "through", "tasks=4", f"agent={agents}:plain")
    assert [tokens(rollout) for rollout in through] == [tokens(rollout) for rollout in own]
    assert [r["outcome"]["reward"] for r in through] == [r["outcome"]["reward"] for r in own]
    assert any(len(rollout["segments"][0]["spans"]) > 2 for rollout in through)  # tools were used
    assert (report.errors, report.policy) == (0, f"{agents}:plain")


def test_what_agents_do_wrong_is_counted_by_its_kind(agents: Path, tmp_path: Path) -> None:
    for name, kind in (("broken", "KeyError"), ("silent", "EnvError"), ("stranger", "BadRequestError")):
        report, rows = evaluated(tmp_path / name, "tasks=1", f"agent={agents}:{name}")
        assert report.error_types == {kind: 1}, rows[0]["outcome"]["error"]
        assert report.mean is None


def test_an_agent_that_needs_more_than_its_budget_is_truncated(agents: Path, tmp_path: Path) -> None:
    limits = ("rollout.max_response_length=80", "rollout.max_turn_tokens=20")
    report, (row,) = evaluated(tmp_path / "out", "tasks=1", f"agent={agents}:greedy", *limits)
    assert report.statuses == {"truncated_tokens": 1}
    assert report.mean == 0.0
    assert 0 < sum(len(segment["response_ids"]) for segment in row["segments"]) <= 80


def settings(agents: Path, folder: Path, name: str, **more: Any) -> TrainConfig:
    values = {
        "env": "even-test",
        "model": "tiny",
        "plugins": agents,
        "rollout.agent_loop.name": "external",
        "rollout.agent_loop.agent": f"{agents}:{name}",
        "data.batch_size": 2,
        "rollout.n": 4,
        "rollout.max_response_length": 48,
        "rollout.temperature": 1.6,
        "trainer.cluster": "inline",
        "trainer.threads": 1,
        "trainer.total_steps": 3,
        "trainer.lr": 1e-4,
        "trainer.val_every": 0,
        "trainer.val_before": "false",
        "trainer.run_dir": folder,
        "trainer.loggers": "[]",
        **more,
    }
    return load_config(TrainConfig, overrides=[f"{key}={value}" for key, value in values.items()])


def test_an_unchanged_agent_is_trained(agents: Path, tmp_path: Path) -> None:
    config = settings(agents, tmp_path, "answers")
    check_run(config)
    text = io.StringIO()
    assert main.run(config, Console(file=text, live=False)) == 0, text.getvalue()
    (run,) = tmp_path.iterdir()
    rows = read_jsonl(run / "metrics.jsonl")
    assert [row["step"] for row in rows][-3:] == [1, 2, 3]
    for row in rows[-3:]:
        assert row["rollout/failed"] == 0
        assert row["sessions/live"] == 0
        assert row["rollout/logprob_gap_max"] < 1e-3  # the recorded ids and log-probs are the engine's
    rollouts = read_jsonl(run / "rollouts" / "step-000003.jsonl")
    assert len(rollouts) == 8
    assert [len(rollout["segments"]) for rollout in rollouts] == [2] * 8  # its second question is no continuation
    assert any(row["actor/grad_norm"] > 0 for row in rows[-3:])


@pytest.mark.parametrize(
    ("loop", "part"),
    [
        ({"name": "externl"}, "external"),
        ({"name": "external"}, "agent"),
        ({"name": "external", "agent": "x", "speed": 3}, "speed"),
        ({"name": "external", "agent": "nope.py:agent"}, "nope.py"),
        ({"name": "external", "agent": "FILE:alone"}, r"\(session, endpoint\)"),
        ({"name": "external", "agent": "FILE:missing"}, "missing"),
        ({"speed": 3}, "_target_"),
    ],
)
def test_a_wrong_loop_is_refused_before_anything_starts(agents: Path, loop: dict[str, Any], part: str) -> None:
    text = json.dumps(loop).replace("FILE", str(agents))
    overrides = ["env=even-test", f"plugins={agents}", f"rollout.agent_loop={text}"]
    with pytest.raises(ConfigError, match=part):
        check_run(load_config(TrainConfig, overrides=overrides))
