"""The dashboard's server over real sockets: what it tells, and whom it refuses.

Reads   answers.
Writes  requests, well-meant and hostile.
Never   the application without its guard.
"""

from __future__ import annotations

import json
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

import outlive
import warm_server
from dashboard import server_process
from dashboard.server_process import DEADLINE_S, Server, deliver, running, served
from deadlines import wait_until


def test_a_page_from_elsewhere_gets_nothing(server: Server):
    """Foreign names, foreign origins, changes by GET or by a form: refused. No header invites others."""
    own = {"Host": f"localhost:{server.port}"}
    ask = "/api/jobs/x/slots/0/recycle"
    origin = {"Origin": f"http://localhost:{server.port}"}
    action = {"X-Outlive": "1"}
    statuses = {
        "a rebound name": server.ask("/api/jobs", headers={"Host": f"evil.example:{server.port}"}).status,
        "no name": server.ask("/api/jobs", headers={"Host": ""}).status,
        "a script of another site": server.ask("/api/jobs", headers={**own, "Sec-Fetch-Site": "cross-site"}).status,
        "a change by GET": server.ask(ask, headers=own).status,
        "no origin": server.ask(ask, "POST", {**own, **action}).status,
        "another origin": server.ask(ask, "POST", {**own, **action, "Origin": "http://evil.example"}).status,
        "no origin to speak of": server.ask(ask, "POST", {**own, **action, "Origin": "null"}).status,
        "a form": server.ask(ask, "POST", {**own, **origin}).status,
        "the page itself": server.ask(ask, "POST", {**own, **origin, **action}).status,
        "a tunnel": server.ask("/api/jobs", headers={"Host": "localhost:9999"}).status,
        "out of the folder": server.ask("/static/../server.py", headers=own).status,
        "out of the folder, in disguise": server.ask("/static/%2e%2e/server.py", headers=own).status,
    }
    page = server.ask("/")
    refused = server.ask("/", headers={"Host": "evil.example"})

    assert statuses == {
        "a rebound name": 421,
        "no name": 421,
        "a script of another site": 403,
        "a change by GET": 405,
        "no origin": 403,
        "another origin": 403,
        "no origin to speak of": 403,
        "a form": 403,
        "the page itself": 404,
        "a tunnel": 200,
        "out of the folder": 404,
        "out of the folder, in disguise": 404,
    }
    for answer in (page, refused):
        policy = answer.headers["content-security-policy"]
        assert policy.startswith("default-src 'self'; ")
        assert "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
        assert not [name for name in answer.headers if name.lower().startswith("access-control")]
    assert page.status == 200
    assert b"style=" not in page.body
    assert b"<script>" not in page.body


def test_prometheus_can_scrape_it(server: Server):
    """The same figures as the page has."""
    parser = pytest.importorskip("prometheus_client.parser")

    def scraped() -> dict[str, float]:
        answer = server.ask("/metrics")
        assert (answer.status, answer.headers["content-type"].partition(";")[0]) == (200, "text/plain")
        families = parser.text_string_to_metric_families(answer.body.decode())
        return {sample.name: sample.value for family in families for sample in family.samples}

    before = scraped()
    with running("plain") as job:
        deliver(job, 12)

        def is_told() -> bool:
            found = scraped()
            return found.get("outlive_batches_total", 0.0) >= 12 and found.get("outlive_restarts_total", 0.0) >= 2

        assert wait_until(is_told, DEADLINE_S)
    assert not [name for name in before if "batches" in name]


def test_a_token_is_asked_for(server: Server):
    """Once in the link; then a cookie that no script can read. Or in the header, for programs."""
    assert server.token is not None
    without = server.ask("/api/jobs", knows_token=False)
    wrong = server.ask(f"/?token={server.token}x", knows_token=False)
    header = server.ask("/api/jobs")
    wrong_header = server.ask("/api/jobs", headers={"Authorization": "Bearer nonsense"})
    scrape = server.ask("/metrics", knows_token=False)
    right = server.ask(f"//elsewhere.example/?a=1&token={server.token}", knows_token=False)
    cookie = right.headers["set-cookie"]
    visit = server.ask("/api/jobs", headers={"Cookie": cookie.partition(";")[0]}, knows_token=False)
    told = f"outlive-dash-{server.port}={server.token}"
    forged = server.ask("/api/jobs", headers={"Cookie": told}, knows_token=False)

    refused = (without, wrong, wrong_header, scrape, forged)
    assert [answer.status for answer in refused] == [401] * 5
    assert b"needs its token" in without.body
    assert header.status == visit.status == 200
    assert right.status == 303
    assert right.headers["location"] == "/elsewhere.example/?a=1"
    assert "HttpOnly" in cookie
    assert "samesite=strict" in cookie.lower()
    assert server.token not in cookie


