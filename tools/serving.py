"""What agentgym's HTTP services share: addresses, bearer tokens, JSON in and out, clear refusals, a clean end.

A service listens on loopback or on a unix socket unless it is told otherwise, and never on another address without a
token that its user chose. Every answer is JSON; what is refused says ``{"error": {"type": ..., "message": ...}}``.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import json
import logging
import os
import secrets
import signal
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import pydantic
from aiohttp import web
from aiohttp.typedefs import Middleware

from agentgym.errors import AgentGymError, ConfigError, EnvError, boundary

M = TypeVar("M", bound=pydantic.BaseModel)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

logger = logging.getLogger(__name__)

TOKEN_VARIABLE = "AGENTGYM_TOOLS_TOKEN"
"""Environment variable from which servers and clients take their token by default."""
MAX_REQUEST_BYTES = 16 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where a service listens: a host and a port, or a unix socket."""

    host: str = "127.0.0.1"
    port: int = 0
    """0: a free one."""
    unix: Path | None = None
    """Path of a unix socket, instead of host and port; only its owner may connect."""

    @property
    def local(self) -> bool:
        """True if only this machine can connect."""
        if self.unix is not None or self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


class Refusal(Exception):
    """Raised in a handler: the request is answered with ``status`` and a text that says what to do.

    Attributes:
        status: HTTP status.
        kind: short name for programs.
        retry_after: seconds after which the request may be sent again.
    """

    def __init__(self, status: int, kind: str, message: str, *, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.retry_after = retry_after

    def response(self) -> web.Response:
        """The answer to the client."""
        headers = {} if self.retry_after is None else {"Retry-After": f"{self.retry_after:g}"}
        return error_response(self.status, self.kind, str(self), headers=headers)


def error_response(
    status: int, kind: str, message: str, *, headers: Mapping[str, str] | None = None, **details: Any
) -> web.Response:
    """``{"error": {"type": kind, "message": message, ...}}``."""
    return json_response({"error": {"type": kind, "message": message, **details}}, status=status, headers=headers)


def json_response(value: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    """JSON with its non-ASCII characters as they are."""
    return web.Response(
        body=json.dumps(value, ensure_ascii=False).encode(errors="replace"),
        status=status,
        content_type="application/json",
        charset="utf-8",
        headers=headers,
    )


async def read_body(request: web.Request, model: type[M]) -> M:
    """The body as ``model``; an empty one is ``{}``. Raises `Refusal` (400, 413) that names what is wrong."""
    try:
        data = await request.read()
    except web.HTTPRequestEntityTooLarge as error:
        raise Refusal(413, "too_large", f"the request is too long: {error.text}") from error
    try:
        value = json.loads(data) if data.strip() else {}
    except (ValueError, RecursionError) as error:
        raise Refusal(400, "bad_request", f"the body is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise Refusal(400, "bad_request", f"the body is {type(value).__name__}; expected a JSON object")
    try:
        return model.model_validate(value)
    except pydantic.ValidationError as error:
        problems = [
            f"{'.'.join(map(str, item['loc'])) or 'body'}: {item['msg']}"
            for item in error.errors(include_url=False, include_context=False, include_input=False)
        ]
        raise Refusal(400, "bad_request", "; ".join(problems)) from error


def make_app(*, token: str | None, public: Collection[str] = (), limit: int = MAX_REQUEST_BYTES) -> web.Application:
    """An application that refuses requests without the token and answers every fault as JSON.

    Args:
        token: bearer token; None: none is needed.
        public: paths that need no token.
        limit: bytes of a request.
    """
    return web.Application(client_max_size=limit, middlewares=[_answer_faults, _bearer(token, frozenset(public))])


@web.middleware
async def _answer_faults(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        with boundary(f"{request.method} {request.path}"):
            try:
                return await handler(request)
            except Refusal as refusal:
                return refusal.response()
            except web.HTTPException as error:
                if error.status < 400:
                    raise
                return error_response(error.status, "http", f"{request.method} {request.path}: {error.reason}")
    except AgentGymError as error:
        logger.error("%s", error, exc_info=error)
        details: dict[str, Any] = {}
        if isinstance(error, EnvError):
            details = {"error_type": error.error_type, "traceback": error.traceback_text}
        return error_response(500, type(error).__name__, str(error), **details)


def _bearer(token: str | None, public: frozenset[str]) -> Middleware:
    expected = None if token is None else f"Bearer {token}".encode()

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").encode(errors="replace")
        if expected is None or request.path in public or hmac.compare_digest(given, expected):
            return await handler(request)
        what = "wrong" if given else "missing"
        return error_response(
            401,
            "unauthorized",
            f"{what} bearer token: send the header 'Authorization: Bearer TOKEN' with the server's token",
            headers={"WWW-Authenticate": "Bearer"},
        )

    return check


def read_token(token_file: Path | None, address: Address) -> tuple[str, bool]:
    """The token of a server: of the file, of the environment variable AGENTGYM_TOOLS_TOKEN, or a new one.

    A new one is written to ``token_file``, readable by its owner only, if a file is named.

    Returns:
        The token, and whether it is new.

    Raises:
        ConfigError: an unreadable or empty file, or an address that others can reach without a token of the user's.
    """
    if token_file is not None and token_file.exists():
        return read_token_file(token_file), False
    if token_file is None and (value := os.environ.get(TOKEN_VARIABLE, "").strip()):
        return value, False
    if not address.local:
        raise ConfigError(
            f"host {address.host!r} can be reached from other machines, so a token is needed: "
            f"write one to a file and pass --token-file FILE, or set {TOKEN_VARIABLE}"
        )
    token = secrets.token_urlsafe(32)
    if token_file is not None:
        try:
            with open(os.open(token_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(token + "\n")
        except OSError as error:
            raise ConfigError(f"token file {str(token_file)!r} cannot be written: {error}") from error
    return token, True


def read_token_file(path: Path) -> str:
    """The token in a file. Raises `ConfigError` if there is none."""
    try:
        token = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"token file {str(path)!r} cannot be read: {error}") from error
    if not token or any(character.isspace() for character in token) or not token.isascii():
        raise ConfigError(f"token file {str(path)!r}: expected one word of ASCII characters")
    return token


class Service:
    """An application that listens; ``async with`` starts and stops it.

    Stopping: no new connections, requests under way get ``grace`` seconds, then the application's ``on_shutdown`` and
    ``on_cleanup`` run.

    Args:
        app: the application.
        address: where to listen.
        grace: seconds.

    Attributes:
        url: ``http://HOST:PORT`` or ``unix:PATH``, once started.
    """

    url: str

    def __init__(self, app: web.Application, address: Address, *, grace: float = 1.0) -> None:
        self._address = address
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=grace, handle_signals=False)

    async def __aenter__(self) -> Self:
        await self._runner.setup()
        try:
            self.url = await self._listen()
        except BaseException:
            await self._runner.cleanup()
            raise
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._runner.cleanup()
        if self._address.unix is not None:
            self._address.unix.unlink(missing_ok=True)

    async def _listen(self) -> str:
        path = self._address.unix
        try:
            if path is None:
                await web.TCPSite(self._runner, self._address.host, self._address.port).start()
                host, port = self._runner.addresses[0][:2]
                return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
            _check_socket(path)
            mask = os.umask(0o177)
            try:
                await web.UnixSite(self._runner, path).start()
            finally:
                os.umask(mask)
            return f"unix:{path}"
        except OSError as error:
            where = f"unix socket {str(path)!r}" if path else f"{self._address.host}:{self._address.port}"
            raise ConfigError(f"cannot listen on {where}: {error.strerror or error}. Choose another one.") from error


def _check_socket(path: Path) -> None:
    """A path that exists must be the socket of a server that has ended."""
    if len(os.fsencode(path)) > 100:
        raise ConfigError(f"unix socket {str(path)!r}: longer than the 100 bytes that systems take")
    if not path.exists():
        return
    if not path.is_socket():
        raise ConfigError(f"unix socket {str(path)!r}: a file of that name exists. Choose another path.")
    if listens(path):
        raise ConfigError(f"unix socket {str(path)!r}: another server listens there. Choose another path.")


def listens(path: Path) -> bool:
    """Whether a server listens on the unix socket."""
    import socket

    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(1.0)
        try:
            client.connect(str(path))
        except OSError:
            return False
    return True


async def until_signal(*others: asyncio.Future[Any]) -> str:
    """Wait for SIGINT or SIGTERM, or for one of ``others``. Returns what ended the wait, for the log.

    A second signal while the caller ends has its usual effect.
    """
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[str] = loop.create_future()
    signals = (signal.SIGINT, signal.SIGTERM)

    def stop(number: signal.Signals) -> None:
        if not ended.done():
            ended.set_result(number.name)

    for number in signals:
        loop.add_signal_handler(number, stop, number)
    try:
        await asyncio.wait({ended, *others}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for number in signals:
            with suppress(RuntimeError):
                loop.remove_signal_handler(number)
    return ended.result() if ended.done() else "its owner ended"
