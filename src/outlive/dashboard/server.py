"""The server of `outlive dash`: what can be asked of it.

Reads   what jobs publish, through the hub; the journal.
Writes  nothing but what POST is for: a wish to a worker.
Never   in a trainer's process; never changes anything by GET.

    GET   /                                      the page
    GET   /static/…                              its parts
    GET   /api/jobs                              how all jobs stand
    GET   /api/jobs/KEY/events?after=N           what happened to one
    GET   /api/stream                            the same as it happens (server-sent events)
    GET   /metrics                               for Prometheus
    GET   /api/incidents                         past runs, from the journal
    GET   /api/incidents/ID                      one incident in sections; ID.json, ID.html: to keep
    POST  /api/jobs/KEY/slots/N/stacks|recycle   ask a worker
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar
from urllib.parse import quote

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from outlive._forensics.journal_file import NewerJournalError
from outlive._metrics import families
from outlive.dashboard import links, past
from outlive.dashboard.guard import Guard, names_served
from outlive.dashboard.hub import Hub, Viewer

STATIC = Path(__file__).with_name("static")
_SEND_S, _END_S = 5.0, 0.1  # a viewer that has not taken a message, or the end, by then hangs
_QUIET_S = 5.0
LINGER_S = 30.0
WAIT_S = 10.0  # for a connection to say what it wants, and be let in
_BACKLOG = 256
_MOST_WAITING, _MOST_LET_IN = 64, 64  # connections
_LOOK_S, _REST_S = 1.0, 5.0  # between two looks whether the job lives; where there is none to look after


class _Connection(H11Protocol):
    """One that waits only for a while, and that can be cut: closing it would wait until the other side has read all.

    It waits until the guard lets a request of it in, and again when that is answered. Any process that reaches the port
    can connect and say nothing, half a request, or requests that are refused. Such a connection lasts `WAIT_S`, and
    goes at once where too many wait and it has waited longest: it shuts out no visitor.
    """

    open: ClassVar[dict[tuple[str, int], _Connection]] = {}  # by the other side's address; who waits longest is first

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._place = tuple(transport.get_extra_info("peername")[:2])
        self._patience: asyncio.TimerHandle | None = None
        self.wait()
        waiting = [each for each in self.open.values() if each._patience is not None]
        if len(waiting) > _MOST_WAITING:
            waiting[0].cut()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()
        super().connection_lost(exc)

    @classmethod
    def of(cls, scope: Scope) -> _Connection | None:
        """The connection of a request; None: it is gone."""
        return cls.open.get(tuple(scope.get("client") or ("", 0)))

    def wait(self) -> None:
        """Nothing is let in, or no more."""
        self._forget()
        if not self.transport.is_closing():
            self.open[self._place] = self
            self._patience = self.loop.call_later(WAIT_S, self.cut)

    def let_in(self) -> None:
        """A request of it is answered: that may take as long as it likes."""
        self._stop_waiting()

    def cut(self) -> None:
        self._forget()
        self.transport.abort()

    def _forget(self) -> None:
        self._stop_waiting()
        if self.open.get(self._place) is self:  # it may be another's by now: ports are used again
            del self.open[self._place]

    def _stop_waiting(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None


def _admitting(app: ASGIApp) -> ASGIApp:
    """Has a connection wait no more while a request of it is answered."""

    async def admitted(scope: Scope, receive: Receive, send: Send) -> None:
        connection = _Connection.of(scope)
        if connection is not None:
            connection.let_in()
        try:
            await app(scope, receive, send)
        finally:
            if connection is not None:
                connection.wait()

    return admitted


class _Stream:
    """Server-sent events to one viewer, for as long as it takes them."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        viewer = Viewer(asyncio.get_running_loop())
        if not await run_in_threadpool(self._hub.join, viewer):
            await _error(503, "too many pages are open")(scope, receive, send)
            return
        gone = asyncio.ensure_future(_until_gone(receive, viewer))
        try:
            headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            while not viewer.is_dropped:
                try:
                    message = await asyncio.wait_for(viewer.queue.get(), _QUIET_S)
                except asyncio.TimeoutError:
                    message = ": still here\n\n"
                if message is None:
                    break
                body = {"type": "http.response.body", "body": message.encode("utf-8", "replace"), "more_body": True}
                await asyncio.wait_for(send(body), _SEND_S)
            await asyncio.wait_for(send({"type": "http.response.body", "body": b""}), _END_S)
        except asyncio.TimeoutError:
            connection = _Connection.of(scope)
            if connection is not None:
                connection.cut()  # it hangs: what was kept for it goes, too
            await asyncio.sleep(0)
        finally:
            gone.cancel()
            viewer.is_dropped = True
            self._hub.leave(viewer)


async def _until_gone(receive: Receive, viewer: Viewer) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    viewer.drop()


