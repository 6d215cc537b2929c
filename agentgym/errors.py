"""Every error agentgym raises, and the one helper that classifies foreign ones.

    AgentGymError
    ├── ConfigError                  a wrong key, value or name; nothing has started
    ├── RegistrationError            registry faults              (gymnasium.error.RegistrationError)
    │   ├── UnknownName              nothing of that name         (gymnasium.error.NameNotFound)
    │   │   └── UnknownVersion       only other versions          (gymnasium.error.VersionNotFound)
    │   └── PluginError              a plugin failed to import
    ├── ToolError                    its text is the tool's answer to the model
    ├── EnvError                     a fault in the code of an environment, tool or scorer
    ├── InfraError                   sandbox, server, engine or remote scorer lost: retried, counted
    ├── SessionError                 misuse of a session or an environment's lifecycle
    │   ├── ResetNeeded              step before reset or after the end (gymnasium.error.ResetNeeded)
    │   ├── SessionClosed            use after close   (gymnasium.error.ClosedEnvironmentError)
    │   └── SessionTimeout           the session's wall clock ran out
    └── TokenAlignmentError          ids, mask or log-probs do not line up

All survive pickling (Ray sends them between processes): the message is the only positional argument,
everything else is an attribute.
"""

from __future__ import annotations

import difflib
import errno
import socket
import traceback
import urllib.error
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import gymnasium.error


class AgentGymError(Exception):
    """Base of all errors of agentgym."""


class ConfigError(AgentGymError, ValueError):
    """A wrong key, value or name, found before anything started. The CLI prints it and exits with code 2."""


class RegistrationError(AgentGymError, gymnasium.error.RegistrationError):
    """A name is registered twice with different targets, or a spec is invalid.

    Attributes:
        name: the name that two registrations claim; None for other faults.
    """

    def __init__(self, message: str, *, name: str | None = None) -> None:
        super().__init__(message)
        self.name = name


class UnknownName(RegistrationError, gymnasium.error.NameNotFound, ConfigError):
    """Nothing is registered under the name."""


class UnknownVersion(UnknownName, gymnasium.error.VersionNotFound):
    """The name is registered, but not in this version."""


class PluginError(RegistrationError, ConfigError):
    """A plugin could not be imported; the original error is the cause."""


class ToolError(AgentGymError):
    """Raise it in a tool to tell the model what went wrong: the text becomes the tool's answer."""


class EnvError(AgentGymError):
    """A fault in the code of an environment, tool or scorer.

    Attributes:
        task_id: the task that was played, if known.
        error_type: class name of the original exception.
        traceback_text: the original traceback as text (tracebacks do not survive pickling).
    """

    def __init__(
        self, message: str, *, task_id: str | None = None, error_type: str = "EnvError", traceback_text: str = ""
    ) -> None:
        super().__init__(message)
        self.task_id = task_id
        self.error_type = error_type
        self.traceback_text = traceback_text


class InfraError(AgentGymError):
    """Something outside the environment's own logic was lost: sandbox, server, engine, remote scorer."""


class SessionError(AgentGymError):
    """A session or an environment was used against its lifecycle."""


class ResetNeeded(SessionError, gymnasium.error.ResetNeeded):
    """``step`` was called before ``reset`` or after the episode ended."""


class SessionClosed(SessionError, gymnasium.error.ClosedEnvironmentError):
    """A closed session or environment was used."""


class SessionTimeout(SessionError):
    """The wall clock of the whole session ran out."""


class TokenAlignmentError(AgentGymError):
    """Token ids, response mask and log-probs do not line up."""


@contextmanager
def boundary(what: str, *, task_id: str | None = None) -> Iterator[None]:
    """Classify what foreign code raises; the only place that catches ``Exception``.

    agentgym's own errors pass unchanged; a lost connection or a wait that timed out, of the standard library or of the
    usual HTTP clients, becomes an `InfraError`; anything else an `EnvError` that carries the original traceback as
    text. Cancellation and other ``BaseException`` pass unchanged. Works around awaited code as well.

    Args:
        what: the foreign code, for the message, e.g. ``"step of environment 'x'"``.
        task_id: the task being played, if known.
    """
    try:
        yield
    except AgentGymError as error:
        if isinstance(error, EnvError) and error.task_id is None:
            error.task_id = task_id
        raise
    except Exception as error:
        where = f" (task {task_id})" if task_id is not None else ""
        if _is_lost_connection(error):
            raise InfraError(f"{what}{where} lost its connection: {type(error).__name__}: {error}") from error
        raise EnvError(
            f"{what}{where} raised {type(error).__name__}: {error}",
            task_id=task_id,
            error_type=type(error).__name__,
            traceback_text=traceback.format_exc(),
        ) from error


_LOST = {
    ("aiohttp", "ClientConnectionError"),
    ("docker", "DockerException"),
    ("grpc", "RpcError"),
    ("httpcore", "NetworkError"),
    ("httpcore", "TimeoutException"),
    ("httpx", "TransportError"),
    ("openai", "APIConnectionError"),
    ("ray", "RayActorError"),
    ("requests", "ConnectionError"),
    ("requests", "Timeout"),
    ("urllib3", "HTTPError"),
    ("websockets", "ConnectionClosed"),
}
"""(package, class) of errors that mean a lost connection, by name: none of these packages is imported for it."""


_UNREACHABLE = {errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETUNREACH}


def _is_lost_connection(error: Exception) -> bool:
    if isinstance(error, ExceptionGroup):
        return all(_is_lost_connection(inner) for inner in error.exceptions)
    if isinstance(error, ConnectionError | TimeoutError | socket.gaierror | InfraError):
        return True
    if isinstance(error, OSError) and error.errno in _UNREACHABLE:
        return True
    if isinstance(error, urllib.error.URLError) and not isinstance(error, urllib.error.HTTPError):
        return True
    return any((base.__module__.partition(".")[0], base.__name__) in _LOST for base in type(error).__mro__)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """``" Did you mean 'x'?"`` with the nearest of the known names, or an empty string.

    A name of the same letters comes first: two letters swapped is the commonest slip.
    """
    names = list(known)
    swapped = [other for other in names if sorted(other) == sorted(name)]
    near = difflib.get_close_matches(name, swapped or names, n=1, cutoff=0.5)
    return f" Did you mean {near[0]!r}?" if near else ""
