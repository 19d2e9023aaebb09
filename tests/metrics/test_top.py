"""`outlive top` in a real terminal, beside a real job.

Reads   the screen.
Writes  keys.
Never   needs the job's help to see it.
"""

from __future__ import annotations

import json
import os
import sys

import outlive
import warm_server
from deadlines import wait_until
from metrics import jobs
from metrics.terminals import Terminal
from outlive._metrics import viewing
from outlive.cli import top_screen


def held_job(gate, **options):
    """A loader whose sample 13 is in hand until the gate opens, after a few incidents."""
    loader = outlive.DataLoader(
        jobs.Gated(gate, 13, faulty=True), batch_size=4, num_workers=2, faults="skip", **options
    )
    batches = iter(loader)
    first = next(batches)
    job = jobs.only_job()
    assert wait_until(lambda: any(slot["sample"] == 13 for slot in job.snapshot()["slots"]), jobs.DEADLINE_S)
    return loader, first, batches


def test_a_job_is_watched_and_steered_from_a_terminal(tmp_path):
    """Started after the job: the sample in hand, incidents, stacks, recycling, pausing, another size."""
    gate = tmp_path / "gate"
    loader, first, batches = held_job(gate, memory_limit="2GiB")

    with Terminal("top", "--interval", "0.1") as terminal:
        terminal.shows(
            "outlive top  1 job, 2 workers", "loader Gated", "fetching           13", "incidents, newest first"
        )
        assert max(map(len, terminal.lines())) <= 80
        terminal.resize(120, 40)
        terminal.comes_to(lambda lines: max(map(len, lines)) > 80, "wider")
        terminal.press("s")
        terminal.shows("by seconds")
        terminal.press("p")
        terminal.shows("PAUSED")
        terminal.press("p")
        terminal.comes_to(lambda lines: "PAUSED" not in lines[0], "goes on")
        terminal.press("s", "s", "s", "s")
        terminal.shows("by slot")
        terminal.press("d")
        terminal.shows("choose a worker or an incident first")
        terminal.press("Down", "Down", "d")
        terminal.shows("__getitem__", "esc back")
        terminal.press("Escape")
        terminal.shows("slot state")
        terminal.press("r")
        terminal.shows("recycle worker 1 after its batch? y")
        terminal.press("y")
        terminal.shows("worker 1 (pid ", "leaves after its next batch")
        terminal.press("Down", "Enter")
        terminal.shows("ValueError", "no such picture", "esc back")
        terminal.press("q")
        terminal.shows("slot state")
        gate.touch()
        rest = list(batches)
        terminal.press("q")
        terminal.shows("«left»")

    samples = [int(i) for batch in [first, *rest] for i in batch]
    assert samples == [i for i in range(64) if i != 1]
    assert loader.statistics().recycled == 1


def test_top_tells_programs_what_there_is(tmp_path):
    """--once is text in 80 columns, --json is everything; both leave with 1 where nothing runs."""
    gate = tmp_path / "gate"

    nothing = warm_server.run([sys.executable, "-m", "outlive", "top", "--once"], capture_output=True, text=True)
    _, _, batches = held_job(gate)
    once = warm_server.run([sys.executable, "-m", "outlive", "top", "--once"], capture_output=True, text=True)
    told = warm_server.run([sys.executable, "-m", "outlive", "top", "--json"], capture_output=True, text=True)
    gate.touch()
    list(batches)

    assert nothing.returncode == 1
    assert "no loader or pool of yours is running" in nothing.stdout
    assert once.returncode == told.returncode == 0
    assert "fetching           13" in once.stdout
    assert "\x1b" not in once.stdout
    assert max(map(len, once.stdout.split("\n"))) <= 80
    job = json.loads(told.stdout)["jobs"][0]
    assert job["pid"] == os.getpid()
    assert [slot["sample"] for slot in job["snapshot"]["slots"]][1] == 13
    assert "incident" in {event["kind"] for event in job["events"]}


def test_hostile_texts_stay_texts_on_the_screen():
    """What user code says cannot steer the terminal, nor is a line longer than the screen."""
    who = {"pid": 1, "command": "a\x1b[2Jb.py", "name": "D\nE", "key": "k"}
    seen = top_screen.Seen(viewing.Job(jobs.Path("/nowhere"), who))
    seen.snapshot = jobs.snapshot_of(advice="do \x1b]0;x\x07 this " * 20, breaker="open: \x1b[31m", slots=3)
    seen.incidents.append(
        {"id": "ab", "verdict": "x", "sentence": "bad \x1b[1m" * 40, "time": 0.0, "incident": "crash"}
    )

    for width, height in ((80, 24), (40, 8), (200, 60), (1, 1)):
        lines = top_screen.screen(top_screen.View([seen]), width, height)

        assert len(lines) == max(4, height)
        assert all(len(line.text) <= width for line in lines)
        assert all(line.text.isprintable() for line in lines)


def test_slots_are_sorted_as_chosen():
    """The one that takes longest, or that has most memory, comes first; those that idle come last."""
    seen = top_screen.Seen(viewing.Job(jobs.Path("/nowhere"), {"pid": 1, "key": "k"}))
    seen.snapshot = jobs.snapshot_of(slots=3)
    for slot, seconds, private in zip(seen.snapshot["slots"], (1.0, 9.0, 90.0), (30, 20, 10)):
        slot["seconds"], slot["memory"]["private"] = seconds, private
    seen.snapshot["slots"][2]["stage"] = "idle"

    def order(sort: str) -> list[int]:
        lines = top_screen.body_of(top_screen.View([seen], sort=sort), 80)
        return [line.choice[1][1] for line in lines if line.choice]

    assert order("slot") == [0, 1, 2]
    assert order("seconds") == [1, 0, 2]
    assert order("memory") == [0, 1, 2]


def test_the_limit_of_a_sample_and_what_is_stuck_in_the_kernel_are_shown():
    """Until when it is waited for stands beside how long it was; in 80 columns."""
    seen = top_screen.Seen(viewing.Job(jobs.Path("/nowhere"), {"pid": 1, "key": "k"}))
    seen.snapshot = jobs.snapshot_of(slots=2, stuck="1 worker is still stuck in the kernel on nas:/export")
    seen.snapshot["slots"][0] |= {"seconds": 31.2, "limit": 120.0}
    seen.snapshot["slots"][1] |= {"seconds": 31.2, "limit": None}

    lines = [line.text for line in top_screen.body_of(top_screen.View([seen]), 80)]

    assert "  1 worker is still stuck in the kernel on nas:/export" in lines
    limited, unlimited = lines[-2:]
    assert " 31s/120s " in limited
    assert " 31s " in unlimited
    assert max(map(len, lines)) <= 80