def application(hub: Hub) -> Starlette:
    """Without its guard, which `serve` puts around it."""

    async def jobs(request: Request) -> Response:
        return JSONResponse({"time": time.time(), "jobs": await run_in_threadpool(hub.jobs)})

    async def events(request: Request) -> Response:
        try:
            after = int(request.query_params.get("after", "0"))
        except ValueError:
            return _error(400, "after must be a number of an event")
        found = await run_in_threadpool(hub.events, request.path_params["key"], after)
        return _error(404, "there is no such job") if found is None else JSONResponse({"events": found})

    async def ask(request: Request) -> Response:
        key, slot, what = (request.path_params[name] for name in ("key", "slot", "what"))
        try:
            return JSONResponse({"answer": await run_in_threadpool(hub.ask, key, what, slot)})
        except KeyError:
            return _error(404, "there is no such job")
        except ValueError as error:
            return _error(404, str(error))

    async def runs(request: Request) -> Response:
        return await _of_journal(lambda: JSONResponse(past.runs()))

    async def incident(request: Request) -> Response:
        name, _, form = request.path_params["name"].partition(".")
        return await _of_journal(lambda: _incident(name, form))

    async def metrics(request: Request) -> Response:
        told = families.exposition(hub.seen()).encode("utf-8", "replace")
        return Response(told, headers={"content-type": families.CONTENT_TYPE})

    async def index(request: Request) -> Response:
        return FileResponse(STATIC / "index.html")

    return Starlette(
        routes=[
            Route("/", index),
            Route("/api/jobs", jobs),
            Route("/api/jobs/{key}/events", events),
            Route("/api/jobs/{key}/slots/{slot:int}/{what}", ask, methods=["POST"]),
            Route("/api/stream", _Stream(hub), methods=["GET"]),
            Route("/metrics", metrics),
            Route("/api/incidents", runs),
            Route("/api/incidents/{name}", incident),
            Mount("/static", StaticFiles(directory=STATIC)),
        ]
    )


def _incident(name: str, form: str) -> Response:
    entry = past.one(name) if form in ("", "json", "html") else None
    if entry is None:
        return _error(404, f"the journal has no incident {name}; it is written a moment after it happened")
    if not form:
        return JSONResponse(past.sections(entry))
    kept = {"content-disposition": f'attachment; filename="outlive-{entry.id}.{form}"'}
    if form == "json":
        return Response(past.as_json(entry), media_type="application/json", headers=kept)
    return Response(past.as_html(entry), media_type="text/html", headers=kept)


async def _of_journal(answer: Callable[[], Response]) -> Response:
    try:
        return await run_in_threadpool(answer)
    except (sqlite3.Error, OSError, ValueError, NewerJournalError) as error:
        return _error(503, f"the journal cannot be read: {error}")


def _error(status: int, why: str) -> Response:
    return JSONResponse({"error": why}, status)


# ---------------------------------------------------------------- running


def listen(host: str, port: int) -> socket.socket:
    """OSError: the address is another's, or not this machine's."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


def link_to(listener: socket.socket, host: str, token: str | None) -> str:
    """What a browser is to open."""
    query = "" if token is None else f"?token={quote(token, safe='')}"
    return f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}/{query}"


def serve(
    listener: socket.socket,
    host: str,
    *,
    token: str | None,
    folder: str | None = None,
    lives: Callable[[], bool] | None = None,
) -> None:
    """Until a signal ends it; or, with `lives`, a while after that is no longer so and nobody looks on."""
    hub = Hub(folder)
    port = listener.getsockname()[1]
    app = Guard(_admitting(application(hub)), names=names_served(host), token=token, port=port)
    config = uvicorn.Config(
        app,
        log_level="error",  # warnings are about what strangers send
        access_log=False,  # its lines would have the token
        proxy_headers=False,  # connections are known by their address
        backlog=_BACKLOG,  # so many are accepted before one can be cut
        server_header=False,
        lifespan="off",
        ws="none",
        http=_Connection,
        limit_concurrency=_MOST_WAITING + _MOST_LET_IN,
        timeout_graceful_shutdown=1,
    )
    server = _Server(config, hub, lives, link_to(listener, host, token))
    hub.start()
    try:
        asyncio.run(server.serve(sockets=[listener]))
    finally:
        hub.close()


class _Server(uvicorn.Server):
    """Uvicorn's looks ten times a second whether it should end; ours is woken for that."""

    def __init__(self, config: uvicorn.Config, hub: Hub, lives: Callable[[], bool] | None, link: str) -> None:
        super().__init__(config)
        self._hub, self._lives, self._link = hub, lives, link
        self._wake: Callable[[], Any] = lambda: None

    async def main_loop(self) -> None:
        woken, loop = asyncio.Event(), asyncio.get_running_loop()
        self._wake = lambda: loop.call_soon_threadsafe(woken.set)
        over = None
        with links.kept(self._link):
            while not await self.on_tick(0):
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(woken.wait(), _REST_S if self._lives is None else _LOOK_S)
                if self._lives is None or self._lives():
                    over = None
                    continue
                over = over or time.monotonic()
                if not self._hub.viewers and time.monotonic() - max(over, self._hub.left_at) > LINGER_S:
                    self.should_exit = True
        self._hub.dismiss()  # streams have no end of their own

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        super().handle_exit(sig, frame)
        self._wake()
