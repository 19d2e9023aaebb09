"""Findings from events and snapshots: which sample, which worker, since when, what it cost, what to change.

Reads   findings.
Writes  nothing.
Never   a process: stories are told event by event.
"""

from __future__ import annotations

from typing import Any

import pytest

from outlive.dashboard import telling
from outlive.dashboard.story import Story

MIB = 1 << 20


def slot(number: int, **more: Any) -> dict[str, Any]:
    load = {"on_cpu": 0.0, "starved": 0.0, "waiting": 0.0, "idle": 0.0, "disk": 0.0, "seconds": 10.0}
    load |= {name: more.pop(name) for name in list(more) if name in load and name != "seconds"}
    return {"slot": number, "pid": 100 + number, "stage": "fetching", "sample": None, "seconds": 0.0, "batch": 5} | {
        "load": load,
        **more,
    }


def snapshot(*slots: dict[str, Any], **more: Any) -> dict[str, Any]:
    told = {"alive": True, "time": 130.0, "wait_seconds": 1.0, "trainer_seconds": 30.0, "workers": len(slots) or 2}
    return told | {"slots": list(slots), "advice": "", "breaker": "closed", "memory_limit": None} | more


def make_story(*events: dict[str, Any]) -> Story:
    told = Story()
    for number, event in enumerate(events, 1):
        told.take({"n": number, "time": 100.0, **event})
    return told


def tick(time: float, wait: float, own: float, delivered: int = 0, slots: Any = ()) -> dict[str, Any]:
    return {"kind": "tick", "time": time, "wait_seconds": wait, "trainer_seconds": own, "delivered": delivered} | {
        "slots": list(slots)
    }


def incident(kind: str, verdict: str, sample: Any, ident: str = "ab", **more: Any) -> dict[str, Any]:
    told = {"kind": "incident", "incident": kind, "verdict": verdict, "id": ident, "slot": 1, "samples": [sample]}
    return told | {"described": [], "sentence": "it died", "cause": "why", "action": "left out", "seconds": 0.0} | more


def waiting(share: float, from_tick: int = 10, ticks: int = 30) -> list[dict[str, Any]]:
    """A trainer that waits `share` of each second from that tick on, and then gets a batch, not four."""
    wait = own = 0.0
    delivered = 0
    told = []
    for n in range(ticks):
        lost = share if n >= from_tick else 0.0
        wait, own = wait + lost, own + 1 - lost
        delivered += 1 if lost else 4
        told.append(tick(100.0 + n, wait, own, delivered=delivered) | {"samples": 8 * delivered})
    return told


def only(told: list[telling.Finding], kind: str) -> telling.Finding:
    found = [each for each in told if each.kind == kind]
    assert len(found) == 1, told
    return found[0]


def test_a_poison_sample_is_named_with_what_it_cost():
    """Two workers, the seconds until others were there, the journal's remedies; not what is done already."""
    told = make_story(
        {"kind": "worker-died", "slot": 1, "time": 110.0},
        incident(
            "crash", "null-pointer", 421, "aa", time=110.1, described=["a.png"], action="tried again", batch=52, epoch=1
        ),
        {"kind": "worker-ready", "slot": 1, "time": 110.5},
        {"kind": "worker-died", "slot": 1, "time": 111.0},
        incident("crash", "null-pointer", 421, "bb", time=111.1, described=["a.png"]),
        {"kind": "quarantine", "id": "bb", "verdict": "null-pointer", "slot": 1, "samples": [421], "replaced": False},
        {"kind": "worker-ready", "slot": 1, "time": 112.0},
    )

    found = only(
        telling.findings(told, snapshot(), remedies={"bb": ["update the library", 'faults="skip" leaves it out']}),
        "poison",
    )

    assert found.title == "Sample 421 kills its worker"
    assert found.level == "bad"
    assert found.which == "sample 421 (a.png)"
    assert found.who == "worker 1 (2 times)"
    assert (found.since, found.at) == (110.1, "batch 52 of epoch 1")
    assert found.cost == "2 workers lost and replaced; 1.5 s of a worker's time until work went on; 1 sample left out"
    assert found.change[:2] == ("update the library", "mend or remove sample 421")
    assert found.incidents == ("aa", "bb")


def test_many_samples_that_raise_are_one_finding():
    """Of a thousand bad samples some are named and the rest counted; memory stays bounded."""
    events = []
    for n in range(1000):
        events.append(incident("exception", "exception", n, f"{n:x}", slot=n % 40))
        events.append({"kind": "quarantine", "id": f"{n:x}", "verdict": "exception", "slot": 0, "samples": [n]})

    told = make_story(*events)
    found = only(telling.findings(told, snapshot()), "poison")

    assert found.title == "Samples 0, 1, 2, 3, 4, 5 and 194 more raise an exception"
    assert found.who.endswith("and 32 more")
    assert len(found.incidents) == 20
    assert found.incidents[-1] == f"{999:x}"


