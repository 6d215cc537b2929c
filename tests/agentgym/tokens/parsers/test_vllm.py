from __future__ import annotations

from typing import Any

import pytest

from agentgym.errors import ConfigError, UnknownName
from agentgym.tokens import get_parser
from agentgym.types import AssistantTurn, ToolCall

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("default")]  # those of vLLM are its own

CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "6*7"}}\n</tool_call>'
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "calculator", "parameters": {"type": "object"}}}


def test_a_parser_of_vllm_reads_calls(tokenizers: dict[str, Any]) -> None:
    pytest.importorskip("vllm")
    parser = get_parser("vllm:hermes", tokenizer=tokenizers["chatml"])
    turn = parser.parse(f"Let me see.\n{CALL}", [TOOL])
    assert turn.tool_calls == (ToolCall(name="calculator", arguments={"expression": "6*7"}),)
    assert (turn.content, turn.errors) == ("Let me see.", ())
    assert parser.parse("42").content == "42"


def test_drafts_are_not_calls(tokenizers: dict[str, Any]) -> None:  # A4
    pytest.importorskip("vllm")
    parser = get_parser("vllm:hermes", tokenizer=tokenizers["chatml"])
    draft = CALL.replace("6*7", "1/0")
    turn = parser.parse(f"<think>maybe {draft}</think>\n{CALL}")
    assert [call.arguments for call in turn.tool_calls] == [{"expression": "6*7"}]
    assert parser.parse(f"maybe {draft}</think> no").tool_calls == ()


def test_what_is_missing_is_named(tokenizers: dict[str, Any]) -> None:
    pytest.importorskip("vllm")
    with pytest.raises(ConfigError, match="needs the tokenizer"):
        get_parser("vllm:hermes")
    with pytest.raises(UnknownName, match="Did you mean 'hermes'"):
        get_parser("vllm:hermse", tokenizer=tokenizers["chatml"])
    with pytest.raises(ConfigError, match="cannot write"):
        get_parser("vllm:hermes", tokenizer=tokenizers["chatml"]).render(AssistantTurn(content="x"))
