from __future__ import annotations

import importlib.util

import pytest

from agentgym.errors import ConfigError, UnknownName
from agentgym.tokens import ParsedTurn, ToolParser, get_parser, register_tool_parser
from agentgym.tokens.parsers import parsers
from agentgym.types import AssistantTurn


def test_hermes_is_the_default() -> None:
    assert type(get_parser()) is type(get_parser("hermes"))


def test_the_names_of_the_design_exist() -> None:
    assert {"hermes", "llama3_json", "qwen3_xml", "mistral", "pythonic"} <= set(parsers.names())


def test_an_unknown_name_gets_the_nearest_one() -> None:
    with pytest.raises(UnknownName, match="Did you mean 'hermes'"):
        get_parser("hermse")


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
def test_vllm_parsers_say_what_to_install() -> None:
    with pytest.raises(ConfigError, match=r"agentgym\[vllm\]"):
        get_parser("vllm:hermes")


def test_own_parsers_can_be_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parsers, "_entries", dict(parsers._entries))

    @register_tool_parser("shout")
    class Shout(ToolParser):
        def parse(self, text: str, tools: object = None) -> ParsedTurn:
            return ParsedTurn(content=text.upper())

        def render(self, turn: AssistantTurn) -> str:
            return turn.content

    assert get_parser("shout").parse("a").content == "A"