def test_a_sample_that_raises_is_told_how_to_be_left_out():
    """Where nothing was left out, the option is named."""
    found = only(telling.findings(make_story(incident("exception", "exception", 9)), snapshot()), "poison")

    assert found.title == "Sample 9 raises an exception"
    assert 'faults="skip" leaves such a sample out' in found.change[0]


def test_a_leak_is_told_when_workers_are_recycled_for_memory():
    """Since the first worker was seen, with the rate, and what would make it rarer."""
    events = [
        tick(100.0 + n, 0, n, slots=[{"slot": 0, "incarnation": 1, "private": (20 + 10 * n) * MIB}])
        | {"samples": 10 * n}
        for n in range(5)
    ]
    events += [
        {"kind": "worker-recycled", "slot": 0, "time": 105.0, "why": "its memory has reached 136 MiB of 160 MiB"},
        {"kind": "worker-ready", "slot": 0, "time": 105.5},
        {"kind": "worker-recycled", "slot": 1, "time": 106.0, "why": "a viewer of the job asked for it"},
    ]

    found = only(telling.findings(make_story(*events), snapshot(memory_limit=160 * MIB)), "leak")

    assert found.who == "worker 0 (recycled 1 time)"
    assert found.since == 100.0
    assert "1 worker recycled in time, none died of it; 500 ms until the new ones were ready" in found.cost
    assert "10 MiB a second" in found.cost
    assert found.change[0].startswith("in the dataset: look for caches")
    assert found.change[1].endswith('memory_limit="320MiB" recycles half as often, where there is room')
    assert found.why == "the private memory of workers rises, and does not fall: each sample leaves about 1 MiB behind"


def test_what_each_sample_leaves_is_told_beside_a_diagnosis():
    """A diagnosis comes later than the first sight of a leak, and takes nothing away; of descriptors it says all."""
    rising = [tick(100.0 + n, 0, n, slots=[_held(0, 20 + 10 * n)]) | {"samples": 10 * n} for n in range(12)]
    diagnosed = [
        incident("growth", verdict, 5, cause="it grows by 80 MiB per batch") for verdict in ("leak", "descriptor-leak")
    ]

    found = [only(telling.findings(make_story(*rising, one), snapshot()), "leak").why for one in diagnosed]

    assert found == [
        "it grows by 80 MiB per batch; each sample leaves about 1 MiB behind",
        "it grows by 80 MiB per batch",
    ]


def test_a_leak_is_told_before_anything_is_recycled():
    """Memory that rises in nearly every second, by much; a warm-up that ends is none."""
    rising = [tick(100.0 + n, 0, n, slots=[_held(0, 20 + 8 * n)]) for n in range(12)]
    warm = [tick(100.0 + n, 0, n, slots=[_held(0, min(20 + 20 * n, 90))]) for n in range(16)]

    found = only(telling.findings(make_story(*rising), snapshot(memory_limit=400 * MIB)), "leak")

    assert "until it is recycled" in found.cost
    assert [each.kind for each in telling.findings(make_story(*warm), snapshot())] == ["well"]


def _held(number: int, mib: int) -> dict[str, Any]:
    return {"slot": number, "incarnation": 1, "private": mib * MIB}


@pytest.mark.parametrize(
    ("load", "kind", "title", "change"),
    [
        ({"waiting": 0.9}, "slow-source", "The source of the samples is slow", "num_workers=6 (now 2)"),
        ({"waiting": 0.9, "disk": 0.8}, "slow-source", "The disk is slow", "num_workers=6 (now 2)"),
        ({"on_cpu": 0.95}, "too-few-workers", "Too few workers: 2 cannot keep up", "num_workers=6 (now 2"),
        ({"on_cpu": 0.5, "starved": 0.5}, "starved", "Workers wait for a CPU", "see what else runs here"),
    ],
)
def test_waiting_is_explained_by_what_workers_do(load, kind, title, change):
    """Why the trainer waits, since when, how long in all, and how many workers would do."""
    told = make_story(*waiting(0.6))
    now = snapshot(slot(0, **load), slot(1, **load), wait_seconds=12.0, trainer_seconds=18.0)

    found = only(telling.findings(told, now, cpus=16), kind)

    assert found.title.startswith(title)
    assert found.change[0].startswith(change)
    assert found.since == 109.0
    assert (
        found.cost == "the trainer waited 12 s since then, 60% of its time; it gets 1 batches a second, before that 4"
    )
    assert found.which == "no single sample: each takes a worker 250 ms, a batch 2 s"
    assert found.who == "all 2 alike"


