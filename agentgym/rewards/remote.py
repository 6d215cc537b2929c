"""``reward.manager=remote``: a scoring service over HTTP."""

from __future__ import annotations

from collections.abc import Mapping

from agentgym.errors import ConfigError
from agentgym.rewards.base import RewardData, RewardManager, RewardResult
from agentgym.rewards.functions import ScoreFunction, arguments_of, read_score
from agentgym.rewards.http import JsonClient


class RemoteManager(RewardManager):
    """Posts ``{"data_source", "solution_str", "ground_truth", "extra_info"}`` and reads a number or ``{"score": ...}``.

    A service that is not reached after all tries makes the rollout a ``failed_infra``, a request that it refuses a
    ``failed_env`` of type ``RemoteScorerError``.

    Args:
        function: none; the service scores.
        url: of the service.
        headers: of every request, e.g. for a token.
        max_concurrency, requests_per_second, retries, timeout: see `JsonClient`.
    """

    def __init__(
        self,
        function: ScoreFunction,
        *,
        url: str,
        headers: Mapping[str, str] | None = None,
        max_concurrency: int = 16,
        requests_per_second: float | None = None,
        retries: int = 3,
        timeout: float = 60.0,
    ) -> None:
        super().__init__(function)
        if not function.own:
            raise ConfigError(f"reward.manager=remote scores at {url}; leave out reward.path={function.path}")
        self.client = JsonClient(
            url,
            headers=headers,
            max_concurrency=max_concurrency,
            requests_per_second=requests_per_second,
            retries=retries,
            timeout=timeout,
        )

    def uses_env_score(self, style: str) -> bool:
        return False

    async def run_single(self, data: RewardData) -> RewardResult:
        return read_score(await self.client.post(arguments_of(data), task_id=data.task_id))

    async def aclose(self) -> None:
        await self.client.aclose()
