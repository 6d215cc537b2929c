"""Tool servers: tools with their sessions over HTTP, and the client that makes them look like local ones."""

from agentgym.tools.server.app import ToolServer
from agentgym.tools.server.remote import ServerEntry, remote_tools, tools_of_entry
from agentgym.tools.server.sessions import ServerLimits

__all__ = ["ServerEntry", "ServerLimits", "ToolServer", "remote_tools", "tools_of_entry"]
