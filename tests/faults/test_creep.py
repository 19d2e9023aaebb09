"""Datasets that leak descriptors or threads: every sample arrives, and the leak is named once."""

from __future__ import annotations

import os
import resource
import threading
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

import outlive
from outlive import IncidentKind
from outlive.verdicts import Name

SIZE = 480
LIMIT = 128

_kept: list[Any] = []


class Leaking(Dataset[Any]):
    """A descriptor or a thread of each sample stays; and it tells how many its worker has by then."""

    def __init__(self, what: str) -> None:
        self.what = what

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Any:
        if self.what == "descriptors":
            _kept.append(open(os.devnull))  # noqa: SIM115
        elif self.what == "threads":
            threading.Thread(target=threading.Event().wait, name=f"leaked-{index}").start()
        folder = "task" if self.what == "threads" else "fd"
        return torch.rand(4) + index, len(os.listdir(f"/proc/self/{folder}"))


def bind(slot: int) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (LIMIT, LIMIT))


def run(what: str, method: str) -> tuple[list[Any], outlive.DataLoader[Any]]:
    torch.manual_seed(7)
    loader = outlive.DataLoader(
        Leaking(what), 4, shuffle=True, num_workers=2, multiprocessing_context=method, worker_init_fn=bind
    )
    return list(loader), loader


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
@pytest.mark.parametrize(
    ("what", "name", "most"), [("descriptors", Name.DESCRIPTOR_LEAK, LIMIT), ("threads", Name.THREAD_LEAK, 80)]
)
def test_a_leak_ends_in_a_recycle_and_the_epoch_does_not_notice(what, name, most, method):
    """Far more than a worker could have; bit for bit as without the leak. Threads that never end hold nobody up."""
    batches, loader = run(what, method)
    healthy, sound = run("nothing", method)

    assert len(batches) == SIZE // 4
    assert all(torch.equal(one[0], other[0]) for one, other in zip(batches, healthy, strict=True))
    assert max(int(count.max()) for _, count in batches) <= most
    statistics = loader.statistics()
    assert statistics.recycled >= 4  # a worker has 240 samples, and room for 64 or 110
    assert (statistics.restarts, statistics.quarantined) == (0, 0)
    growth = [incident for incident in loader.incidents if incident.kind is IncidentKind.GROWTH]
    assert sorted(incident.slot for incident in growth) == [0, 1]
    for incident in growth:
        assert incident.verdict is not None
        assert incident.verdict.name is name
        creep = incident.evidence.creep
        assert creep is not None
        assert creep.per_batch == pytest.approx(4, rel=0.25)
        assert any("/dev/null" in kind or "leaked" in kind for kind in creep.mostly), creep
        if what == "descriptors":
            assert f"until the limit of {LIMIT}" in incident.verdict.cause
    assert len(loader.incidents) == len(growth) + statistics.recycled
    assert list(sound.incidents) == []
