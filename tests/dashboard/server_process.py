"""A dashboard in a process of its own, jobs beside it, and how tests ask it.

Reads   what the command prints.
Writes  to the server's socket.
Never   talks to the application but over HTTP.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import warm_server

DEADLINE_S = 60.0
PROGRAM = Path(__file__).with_name("program.py")
ADDRESS = re.compile(r"http://([^/\s]+):(\d+)/(?:\?token=(\S+))?")


@dataclass(frozen=True)
class Answer:
    status: int
    headers: http.client.HTTPMessage
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass(frozen=True)
class Server:
    host: str
    port: int
    token: str | None
    process: subprocess.Popen[str]

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}/"

    @property
    def link(self) -> str:
        """For the first visit."""
        return self.url if self.token is None else f"{self.url}?token={self.token}"

    @property
    def authorization(self) -> dict[str, str]:
        """The header that a program sends."""
        return {} if self.token is None else {"Authorization": f"Bearer {self.token}"}

    def ask(
        self, path: str, method: str = "GET", headers: dict[str, str] | None = None, *, knows_token: bool = True
    ) -> Answer:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=DEADLINE_S)
        try:
            told = {**(self.authorization if knows_token else {}), **(headers or {})}
            connection.putrequest(method, path, skip_host="Host" in told, skip_accept_encoding=True)
            for name, value in told.items():
                connection.putheader(name, value)
            connection.endheaders()
            response = connection.getresponse()
            return Answer(response.status, response.headers, response.read())
        finally:
            connection.close()

    def request(self, path: str) -> bytes:
        """What a program writes that asks for a path."""
        told = {"Host": f"localhost:{self.port}", **self.authorization}
        lines = [f"GET {path} HTTP/1.1", *(f"{name}: {value}" for name, value in told.items())]
        return "\r\n".join([*lines, "", ""]).encode()

    def post(self, path: str) -> Answer:
        """As the page does it."""
        return self.ask(path, "POST", {"Origin": self.url.rstrip("/"), "X-Outlive": "1", "Content-Length": "0"})

    def jobs(self) -> list[dict[str, Any]]:
        return self.ask("/api/jobs").json["jobs"]  # type: ignore[no-any-return]


@contextlib.contextmanager
def served(*options: str) -> Iterator[Server]:
    command = [sys.executable, "-m", "outlive", "dash", "--port", "0", *options]
    with warm_server.Popen(command, stdout=subprocess.PIPE, text=True, stdin=subprocess.DEVNULL) as process:
        try:
            assert process.stdout is not None
            found = ADDRESS.search(process.stdout.readline())
            assert found is not None
            yield Server(found[1], int(found[2]), found[3], process)
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(DEADLINE_S)
            except subprocess.TimeoutExpired:
                process.kill()


@contextlib.contextmanager
def running(what: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """A job of `program.py`; `deliver` has it go on."""
    with warm_server.Popen(
        [sys.executable, str(PROGRAM), what],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            assert process.stdin is not None
            with contextlib.suppress(OSError):
                process.stdin.close()
            try:
                process.wait(DEADLINE_S)
            except subprocess.TimeoutExpired:
                process.kill()


def deliver(job: subprocess.Popen[str], count: int) -> list[str]:
    """What a job says after each of so many batches."""
    assert job.stdin is not None
    assert job.stdout is not None
    said = []
    for _ in range(count):
        job.stdin.write("\n")
        job.stdin.flush()
        said.append(job.stdout.readline())
    return said
