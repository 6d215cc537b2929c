"""``reward.manager=model``: a reward model, or a judge behind an endpoint, for rows that say ``style: model``."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from agentgym.errors import AgentGymError, ConfigError, EnvError, boundary
from agentgym.rewards.base import RewardData, RewardManager, RewardResult
from agentgym.rewards.classifier import RewardClassifier
from agentgym.rewards.functions import ScoreFunction
from agentgym.rewards.http import JsonClient

Classify = Callable[[Sequence[tuple[str, str]]], Awaitable[Sequence[float]]]

JUDGE_PROMPT = """Rate the answer to the question from 0 (wrong) to 1 (right).

Question:
{prompt}

Reference answer:
{ground_truth}

Answer:
{solution}

Think first, then end with a line like this: Score: 0.5"""
JUDGE_PATTERN = r"(?i)score\s*[:=]\s*\**\s*(-?\d+(?:\.\d+)?)"


class ModelManager(RewardManager):
    """Rows of ``style: model`` are scored by a model, all others by the reward function (or their environment).

    Either ``model`` or ``endpoint`` is given. A classifier is loaded into workers of its own in training
    (`connect`), into this process otherwise; texts that wait are scored together.

    Args:
        function: for rows of ``style: rule``.
        model: folder or hub id of a Hugging Face sequence classifier.
        workers: processes that hold it, in training.
        batch_size: texts that go through it at a time.
        max_length, label, device: see `RewardClassifier`.
        all_rows: score every row by the model, whatever its style.
        endpoint: base address of an OpenAI-compatible server, e.g. ``http://127.0.0.1:8000/v1``.
        judge: name of the model there.
        prompt: what the judge is asked, with ``{prompt}``, ``{solution}`` and ``{ground_truth}``.
        pattern: regular expression whose first group is the score in the judge's answer; the last match counts.
        api_key_env: environment variable that holds the key.
        max_concurrency, requests_per_second, retries, timeout: see `JsonClient`.
    """

    def __init__(
        self,
        function: ScoreFunction,
        *,
        model: str | None = None,
        workers: int = 1,
        batch_size: int = 32,
        max_length: int = 2048,
        label: int | None = None,
        device: str | None = None,
        all_rows: bool = False,
        endpoint: str | None = None,
        judge: str = "default",
        prompt: str = JUDGE_PROMPT,
        pattern: str = JUDGE_PATTERN,
        api_key_env: str = "OPENAI_API_KEY",
        max_concurrency: int = 16,
        requests_per_second: float | None = None,
        retries: int = 3,
        timeout: float = 120.0,
    ) -> None:
        super().__init__(function)
        function.check()
        if (model is None) == (endpoint is None):
            raise ConfigError(
                f"reward.manager=model: reward.options.model={model}, reward.options.endpoint={endpoint}; "
                f"expected one of them: a sequence classifier, or an OpenAI-compatible server with a judge"
            )
        if model is not None and not Path(model).is_dir() and re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", model) is None:
            raise ConfigError(f"reward.options.model={model}: no such folder, and not a hub id")
        self.model = model
        self.workers = workers
        self.batch_size = batch_size
        self.classifier_options = (max_length, label, device)
        self.all_rows = all_rows
        self.judge, self.prompt = judge, prompt
        self.pattern = _compiled(pattern)
        self.client: JsonClient | None = None
        if endpoint is not None:
            key = os.environ.get(api_key_env)
            self.client = JsonClient(
                f"{endpoint.rstrip('/')}/chat/completions",
                headers={} if key is None else {"Authorization": f"Bearer {key}"},
                max_concurrency=max_concurrency,
                requests_per_second=requests_per_second,
                retries=retries,
                timeout=timeout,
            )
        self._classify: Classify | None = None
        self._waiting: list[tuple[tuple[str, str], asyncio.Future[float]]] = []
        self._batches: asyncio.Task[None] | None = None

    def connect(self, classify: Classify) -> None:
        """Score with workers that live elsewhere instead of a model in this process."""
        self._classify = classify

    def uses_env_score(self, style: str) -> bool:
        return self.function.own and not self._by_model(style)

    async def run_single(self, data: RewardData) -> RewardResult:
        if not self._by_model(data.style):
            return await self.function(data)
        score = await (self._ask_judge(data) if self.client is not None else self._ask_classifier(data))
        return {"reward_score": score, "reward_extra_info": {}}

    async def aclose(self) -> None:
        if self.client is not None:
            await self.client.aclose()
        if self._batches is not None:
            self._batches.cancel()
            await asyncio.gather(self._batches, return_exceptions=True)
            self._batches = None

    def _by_model(self, style: str) -> bool:
        return self.all_rows or style == "model"

    async def _ask_judge(self, data: RewardData) -> float:
        assert self.client is not None
        text = self.prompt
        for name, value in (
            ("{prompt}", data.prompt_str),
            ("{ground_truth}", str(data.ground_truth)),
            ("{solution}", data.solution_str),
        ):
            text = text.replace(name, value)
        body = {"model": self.judge, "temperature": 0.0, "messages": [{"role": "user", "content": text}]}
        answer = await self.client.post(body, task_id=data.task_id)
        said = str(answer["choices"][0]["message"]["content"])
        found = list(self.pattern.finditer(said))
        if not found:
            raise EnvError(
                f"the judge's answer has no score ({self.pattern.pattern}): {said[-300:]!r}",
                task_id=data.task_id,
                error_type="UnreadableJudgement",
            )
        return float(found[-1][1])

    async def _ask_classifier(self, data: RewardData) -> float:
        score: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._waiting.append(((data.prompt_str, data.solution_str), score))
        if self._batches is None or self._batches.done():
            self._batches = asyncio.create_task(self._run_batches())
        return await score

    async def _run_batches(self) -> None:
        """Score what waits, in batches, until nothing does; what arrives meanwhile is in the next batch."""
        while self._waiting:
            batch, self._waiting = self._waiting[: self.batch_size], self._waiting[self.batch_size :]
            open_ones = [(pair, score) for pair, score in batch if not score.done()]
            if not open_ones:
                continue
            waiting = [score for _, score in open_ones]
            try:
                with boundary(f"reward model {self.model!r}"):
                    values = await self._scores([pair for pair, _ in open_ones])
                    for score, value in zip(waiting, values, strict=True):
                        if not score.done():
                            score.set_result(value)
            except AgentGymError as error:
                for score in waiting:
                    if not score.done():
                        score.set_exception(error)
            finally:
                for score in waiting:
                    score.cancel()  # nothing, unless the task itself was cancelled

    async def _scores(self, pairs: Sequence[tuple[str, str]]) -> Sequence[float]:
        if self._classify is None:
            assert self.model is not None
            local = await asyncio.to_thread(RewardClassifier, 0, self.model, *self.classifier_options)

            async def classify(given: Sequence[tuple[str, str]]) -> Sequence[float]:
                return await asyncio.to_thread(local.score, given)

            self._classify = classify
        return await self._classify(pairs)


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"reward.options.pattern={pattern!r} is not a regular expression: {error}") from None
    if compiled.groups < 1:
        raise ConfigError(f"reward.options.pattern={pattern!r}: expected a group around the score")
    return compiled
