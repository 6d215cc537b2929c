"""The sandbox image."""

from __future__ import annotations

import io
import tarfile

import pytest

from agentgym.cli import run
from agentgym.errors import ConfigError, InfraError
from agentgym.tools.sandbox.daemon import Daemon
from agentgym.tools.sandbox.host_base import write_host_archive
from agentgym.tools.sandbox.image import DEFAULT_IMAGE, build_image


def test_the_archive_has_an_interpreter_and_programs_and_nothing_of_the_user() -> None:
    output = io.BytesIO()
    digest = write_host_archive(output)
    assert len(digest) == 64
    output.seek(0)
    with tarfile.open(fileobj=output) as archive:
        members = {member.name: member for member in archive}
    assert members["usr/local/bin/python3"].issym()
    assert members["usr/bin/bash"].mode == 0o755
    assert {"usr/bin/ls", "usr/bin/sh", "work", "tmp", "etc/passwd"} <= members.keys()
    assert {(member.uid, member.gid, member.mtime) for member in members.values()} == {(0, 0, 0)}
    assert not [name for name in members if "site-packages" in name or name.startswith(("home", "root/."))]


@pytest.mark.docker
def test_builds_of_the_same_machine_have_the_same_tag(capsys: pytest.CaptureFixture[str]) -> None:
    tags = set()
    for _ in range(2):
        assert run(["sandbox", "build", "--base", "host"]) == 0
        tags.add(capsys.readouterr().out)
    (line,) = tags
    assert line.startswith(f"{DEFAULT_IMAGE} (agentgym-sandbox:host-")


@pytest.mark.docker
def test_a_base_that_cannot_be_had_is_an_error_that_says_what_to_do() -> None:
    daemon = Daemon()
    try:
        with pytest.raises(InfraError, match=r"registry\.invalid/nothing:1.*--base host"):
            build_image(daemon.client, "registry.invalid/nothing:1")
    finally:
        daemon.close()


@pytest.mark.docker
def test_a_base_without_python_is_refused() -> None:
    daemon = Daemon()
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        tar.addfile(tarfile.TarInfo("empty"))
    name = "agentgym-test-empty"
    try:
        daemon.client.api.import_image_from_data(archive.getvalue(), repository=name, tag="1")
        with pytest.raises(ConfigError, match="cannot hold a sandbox"):
            build_image(daemon.client, f"{name}:1")
        daemon.client.images.remove(f"{name}:1")
    finally:
        daemon.close()
