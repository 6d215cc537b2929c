from __future__ import annotations

import socket
import stat
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from agentgym.errors import ConfigError
from agentgym.tools.serving import Address, Service, json_response, make_app, read_token


@pytest.fixture
def app() -> web.Application:
    async def hello(_: web.Request) -> web.Response:
        return json_response({"text": "日本"})

    app = make_app(token=None)
    app.add_routes([web.get("/", hello)])
    return app


@pytest.mark.parametrize(
    ("host", "local"),
    [
        ("127.0.0.1", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("example.org", False),
    ],
)
def test_only_loopback_is_local(host: str, local: bool) -> None:
    assert Address(host=host).local is local


def test_an_address_that_others_can_reach_needs_a_token_of_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AGENTGYM_TOOLS_TOKEN", raising=False)
    everywhere, file = Address(host="0.0.0.0"), tmp_path / "token"
    for token_file in (None, file):
        with pytest.raises(ConfigError, match=r"'0\.0\.0\.0' can be reached from other machines"):
            read_token(token_file, everywhere)
    assert not file.exists()
    file.write_text("secret\n")
    assert read_token(file, everywhere) == ("secret", False)
    monkeypatch.setenv("AGENTGYM_TOOLS_TOKEN", "other")
    assert read_token(None, everywhere) == ("other", False)


def test_a_new_token_is_written_for_its_owner_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AGENTGYM_TOOLS_TOKEN", raising=False)
    token, new = read_token(tmp_path / "token", Address())
    assert new
    assert len(token) > 30
    assert stat.S_IMODE((tmp_path / "token").stat().st_mode) == 0o600
    assert read_token(tmp_path / "token", Address()) == (token, False)
    assert read_token(None, Address())[0] != token
    with pytest.raises(ConfigError, match="cannot be written"):
        read_token(tmp_path / "no" / "token", Address())


@pytest.mark.parametrize("content", ["", "two words", "tökén", b"\xff"])
def test_a_file_without_a_token_is_refused(tmp_path: Path, content: str | bytes) -> None:
    file = tmp_path / "token"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError, match="token file"):
        read_token(file, Address())


async def test_over_a_unix_socket_that_only_its_owner_may_use(app: web.Application, tmp_path: Path) -> None:
    path = tmp_path / "socket"
    async with Service(app, Address(unix=path)) as service:
        assert service.url == f"unix:{path}"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        async with (
            aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(path))) as client,
            client.get("http://x/") as response,
        ):
            assert await response.json() == {"text": "日本"}
        with pytest.raises(ConfigError, match="another server listens there"):
            await Service(make_app(token=None), Address(unix=path)).__aenter__()
    assert not path.exists()


async def test_the_socket_of_a_server_that_was_killed_is_used_again(app: web.Application, tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    async with Service(app, Address(unix=path)):
        assert path.is_socket()


async def test_addresses_that_cannot_be_used_are_named(app: web.Application, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}"):
            await Service(app, Address(port=port)).__aenter__()
    file = tmp_path / "file"
    file.write_text("precious")
    for path, words in ((file, "a file of that name exists"), (tmp_path / ("x" * 100), "longer than")):
        with pytest.raises(ConfigError, match=words):
            await Service(make_app(token=None), Address(unix=path)).__aenter__()
    assert file.read_text() == "precious"
