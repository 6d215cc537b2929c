"""``reward.manager=parallel``: the reward function in processes of its own, which a timeout can end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Mapping
from typing import Any

from agentgym.errors import ConfigError, EnvError, InfraError
from agentgym.rewards.base import RewardData, RewardManager, RewardResult
from agentgym.rewards.functions import ScoreFunction, arguments_of, read_score

LINE_LIMIT = 64 * 2**20
"""Bytes of the longest answer of a process."""


class ParallelManager(RewardManager):
    """Scores rollouts in a pool of processes: for slow or hanging graders, and for code that blocks the interpreter.

    A call that takes longer than ``timeout`` fails (``ScorerTimeout``) and its process is killed; the next call gets a
    new one. What the function prints goes to standard error.

    Args:
        function: must be named by ``reward.path``.
        processes: calls at the same time.
        timeout: seconds for one call, without the start of the process.
        start_timeout: seconds for the start of a process: the import of the function.
    """

    def __init__(
        self, function: ScoreFunction, *, processes: int = 2, timeout: float = 30.0, start_timeout: float = 60.0
    ) -> None:
        super().__init__(function)
        if function.own:
            raise ConfigError("reward.manager=parallel needs a function to run in other processes: set reward.path")
        if processes < 1 or timeout <= 0:
            raise ConfigError(
                f"reward.options: processes={processes}, timeout={timeout}: expected at least 1 and a time above 0"
            )
        function.check()
        self.timeout = timeout
        self.start_timeout = start_timeout
        self._places = asyncio.Semaphore(processes)
        self._idle: list[asyncio.subprocess.Process] = []

    async def run_single(self, data: RewardData) -> RewardResult:
        async with self._places:
            process = self._idle.pop() if self._idle else await self._start()
            try:
                answer = await self._ask(process, json.dumps(arguments_of(data)), self.timeout, data.task_id)
            except BaseException:
                await _kill(process)
                raise
            self._idle.append(process)
        if "error_type" in answer:
            raise EnvError(
                f"reward function {self.function.path} raised {answer['error_type']}: {answer['message']}",
                task_id=data.task_id,
                error_type=answer["error_type"],
                traceback_text=answer["traceback"],
            )
        return read_score(answer["value"])

    async def aclose(self) -> None:
        while self._idle:
            await _kill(self._idle.pop())

    async def _start(self) -> asyncio.subprocess.Process:
        setup = json.dumps({"path": self.function.path, "name": self.function.name, "kwargs": self.function.kwargs})
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "agentgym.rewards.score_process",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=environment,
            limit=LINE_LIMIT,
            start_new_session=True,  # Ctrl-C is for the run, which ends its processes itself
        )
        try:
            await self._ask(process, setup, self.start_timeout, "")
        except BaseException:
            await _kill(process)
            raise
        return process

    async def _ask(
        self, process: asyncio.subprocess.Process, line: str, timeout: float, task_id: str
    ) -> Mapping[str, Any]:
        assert process.stdin is not None
        assert process.stdout is not None
        scope = asyncio.timeout(timeout)
        try:
            async with scope:
                process.stdin.write(line.encode() + b"\n")
                await process.stdin.drain()
                answer = await process.stdout.readline()
        except TimeoutError:
            late = f"reward function {self.function.path} took more than {timeout:g} s (reward.options.timeout)"
            raise EnvError(late, task_id=task_id, error_type="ScorerTimeout") from None
        if not answer:
            raise InfraError(f"a process of reward function {self.function.path} died; its last words are on stderr")
        value: Mapping[str, Any] = json.loads(answer)
        return value


async def _kill(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    await process.wait()
    transport: Any = getattr(process, "_transport", None)
    if transport is not None:
        transport.close()
