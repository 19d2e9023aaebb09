"""Loaders without workers: what is published while the trainer makes its batches itself.

Reads   boards, events, the screen of `top`, a scrape.
Writes  gates that datasets wait for.
Never   compares seconds.
"""

from __future__ import annotations

import gc
import os
import sys
import threading

import pytest
import torch

import outlive
import warm_server
from dashboard.test_telling import waiting
from deadlines import wait_until
from metrics import jobs
from outlive._metrics import viewing
from outlive.dashboard import telling
from outlive.dashboard.story import Story
from outlive.loader import here


@pytest.fixture(autouse=True)
def first_loaders(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that has made none yet."""
    monkeypatch.setattr(here, "loader_numbers", iter(range(1000)))


class Raising(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 9:
            raise ValueError("no such picture")
        return torch.full((16,), float(index))


class BatchAtOnce(Raising):
    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        assert type(indices) is list
        return [self[index] for index in indices]


class Stream(torch.utils.data.IterableDataset[int]):
    def __iter__(self):
        return iter(range(10))


@pytest.mark.parametrize("faults", ["raise", "skip"])
def test_counts_are_on_the_board_when_there_are_no_workers(faults):
    """Delivered is exact at every moment; samples, bytes, times and epochs are as with workers."""
    loader = outlive.DataLoader(range(64), batch_size=4, faults=faults)

    seen = [(number, jobs.only_job().snapshot()["delivered"]) for number, _ in enumerate(loader, 1)]
    list(loader)
    job = jobs.only_job()
    snapshot, told = job.snapshot(), loader.statistics()

    assert all(given == shown for given, shown in seen)
    assert len(seen) == 16
    assert (snapshot["delivered"], snapshot["samples"], snapshot["bytes"]) == (32, 128, 32 * 4 * 8)
    assert (told.samples, told.bytes, told.workers) == (128, 32 * 4 * 8, 0)
    assert snapshot["epoch"] == 1
    assert snapshot["here"]
    assert snapshot["workers"] == 0
    assert snapshot["wait_seconds"] > 0
    for name, some in (("fetch", True), ("collate", True), ("send", False)):
        assert bool(sum(snapshot["histograms"][name]["counts"])) is some
    (slot,) = snapshot["slots"]
    assert (slot["state"], slot["pid"], slot["doing"]) == ("here", os.getpid(), "the trainer's own work")
    kinds = [kind for kind in jobs.kinds(job) if kind != "tick"]
    assert kinds == ["job-began", *["epoch-began", "epoch-ended"] * 2]
    assert job.ask("recycle", 0).startswith("there is no worker to recycle")
    del loader
    gc.collect()
    assert not job.alive
    assert jobs.kinds(job)[-1] == "job-ended"


def test_the_sample_in_hand_is_seen_while_the_trainer_fetches_it(tmp_path):
    """Under both ways of making batches: no help of the trainer is needed, which hangs."""
    for number, faults in enumerate(("raise", "skip")):
        gate = tmp_path / faults
        loader = outlive.DataLoader(jobs.Gated(gate, 2), batch_size=4, faults=faults)
        run = threading.Thread(target=list, args=(loader,))
        run.start()
        try:

            def held(place: int = number) -> bool:
                found = viewing.jobs()
                return len(found) > place and found[place].snapshot()["slots"][0]["sample"] == 2

            assert wait_until(held, jobs.DEADLINE_S)
            snapshot = viewing.jobs()[number].snapshot()
            assert (snapshot["slots"][0]["doing"], snapshot["slots"][0]["batch"]) == ("fetching a sample", 0)
            assert snapshot["waiting"]
        finally:
            gate.touch()
            run.join()
        assert viewing.jobs()[number].snapshot()["slots"][0]["stage"] == "idle"


def test_what_goes_wrong_is_told_when_there_are_no_workers():
    """Incidents, the quarantine and retries, as statistics() has them; nobody is called a worker's death."""
    policy = outlive.FaultPolicy(on_error="skip", retry_on=(ValueError,), retries=2, backoff_s=0.001)
    loader = outlive.DataLoader(Raising(), batch_size=4, faults=policy)

    list(loader)
    job = jobs.only_job()
    snapshot, told = job.snapshot(), loader.statistics()

    assert snapshot["by_verdict"] == told.by_verdict == {"exception": 1}
    assert (snapshot["samples"], snapshot["quarantined"]) == (63, 1)
    assert snapshot["retries"] == told.retries == 2
    assert {event["id"] for event in jobs.of_kind(job, "incident")} == {i.id for i in loader.incidents}
    assert [event["samples"] for event in jobs.of_kind(job, "quarantine")] == [[9]]
    assert not {"worker-started", "worker-ready", "worker-died"} & set(jobs.kinds(job))


def test_an_exception_that_ends_the_pass_leaves_nothing_in_hand():
    """It is raised as ever; the board says that the trainer goes on, and the next batches count."""
    loader = outlive.DataLoader(Raising(), batch_size=4)
    batches = iter(loader)
    next(batches), next(batches)
    with pytest.raises(ValueError, match="no such picture"):
        next(batches)
    job = jobs.only_job()
    after = job.snapshot()
    next(batches)

    assert after["slots"][0]["stage"] == "idle"
    assert not after["waiting"]
    assert job.snapshot()["delivered"] == 3
    del batches
    assert jobs.kinds(job)[-1] == "epoch-ended"  # it was left early


@pytest.mark.parametrize(
    ("dataset", "options", "delivered", "samples"),
    [
        (Stream(), {"batch_size": 4}, 3, 10),
        (Stream(), {"batch_size": 4, "faults": "skip"}, 3, 10),
        (Stream(), {"batch_size": None}, 10, 10),
        (BatchAtOnce(), {"batch_size": 8, "sampler": range(16, 40)}, 3, 24),
        (BatchAtOnce(), {"batch_size": 8, "sampler": range(16, 40), "faults": "skip"}, 3, 24),
        (range(5), {"batch_size": None}, 5, 5),
        (range(6), {"batch_sampler": [(0, 1), (2, 3, 4)], "collate_fn": len}, 2, 5),
    ],
)
def test_every_kind_of_dataset_is_counted(dataset, options, delivered, samples):
    """Streams with a short last batch, __getitems__, unbatched ones, batches of which nobody knows the size."""
    loader = outlive.DataLoader(dataset, **options)

    assert len(list(loader)) == delivered

    snapshot = jobs.only_job().snapshot()
    assert (snapshot["delivered"], snapshot["samples"]) == (delivered, samples)


def test_many_short_loaders_leave_nothing_behind(runtime, monkeypatch):
    """A process may make thousands: only the first few have a folder at once, others when they live long or fail."""
    monkeypatch.setattr(here, "loader_numbers", iter(range(here.PUBLISHED_AT_ONCE - 1, 1000)))
    monkeypatch.setattr(here, "PUBLISH_DELAY_S", 1e9)

    for _ in range(20):
        assert len(list(outlive.DataLoader(range(8), batch_size=4))) == 2
    assert len(list(runtime.glob("*-*-*"))) == 1
    list(outlive.DataLoader(Raising(), batch_size=4, faults="skip"))
    assert len(list(runtime.glob("*-*-*"))) == 2
    monkeypatch.setattr(here, "PUBLISH_DELAY_S", 1e-9)
    list(outlive.DataLoader(range(8), batch_size=4))
    assert len(list(runtime.glob("*-*-*"))) == 3
    assert [job.snapshot()["delivered"] for job in viewing.jobs()] == [2, 16, 2]


def test_a_fork_that_goes_on_with_the_pass_does_not_write_to_the_board():
    """What is mapped is the parent's; the copy of the iterator works, and is not seen."""
    loader = outlive.DataLoader(range(64), batch_size=4)
    batches = iter(loader)
    next(batches)
    pid = os.fork()
    if pid == 0:
        os._exit(0 if len(list(batches)) == 15 else 1)
    assert os.waitpid(pid, 0)[1] == 0

    assert jobs.only_job().snapshot()["delivered"] == 1
    assert len(list(batches)) == 15
    assert jobs.only_job().snapshot()["delivered"] == 16


def test_nothing_is_published_when_it_is_turned_off(monkeypatch, runtime):
    """OUTLIVE_BOARD=0: no folder, no figures, the same batches."""
    monkeypatch.setenv("OUTLIVE_BOARD", "0")

    for faults in ("raise", "skip"):
        loader = outlive.DataLoader(range(64), batch_size=4, faults=faults)
        assert len(list(loader)) == 16
        assert loader.statistics().samples == 0

    assert not runtime.exists()


def test_viewers_show_a_loader_without_workers(tmp_path):
    """`top` has a line for the trainer, a scrape no workers, and the page says what num_workers would change."""
    client = pytest.importorskip("prometheus_client")
    loader = outlive.DataLoader(range(64), batch_size=4)
    batches = iter(loader)
    next(batches)
    once = warm_server.run([sys.executable, "-m", "outlive", "top", "--once"], capture_output=True, text=True)
    registry = client.CollectorRegistry()
    registry.register(outlive.PrometheusCollector(pid="own"))
    scrape = client.generate_latest(registry).decode()
    story = Story()
    for number, event in enumerate(waiting(0.6), 1):
        story.take({"n": number, **event})
    now = {**jobs.only_job().snapshot(), "wait_seconds": 12.0, "trainer_seconds": 18.0}

    (found,) = telling.findings(story, now, cpus=16)

    assert "no workers, the trainer loads" in once.stdout
    assert "  - here     training" in once.stdout
    assert max(map(len, once.stdout.split("\n"))) <= 80
    assert 'name="range"' in scrape
    assert [line.partition("{")[0] for line in scrape.split("\n") if 'slot="' in line] == [
        "outlive_worker_in_hand_seconds"
    ]
    assert found.title == "The trainer loads its batches itself, and waits for them"
    assert found.who == "none: with num_workers=0 the trainer loads its batches itself"
    assert found.which == "no single sample: each batch takes 600 ms"
    assert found.change[0].startswith("num_workers=2 (now 0; this machine has 16 CPUs)")
