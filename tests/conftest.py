"""What all tests need."""

from __future__ import annotations

import functools
import signal

import pytest

# A shell that starts the tests in the background makes them ignore Ctrl-C, and with them every process they start.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What takes minutes runs only when it is asked for."""
    if "slow" not in config.option.markexpr:
        for item in items:
            if item.get_closest_marker("slow") is not None:
                item.add_marker(pytest.mark.skip(reason="takes minutes: run with -m slow"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """What needs a Docker daemon is skipped where there is none."""
    if item.get_closest_marker("docker") is not None and (reason := _docker_is_missing()) is not None:
        pytest.skip(reason)


@functools.cache
def _docker_is_missing() -> str | None:
    from agentgym.tools.sandbox.docker import DockerBackend

    return DockerBackend().unavailable()
