"""What the dashboard reads of jobs, and what it leaves alone.

Reads   what a job of this process publishes.
Writes  an event of its own, after the job's end.
Never   serves anything.
"""

from __future__ import annotations

from typing import Any

import outlive
from outlive._metrics import runtime, viewing
from outlive.dashboard import hub


def test_a_job_that_ended_a_while_ago_is_left_alone_until_it_has_news(monkeypatch):
    """Its board is not read again and again; what it told last stays."""
    loader = outlive.DataLoader(range(8), batch_size=4, num_workers=1)
    assert len(list(loader)) == 2
    (job,) = viewing.jobs()
    del loader
    looks: list[dict[str, Any]] = []
    snapshot = job.snapshot

    def noted() -> dict[str, Any]:
        looks.append(snapshot())
        return looks[-1]

    monkeypatch.setattr(job, "snapshot", noted)
    watched = hub.Watched(job)

    first = watched.read({})
    watched.read({})
    soon = len(looks)
    monkeypatch.setattr(hub, "SETTLED_S", -1.0)
    later = [watched.read({}), watched.read({})]
    still = len(looks)
    with open(job.path / runtime.EVENTS, "a") as file:
        file.write('{"n": 999, "kind": "epoch-ended", "time": 1.0, "epoch": 0, "delivered": 2}\n')
    news = watched.read({})

    assert [event["kind"] for event in first][-1] == "job-ended"
    assert not looks[0]["alive"]
    assert (soon, later, still) == (2, [[], []], 2)
    assert [event["n"] for event in news] == [999]
    assert watched.snapshot["delivered"] == 2