def test_no_more_workers_are_advised_than_there_are_cpus():
    """Workers that compute need a CPU each; what is missing is told."""
    told = make_story(*waiting(0.6))
    now = snapshot(slot(0, on_cpu=0.95), wait_seconds=12.0, trainer_seconds=18.0)

    found = only(telling.findings(told, now, cpus=2), "too-few-workers")

    assert found.change == (
        'num_workers=2 (now 1; this machine has 2 CPUs), or num_workers="auto"',
        "about 3 workers would be needed: more CPUs, or less work in __getitem__ and collate_fn",
    )


def test_fewer_workers_are_advised_when_they_take_each_other_the_cpu():
    """Where there are more of them than CPUs, nobody else need be to blame."""
    load = {"on_cpu": 0.5, "starved": 0.5}
    now = snapshot(*(slot(n, **load) for n in range(3)), wait_seconds=12.0, trainer_seconds=18.0)

    found = only(telling.findings(make_story(*waiting(0.6)), now, cpus=2), "starved")

    assert found.change == ("num_workers=2, or more CPUs for the job",)


def test_nothing_is_found_when_the_trainer_has_caught_up():
    """A slow beginning is over: it is no finding any more."""
    told = make_story(*waiting(0.6, 0, 10), *(tick(110.0 + n, 6.0, 4.0 + n) for n in range(10)))

    assert [each.kind for each in telling.findings(told, snapshot(slot(0, on_cpu=0.9)))] == ["well"]


def test_workers_that_cannot_be_killed_are_named():
    """They wait in the kernel, after others have their slots."""
    told = only(
        telling.findings(make_story(), snapshot(stuck="1 worker is still stuck in the kernel on nas:/x")), "hang"
    )

    assert told.title == "1 worker is still stuck in the kernel on nas:/x"
    assert "umount -f" in told.change[0]


def test_a_hang_is_told_while_it_lasts_and_after():
    """Which sample is in hand and for how long; then that it cost its worker."""
    held = snapshot(slot(0), slot(1, sample=77, seconds=34.0, limit=120.0))
    hang = incident("hang", "sleeping", 77, seconds=34.0)
    condemned = {"kind": "quarantine", "id": "ab", "verdict": "sleeping", "slot": 1, "samples": [77]}

    now = only(telling.findings(make_story(), held), "hang")
    after = only(telling.findings(make_story(hang, condemned), snapshot()), "hang")

    assert now.title == "Worker 1 has had sample 77 in hand for 34 s"
    assert now.cost == "34 s of this worker so far; it is ended at 2 min 0 s"
    assert now.since == 96.0
    assert "FaultPolicy(sample_timeout=17)" in now.change[1]
    assert after.title == "Sample 77 hangs and costs its worker"
    assert "34 s" in after.cost


def test_a_source_that_is_gone_is_told_and_that_it_is_back():
    """Nobody is to blame; how long nothing came."""
    gone = {"kind": "breaker", "id": "ab", "sentence": "the source is gone: OSError", "open": True}
    back = {"kind": "breaker", "id": "ac", "sentence": "the source is back", "open": False, "time": 112.0}

    open_now = only(telling.findings(make_story(gone), snapshot(breaker="open since 30 s")), "breaker")
    closed = only(telling.findings(make_story(gone, back), snapshot()), "breaker")

    assert (open_now.level, closed.level) == ("bad", "note")
    assert open_now.cost == "nothing is fetched since 30 s"
    assert closed.cost == "nothing was fetched for 12 s"
    assert "breaker_patience" in open_now.change[1]


def test_a_death_that_blames_no_sample_is_reported():
    """A worker that was killed while it did nothing."""
    killed = incident("crash", "killed", None, samples=[], action="replaced")

    found = only(telling.findings(make_story(killed), snapshot()), "death")

    assert found.title.startswith("1 worker died (killed)")
    assert found.which == "no sample: none was in hand"


def test_the_worst_comes_first():
    """What gave up, what kills, what raises, what costs time, what is good to know."""
    told = make_story(
        *waiting(0.6),
        incident("exception", "exception", 9),
        incident("crash", "killed", 13, "ac"),
        {"kind": "quarantine", "id": "ac", "verdict": "killed", "slot": 1, "samples": [13]},
        {"kind": "given-up", "limit": "max_bad", "why": "too many"},
    )
    now = snapshot(slot(0, on_cpu=0.9), wait_seconds=12.0, trainer_seconds=18.0, advice="workers are idle 90% of …")

    kinds = [each.kind for each in telling.findings(told, now, cpus=8)]

    assert kinds == ["given-up", "poison", "poison", "too-few-workers", "too-many-workers"]
