"""Agent loops: they drive a session with a token generator and write down exact token sequences."""

from agentgym.loops.base import AgentLoop, LoopSampling, Trace, agent_loops, make_agent_loop, register_agent_loop
from agentgym.loops.external import ExternalLoop
from agentgym.loops.single_turn import SingleTurnLoop
from agentgym.loops.tool_agent import ToolAgentLoop

__all__ = [
    "AgentLoop",
    "ExternalLoop",
    "LoopSampling",
    "SingleTurnLoop",
    "ToolAgentLoop",
    "Trace",
    "agent_loops",
    "make_agent_loop",
    "register_agent_loop",
]
