"""A source on the network that is slow, refuses, fails or never answers: a real server on loopback.

Reads   what it serves: a mapping, a folder, or a function.
Writes  answers, from threads of this process; they end with the block, or with the process.
Never   gives its port away while it refuses: it stays bound, and nobody else can answer there.
"""

from __future__ import annotations

import contextlib
import http.server
import random
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from outlive.settings import check_number

Content: TypeAlias = Mapping[str, bytes] | str | Path | Callable[[str], bytes | None]
_CHUNK = 4096


class Server:
    """Serves over HTTP at `url`. What is wrong with it is set by its methods, and may change while it runs."""

    def __init__(self, content: Content, seed: int = 0) -> None:
        self._get = _getter(content)
        self._rng = random.Random(seed)
        self._delay_s = 0.0
        self._bytes_per_s: float | None = None
        self._failing = 0.0
        self._cutting = 0.0
        self._never = threading.Event()  # set: nobody is kept waiting
        self._never.set()
        self._closed = threading.Event()
        self.requests = 0
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._http: http.server.ThreadingHTTPServer | None = None
        self._serve()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    # ------------------------------------------------------------ what is wrong

    def slow(self, delay_s: float = 0.0, bytes_per_s: float | None = None) -> None:
        """Wait before each answer, and send it at this rate; slow() ends it."""
        check_number("delay_s", delay_s, least=0)
        if bytes_per_s is not None:
            check_number("bytes_per_s", bytes_per_s, least=1)
        self._delay_s, self._bytes_per_s = delay_s, bytes_per_s

    def fail(self, share: float = 1.0, cut: float = 0.0) -> None:
        """Answer this share of requests with 503, and cut this share of answers off in the middle; fail(0) ends it.

        Which ones, the seed says, in the order in which requests come.
        """
        for name, value in (("share", share), ("cut", cut)):
            check_number(name, value, least=0)
            if value > 1:
                raise ValueError(f"{name} is a share between 0.0 and 1.0, got {value}")
        self._failing, self._cutting = share, cut

    @contextlib.contextmanager
    def refusing(self) -> Iterator[None]:
        """Connections are refused, as by a host whose service is down."""
        self._stop()
        self._listener = _bound(self.port)  # bound and deaf: the kernel refuses
        try:
            yield
        finally:
            self._listener.close()
            self._listener = socket.create_server(("127.0.0.1", self.port))
            self._serve()

    @contextlib.contextmanager
    def hanging(self) -> Iterator[None]:
        """Requests are taken and not answered before the block is left."""
        self._never.clear()
        try:
            yield
        finally:
            self._never.set()

    # ------------------------------------------------------------ serving

    def close(self) -> None:
        self._closed.set()
        self._never.set()
        self._stop()

    def _serve(self) -> None:
        server = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                server._answer(self)

            def log_message(self, *args: Any) -> None:
                """To nobody."""

        http_server = http.server.ThreadingHTTPServer(self._listener.getsockname(), Handler, bind_and_activate=False)
        http_server.socket.close()
        http_server.socket = self._listener
        http_server.daemon_threads = False
        http_server.block_on_close = True
        self._http = http_server
        self._thread = threading.Thread(target=http_server.serve_forever, args=(0.02,), name="outlive-server")
        self._thread.start()

    def _stop(self) -> None:
        if self._http is not None:
            self._http.shutdown()
            self._http.server_close()
            self._thread.join()
            self._http = None
        self._listener.close()

    def _answer(self, request: http.server.BaseHTTPRequestHandler) -> None:
        with self._lock:  # in the order in which they come
            self.requests += 1
            fails, cuts = self._rng.random() < self._failing, self._rng.random() < self._cutting
        self._never.wait()
        if self._delay_s:
            self._closed.wait(self._delay_s)
        body = None if fails else self._get(request.path)
        with contextlib.suppress(OSError):  # whoever asked has gone
            request.send_response(503 if fails else 200 if body is not None else 404)
            request.send_header("Content-Length", str(len(body or b"")))
            request.end_headers()
            self._send(request.wfile, (body or b"")[: len(body or b"") // 2] if cuts else body or b"")

    def _send(self, to: Any, body: bytes) -> None:
        if self._bytes_per_s is None:
            to.write(body)
            return
        for at in range(0, len(body), _CHUNK):
            chunk = body[at : at + _CHUNK]
            if self._closed.wait(len(chunk) / self._bytes_per_s):
                return
            to.write(chunk)


@contextlib.contextmanager
def serving(content: Content, seed: int = 0) -> Iterator[Server]:
    """A server on loopback: of a mapping «/path» → bytes, of a folder, or of a function path → bytes or None."""
    server = Server(content, seed)
    try:
        yield server
    finally:
        server.close()


def _bound(port: int) -> socket.socket:
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("127.0.0.1", port))
    return holder


def _getter(content: Any) -> Callable[[str], bytes | None]:
    if callable(content):
        return content  # type: ignore[no-any-return]
    if isinstance(content, Mapping):
        return lambda path: content.get(path)
    home = Path(content).resolve()

    def read(path: str) -> bytes | None:
        file = (home / path.lstrip("/")).resolve()
        return file.read_bytes() if file.is_file() and home in file.parents else None

    return read
