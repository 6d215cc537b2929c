"""The command line: ``agentgym``. Commands are thin functions in `agentgym.cli.app`; heavy imports happen inside."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Entry point of the ``agentgym`` script.

    Exit codes: 0 done, 1 failed, 2 wrong input (nothing has started), 130 interrupted.
    """
    # A user's own modules are found from where the command is typed, after everything that is installed.
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run one command line and return its exit code; errors of agentgym become short messages on standard error."""
    from agentgym.cli.app import app
    from agentgym.errors import AgentGymError, ConfigError, EnvError, RegistrationError

    try:
        app(arguments, prog_name="agentgym")
    except SystemExit as done:
        return done.code if isinstance(done.code, int) else 0
    except (ConfigError, RegistrationError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except AgentGymError as error:
        trace = error.traceback_text if isinstance(error, EnvError) else ""
        print(f"{trace}error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0
