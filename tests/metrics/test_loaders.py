"""What a loader publishes while it runs, as a viewer sees it.

Reads   boards, events and black boxes of real loaders.
Writes  gates that datasets wait for.
Never   compares seconds.
"""

from __future__ import annotations

import gc
import json
import os
import signal

import pytest

import outlive
from deadlines import wait_until
from metrics import jobs
from outlive._metrics import viewing


def test_counts_are_on_the_board_when_batches_were_delivered():
    """Delivered is exact at every moment; the rest follows within the next look."""
    loader = outlive.DataLoader(jobs.Faulty(), batch_size=4, num_workers=2, faults="skip", memory_limit="2GiB")

    seen = []
    for number, _ in enumerate(loader, 1):
        seen.append((number, jobs.only_job().snapshot()["delivered"]))
    snapshot = jobs.only_job().snapshot()

    assert all(given == shown for given, shown in seen)
    assert snapshot["delivered"] == 16
    assert snapshot["samples"] == 62
    assert snapshot["epoch"] == 0
    assert snapshot["restarts"] == 2
    assert snapshot["retries"] == 1
    assert snapshot["quarantined"] == 2
    assert snapshot["by_verdict"] == {"exception": 1, "exited": 1}
    assert snapshot["memory_limit"] == 2 << 30
    assert snapshot["bytes"] > 0
    assert sum(snapshot["histograms"]["fetch"]["counts"]) > 0
    assert len(snapshot["histograms"]["send"]["counts"]) == len(snapshot["histograms"]["send"]["bounds"]) + 1
    json.dumps(snapshot)


def test_events_tell_the_run_when_workers_die():
    """Each thing that happened has its line, in order, with the incident's name in the journal."""
    loader = outlive.DataLoader(jobs.Faulty(), batch_size=4, num_workers=2, faults="skip")

    list(loader)
    job = jobs.only_job()
    events, last = job.events()

    assert [event["n"] for event in events] == list(range(1, last + 1))
    kinds = [event["kind"] for event in events if event["kind"] != "tick"]
    assert kinds[0] == "job-began"
    assert kinds[-1] == "epoch-ended"
    assert kinds.count("worker-started") == 4
    assert kinds.count("worker-died") == 2
    assert kinds.count("quarantine") == 2
    told = {event["id"]: event for event in events if event["kind"] == "incident"}
    assert set(told) == {incident.id for incident in loader.incidents}
    assert all(told[incident.id]["sentence"] == str(incident) for incident in loader.incidents)
    assert {tuple(e["samples"]) for e in events if e["kind"] == "quarantine"} == {(9,), (21,)}
    assert job.events(after=last) == ([], last)
    assert job.events(after=3, limit=2) == (events[3:5], 5)


def test_the_sample_in_hand_is_seen_when_the_trainer_does_nothing(tmp_path):
    """A viewer needs no help of the trainer: the black box is opened through the process that holds it."""
    gate = tmp_path / "gate"
    policy = outlive.FaultPolicy(hang_wait_s=150.0)
    loader = outlive.DataLoader(jobs.Gated(gate, 13), batch_size=4, num_workers=2, prefetch_factor=2, faults=policy)
    batches = iter(loader)
    next(batches)
    job = jobs.only_job()

    def held() -> list[dict]:
        return [slot for slot in job.snapshot()["slots"] if slot["sample"] == 13]

    wait_until(lambda: bool(held()), jobs.DEADLINE_S)
    first = held()[0]
    wait_until(lambda: held()[0]["seconds"] > first["seconds"], jobs.DEADLINE_S)
    wait_until(lambda: held()[0]["limit"] == 150.0, jobs.DEADLINE_S)
    limits = [slot.limit_s for slot in loader.statistics().slots if slot.slot == first["slot"]]
    gate.touch()
    rest = list(batches)

    assert first["doing"] == "fetching a sample"
    assert first["batch"] == 3
    assert limits == [150.0]
    assert first["slot"] == 1
    assert first["pid"] not in (None, os.getpid())
    assert first["incarnation"] == 1
    assert len(rest) == 15


def test_a_slot_is_recycled_when_a_viewer_asks(tmp_path):
    """The worker finishes its batch, leaves, and a fresh one goes on; nothing is lost."""
    gate = tmp_path / "gate"
    loader = outlive.DataLoader(jobs.Gated(gate, 13), batch_size=4, num_workers=2)
    batches = iter(loader)
    delivered = [next(batches)]
    job = jobs.only_job()
    wait_until(lambda: any(slot["sample"] == 13 for slot in job.snapshot()["slots"]), jobs.DEADLINE_S)

    stacks = job.ask("stacks", 1)
    answer = job.ask("recycle", 1)
    gate.touch()
    delivered += list(batches)

    assert "__getitem__" in stacks
    assert answer.startswith("worker 1 (pid ")
    assert "leaves" in answer
    assert [int(i) for batch in delivered for i in batch] == list(range(64))
    assert loader.statistics().recycled == 1
    assert [event["why"] for event in jobs.of_kind(job, "worker-recycled")] == [
        "a viewer of the job asked for a fresh one"
    ]
    with pytest.raises(ValueError, match="no slot 7, this loader has 2"):
        job.ask("recycle", 7)
    with pytest.raises(ValueError, match='"stacks" or to "recycle"'):
        job.ask("stop", 0)  # type: ignore[arg-type]
    assert job.ask("stacks", 0) == "slot 0 has no worker now"


def test_a_death_is_seen_when_the_trainer_is_busy(tmp_path):
    """Nobody has told the trainer's machine yet, and the viewer knows."""
    gate = tmp_path / "gate"
    loader = outlive.DataLoader(jobs.Gated(gate, 13), batch_size=4, num_workers=2)
    batches = iter(loader)
    next(batches)
    job = jobs.only_job()
    assert wait_until(lambda: any(slot["sample"] == 13 for slot in job.snapshot()["slots"]), jobs.DEADLINE_S)

    os.kill(job.snapshot()["slots"][1]["pid"], signal.SIGKILL)

    assert wait_until(lambda: job.snapshot()["slots"][1]["state"] == "dead", jobs.DEADLINE_S)
    assert job.snapshot()["slots"][1]["pid"] is None
    assert job.ask("stacks", 1) == "slot 1 has no worker now"
    gate.touch()
    assert len(list(batches)) == 15


def test_a_job_is_over_when_its_loader_is_gone():
    """What it published stays for a while, and says so; counts go on over epochs."""
    loader = outlive.DataLoader(range(8), batch_size=2, num_workers=1, persistent_workers=True)
    list(loader)
    list(loader)
    job = jobs.only_job()

    assert job.alive
    assert job.kind == "loader"
    assert job.name == "range"
    assert job.pid == os.getpid()
    assert job.rank is None
    assert job.snapshot()["delivered"] == 8
    assert job.snapshot()["samples"] == 16
    assert job.snapshot()["epoch"] == 1
    del loader
    gc.collect()
    assert not job.alive
    assert viewing.jobs() == [job]
    assert jobs.kinds(job)[-1] == "job-ended"
    assert [slot["state"] for slot in job.snapshot()["slots"]] == ["closed"]


def test_nothing_is_published_when_it_is_turned_off(monkeypatch, runtime):
    """OUTLIVE_BOARD=0: no folder, and the loader works."""
    monkeypatch.setenv("OUTLIVE_BOARD", "0")
    loader = outlive.DataLoader(jobs.Faulty(), batch_size=4, num_workers=2, faults="skip")

    batches = list(loader)

    assert len(batches) == 16
    assert not runtime.exists()
    assert viewing.jobs() == []