def test_the_token_can_be_chosen_or_left_out(monkeypatch):
    """One of the user's own, with any characters; none at all only where the user says so."""
    monkeypatch.setenv("OUTLIVE_DASH_TOKEN", "of my own & sixteen")
    with served() as chosen, served("--no-token") as without:
        right = chosen.ask("/api/jobs", headers={"Authorization": "Bearer of my own & sixteen"})
        linked = chosen.ask(f"/?token={chosen.token}", knows_token=False)
        wrong = chosen.ask("/api/jobs", knows_token=False)
        anyone = without.ask("/api/jobs")

    assert chosen.token == "of%20my%20own%20%26%20sixteen"
    assert (right.status, linked.status, wrong.status) == (200, 303, 401)
    assert (without.token, anyone.status) == (None, 200)


def listed() -> tuple[int, list[str]]:
    """What a second terminal is told."""
    asked = warm_server.run(
        [sys.executable, "-m", "outlive", "dash", "--list"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    return asked.returncode, asked.stdout.split()


def test_a_second_terminal_finds_the_link(tmp_path):
    """In a file that only this user may read; it is gone when the server is, also where that is killed."""

    def files() -> list[Path]:
        return sorted(tmp_path.rglob("dash-*.json"))

    with served() as first, served() as second:
        assert wait_until(lambda: len(files()) == 2, DEADLINE_S)
        modes = [(stat.S_IMODE(path.stat().st_mode), stat.S_IMODE(path.parent.stat().st_mode)) for path in files()]
        both = listed()
        second.process.send_signal(signal.SIGTERM)
        second.process.wait(DEADLINE_S)
        ended = files()
        first.process.kill()
        first.process.wait(DEADLINE_S)
        killed = listed()

    assert modes == [(0o600, 0o700)] * 2
    assert both[0] == 0
    assert set(both[1]) == {first.link, second.link}
    assert len(ended) == 1
    assert killed == (1, [])
    assert files() == []


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--host", "0.0.0.0", "--no-token"], "can be reached from other machines, so it needs a token"),
        (["--token", "short"], "--token must have at least 16 characters, got 5"),
        (["--token", "of sixteen or more", "--no-token"], "contradict each other"),
        (["--host", "192.0.2.1"], "192.0.2.1:7117 cannot be used"),
    ],
)
def test_the_command_says_what_to_do_when_it_will_not_serve(options, says):
    """An address that others reach is never served without a token."""
    ended = subprocess.run(
        [sys.executable, "-m", "outlive", "dash", *options],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        stdin=subprocess.DEVNULL,
    )

    assert ended.returncode in (1, 2)
    assert says in " ".join(ended.stderr.split())


def test_everything_about_a_death_can_be_asked_for(server: Server):
    """Jobs, findings, events, incidents as JSON and HTML, past runs; and a worker can be asked."""
    with running("plain") as job:
        deliver(job, 12)
        assert wait_until(lambda: bool(server.jobs()), DEADLINE_S)
        key = server.jobs()[0]["key"]

        def told_of() -> list[dict]:
            return server.ask(f"/api/jobs/{key}/events").json["events"]

        def remedied() -> bool:
            if len([event for event in told_of() if event["kind"] == "quarantine"]) < 2:
                return False
            found = {each["title"]: each for each in server.jobs()[0]["findings"]}
            return "check what this sample hands" in str(found.get("Sample 13 kills its worker"))

        assert wait_until(remedied, DEADLINE_S)
        told = server.jobs()[0]
        events = told_of()
        later = server.ask(f"/api/jobs/{key}/events?after={events[2]['n']}").json["events"]
        stacks = server.post(f"/api/jobs/{key}/slots/0/stacks")
        recycle = server.post(f"/api/jobs/{key}/slots/0/recycle")
        nobody = server.post(f"/api/jobs/{key}/slots/7/recycle")
        nothing = server.post(f"/api/jobs/{key}/slots/0/stop")
    incidents = {event["id"]: event for event in events if event["kind"] == "incident"}
    death = next(ident for ident, event in incidents.items() if event["samples"] == [13])
    seen = server.ask(f"/api/incidents/{death}").json
    as_json = server.ask(f"/api/incidents/{death}.json")
    as_html = server.ask(f"/api/incidents/{death}.html")
    runs = server.ask("/api/incidents").json["runs"]

    found = {each["title"]: each for each in told["findings"]}
    assert found["Sample 13 kills its worker"]["who"] == "worker 0 (2 times)"
    assert found["Sample 13 kills its worker"]["cost"].startswith("2 workers lost and replaced")
    assert found["Sample 9 raises an exception"]["cost"] == "1 sample left out"
    assert [event["n"] for event in later] == [event["n"] for event in events if event["n"] > events[2]["n"]]
    assert stacks.status == recycle.status == 200
    assert "leaves after its next batch" in recycle.json["answer"]
    assert (nobody.status, nothing.status) == (404, 404)
    assert "there is no slot 7" in nobody.json["error"]
    assert "Python stacks" in [section["title"] for section in seen["sections"]]
    assert json.loads(as_json.body)["id"] == death
    assert as_json.headers["content-disposition"] == f'attachment; filename="outlive-{death}.json"'
    assert as_html.body.startswith(b"<!DOCTYPE html>")
    assert "attachment" in as_html.headers["content-disposition"]
    assert len(runs) == 1
    assert {row["id"] for row in runs[0]["incidents"]} == set(incidents)
    assert server.ask("/api/incidents/..%2f..").status == 404
    assert server.ask("/api/incidents/ffffffff").status == 404


