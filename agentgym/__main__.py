"""``python -m agentgym`` is the command ``agentgym``."""

from agentgym.cli import main

main()
