"""The webhook against real servers: one that answers, one that is not there, one that never answers.

Reads   what arrives at servers on the loopback interface.
Writes  HTTP to them.
Never   another machine.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pickle
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

import outlive
import warm_server
from forensics import example_incidents
from outlive import Webhook
from outlive._forensics import alerts
from outlive.verdicts import Name, Verdict


class Answering(ThreadingHTTPServer):
    """Keeps what it is sent, and answers with the next of `statuses`; with 200 when there are no more."""

    daemon_threads = True

    def __init__(self, *statuses: int) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.statuses = list(statuses)
        self.received: list[tuple[dict[str, str], dict[str, Any]]] = []
        self.url = f"http://127.0.0.1:{self.server_port}/hook/secret"


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        server = self.server
        assert isinstance(server, Answering)
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server.received.append((dict(self.headers), body))
        self.send_response(server.statuses.pop(0) if server.statuses else 200)
        self.send_header("Location", server.url)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_GET = do_POST

    def log_message(self, *args: Any) -> None: ...


@contextlib.contextmanager
def answering(*statuses: int) -> Iterator[Answering]:
    with Answering(*statuses) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(autouse=True)
def _no_proxy_and_short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(alerts, "RETRY_PAUSES_S", (0.01, 0.02, 0.04))


def test_an_incident_arrives_as_json_with_a_sentence():
    """What a program reads, and what a chat shows; with the user's headers."""
    incident = example_incidents.segfault()
    with answering() as server:
        hook = Webhook(server.url, headers={"Authorization": "Bearer abc"})
        hook(incident)
        assert hook.flush(60)

    ((headers, body),) = server.received
    assert (body["id"], body["index"], body["signal"]) == ("7f3a12cd", 18204, "SIGSEGV")
    assert body["verdict"]["cause"] == "read of address 0x0 in libimgcodecs.so.4"
    assert body["stack"] == example_incidents.STACK
    assert body["text"].startswith(
        "worker 3 died of SIGSEGV while fetching sample 18204 "
        "(likely: read of address 0x0 in libimgcodecs.so.4): left out. "
    )
    assert "outlive report 7f3a12cd" in body["text"]
    assert body["job"]["pid"] == os.getpid()
    assert headers["Authorization"] == "Bearer abc"
    assert headers["Content-Type"] == "application/json"
    assert (hook.sent, hook.failed, hook.dropped) == (1, 0, 0)


def test_only_the_verdicts_that_were_asked_for_are_sent():
    """Nobody wants to be woken by every truncated image."""
    oom = example_incidents.segfault(verdict=Verdict(Name.OOM_KILLER, "killed"))
    with answering() as server:
        hook = Webhook(server.url, only=["oom-killer", Name.KILLED])
        for incident in (example_incidents.segfault(), oom, example_incidents.segfault(verdict=None)):
            hook(incident)
        assert hook.flush(60)

    assert [body["verdict"]["name"] for _, body in server.received] == ["oom-killer"]


@pytest.mark.parametrize(
    ("statuses", "tries", "sent"),
    [
        ([500, 503, 200], 3, 1),
        ([429, 200], 2, 1),
        ([500] * 9, 4, 0),
        ([404], 1, 0),
        ([302], 1, 0),
    ],
)
def test_a_server_in_trouble_is_tried_again_and_one_that_refuses_is_not(statuses, tries, sent):
    """Four tries with growing pauses; a redirect would lose the body, so it is an error."""
    with answering(*statuses) as server:
        hook = Webhook(server.url)
        hook(example_incidents.raised())
        assert hook.flush(60)

    assert len(server.received) == tries
    assert (hook.sent, hook.failed) == (sent, 1 - sent)


def test_a_closed_port_costs_one_line_in_the_log(caplog):
    """It names the host, and not the path, which is a secret."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        hook = Webhook(f"http://127.0.0.1:{closed.getsockname()[1]}/hook/secret")
        hook(example_incidents.raised())
        hook(example_incidents.raised())
        assert hook.flush(60)

    (line,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert line.startswith("the webhook at 127.0.0.1 cannot be reached: ")
    assert "secret" not in line + repr(hook)
    assert (hook.sent, hook.failed) == (0, 2)


@pytest.fixture
def silent() -> Iterator[str]:
    """A server that takes connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}/"


def test_a_server_that_never_answers_is_given_up(silent):
    """After timeout_s, each time."""
    hook = Webhook(silent, timeout_s=0.05)
    hook(example_incidents.raised())

    assert hook.flush(60)
    assert hook.failed == 1