def test_ranks_and_jobs_stand_side_by_side(server: Server):
    """Ranks of a run together, in their order, with their labels, for the page, for top and for a scrape; a death in
    one is that one's alone."""
    client = pytest.importorskip("prometheus_client")
    parser = pytest.importorskip("prometheus_client.parser")
    with (
        running("plain", RANK="1", WORLD_SIZE="2") as second,
        running("plain") as other,
        running("plain", RANK="0", WORLD_SIZE="2") as first,
    ):
        deliver(second, 12)

        def told() -> dict[int, dict]:
            return {job["pid"]: job for job in server.jobs()}

        def has_died() -> bool:
            return "kills its worker" in str(told().get(second.pid, {}).get("findings"))

        assert wait_until(lambda: len(told()) == 3 and has_died(), DEADLINE_S)
        page = told()
        top = subprocess.run([sys.executable, "-m", "outlive", "top", "--json"], capture_output=True, text=True)
        once = subprocess.run([sys.executable, "-m", "outlive", "top", "--once"], capture_output=True, text=True)
        registry = client.CollectorRegistry()
        registry.register(outlive.PrometheusCollector())
        scrape = client.generate_latest(registry).decode()

    order = [(first.pid, 0, 2), (second.pid, 1, 2), (other.pid, None, None)]
    assert [(job["pid"], job["rank"], job["world_size"]) for job in json.loads(top.stdout)["jobs"]] == order
    assert [(page[pid]["rank"], page[pid]["world_size"]) for pid, *_ in order] == [(0, 2), (1, 2), (None, None)]
    assert page[first.pid]["run"] == page[second.pid]["run"] != page[other.pid]["run"]
    heads = [line.split()[2:4] for line in once.stdout.split("\n") if line.startswith("loader Faulty ")]
    assert heads == [["rank", "0/2"], ["rank", "1/2"], ["pid", str(other.pid)]]
    (family,) = [
        family for family in parser.text_string_to_metric_families(scrape) if family.name == "outlive_restarts"
    ]
    restarts = {(int(s.labels["pid"]), s.labels["rank"]): s.value for s in family.samples}
    assert restarts == {(first.pid, "0"): 0, (second.pid, "1"): 2, (other.pid, ""): 0}
    assert [each["kind"] for each in page[first.pid]["findings"]] == ["well"]


def test_others_are_told_when_one_viewer_hangs(server: Server):
    """A viewer that takes nothing costs the others nothing, and the stream begins with all that was before."""
    with running("plain") as job, socket.create_connection(("127.0.0.1", server.port)) as stuck:
        stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        request = server.request("/api/stream")
        stuck.sendall(request)
        assert wait_until(lambda: bool(server.jobs()), DEADLINE_S)
        with socket.create_connection(("127.0.0.1", server.port), timeout=DEADLINE_S) as lively:
            lively.sendall(request)
            read = lively.makefile("rb")
            first = _data(read, b"state")
            deliver(job, 12)
            kinds: set[str] = set()
            while "quarantine" not in kinds:
                kinds |= {event["kind"] for each in _data(read, b"news")["jobs"] for event in each["events"]}
            read.close()

    assert first["jobs"][0]["events"][0]["kind"] == "job-began"
    assert {"worker-died", "incident", "quarantine"} <= kinds


def _data(read, kind: bytes) -> dict:
    while True:
        line = read.readline()
        assert line, "the stream ended"
        if line.strip() == b"event: " + kind:
            return json.loads(read.readline().removeprefix(b"data: "))


def test_a_program_is_shown_when_it_is_run_with_dash(tmp_path):
    """The address is on standard error; the server is no child of the program, and holds none of its streams."""
    program = tmp_path / "program.py"
    program.write_text(
        "import os, psutil\n"
        "print([child.name() for child in psutil.Process().children(recursive=True)])\n"
        "print(input())\n"
    )
    with subprocess.Popen(
        [sys.executable, "-m", "outlive", "run", "--dash", str(program)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        assert process.stdin is not None
        found = server_process.ADDRESS.search(process.stderr.readline())
        assert found is not None
        server = Server(found[1], int(found[2]), found[3], process)
        page = server.ask("/")
        without = server.ask("/", knows_token=False)
        out, _ = process.communicate("done\n", timeout=DEADLINE_S)  # returns only when nobody holds the pipes
    pids = _listeners(server.port)

    for pid in pids:
        pid.terminate()
    for pid in pids:
        pid.wait(DEADLINE_S)
    assert (page.status, without.status) == (200, 401)
    assert out == "[]\ndone\n"
    assert len(pids) == 1


def _listeners(port: int):
    import psutil

    found = []
    for process in psutil.process_iter():
        try:
            if any(
                each.laddr and each.laddr.port == port and each.status == "LISTEN" for each in process.net_connections()
            ):
                found.append(process)
        except psutil.Error:
            continue
    return found
