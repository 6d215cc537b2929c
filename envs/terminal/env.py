"""The environment: jobs as tasks, the shell, and the check of the files."""

from __future__ import annotations

import random
import zlib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from agentgym.envs.generated import check_level, check_sizes, draw_level, size_of
from agentgym.envs.terminal.jobs import draw
from agentgym.errors import InfraError, ToolError
from agentgym.sandbox import Sandbox, SandboxConfig
from agentgym.tool import BaseTool
from agentgym.tool_env import ToolEnv
from agentgym.toolbox import ToolLimits
from agentgym.tools.bash import BashTool
from agentgym.types import AssistantTurn, Task, ToolCall

LEVEL_WEIGHTS = {1: 0.5, 2: 0.3, 3: 0.2}
"""Shares of the numbers of jobs in the default mix."""


class Terminal(ToolEnv):
    """One to three jobs with files, for a model that has a shell.

    The reward is the share of the jobs that are done right: every file of a job is there with exactly its content (a
    missing newline at the end is fine), also those that the job does not touch, and what had to go is gone. If the
    sandbox is lost before they can be checked, the episode counts as a failure of the infrastructure.

    Args:
        level: number of jobs: 1, 2, 3 or ``"mix"`` (50 %, 30 % and 20 %).
        train_size: number of training tasks.
        validation_size: number of validation tasks.
        sandbox: where the shell runs: a backend's name or the settings of `agentgym.sandbox.SandboxConfig`.
        split: where tasks are drawn from: ``"train"`` or ``"validation"``.
        seed: of the tasks.
        limits: of tool calls.
    """

    tools: Sequence[BaseTool] = (BashTool(),)
    sandbox = "auto"
    system_prompt = "Do the jobs with the bash tool, in the current folder. Then answer: done."

    def __init__(
        self,
        *,
        level: int | str = "mix",
        train_size: int = 2000,
        validation_size: int = 200,
        sandbox: SandboxConfig | Mapping[str, Any] | str | None = None,
        split: str = "train",
        seed: int = 0,
        limits: ToolLimits | Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(split=split, seed=seed, limits=limits, sandbox=sandbox)
        self.level = check_level(level, LEVEL_WEIGHTS)
        self.sizes = check_sizes(train=train_size, validation=validation_size)

    def tasks(self, split: str) -> Sequence[Task]:
        """The tasks of a split, made when first asked for."""
        return _tasks(split, self.seed, self.level, size_of(self.sizes, split))

    async def prepare_sandbox(self, sandbox: Sandbox) -> None:
        """Write the task's files."""
        for job in self.task.data["jobs"]:
            for path, text in job["before"].items():
                await sandbox.write_file(path, text.encode())

    async def score(self, task: Task, answer: str) -> float:
        """The share of the jobs that are done right; 0.0, without a sandbox, where the model has never called a tool.

        Raises:
            InfraError: the sandbox is gone. There is nothing to score then: its files may have been right.
        """
        lazy = self.toolbox.context.sandbox
        if lazy is None or not lazy.opened:
            return 0.0
        try:
            sandbox = await lazy.get()
        except ToolError as error:
            raise InfraError(f"the files of task {task.id!r} cannot be checked: {error}") from error
        jobs = task.data["jobs"]
        done = [await is_done(sandbox, job) for job in jobs]
        if sandbox.lost:
            raise InfraError(f"the files of task {task.id!r} cannot be checked: the sandbox was lost meanwhile")
        return sum(done) / len(jobs)

    def oracle(self, task: Task) -> list[AssistantTurn]:
        """One command for each job."""
        commands = [job["command"] for job in task.data["jobs"]]
        calls = [ToolCall(name="bash", arguments={"command": command}) for command in commands]
        return [*(AssistantTurn(tool_calls=(call,)) for call in calls), AssistantTurn(content="done")]


async def is_done(sandbox: Sandbox, job: Mapping[str, Any]) -> bool:
    """Whether the files of a job are as they should be, as the sandbox's own channel reads them."""
    for path, text in job["after"].items():
        expected = text.encode()
        try:
            found = await sandbox.read_file(path, limit=len(expected) + 1)
        except ToolError:
            return False
        if found.removesuffix(b"\n") != expected.removesuffix(b"\n"):
            return False
    for path in job["gone"]:
        folder, _, name = path.rpartition("/")
        try:
            entries = await sandbox.list_files(folder)
        except ToolError:
            return False
        if name in {entry.name for entry in entries}:
            return False
    return True


def split_of(prompt: str) -> str:
    """The split of a task with this prompt: one prompt in eight is for validation, whatever the seed."""
    return "validation" if zlib.crc32(prompt.encode()) % 8 == 0 else "train"


@lru_cache(maxsize=16)
def _tasks(split: str, seed: int, level: int | str, size: int) -> tuple[Task, ...]:
    """Shared by the environments of a process. No two tasks have the same prompt."""
    rng = random.Random(f"terminal/{seed}/{split}/{level}")
    tasks: dict[str, Task] = {}
    while len(tasks) < size:
        count = draw_level(rng, level, LEVEL_WEIGHTS)
        jobs = draw(rng, count)
        texts = [job.text for _, job in jobs]
        prompt = texts[0] if count == 1 else "\n".join(f"{number}. {text}" for number, text in enumerate(texts, 1))
        if split_of(prompt) == split and prompt not in tasks:
            data = [
                {"kind": kind, "before": job.before, "command": job.command, "after": job.after, "gone": list(job.gone)}
                for kind, job in jobs
            ]
            tasks[prompt] = Task(
                id=f"{split}-{len(tasks):06d}",
                prompt=prompt,
                data={"jobs": data, "level": count},
                data_source="terminal",
            )
    return tuple(tasks.values())
