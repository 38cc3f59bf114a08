"""The page and its answers over HTTP, for this machine alone.

The address holds a secret token.
"""

import errno
import json
import logging
import secrets
import signal
import socket
import webbrowser
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any, Protocol

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Mount, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from regard.viewer.data.questions import DIGITS, Answer, Query
from regard.viewer.serve import built, routes
from regard.viewer.serve.answers import ROUTES, missing
from regard.viewer.serve.codecs import kind, raw

HOME = "127.0.0.1"
LARGEST_BODY = 2**20  # bytes of a question, which is read whole

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; font-src 'self' data:; connect-src 'self'; worker-src 'none'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",  # the address holds the token
    "X-Content-Type-Options": "nosniff",
}


class Answering(Protocol):
    """A responder to a page: `Answers`, or the thread that prepares them."""

    def along(self, route: routes.Route, named: Mapping[str, str], query: Query, body: Any = None) -> Answer: ...
    def close(self) -> None: ...


class Guard:
    """Middleware that admits only this machine's own page, with its token.

    A page of another site can make a browser send requests here, even under a host name that resolves to this machine.
    `Host` and `Origin` refuse those. The token in the path refuses other users of the machine.
    """

    def __init__(self, app: ASGIApp, token: str, port: int):
        self.app, self.token = app, token
        self.hosts = {f"{name}:{port}" for name in (HOME, "localhost")}
        self.origins = {f"http://{host}" for host in self.hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        request = Request(scope)
        reason = self._reason(request)

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] += [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
            await send(message)

        answer = self.app if reason is None else PlainTextResponse(reason[1], status_code=reason[0])
        await answer(scope, receive, with_headers)

    def _reason(self, request: Request) -> tuple[int, str] | None:
        headers = request.headers
        if headers.get("host") not in self.hosts:
            return 403, "this server answers to its own address alone"
        if headers.get("origin", next(iter(self.origins))) not in self.origins:
            return 403, "this server answers its own page alone"
        if headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            return 403, "this server answers its own page alone"
        start = request.url.path.split("/")[1]
        if not secrets.compare_digest(start.encode(), self.token.encode()):
            return 404, "there is nothing here"
        return None


def application(answers: Answering, token: str, port: int) -> ASGIApp:
    """Return the ASGI app: the page at `/token/`, its answers below `/token/api/`."""

    async def file(request: Request) -> Response:
        name = request.path_params.get("name", "index.html")
        if name not in built.FILES:
            return PlainTextResponse("there is nothing here", status_code=404)
        return Response(built.page()[name], media_type=built.FILES[name])

    api = [_route(answers, route) for route in ROUTES]
    api.append(Route("/{path:path}", _missing, methods=["GET", "POST"]))
    pages = [Route(f"/{token}/", file), Mount(f"/{token}/api", routes=api), Route(f"/{token}/{{name}}", file)]
    return Guard(Starlette(routes=pages), token, port)


def _route(answers: Answering, route: routes.Route) -> Route:
    """Return Starlette's route of one of the page's."""

    async def endpoint(request: Request) -> Response:
        body = None
        if route.method == "POST":
            try:
                body = parsed(await _body(request))
            except ValueError as error:
                return JSONResponse({"error": str(error)}, status_code=400)
        query = dict(request.query_params)
        return _response(await run_in_threadpool(answers.along, route, request.path_params, query, body))

    return Route(f"/{route.path}", endpoint, methods=[route.method])


async def _missing(request: Request) -> Response:
    return _response(missing(request.path_params["path"]))


def parsed(body: bytes) -> Any:
    """Return the JSON of a body.

    Raises ValueError for invalid JSON, deep nesting, and integers with too many digits.
    """
    try:
        return json.loads(body, parse_int=_number)
    except RecursionError:
        raise ValueError("a question must not be nested so deeply") from None


def _number(digits: str) -> int:
    if len(digits) > DIGITS + 1:
        raise ValueError(f"a number must have {DIGITS} digits at most")
    return int(digits)


async def _body(request: Request) -> bytes:
    if request.headers.get("content-type", "").split(";")[0] != "application/json":
        raise ValueError("a question with a body must be application/json")
    parts, size = [], 0
    async for part in request.stream():
        parts.append(part)
        size += len(part)
        if size > LARGEST_BODY:
            raise ValueError(f"a question may have {LARGEST_BODY} bytes at most")
    try:
        return b"".join(parts).decode("utf-8").encode()
    except UnicodeDecodeError:
        raise ValueError("a question must be UTF-8") from None


def _response(answer: Answer) -> Response:
    if isinstance(answer.content, dict):
        return JSONResponse(answer.content, status_code=answer.status)
    headers = {"X-Regard-Exact": "1" if answer.exact else "0", "X-Regard-Type": kind(answer.content)}
    media = "image/png" if isinstance(answer.content, bytes) else "application/octet-stream"
    return Response(raw(answer.content), media_type=media, headers=headers)


class Server(uvicorn.Server):
    """uvicorn's server, which waits for no answer after Ctrl-C, and calls none that is cut short an error.

    interrupted: whether Ctrl-C was pressed.
    """

    interrupted = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.interrupted |= sig == signal.SIGINT
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        super().handle_exit(sig, frame)
        self.force_exit = True


class Viewer:
    """A page served at `url` until `close`.

    home: the socket to serve at, see `bound`; by default at any free port.
    """

    def __init__(self, answers: Answering, home: socket.socket | None = None):
        self.answers = answers
        home = _bind(0) if home is None else home
        self._socket = home
        home.listen()  # requests before `run` wait
        self.port: int = home.getsockname()[1]
        self.token = secrets.token_urlsafe(16)
        self.url = f"http://{HOME}:{self.port}/{self.token}/"
        built.page()
        config = uvicorn.Config(
            application(answers, self.token, self.port),
            log_level="error",
            access_log=False,
            lifespan="off",
            http="h11",
            ws="none",
            server_header=False,
            timeout_graceful_shutdown=1,
        )
        self._server = Server(config)

    def run(self, ready: Callable[[], object] = lambda: None) -> bool:
        """Call `ready`, then serve until interrupted or closed from another thread.

        Return True if it was interrupted, by Ctrl-C.
        """
        try:
            with self._server.capture_signals():  # asyncio prints a warning after a Ctrl-C between `ready` and serving
                ready()
                self._server.run(sockets=[self._socket])
        except KeyboardInterrupt:  # not where SIGINT is ignored, as in the background of a script
            return True
        finally:
            self.answers.close()
            self._socket.close()
        return self._server.interrupted

    def close(self) -> None:
        """Stop serving."""
        self._server.should_exit = True

    def show(self, link: str = "") -> None:
        """Open the page in the user's browser, at the view of a link such as "#view=map"."""
        webbrowser.open(self.url + link)

    def __repr__(self) -> str:
        return f"Viewer at {self.url}"


@contextmanager
def bound(port: int = 0) -> Iterator[socket.socket]:
    """Bind a socket that only this machine reaches, and close it after an error.

    Raises ValueError for an invalid port, and for one in use.
    """
    listener = _bind(port)
    try:
        yield listener
    except BaseException:
        listener.close()
        raise


def _bind(port: int) -> socket.socket:
    if not 0 <= port <= 65535:
        raise ValueError(f"port must be from 0 (any that is free) to 65535, got {port}")
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        # SO_REUSEADDR allows ports that were just closed. On Windows it would let two processes share one.
        alone = getattr(socket, "SO_EXCLUSIVEADDRUSE", socket.SO_REUSEADDR)
        listener.setsockopt(socket.SOL_SOCKET, alone, 1)
        listener.bind((HOME, port))
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise ValueError(f"port {port} is in use; give another one, or 0 for any that is free") from None
        raise ValueError(f"cannot serve at port {port}: {error.strerror}") from None
    return listener