def test_ten_thousand_incidents_at_once_cost_the_job_nothing():
    """The newest wait, the others are counted. To wait for the server once would be to wait for ever."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        hook = Webhook(f"http://127.0.0.1:{silent.getsockname()[1]}/", timeout_s=1e6, queue=100)
        incident = example_incidents.segfault()

        for _ in range(10_000):
            hook(incident)

        dropped = hook.dropped
        hook._courier.leaving.set()  # as at the end of a program, so that this test need not wait for 100 tries

    assert dropped in (9_899, 9_900)  # one may be on its way
    assert hook.flush(60)  # nobody is there any more


def test_a_burst_arrives_when_the_server_answers():
    """All of it, in order, as long as the queue holds it."""
    with answering() as server:
        hook = Webhook(server.url, queue=500)
        for n in range(200):
            hook(example_incidents.raised(number=n))
        assert hook.flush(60)

    assert [body["number"] for _, body in server.received] == list(range(200))
    assert hook.dropped == 0


# The two seconds of grace are another test's: this one's machine may be busy.
PATIENT = "from outlive._forensics import courier\ncourier.EXIT_S = 50.0\n"


def run_program(source: str, *args: str) -> str:
    """What a program says that ends by itself."""
    path = os.pathsep.join([str(Path(outlive.__file__).parents[1]), str(Path(__file__).parents[1])])
    head = "import os, sys, time\nfrom forensics import example_incidents\nfrom outlive import Webhook\n"
    process = warm_server.Popen(
        [sys.executable, "-c", f"{head}{source}\nprint('trained', flush=True)", *args],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    with process.stdout:
        said = process.stdout.read()
    assert process.wait(60) == 0
    return said


def test_what_waits_is_sent_before_the_program_ends():
    """The last incident is the one that ended the job."""
    with answering() as server:
        run_program(
            f"{PATIENT}hook = Webhook(sys.argv[1])\nfor n in range(20): hook(example_incidents.raised(number=n))",
            server.url,
        )

    assert [body["number"] for _, body in server.received] == list(range(20))


def test_a_program_ends_in_time_when_the_server_is_silent(silent):
    """Two seconds of grace, not a timeout per incident: the first of these would never pass."""
    source = (
        "from types import SimpleNamespace\n"
        "from outlive._forensics import courier\n"
        "hook = Webhook(sys.argv[1], timeout_s=1e6)\n"
        "for n in range(50): hook(example_incidents.raised())\n"
        # The program prints the time limit of the wait. Its clock stands still.
        "courier.time = SimpleNamespace(monotonic=lambda: 0.0)\n"
        "flush = courier.Courier.flush\n"
        "courier.Courier.flush = lambda self, deadline_s: print(deadline_s, flush=True) or flush(self, deadline_s)"
    )

    assert run_program(source, silent) == "trained\n2.0\n"


def test_a_fork_does_not_send_what_its_parent_sends():
    """Each incident arrives once; the child's own arrive, too."""
    source = (
        f"{PATIENT}hook = Webhook(sys.argv[1])\n"
        "for n in range(30): hook(example_incidents.raised(number=n))\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    hook(example_incidents.raised(number=100)); os._exit(not hook.flush(20))\n"
        "assert os.waitpid(child, 0)[1] == 0"
    )
    with answering() as server:
        run_program(source, server.url)

    assert sorted(body["number"] for _, body in server.received) == [*range(30), 100]


def test_an_incident_that_cannot_be_told_is_counted_and_the_next_one_is_sent():
    """Whatever an index or a field does."""
    with answering() as server:
        hook = Webhook(server.url)
        hook(example_incidents.raised(evidence=object()))
        hook(example_incidents.raised(number=2))
        assert hook.flush(60)

    assert [body["number"] for _, body in server.received] == [2]
    assert (hook.sent, hook.failed) == (1, 1)


def test_a_webhook_travels_with_a_loader():
    """Pickled with its settings, and without its queue."""
    hook = pickle.loads(pickle.dumps(Webhook("https://host/x", timeout_s=2, queue=7, only=["killed"])))

    assert (hook.url, hook.timeout_s, hook.queue) == ("https://host/x", 2, 7)
    assert hook.only == {Name.KILLED}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"url": "ftp://host/x"}, "url must be like \"https://host/path\", got 'ftp://host/x'"),
        ({"url": "host/x"}, "url must be like"),
        ({"timeout_s": 0}, "timeout_s must be more than 0, got 0"),
        ({"queue": 0}, "queue must be at least 1, got 0"),
        ({"only": ["oom-kilr"]}, "did you mean 'oom-killer'?"),
        ({"only": "killd"}, "did you mean 'killed'?"),
    ],
)
def test_a_wrong_setting_is_named_at_once(settings, message):
    """When the loader is made, not at the first incident of the night."""
    with pytest.raises(ValueError) as raised:
        Webhook(**{"url": "https://host/x"} | settings)

    assert message in str(raised.value)
