"""Workers that are recycled: no sample is blamed, and no epoch ends because of it.

Reads   the actions that events are answered with.
Writes  events, one by one.
Never   a process, a clock; times are numbers.
"""

from __future__ import annotations

from machine.events import begun, death, handle, of, ready, sent, submit
from outlive import records as r
from outlive.incident import IncidentKind, Stage


def test_a_recycled_worker_is_replaced_without_blame():
    """It left between two batches: what it had not done goes to the next, in order."""
    machine = begun(retries=0)
    submit(machine, 0, 1, 2)
    handle(machine, r.TaskFinished(0, 1, 0))

    actions = handle(machine, death(1, Stage.LEAVING, recycled="its memory reached 190 MiB of 200 MiB"))

    assert of(r.StartWorker, actions) == [r.StartWorker(0, 2)]
    assert [seq for _, seq, _ in sent(actions)] == [1, 2]
    (report,) = of(r.ReportIncident, actions)
    assert report.incident.kind is IncidentKind.RECYCLED
    assert "190 MiB" in str(report.incident)
    assert (machine.recycled, machine.restarts, machine.retries, machine.bad) == (1, 0, 0, 0)


def test_recycling_never_ends_an_epoch():
    """Only deaths count against the limit of restarts."""
    machine = begun(max_restarts=2)
    submit(machine, 0)

    for incarnation in range(1, 50):
        handle(machine, death(incarnation, Stage.LEAVING, recycled="on time"), ready(incarnation + 1))

    assert not machine.given_up
    assert machine.recycled == 49


def test_a_recycled_worker_of_a_stream_that_has_ended_is_not_replaced():
    """There is nothing left to do."""
    machine = begun()
    submit(machine, 0)
    handle(machine, r.TaskFinished(0, 1, 0, ended=True))

    assert of(r.StartWorker, handle(machine, death(1, Stage.LEAVING, recycled="on time"))) == []
