"""Tool-call parsers by name: the text of a turn in, its content, calls and errors out."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from agentgym import plugins
from agentgym.registry import Registry

from .base import ParsedTurn, ToolParser, Tools

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["DEFAULT_PARSER", "ParsedTurn", "ToolParser", "Tools", "get_parser", "parsers", "register_tool_parser"]

DEFAULT_PARSER = "hermes"
_VLLM = "vllm:"

parsers: Registry[Callable[[], ToolParser]] = Registry("tool parser", before_lookup=plugins.scan)
"""Names to `ToolParser` classes (or anything that makes one without arguments)."""

for _name, _target in {
    "hermes": "hermes:HermesParser",
    "llama3_json": "llama3_json:Llama3JsonParser",
    "qwen3_xml": "qwen3_xml:Qwen3XmlParser",
    "mistral": "mistral:MistralParser",
    "pythonic": "pythonic:PythonicParser",
}.items():
    parsers.register(_name, f"{__name__}.{_target}")


def get_parser(name: str = DEFAULT_PARSER, *, tokenizer: PreTrainedTokenizerBase | None = None) -> ToolParser:
    """The parser of the model's tool format.

    Args:
        name: a registered name, or ``vllm:NAME`` for one of vLLM's.
        tokenizer: of the model; only vLLM's parsers need it.

    Raises `UnknownName` with the nearest known name, `ConfigError` where vLLM is asked for and not installed.
    """
    if name.startswith(_VLLM):
        from .vllm import VllmParser

        return VllmParser(name.removeprefix(_VLLM), tokenizer)
    return parsers.get(name)()


def register_tool_parser(
    name: str, *, override: bool = False
) -> Callable[[Callable[[], ToolParser]], Callable[[], ToolParser]]:
    """``@register_tool_parser("my_format")`` on a `ToolParser` class."""
    return parsers.decorator(name, override=override)
