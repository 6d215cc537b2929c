"""Requests to a scoring service: limited in rate and number, repeated where the service was not reached."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from agentgym.errors import ConfigError, EnvError, InfraError
from agentgym.pace import Pace

if TYPE_CHECKING:
    import aiohttp

BUSY = frozenset({408, 425, 429, 500, 502, 503, 504})
"""HTTP statuses that are worth another try."""


class JsonClient:
    """Posts JSON and gives back the JSON that answers.

    Args:
        url: of the service.
        headers: of every request.
        max_concurrency: requests at the same time.
        requests_per_second: at most; None: no limit.
        retries: further tries after a lost connection, a timeout or a busy service.
        timeout: seconds for one try.
    """

    def __init__(
        self,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        max_concurrency: int = 16,
        requests_per_second: float | None = None,
        retries: int = 3,
        timeout: float = 60.0,
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"reward.options: {url!r} is not an address; expected http://... or https://...")
        if max_concurrency < 1 or retries < 0 or timeout <= 0 or (requests_per_second or 1.0) <= 0:
            raise ConfigError(
                f"reward.options: max_concurrency={max_concurrency}, retries={retries}, timeout={timeout}, "
                f"requests_per_second={requests_per_second}: expected at least 1, 0 or more, and numbers above 0"
            )
        self.url = url
        self.headers = dict(headers or {})
        self.retries = retries
        self.timeout = timeout
        self._pace = Pace(requests_per_second)
        self._places = asyncio.Semaphore(max_concurrency)
        self._session: aiohttp.ClientSession | None = None

    async def post(self, body: Mapping[str, Any], *, task_id: str) -> Any:
        """The answer to one request.

        Raises:
            InfraError: the service was not reached, also at the last try.
            EnvError: it refused the request.
        """
        reason = ""
        for attempt in range(self.retries + 1):
            if attempt:
                await asyncio.sleep(min(0.25 * 2**attempt, 10.0) * random.uniform(0.5, 1.0))
            async with self._places:
                await self._pace.wait()
                status, answer = await self._try(body)
            if status == 200:
                return answer
            reason = f"HTTP {status}: {answer}" if status else str(answer)
            if status and status not in BUSY:
                raise EnvError(f"{self.url} refused: {reason}", task_id=task_id, error_type="RemoteScorerError")
        raise InfraError(f"{self.url} was not reached in {self.retries + 1} tries: {reason}")

    async def aclose(self) -> None:
        """Close the connections. Idempotent."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _try(self, body: Mapping[str, Any]) -> tuple[int, Any]:
        """HTTP status and answer; status 0 and a reason where there was no answer."""
        import aiohttp

        if self._session is None:
            self._session = aiohttp.ClientSession(
                headers=self.headers, timeout=aiohttp.ClientTimeout(total=self.timeout)
            )
        try:
            async with self._session.post(self.url, json=dict(body)) as response:
                if response.status != 200:
                    return response.status, (await response.text())[:500]
                return 200, await response.json(content_type=None)
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, TimeoutError) as error:
            return 0, f"{type(error).__name__}: {error}"
