"""What all tests need."""

from __future__ import annotations

import functools
import signal

import pytest

# A shell that starts the tests in the background makes them ignore Ctrl-C, and with them every process they start.
signal.signal(signal.SIGINT, signal.default_int_handler)


ON_REQUEST = {"slow": "takes minutes", "docker": "starts containers"}
"""Marks of tests that run only when ``-m`` names them, and why."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what runs only when it is asked for."""
    for mark, why in ON_REQUEST.items():
        if mark not in config.option.markexpr:
            for item in items:
                if item.get_closest_marker(mark) is not None:
                    item.add_marker(pytest.mark.skip(reason=f"{why}: run with -m {mark}"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """What needs a Docker daemon is skipped where there is none."""
    if item.get_closest_marker("docker") is not None and (reason := _docker_is_missing()) is not None:
        pytest.skip(reason)


@functools.cache
def _docker_is_missing() -> str | None:
    from agentgym.tools.sandbox.docker import DockerBackend

    return DockerBackend().unavailable()
