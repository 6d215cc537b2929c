"""The image of docker sandboxes: a registry's Python image, or one made of this machine's interpreter and programs.

The worker is not part of an image (it is handed over when a container starts), so any image with python3 and bash
will do.
"""

from __future__ import annotations

import logging
import tempfile
from dataclasses import dataclass
from typing import TYPE_CHECKING

from agentgym.errors import ConfigError, InfraError
from agentgym.tools.sandbox.host_base import write_host_archive

if TYPE_CHECKING:
    import docker
    from docker.models.images import Image

logger = logging.getLogger(__name__)

REPOSITORY = "agentgym-sandbox"
RECIPE = 1
"""Raised when the content of the image changes; the tag of the default image carries it."""

DEFAULT_IMAGE = f"{REPOSITORY}:v{RECIPE}"
"""What a sandbox runs if the configuration names no image."""

REGISTRY_BASE = "python:3.11-slim"
"""Taken by ``agentgym sandbox build`` where a registry can be reached."""

_CHANGES = [
    "ENV PATH=/usr/local/bin:/usr/bin:/bin",
    "ENV LANG=C.UTF-8",
    "WORKDIR /work",
    'CMD ["python3"]',
    f"LABEL agentgym.recipe={RECIPE}",
]
_CHECK = 'python3 -c "import sys; assert sys.version_info >= (3, 8), sys.version" && bash -c "ls / >/dev/null"'


@dataclass(frozen=True, kw_only=True)
class BuiltImage:
    """An image that is there now."""

    tag: str
    """`DEFAULT_IMAGE`."""
    exact_tag: str
    """Names the content: equal on machines that have the same files or the same registry image."""
    base: str
    """``"host"`` or the registry image."""
    megabytes: float


def build_image(client: docker.DockerClient, base: str = "auto") -> BuiltImage:
    """Make the default image. Blocks for seconds; what had its tag before loses it.

    Args:
        client: of the daemon that gets the image.
        base: ``"host"``, a registry image, or ``"auto"``: `REGISTRY_BASE` where it can be had, else ``"host"``.

    Raises:
        ConfigError: this machine cannot be a base, or python3 or bash does not run in the image.
        InfraError: the daemon failed, or a base that was asked for by name cannot be pulled.
    """
    from docker.errors import DockerException
    from requests.exceptions import RequestException

    if base != "host":
        try:
            return _from_registry(client, REGISTRY_BASE if base == "auto" else base)
        except (DockerException, RequestException) as error:
            if base != "auto":
                raise InfraError(
                    f"image {base!r} is neither here nor can it be pulled: {error}. "
                    "Without a registry: agentgym sandbox build --base host"
                ) from error
            logger.info("image %s cannot be pulled (%s): building from this machine", REGISTRY_BASE, error)
    try:
        return _from_host(client)
    except (DockerException, RequestException) as error:
        raise InfraError(f"the Docker daemon did not take the image: {error}") from error


def _from_registry(client: docker.DockerClient, base: str) -> BuiltImage:
    from docker.errors import ImageNotFound

    try:
        image = client.images.get(base)
    except ImageNotFound:
        image = client.images.pull(base)
    digest = image.id.partition(":")[2]
    return _checked(client, image, f"{REPOSITORY}:base-{digest[:12]}", base)


def _from_host(client: docker.DockerClient) -> BuiltImage:
    from docker.errors import ImageNotFound

    with tempfile.TemporaryFile(prefix="agentgym-image-") as archive:
        exact = f"host-{write_host_archive(archive)[:12]}"
        try:
            image = client.images.get(f"{REPOSITORY}:{exact}")
        except ImageNotFound:
            archive.seek(0)
            client.api.import_image(archive, repository=REPOSITORY, tag=exact, changes=_CHANGES)
            image = client.images.get(f"{REPOSITORY}:{exact}")
    return _checked(client, image, f"{REPOSITORY}:{exact}", "host")


def _checked(client: docker.DockerClient, image: Image, exact: str, base: str) -> BuiltImage:
    """Tag the image once it has shown that python3 and bash run in it as nobody on a read-only root."""
    from docker.errors import APIError

    container = client.containers.create(
        image.id, entrypoint=["sh", "-c", _CHECK], user="65534:65534", read_only=True, network_mode="none"
    )
    try:
        container.start()
        code = container.wait()["StatusCode"]
        said = container.logs(stdout=False).decode(errors="replace").strip()
    except APIError as error:
        if error.status_code not in (400, 404):
            raise
        code, said = 127, error.explanation
    finally:
        container.remove(force=True)
    if code != 0:
        raise ConfigError(f"image {base!r} cannot hold a sandbox, which needs sh, bash and python3 >= 3.8: {said}")
    for tag in (exact, DEFAULT_IMAGE):
        image.tag(*tag.split(":"))
    return BuiltImage(tag=DEFAULT_IMAGE, exact_tag=exact, base=base, megabytes=image.attrs["Size"] / 1e6)
