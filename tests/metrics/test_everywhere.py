"""Pools, streams, every start method, the portable layer, forks and copies: what is published of each.

Reads   boards and events.
Writes  gates.
Never   compares seconds.
"""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys

import pytest
import torch

import outlive
from deadlines import wait_until
from metrics import jobs
from outlive import records as r
from outlive._metrics import fold, viewing
from outlive.cli import top
from outlive.incident import Exit, Failure, InHand, Stage


class Stream(torch.utils.data.IterableDataset[int]):
    def __iter__(self):
        return iter(range(10))


def nap_or_die(gate: str, number: int) -> int:
    if number == 3:
        os._exit(5)
    wait_until(lambda: number != 5 or os.path.exists(gate), jobs.DEADLINE_S)
    return number


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_the_sample_in_hand_is_seen_under_other_start_methods(tmp_path, method):
    """The zygote is of another making there; its descriptors are found all the same."""
    gate = tmp_path / "gate"
    loader = outlive.DataLoader(
        jobs.Gated(gate, 13), batch_size=4, num_workers=2, multiprocessing_context=method, faults="skip"
    )
    batches = iter(loader)
    first = next(batches)
    job = jobs.only_job()

    assert wait_until(lambda: any(slot["sample"] == 13 for slot in job.snapshot()["slots"]), jobs.DEADLINE_S)
    gate.touch()
    assert 1 + len(list(batches)) == 16
    assert job.snapshot()["delivered"] == 16
    del first


def test_counts_are_published_where_black_boxes_cannot_be_opened(tmp_path, monkeypatch):
    """The portable layer: slots are as the trainer saw them last, and nobody can be asked to leave."""
    monkeypatch.setenv("OUTLIVE_SYSTEM", "portable")
    gate = tmp_path / "gate"
    program = tmp_path / "portable.py"
    program.write_text(
        "import sys, outlive\n"
        f"sys.path.insert(0, {os.path.dirname(os.path.dirname(__file__))!r})\n"
        "from metrics import jobs\n"
        "if __name__ == '__main__':\n"
        f"    loader = outlive.DataLoader(jobs.Gated(jobs.Path({str(gate)!r}), 13), batch_size=4, num_workers=1)\n"
        "    batches = iter(loader); next(batches)\n"
        "    job = jobs.only_job()\n"
        "    snapshot = job.snapshot()\n"
        "    assert snapshot['delivered'] == 1, snapshot\n"
        "    assert snapshot['slots'][0]['pid'] and not snapshot['waiting'], snapshot\n"
        "    assert 'cannot be opened' in job.ask('recycle', 0), job.ask('recycle', 0)\n"
        f"    jobs.Path({str(gate)!r}).touch()\n"
        "    assert len(list(batches)) == 15\n"
        "    assert job.snapshot()['delivered'] == 16\n"
        "    print('well')\n"
    )

    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=120)

    assert done.stdout == "well\n", done.stderr


def test_a_pool_is_published_with_its_tasks(tmp_path):
    """Tasks by their number, the death of one of them, and its end."""
    gate = tmp_path / "gate"
    with outlive.Pool(2) as pool:
        futures = [pool.submit(nap_or_die, str(gate), number) for number in range(8)]
        assert wait_until(lambda: bool(viewing.jobs()), jobs.DEADLINE_S)
        job = jobs.only_job()
        assert wait_until(lambda: any(slot["sample"] == 5 for slot in job.snapshot()["slots"]), jobs.DEADLINE_S)
        gate.touch()
        errors = [type(future.exception()).__name__ for future in futures]

    assert errors.count("NoneType") == 7
    assert job.kind == "pool"
    assert not job.alive
    snapshot = job.snapshot()
    assert snapshot["delivered"] == 7
    assert snapshot["by_verdict"] == {"exited": 1}
    assert jobs.kinds(job)[-1] == "job-ended"
    assert {tuple(event["samples"]) for event in jobs.of_kind(job, "quarantine")} == {(3,)}


def test_a_stream_is_published_without_names_for_its_samples():
    """Its samples have no index: none is made up."""
    loader = outlive.DataLoader(Stream(), batch_size=5, num_workers=1)

    delivered = len(list(loader))

    snapshot = jobs.only_job().snapshot()
    assert snapshot["delivered"] == delivered == 2
    assert [slot["sample"] for slot in snapshot["slots"]] == [None]


def test_a_copy_of_a_loader_publishes_for_itself_and_a_fork_of_the_process_nothing():
    """What is mapped belongs to one process and one loader."""
    loader = outlive.DataLoader(range(8), batch_size=4, num_workers=1)
    list(loader)
    for other in (copy.copy(loader), pickle.loads(pickle.dumps(loader))):
        list(other)
    assert len({job.key for job in viewing.jobs()}) == 3
    before = [job.events(limit=10_000)[1] for job in viewing.jobs()]
    pid = os.fork()
    if pid == 0:
        loader._meter.epoch_ended()
        loader._meter.publisher.end()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0

    assert [job.events(limit=10_000)[1] for job in viewing.jobs()] == before
    assert next(job.alive for job in viewing.jobs())


def test_records_become_events_without_a_clock():
    """The fold is pure: what is not worth a line has none, and quarantined samples are counted by verdict."""
    counted = fold.Fold()
    hand = InHand(Stage.FETCHING, 3, 1, 0.5)
    failure = Failure("ValueError", "x" * 9000, "")

    assert counted.event(r.StartWorker(2, 1)) == [{"kind": "worker-started", "slot": 2, "incarnation": 1}]
    assert counted.event(r.StartWorker(2, 2))[0]["incarnation"] == 2
    assert counted.restarts == {2: 1}
    (died,) = counted.event(r.WorkerExited(2, 1, 77, Exit(signal=9), hand))
    assert (died["kind"], died["how"], died["batch"]) == ("worker-died", "died of SIGKILL", 3)
    (left,) = counted.event(r.WorkerExited(2, 1, 77, Exit(code=0), hand, recycled="it has done 5 batches"))
    assert (left["kind"], left["why"]) == ("worker-recycled", "it has done 5 batches")
    (failed,) = counted.event(r.PreparationFailed(1, 1, -1, failure))
    assert failed["kind"] == "worker-unstarted"
    assert len(failed["how"]) == 500
    (ended,) = counted.event(r.GiveUp(r.LimitKind.RESTARTS, "too many"))
    assert (ended["kind"], ended["limit"]) == ("given-up", "restarts")
    assert counted.event(r.EpochBegan(1)) == []


def test_keys_are_told_apart_when_they_come_at_once():
    """Over a slow line several come in one read, and arrows are three bytes."""
    assert top.keys_of(b"ss\x1b[A\x1b[Bq") == ["s", "s", "up", "down", "q"]
    assert top.keys_of(b"\x1b") == ["escape"]
    assert top.keys_of(b"\x1b[5~\r\x03") == ["page up", "enter", "q"]
