"""vLLM's own tool parsers behind agentgym's contract, where vLLM is installed: ``vllm:NAME``."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from agentgym.errors import AgentGymError, ConfigError, UnknownName, boundary, did_you_mean
from agentgym.types import AssistantTurn, ParseError, ToolCall

from .base import ParsedTurn, ToolParser, Tools, join, split_thinking
from .json_calls import to_call

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class VllmParser(ToolParser):
    """One of vLLM's parsers. It needs the model's tokenizer; a fault inside it is a `ParseError`, never raised.

    It sees the text without its thinking blocks. Most of vLLM's parsers take a malformed call for plain content, so
    that it ends the episode like an answer; agentgym's own parsers report it.

    Raises `ConfigError` where vLLM or the tokenizer is missing, `UnknownName` where vLLM has no parser of the name.
    """

    def __init__(self, name: str, tokenizer: PreTrainedTokenizerBase | None) -> None:
        try:
            protocol = importlib.import_module("vllm.entrypoints.openai.chat_completion.protocol")
            manager: Any = importlib.import_module("vllm.tool_parsers").ToolParserManager
        except ImportError as error:
            raise ConfigError(
                f"parser 'vllm:{name}' needs vLLM, which cannot be imported ({error}). Install the extra: "
                f"pip install 'agentgym[vllm]', or choose one of agentgym's own parsers."
            ) from error
        if tokenizer is None:
            raise ConfigError(
                f"parser 'vllm:{name}' needs the tokenizer: get_parser('vllm:{name}', tokenizer=tokenizer)"
            )
        known = manager.list_registered()
        if name not in known:
            raise UnknownName(f"vLLM has no parser {name!r}.{did_you_mean(name, known)} Known: {', '.join(known)}")
        self._name = name
        self._tokenizer = tokenizer
        self._request: Any = protocol.ChatCompletionRequest
        self._parser: Any = manager.get_tool_parser(name)

    def parse(self, text: str, tools: Tools | None = None) -> ParsedTurn:
        thinking, answer = split_thinking(text)
        try:
            with boundary(f"vLLM's parser {self._name!r}"):
                request = self._request(messages=[], model="", tools=list(tools) if tools else None)
                # Its parsers keep state while they stream, so each text gets a new one.
                found = self._parser(self._tokenizer, request.tools).extract_tool_calls(answer, request)
        except AgentGymError as error:
            return ParsedTurn(content=text, errors=(ParseError(message=str(error), raw=text),))
        if not found.tools_called:
            return ParsedTurn(content=text)
        read = [
            to_call({"name": call.function.name, "arguments": call.function.arguments}, call.function.arguments)
            for call in found.tool_calls
        ]
        return ParsedTurn(
            content=join(thinking.strip(), (found.content or "").strip()),
            tool_calls=tuple(item for item in read if isinstance(item, ToolCall)),
            errors=tuple(item for item in read if isinstance(item, ParseError)),
        )

    def render(self, turn: AssistantTurn) -> str:
        raise ConfigError(
            f"vLLM's parser {self._name!r} reads tool calls but cannot write them; use one of agentgym's own"
        )
