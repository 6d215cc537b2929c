"""The tree of errors and the boundary that classifies foreign ones."""

from __future__ import annotations

import asyncio
import errno
import http.client
import inspect
import pickle
import socket
import types
import urllib.error

import aiohttp
import gymnasium.error
import pytest

from agentgym import errors
from agentgym.errors import (
    AgentGymError,
    ConfigError,
    EnvError,
    InfraError,
    PluginError,
    RegistrationError,
    ResetNeeded,
    SessionClosed,
    SessionError,
    SessionTimeout,
    TokenAlignmentError,
    ToolError,
    UnknownName,
    UnknownVersion,
    boundary,
    did_you_mean,
)

CLASSES = [cls for _, cls in inspect.getmembers(errors, inspect.isclass) if issubclass(cls, AgentGymError)]


def test_the_list_of_classes_is_complete() -> None:
    assert {cls.__name__ for cls in CLASSES} == {
        "AgentGymError",
        "ConfigError",
        "EnvError",
        "InfraError",
        "PluginError",
        "RegistrationError",
        "ResetNeeded",
        "SessionClosed",
        "SessionError",
        "SessionTimeout",
        "TokenAlignmentError",
        "ToolError",
        "UnknownName",
        "UnknownVersion",
    }


@pytest.mark.parametrize("cls", CLASSES)
def test_every_error_survives_pickling_with_all_its_attributes(cls: type[AgentGymError]) -> None:
    error = cls("value 3; expected 4; do this")
    error.add_note("seen on rank 1")
    error.extra = {"a": [1]}  # type: ignore[attr-defined]
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is cls
    assert str(again) == "value 3; expected 4; do this"
    assert vars(again) == vars(error)
    assert again.__notes__ == ["seen on rank 1"]


def test_the_attributes_of_an_environments_error_survive_pickling() -> None:
    error = EnvError("broken", task_id="train-17", error_type="KeyError", traceback_text="Traceback ...")
    again = pickle.loads(pickle.dumps(error))
    assert (again.task_id, again.error_type, again.traceback_text) == ("train-17", "KeyError", "Traceback ...")
    assert pickle.loads(pickle.dumps(RegistrationError("twice", name="x"))).name == "x"


@pytest.mark.parametrize(
    ("cls", "bases"),
    [
        (ConfigError, [ValueError]),
        (RegistrationError, [gymnasium.error.RegistrationError, gymnasium.error.Error]),
        (UnknownName, [gymnasium.error.NameNotFound, gymnasium.error.UnregisteredEnv, ConfigError, RegistrationError]),
        (UnknownVersion, [gymnasium.error.VersionNotFound, UnknownName]),
        (PluginError, [RegistrationError, ConfigError]),
        (ResetNeeded, [gymnasium.error.ResetNeeded, SessionError]),
        (SessionClosed, [gymnasium.error.ClosedEnvironmentError, SessionError]),
        (SessionTimeout, [SessionError]),
    ],
)
def test_errors_are_caught_by_what_callers_know(cls: type[AgentGymError], bases: list[type[Exception]]) -> None:
    for base in bases:
        with pytest.raises(base):
            raise cls("x")


def third_party(package: str, name: str) -> Exception:
    """An error like that of a package which need not be installed."""
    cls = type(name, (Exception,), {"__module__": f"{package}._exceptions"})
    error: Exception = type("Derived", (cls,), {"__module__": "somewhere.else"})("gone")
    return error


