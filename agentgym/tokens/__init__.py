"""From messages to exact token sequences and back: parsers, the renderer, the token records."""

from agentgym.tokens.audit import Finding
from agentgym.tokens.output import AgentLoopOutput, Span, SpanKind
from agentgym.tokens.parsers import ParsedTurn, ToolParser, get_parser, register_tool_parser
from agentgym.tokens.renderer import Increment, Renderer

__all__ = [
    "AgentLoopOutput",
    "Finding",
    "Increment",
    "ParsedTurn",
    "Renderer",
    "Span",
    "SpanKind",
    "ToolParser",
    "get_parser",
    "register_tool_parser",
]
