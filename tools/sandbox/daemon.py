"""The Docker daemon by blocking calls, each for a thread. All errors are agentgym's."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeVar

from agentgym.errors import AgentGymError, ConfigError, InfraError
from agentgym.tools.sandbox.image import DEFAULT_IMAGE, build_image

if TYPE_CHECKING:
    import docker

logger = logging.getLogger(__name__)

T = TypeVar("T")

REMEDY = "Start it (as root: dockerd), or choose another backend: sandbox=namespace"

_THREADS = 4
"""Containers that are started or removed at the same time: more only make each slower."""

_CALL_TIMEOUT = 60.0
"""Seconds without an answer after which the daemon counts as lost."""

_REMOVE_ATTEMPTS = 3
_BAD_REQUEST, _CONFLICT = 400, 409
_KILLED = 128 + 9


class Daemon:
    """A connection to the daemon that the environment names (``DOCKER_HOST``), made at its first use."""

    def __init__(self) -> None:
        self._client: docker.DockerClient | None = None
        self._lock = threading.Lock()
        self._building = threading.Lock()
        self._threads: ThreadPoolExecutor | None = None
        self._kept: set[str] = set()
        """Containers whose removal has begun and not succeeded."""

    @property
    def client(self) -> docker.DockerClient:
        """The client, connected at its first use. Raises what the ``docker`` package raises."""
        import docker

        with self._lock:
            if self._client is None:
                _try_socket()
                self._client = docker.from_env(timeout=_CALL_TIMEOUT)
            return self._client

    def submit(self, call: Callable[..., T], *args: Any) -> asyncio.Future[T]:
        """Run a blocking call on one of a few threads."""
        with self._lock:
            if self._threads is None:
                self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="agentgym-docker")
        return asyncio.get_running_loop().run_in_executor(self._threads, call, *args)

    def close(self) -> None:
        """Let threads and connections go; a later call makes new ones."""
        with self._lock:
            client, threads, self._client, self._threads = self._client, self._threads, None, None
        if threads is not None:
            threads.shutdown()
        if client is not None:
            client.close()

    def ping(self) -> None:
        """Raise `InfraError` if the daemon does not answer."""
        with _daemon_errors("the Docker daemon does not answer"):
            self.client.ping()

    def unavailable(self) -> str | None:
        """Why there is no daemon to talk to; None if there is."""
        try:
            self.ping()
        except AgentGymError as error:
            return str(error)
        return None

    def start(self, name: str, options: Callable[[Any], dict[str, Any]], stop: threading.Event) -> socket.socket:
        """Create, attach and start a container; one that does not get so far is removed.

        Args:
            name: of the container, not used before.
            options: makes the arguments of ``create_container``, given a ``docker.APIClient``.
            stop: set by someone who does not want the container any more.

        Returns:
            The attached connection, of which the caller is the only holder.
        """
        try:
            with _daemon_errors(f"container {name} did not start"):
                self._create(options(self.client.api))
                _continue_unless(stop, name)
                connection = self._attach(name)
                try:
                    self.client.api.start(name)
                    _continue_unless(stop, name)
                except BaseException:
                    connection.close()
                    raise
                return connection
        except BaseException:
            with suppress(InfraError):  # the daemon is lost: the labels tell the reaper whose it is
                self.remove(name)
            raise

    def remove(self, name: str) -> None:
        """Kill and delete a container. Returns when it is gone; also if it never was.

        Raises:
            InfraError: it may still be there.
        """
        with self._lock:
            self._kept.add(name)
        for attempt in range(_REMOVE_ATTEMPTS):
            try:
                with _daemon_errors(f"container {name} cannot be removed"):
                    if self._removed(name):
                        with self._lock:
                            self._kept.discard(name)
                        return
            except InfraError:
                if attempt == _REMOVE_ATTEMPTS - 1:
                    raise
        raise InfraError(f"container {name} is still there after {_REMOVE_ATTEMPTS} attempts to remove it")

    def sweep(self) -> None:
        """`remove` what an earlier one left. Raises `InfraError` for the first that is still there."""
        with self._lock:
            kept = list(self._kept)
        failures: list[InfraError] = []
        for name in kept:
            try:
                self.remove(name)
            except InfraError as error:
                failures.append(error)
        if failures:
            raise failures[0]

    def labelled(self, key: str) -> dict[str, dict[str, str]]:
        """Id and labels of every container, running or not, that has the label. Raises `InfraError`."""
        with _daemon_errors("containers cannot be listed"):
            found = self.client.api.containers(all=True, filters={"label": key})
        return {container["Id"]: dict(container["Labels"]) for container in found}

    def first_process(self, name: str) -> int:
        """Id, on the daemon's machine, of a container's first process. Raises `InfraError`."""
        with _daemon_errors(f"container {name} cannot be looked at"):
            return int(self.client.api.inspect_container(name)["State"]["Pid"])

    def fault_of_the_host(self, name: str) -> InfraError | None:
        """Why the worker's stream ended, if neither the worker nor the code inside can have done that."""
        from docker.errors import NotFound

        try:
            with _daemon_errors("the Docker daemon was lost"):
                try:
                    state = self.client.api.inspect_container(name)["State"]
                except NotFound:
                    return InfraError(f"container {name} was removed from outside")
        except InfraError as error:
            return error
        if state["Running"] or state["OOMKilled"] or state["ExitCode"] != _KILLED:
            return None
        return InfraError(f"container {name} was killed from outside")

    def _create(self, options: dict[str, Any]) -> None:
        from docker.errors import ImageNotFound

        image = options["image"]
        try:
            self.client.api.create_container(**options)
        except ImageNotFound:
            if image != DEFAULT_IMAGE:
                raise ConfigError(
                    f"Docker has no image {image!r}. Pull it (docker pull {image}), or name none: then the one of "
                    "agentgym sandbox build is used"
                ) from None
            with self._building:
                self._build_default()
            self.client.api.create_container(**options)

    def _build_default(self) -> None:
        from docker.errors import ImageNotFound

        try:
            self.client.images.get(DEFAULT_IMAGE)
        except ImageNotFound:
            logger.info("making the sandbox image %s from this machine's own programs", DEFAULT_IMAGE)
            build_image(self.client, "host")

    def _attach(self, name: str) -> socket.socket:
        raw = self.client.api.attach_socket(name, {"stdin": 1, "stdout": 1, "stderr": 1, "stream": 1})
        try:
            connection = getattr(raw, "_sock", raw)
            if not isinstance(connection, socket.socket) or isinstance(connection, ssl.SSLSocket):
                raise ConfigError(
                    f"DOCKER_HOST {self.client.api.base_url}: sandboxes need a unix socket or plain TCP. "
                    "Forward the daemon's socket, e.g. ssh -L /tmp/docker.sock:/var/run/docker.sock HOST"
                )
            return connection.dup()
        finally:
            response = getattr(raw, "_response", None)
            if response is not None:
                response.close()
            raw.close()

    def _removed(self, name: str) -> bool:
        from docker.errors import APIError, NotFound

        try:
            self.client.api.remove_container(name, v=True, force=True)
        except NotFound:
            return True
        except APIError as error:
            if error.status_code != _CONFLICT:
                raise
            with suppress(NotFound):  # somebody else is removing it
                self.client.api.wait(name, timeout=_CALL_TIMEOUT, condition="removed")
        try:
            self.client.api.inspect_container(name)
        except NotFound:
            return True
        return False


def _try_socket() -> None:
    """Raise `OSError` if nobody listens at the daemon's socket, in clearer words than the ``docker`` package has."""
    from docker.utils import parse_host

    kind, _, path = parse_host(os.environ.get("DOCKER_HOST")).partition("://")
    if kind == "http+unix":
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(f"/{path.lstrip('/')}")
            except OSError as error:
                raise OSError(error.errno, f"{error.strerror}: {path}") from error


def _continue_unless(stop: threading.Event, name: str) -> None:
    if stop.is_set():
        raise InfraError(f"container {name} is not wanted any more")


@contextmanager
def _daemon_errors(what: str) -> Iterator[None]:
    """What the ``docker`` package raises, as agentgym's errors."""
    from docker.errors import APIError, DockerException
    from requests.exceptions import RequestException

    try:
        yield
    except APIError as error:
        if error.status_code == _BAD_REQUEST:
            raise ConfigError(f"{what}: the Docker daemon refuses it: {error.explanation}") from error
        raise InfraError(f"{what}: {error.explanation or error}") from error
    except (DockerException, RequestException, OSError) as error:
        raise InfraError(f"{what}: {error}. {REMEDY}") from error
