"""Viewers that hang, are killed, come late or stop reading: the job and the other viewers go on.

Reads   streams, the server's connections, what jobs print.
Writes  signals to viewers.
Never   a signal to the job.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import Iterator
from typing import Any

import psutil

import warm_server
from dashboard.server_process import DEADLINE_S, Server, deliver, running, served
from deadlines import wait_until
from metrics.terminals import Terminal
from outlive._metrics import history, runtime


def titles(server: Server) -> str:
    return str([finding["title"] for job in server.jobs() for finding in job["findings"]])


def test_viewers_that_are_stopped_or_killed_do_not_touch_the_job():
    """A dash and a top stand still while two workers die and batches are delivered; then they are killed. One that goes
    on knows what it missed, and those that come late are told it from the beginning."""
    with running("plain") as job, contextlib.ExitStack() as viewers:
        dash = viewers.enter_context(served())
        terminal = viewers.enter_context(Terminal("top", "--interval", "0.1"))
        assert wait_until(lambda: bool(dash.jobs()), DEADLINE_S)
        terminal.shows("loader Faulty")
        top = terminal.process()
        for viewer in (dash.process, top):
            viewer.send_signal(signal.SIGSTOP)

        def states_of_viewers() -> list[str]:
            return [psutil.Process(viewer.pid).status() for viewer in (dash.process, top)]

        assert wait_until(lambda: states_of_viewers() == [psutil.STATUS_STOPPED] * 2, DEADLINE_S)
        with socket.create_connection((dash.host, dash.port)) as waiting:
            waiting.sendall(dash.request("/api/stream"))
            stopped = deliver(job, 12)
            states = states_of_viewers()
            top.kill()
            dash.process.send_signal(signal.SIGCONT)
            caught_up = wait_until(lambda: "Sample 13 kills its worker" in titles(dash), DEADLINE_S)
        dash.process.kill()
        killed = deliver(job, 12)
        with served() as late:
            told = wait_until(lambda: "Sample 13 kills its worker" in titles(late), DEADLINE_S)
            events = late.ask(f"/api/jobs/{late.jobs()[0]['key']}/events").json["events"]
        once = warm_server.run([sys.executable, "-m", "outlive", "top", "--once"], capture_output=True, text=True)

    delivered = [int(number) for line in [*stopped, *killed] for number in line[4:-2].split(",")]
    assert delivered == [n for n in range(2, 50) if n not in (9, 13)]
    assert states == [psutil.STATUS_STOPPED] * 2
    assert caught_up
    assert told
    kinds = [event["kind"] for event in events]
    assert kinds[0] == "job-began"
    assert kinds.count("worker-died") == 2
    assert once.stdout.count("sample 13 null-pointer: worker 0 died of SIGSEGV") == 2
    assert "2 restarts 1 retry 2 quarantined" in " ".join(once.stdout.split())


@contextlib.contextmanager
def listening(server: Server, room: int = 0) -> Iterator[socket.socket]:
    """A connection that asked for the stream."""
    with socket.socket() as made:
        made.settimeout(DEADLINE_S)
        if room:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, room)
        made.connect((server.host, server.port))
        made.sendall(server.request("/api/stream"))
        yield made


def is_connected(server: Server, to: socket.socket) -> bool:
    port = to.getsockname()[1]
    return any(
        each.raddr and each.raddr.port == port for each in psutil.Process(server.process.pid).net_connections("tcp")
    )


def test_a_viewer_that_stops_reading_is_dropped_and_others_go_on(server: Server):
    """Its connection is closed, and what was kept for it goes, while others are told what happens."""
    folder = runtime.make("7-0-a")
    who: dict[str, Any] = {"pid": os.getpid(), "start": runtime.start_of(os.getpid()), "key": "7-0-a"}
    (folder / runtime.WHO).write_text(json.dumps(who))
    writer = history.Writer(folder, most_bytes=1 << 30)
    writer.write([{"kind": "resized", "why": "x" * 20_000} for _ in range(800)])
    assert wait_until(lambda: bool(server.jobs()), DEADLINE_S)

    with listening(server) as lively, listening(server, room=4096) as stuck:
        read = lively.makefile("rb")
        seen: list[int] = []

        def hears_of_another() -> bool:
            writer.write([{"kind": "resized", "why": "news"}])
            while writer.number not in seen:
                line = read.readline()
                assert line
                if line.startswith(b"data: "):
                    told = json.loads(line.removeprefix(b"data: "))
                    seen.extend(event["n"] for job in told["jobs"] for event in job["events"])
            return True

        assert wait_until(lambda: is_connected(server, stuck), DEADLINE_S)
        assert hears_of_another()
        dropped = wait_until(lambda: hears_of_another() and not is_connected(server, stuck), DEADLINE_S)
        went_on = hears_of_another()
        held = is_connected(server, lively)
        read.close()

    assert dropped
    assert went_on
    assert held
