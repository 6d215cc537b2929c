"""A model behind an OpenAI-compatible endpoint as an agent: retries, a limit of requests, streaming."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

from agentgym.errors import ConfigError, InfraError, boundary
from agentgym.messages import openai_messages, turn_from_openai
from agentgym.pace import Pace
from agentgym.session import Session
from agentgym.types import RolloutStatus

if TYPE_CHECKING:
    from agentgym.evaluation_config import EndpointConfig, EvalRolloutConfig
    from agentgym.tokens import ToolParser

NO_KEY = "none"
"""Sent where the environment has no key: local servers want a header, whatever stands in it."""


class EndpointRefused(ConfigError):
    """The endpoint refuses every request: wrong key, unknown model, wrong address. The evaluation stops."""


class EndpointAgent:
    """Plays sessions with a model behind an endpoint.

    Temporary failures (429, 5xx, timeouts, lost connections) are retried with growing pauses, or after what the server
    asks for; then the rollout has failed for reasons of infrastructure. A wrong key, model or address ends the
    evaluation at once with `EndpointRefused`.

    Args:
        model: the name the endpoint knows.
        settings: of the endpoint.
        rollout: sampling and limits. The budget counts what the endpoint says it wrote.
        parser: reads calls that stand in the text, for servers without a tool parser.
    """

    def __init__(
        self, model: str, settings: EndpointConfig, rollout: EvalRolloutConfig, parser: ToolParser | None
    ) -> None:
        import openai

        assert settings.url is not None
        self.model = model
        self.settings = settings
        self.rollout = rollout
        self.parser = parser
        per_minute = settings.requests_per_minute
        self._pace = Pace(None if per_minute is None else per_minute / 60)
        self._client = openai.AsyncOpenAI(
            base_url=base_url(settings.url),
            api_key=api_key(settings),
            max_retries=settings.max_retries,
            timeout=settings.timeout,
        )

    async def aclose(self) -> None:
        """Close the connections."""
        await self._client.close()

    async def play(self, session: Session, metrics: MutableMapping[str, float]) -> None:
        """Play the session to its end; ``metrics`` gets the tokens that the endpoint counted."""
        metrics.update(prompt_tokens=0.0, completion_tokens=0.0)
        with boundary(f"endpoint {self.settings.url}", task_id=None if session.task is None else session.task.id):
            await self._play(session, metrics)

    async def _play(self, session: Session, metrics: MutableMapping[str, float]) -> None:
        while not session.done:
            left = self.rollout.max_response_length - int(metrics["completion_tokens"])
            if left <= 0:
                await session.truncate(RolloutStatus.TRUNCATED_TOKENS)
                return
            reply = await session.guard(self._ask(session, left))
            if reply is None:
                await session.truncate(RolloutStatus.TRUNCATED_TOKENS)
                return
            choice = reply["choices"][0]
            usage = reply.get("usage") or {}
            for name in ("prompt_tokens", "completion_tokens"):
                metrics[name] += usage.get(name) or 0
            parser = self.parser if session.tools else None
            turn = turn_from_openai(
                choice["message"], finish_reason=choice.get("finish_reason") or "stop", parser=parser
            )
            await session.step(turn)

    async def _ask(self, session: Session, left: int) -> dict[str, Any] | None:
        """One completion; None where the conversation is longer than the model's context."""
        import openai

        await self._pace.wait()
        try:
            return await self._request(self._parameters(session, left))
        except (openai.AuthenticationError, openai.PermissionDeniedError, openai.NotFoundError) as error:
            raise EndpointRefused(
                f"endpoint={self.settings.url} model={self.model}: {_reason(error)}. Check the address (it usually "
                f"ends with /v1), the model's name and the key in the environment variable {self.settings.key_env}"
            ) from error
        except openai.BadRequestError as error:
            if _is_too_long(error):
                return None
            raise InfraError(f"the endpoint refused a request: {_reason(error)}") from error
        except openai.APIError as error:
            raise InfraError(
                f"the endpoint failed, also after {self.settings.max_retries} retries: {_reason(error)}"
            ) from error

    def _parameters(self, session: Session, left: int) -> dict[str, Any]:
        limit = left if self.rollout.max_turn_tokens is None else min(left, self.rollout.max_turn_tokens)
        parameters: dict[str, Any] = {
            "model": self.model,
            "messages": openai_messages(session.conversation),
            "temperature": self.rollout.temperature,
            self.settings.limit_key: limit,
            "extra_body": self.settings.extra_body,
        }
        if self.rollout.top_p < 1:
            parameters["top_p"] = self.rollout.top_p
        if session.tools:
            parameters["tools"] = session.tools
        return parameters

    async def _request(self, parameters: dict[str, Any]) -> dict[str, Any]:
        create: Any = self._client.chat.completions.create
        if self.settings.stream:
            reply = await self._stream(parameters)
        else:
            reply = (await create(**parameters)).model_dump(mode="json")
        if not reply.get("choices"):
            raise InfraError(f"the endpoint answered without a choice: {str(reply)[:200]}")
        return reply

    async def _stream(self, parameters: dict[str, Any]) -> dict[str, Any]:
        """An answer in pieces. The client retries what fails before the first piece; here what breaks after it."""
        import openai

        create: Any = self._client.chat.completions.create
        for left in range(self.settings.max_retries, -1, -1):
            stream = await create(**parameters, stream=True, stream_options={"include_usage": True})
            try:
                with boundary("the endpoint's stream"):
                    return await _collect(stream)
            except (InfraError, openai.APIConnectionError) as error:
                if not left:
                    raise InfraError(f"the endpoint's stream broke: {_reason(error)}") from error
        raise AssertionError("unreachable")


async def _collect(stream: Any) -> dict[str, Any]:
    """Put the chunks of a stream together to the message of a reply that was not streamed."""
    content: list[str] = []
    calls: dict[int, dict[str, Any]] = {}
    finish_reason: str | None = None
    usage: Mapping[str, Any] = {}
    async with stream:
        async for chunk in stream:
            if chunk.usage is not None:
                usage = chunk.usage.model_dump(mode="json")
            for choice in chunk.choices:
                finish_reason = choice.finish_reason or finish_reason
                content.append(choice.delta.content or "")
                for part in choice.delta.tool_calls or ():
                    call = calls.setdefault(part.index, {"id": "", "function": {"name": "", "arguments": ""}})
                    call["id"] = part.id or call["id"]
                    if part.function is not None:
                        call["function"]["name"] += part.function.name or ""
                        call["function"]["arguments"] += part.function.arguments or ""
    if finish_reason is None:
        raise InfraError("the endpoint's stream ended before the answer did")
    message = {"role": "assistant", "content": "".join(content), "tool_calls": [calls[i] for i in sorted(calls)]}
    return {"choices": [{"message": message, "finish_reason": finish_reason}], "usage": usage}


def base_url(url: str) -> str:
    """The address with a scheme."""
    return url if "://" in url else f"http://{url}"


def api_key(settings: EndpointConfig) -> str:
    """The key of the environment."""
    return os.environ.get(settings.key_env) or NO_KEY


def _reason(error: Any) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0][:300]}"


def _is_too_long(error: Any) -> bool:
    text = str(error).lower()
    return getattr(error, "code", None) == "context_length_exceeded" or "context length" in text