@pytest.mark.parametrize(
    "error",
    [
        ConnectionError("x"),
        ConnectionResetError("x"),
        ConnectionRefusedError("x"),
        BrokenPipeError("x"),
        TimeoutError("x"),
        socket.gaierror(-2, "Name or service not known"),
        OSError(errno.EHOSTUNREACH, "No route to host"),
        OSError(errno.ENETUNREACH, "Network is unreachable"),
        http.client.RemoteDisconnected("x"),
        urllib.error.URLError("refused"),
        aiohttp.ServerDisconnectedError(),
        aiohttp.ClientOSError("x"),
        third_party("httpx", "TransportError"),
        third_party("requests", "ConnectionError"),
        third_party("openai", "APIConnectionError"),
        third_party("docker", "DockerException"),
        ExceptionGroup("several", [ConnectionResetError("x"), InfraError("y")]),
    ],
    ids=lambda error: type(error).__mro__[1].__name__ if type(error).__name__ == "Derived" else type(error).__name__,
)
def test_lost_connections_are_infrastructure(error: Exception) -> None:
    with pytest.raises(InfraError, match=type(error).__name__) as caught, boundary("step of 'x'", task_id="t1"):
        raise error
    assert caught.value.__cause__ is error
    assert "step of 'x' (task t1) lost its connection" in str(caught.value)


@pytest.mark.parametrize(
    "error",
    [
        ValueError("x"),
        KeyError("x"),
        AssertionError("x"),
        StopIteration("x"),
        RecursionError("x"),
        MemoryError("x"),
        FileNotFoundError(errno.ENOENT, "x"),
        OSError(errno.ENOSPC, "disk full"),
        NotImplementedError("x"),
        third_party("mypackage", "TransportError"),
        ExceptionGroup("several", [ConnectionResetError("x"), ValueError("y")]),
    ],
    ids=lambda error: type(error).__name__,
)
def test_everything_else_is_a_fault_of_the_environment(error: Exception) -> None:
    with pytest.raises(EnvError) as caught, boundary("step of 'x'", task_id="train-17"):
        raise error
    assert caught.value.error_type == type(error).__name__
    assert caught.value.task_id == "train-17"
    assert "raise error" in caught.value.traceback_text
    assert caught.value.__cause__ is error
    assert f"step of 'x' (task train-17) raised {type(error).__name__}" in str(caught.value)


@pytest.mark.parametrize(
    "error", [ToolError("x"), InfraError("x"), ConfigError("x"), SessionTimeout("x"), TokenAlignmentError("x")]
)
def test_own_errors_pass_unchanged(error: AgentGymError) -> None:
    with pytest.raises(type(error)) as caught, boundary("step"):
        raise error
    assert caught.value is error


def test_the_task_is_noted_on_an_error_that_does_not_know_it_yet() -> None:
    with pytest.raises(EnvError) as caught, boundary("outer", task_id="outer-task"), boundary("inner"):
        raise ValueError("x")
    assert caught.value.task_id == "outer-task"
    assert str(caught.value) == "inner raised ValueError: x"
    with pytest.raises(EnvError) as caught, boundary("outer", task_id="b"):
        raise EnvError("x", task_id="a")
    assert caught.value.task_id == "a"


@pytest.mark.parametrize("error", [asyncio.CancelledError(), KeyboardInterrupt(), SystemExit(2), GeneratorExit()])
def test_cancellation_and_the_like_pass_unchanged(error: BaseException) -> None:
    with pytest.raises(type(error)) as caught, boundary("step"):
        raise error
    assert caught.value is error


async def test_the_boundary_works_around_awaited_code() -> None:
    async def fail() -> None:
        await asyncio.sleep(0)
        raise LookupError("nothing")

    with pytest.raises(EnvError, match="LookupError: nothing"), boundary("score"):
        await fail()


def test_a_classified_error_survives_pickling_without_its_cause() -> None:
    local = types.new_class("Local", (Exception,))  # cannot be pickled itself
    with pytest.raises(EnvError) as caught, boundary("tool"):
        raise local("x")
    assert pickle.loads(pickle.dumps(caught.value)).error_type == "Local"


@pytest.mark.parametrize(
    ("name", "known", "expected"),
    [
        ("calculator-maths", ["calculator-math", "twenty-questions"], " Did you mean 'calculator-math'?"),
        ("zzz", ["calculator-math"], ""),
        ("x", [], ""),
    ],
)
def test_did_you_mean_names_the_nearest(name: str, known: list[str], expected: str) -> None:
    assert did_you_mean(name, known) == expected
