"""Plans and survival tables, without a process.

Reads   texts, tables and notes that are made up.
Writes  nothing.
Never   a fault.
"""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest

from outlive.incident import Exit, Failure, Incident, IncidentKind, InHand
from outlive.testing import around, chaos, survival
from outlive.testing import plan as plans
from outlive.testing.around import Surrounding
from outlive.testing.faults import CATALOGUE
from outlive.testing.plan import Planned
from outlive.testing.plan_words import PlanError


def test_a_list_of_faults_says_how_many_how_often_and_when():
    """The grammar of the command line."""
    assert plans.parse_faults("segv, oom:5,hang:2%,Kill@collate:always,exit:10%:x3,sigbus") == (
        Planned("segv"),
        Planned("oom", count=5),
        Planned("hang", share=0.02),
        Planned("kill", moment="collate", times=None),
        Planned("exit", share=0.1, times=3),
        Planned("bus"),
    )
    assert [planned.fault for planned in plans.parse_faults("all")] == list(CATALOGUE)


def test_what_is_around_a_program_may_stand_in_the_list():
    """From when and for how long; a plan keeps it apart from faults of samples."""
    text = "outage,segv,network@1s:3s,memory@500ms:64MiB:10s,cpus:2,disk:2MiB,memory:50%"

    plan = plans.Plan(plans.parse_faults(text), busy_cpus=3, seed=4)

    assert plan.faults == (Planned("segv"),)
    assert plan.around == (
        Surrounding("outage"),
        Surrounding("network", from_s=1.0, for_s=3.0),
        Surrounding("memory", from_s=0.5, for_s=10.0, size="64MiB"),
        Surrounding("cpus", count=2),
        Surrounding("disk", size="2MiB"),
        Surrounding("memory", size="50%"),
        Surrounding("cpus", count=3),
    )
    assert dataclasses.replace(plan, seed=5).around == plan.around
    assert plan.errors == ["outlive.testing.faults.InjectedError"]  # a source that is gone is the breaker's
    with pytest.raises(PlanError, match="'outage:3%': for: '3%' is no span of time"):
        plans.parse_faults("outage:3%")
    with pytest.raises(PlanError, match="'4s' in 'outage:3s:4s' says nothing: '3s' says for how long already"):
        plans.parse_faults("outage:3s:4s")


def test_what_fails_begins_when_the_seed_says_within_the_time_that_loaders_take():
    """Unless a moment is given; burdens are there from the beginning."""
    planned = (Surrounding("outage"), Surrounding("cpus"), Surrounding("network", from_s=7.0, for_s=1.0))

    found = around.timeline(planned, 3, 10.0)

    assert found == around.timeline(planned, 3, 10.0) != around.timeline(planned, 4, 10.0)
    (_, begins, lasts), *others = found
    assert (1.0 <= begins <= 6.0, lasts) == (True, 2.0)
    assert others == [(planned[1], 0.0, None), (planned[2], 7.0, 1.0)]
    assert around.words(*others[0]) == "cpus to the end"
    assert around.words(*others[1]) == "network from 7 s for 1 s"


@pytest.mark.parametrize(
    ("words", "kill_every_s", "retries"),
    [
        ("segv", None, 1),
        ("segv:x3", None, 3),
        ("segv:always", None, 1),
        ("segv,slow,leak", None, 1),
        ("segv", 5.0, 2),
        ("segv,kill", None, 2),
        ("segv:x3,kill,raise,exit", 5.0, 4),
    ],
)
def test_a_sample_may_be_hit_by_as_much_as_is_likely(words, kill_every_s, retries):
    """Its own fault as often as it fires, and another; what harms nobody does not count."""
    assert plans.Plan(plans.parse_faults(words), kill_every_s=kill_every_s).retries == retries


def test_samples_are_chosen_by_the_seed():
    """The same seed chooses the same; a share is at least one sample."""
    keys = list(range(50))

    chosen = Planned("segv", share=0.1).choose(keys, random.Random(4))

    assert chosen == Planned("segv", share=0.1).choose(keys, random.Random(4))
    assert len(chosen) == 5
    assert len(Planned("segv", share=0.001).choose(keys, random.Random(4))) == 1
    assert Planned("segv", samples=(3, 99)).choose(keys, random.Random(4)) == [3]
    stream = [(worker, number) for worker in range(2) for number in range(3)]
    assert Planned("segv", samples=(2,)).choose(stream, random.Random(4)) == [(0, 2), (1, 2)]
    assert Planned("segv", samples=((1, 0),)).choose(stream, random.Random(4)) == [(1, 0)]


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ({}, "a plan without faults shows nothing"),
        ({"faults": []}, "there is no key 'faults'; did you mean fault"),
        ({"fault": "segv"}, r"each begun by \[\[fault\]\]"),
        ({"surroundings": {}}, r"each begun by \[\[surroundings\]\]"),
        (
            {"surroundings": [{}]},
            r'surroundings 1: which kind\? write kind = "memory" \(there are outage, network, memory',
        ),
        ({"surroundings": [{"kind": "memroy"}]}, "there is no kind 'memroy'; did you mean memory"),
        (
            {"surroundings": [{"kind": "weather"}]},
            "there is no kind 'weather'; there are outage, network, memory, cpus",
        ),
        ({"surroundings": [{"kind": "cpus", "size": 1}]}, "cpus has no 'size'; it has count, from, for"),
        ({"surroundings": [{"kind": "cpus", "count": 0}]}, "surroundings 1: count must be at least 1"),
        ({"surroundings": [{"kind": "memory"}]}, "surroundings 1: how much memory\\? give a size, such as 500MiB"),
        ({"surroundings": [{"kind": "memory", "size": "lots"}]}, 'size must be a size such as "24GiB" or a share'),
        ({"surroundings": [{"kind": "disk", "from": "5s"}]}, "disk has no 'from'; it has size, folder"),
        ({"surroundings": [{"kind": "outage", "for": "soon"}]}, "for: 'soon' is no span of time; write 90s"),
        ({"surroundings": [{"kind": "outage", "for": 0}]}, 'for is written 5 or "5s", and is more than 0, got 0'),
        ({"surroundings": [{"kind": "outage", "from": -1}]}, 'from is written 5 or "5s", and is at least 0, got -1'),
        ({"surroundings": [{"kind": "outage", "error": "OhNo"}]}, "'OhNo' is none of Python's exceptions"),
        (
            {"surroundings": [{"kind": "outage", "loaders": 0}]},
            r"loaders must be a list of whole numbers, such as \[0, 2\]",
        ),
        (
            {"fault": [{"fault": "outage"}]},
            r'outage is no fault of a sample; write \[\[surroundings\]\] and kind = "outage"',
        ),
        ({"fault": [{"fault": "kill", "samples": 5}]}, r"fault 1: samples are a list, such as \[18, 40\], got 5"),
        ({"fault": [{"fault": "kill", "share": [1]}]}, r'fault 1: a share is written "2%" or 0.02, got \[1\]'),
        ({"fault": [{"fault": "kill", "count": "two"}]}, "fault 1: count must be a whole number, got 'two'"),
        ({"busy_cpus": -1}, "busy_cpus must be at least 0"),
        ({"fault": [{"share": 0.1}]}, r'fault 1: which one\? write fault = "segv"'),
        ({"fault": [{"fault": "deadlok"}]}, "did you mean deadlock"),
        ({"fault": [{"fault": "zzz"}]}, "there are raise, unpicklable, segv"),
        ({"fault": [{"fault": "slow", "second": 2}]}, "slow has no 'second'; did you mean seconds"),
        ({"fault": [{"fault": "slow", "seconds": -2}]}, "seconds must be at least 0"),
        ({"fault": [{"fault": "kill", "moment": "fetsch"}]}, "there is no moment 'fetsch'; did you mean fetch"),
        ({"fault": [{"fault": "kill", "share": 2}]}, "between 0% and 100%"),
        ({"fault": [{"fault": "kill", "share": "many"}]}, '"2%" or 0.02'),
        ({"fault": [{"fault": "kill", "share": 0.1, "count": 2}]}, "share and count are two answers"),
        ({"fault": [{"fault": "kill", "times": 0}]}, "times must be at least 1"),
        ({"fault": [{"fault": "kill", "times": "often"}]}, "times must be a whole number"),
        ({"fault": [{"fault": "raise", "error": "OhNo: x"}]}, "'OhNo' is none of Python's exceptions"),
        ({"kill_every": 0}, "is more than 0"),
        ({"kill_every": "5s", "policy": "hope"}, "policy must be raise, skip or replace"),
        ({"kill_every": "5s", "memory_pressure": "much"}, "memory_pressure must be a size"),
    ],
)
def test_a_plan_that_makes_no_sense_is_an_error_that_says_what_does(told: dict[str, Any], words):
    """With the plan's name, and the nearest word that there is."""
    with pytest.raises(PlanError, match=words) as raised:
        plans.from_dict(told, "plan.toml")

    assert str(raised.value).startswith("plan.toml")


def test_a_plan_goes_through_its_own_tables():
    """What chaos hands to the program is what it was told."""
    planned = plans.from_dict({"fault": [{"fault": "raise", "error": "OSError: torn", "times": "always"}]}).faults[0]

    again = plans.from_dict({"fault": [planned.table]}).faults[0]

    assert (again.fault, again.times, again.arguments) == ("raise", None, {"error": "OSError: torn"})
    assert repr(again.make().plain.error) == "OSError('torn')"


# ---------------------------------------------------------------- tables


def notes(*rows: tuple[Any, ...]) -> survival.Story:
    """A story of («what», {…}), one second apart."""
    base = {"loader": "0", "epoch": 0, "pid": 1, "worker": 0, "moment": "fetch"}
    return survival.read({**base, "what": what, "t": float(at), **more} for at, (what, more) in enumerate(rows))


def batch(*keys: Any) -> list[tuple[str, dict[str, Any]]]:
    return [("got", {"keys": list(keys)}), ("gave", {})]


PLAIN = notes(("begun", {}), ("drawn", {"keys": [0, 1, 2, 3]}), *batch(0, 1), *batch(2, 3), ("ended", {}))


def judged(story: survival.Story, **more: Any) -> survival.Outcome:
    return survival.judge(story, more.pop("plain", PLAIN), more.pop("incidents", ()), more.pop("excused", set()), 0)


def test_lost_is_what_was_drawn_and_neither_came_nor_is_bad_for_good():
    """In an epoch that ended, by name; a sample that came again is counted, too."""
    story = notes(("begun", {}), ("drawn", {"keys": [0, 1, 2, 3]}), *batch(0, 0), *batch(2), ("ended", {}))

    outcome = judged(story)

    assert (outcome.lost, sorted(outcome.lost_samples), outcome.twice) == (2, [1, 3], 1)
    assert judged(story, excused={("0", 1)}).lost_samples == (3,)
    assert not outcome.is_whole
    assert judged(PLAIN).is_whole


def test_what_did_not_come_without_faults_either_is_not_lost_by_them():
    """A sample that is bad by itself is told apart."""
    plain = notes(("begun", {}), ("drawn", {"keys": [0, 1, 2, 3]}), *batch(0, 1, 2), ("ended", {}))
    story = notes(("begun", {}), ("drawn", {"keys": [3, 2, 1, 0]}), *batch(2, 0), ("ended", {}))

    outcome = judged(story, plain=plain)

    assert (outcome.lost_samples, outcome.bad_anyway) == ((1,), (3,))
    assert judged(plain, plain=plain).is_whole


def test_an_epoch_that_broke_off_has_lost_what_the_plain_one_received():
    """What had arrived and was not given to the program does not count; nor does an epoch that never began."""
    broken = notes(("begun", {}), ("drawn", {"keys": [0, 1, 2, 3]}), *batch(0, 1), ("got", {"keys": [2, 3]}))

    assert judged(broken).lost == 2
    assert judged(notes()).lost == 4


def test_streams_are_compared_with_the_run_without_faults():
    """Nothing is drawn there; a sample is named by its worker and its number."""
    plain = notes(("begun", {}), *batch([0, 0], [0, 1]), *batch([1, 0]), ("ended", {}))
    story = notes(("begun", {}), *batch([0, 0]), *batch([1, 0]), ("ended", {}))

    assert judged(story, plain=plain).lost_samples == ((0, 1),)


def test_a_fault_is_survived_when_a_replacement_goes_on():
    """A death by its pid, an exception by its sample; going on is another process's fetch, or the end of the epoch."""
    story = notes(
        ("begun", {}),
        ("went on", {"pid": 10}),
        ("fired", {"fault": "kill", "key": 1, "pid": 10}),
        ("went on", {"pid": 10}),  # still the one that is to die
        ("went on", {"pid": 11}),
        ("fired", {"fault": "raise", "key": 2, "pid": 11}),
        ("fired", {"fault": "raise", "key": 3, "pid": 11}),
        ("drawn", {"keys": [0, 1, 2, 3]}),
        *batch(0, 1, 2, 3),
        ("ended", {}),
        ("fired", {"fault": "hang", "key": 3, "pid": 12, "worker": 1}),
    )
    crash = Incident(IncidentKind.CRASH, 0, 0, 10, 0, InHand(), exit=Exit(signal=9), indices=(1,))
    error = Incident(IncidentKind.EXCEPTION, 0, 0, -1, 0, InHand(), indices=(2,))

    rows = {row.fault: row for row in judged(story, incidents=(crash, error)).rows}

    assert list(rows) == ["raise", "kill", "hang"]
    assert (rows["kill"].noticed, rows["kill"].survived, rows["kill"].recovery_s) == (1, 1, (2.0,))
    assert (rows["raise"].injected, rows["raise"].noticed, rows["raise"].survived) == (2, 1, 2)
    assert rows["hang"].noticed == 0


def test_what_is_around_a_program_has_rows_of_its_own():
    """An outage counts if a sample met it, and is over when batches come again; a burden is nothing to be noticed."""
    story = notes(
        ("begun", {}),
        ("began", {"kind": "cpus", "place": 0, "fails": False, "error": ""}),
        ("began", {"kind": "outage", "place": 1, "fails": True, "error": "TimeoutError"}),
        ("fired", {"fault": "outage", "key": 2, "pid": 10}),
        ("over", {"place": 1}),
        ("began", {"kind": "network", "place": 2, "fails": True, "error": ""}),
        ("over", {"place": 2}),
        ("drawn", {"keys": [0, 1, 2, 3]}),
        *batch(0, 1, 3),
        ("ended", {}),
    )
    failure = Failure("TimeoutError", "no answer", "")
    opened = Incident(IncidentKind.BREAKER, 0, 0, 10, 0, InHand(), indices=(2,), failure=failure)
    another = dataclasses.replace(opened, failure=Failure("OSError", "torn", ""))

    rows = {row.fault: row for row in judged(story, incidents=(opened,)).rows}
    died = {row.fault: row for row in survival.judge(story, PLAIN, None, set(), 1).rows}

    assert list(rows) == ["outage", "network", "cpus"]
    outage = rows["outage"]
    assert (outage.injected, outage.noticed, outage.survived, outage.lost, outage.recovery_s) == (1, 1, 1, 1, (5.0,))
    assert (rows["cpus"].injected, rows["cpus"].noticed, rows["cpus"].recovery_s) == (1, None, ())
    assert rows["network"].injected == 0
    assert judged(story).rows[0].noticed == judged(story, incidents=(another,)).rows[0].noticed == 0
    assert (died["outage"].noticed, died["outage"].survived, died["cpus"].survived) == (None, 1, 0)


def test_a_worker_that_goes_on_in_a_program_that_dies_has_survived_nothing():
    """As stock torch's does after an exception: only what still came to the program counts."""
    story = notes(
        ("begun", {}),
        ("drawn", {"keys": [0, 1, 2, 3]}),
        ("fired", {"fault": "slow", "key": 0}),
        ("fired", {"fault": "raise", "key": 2}),
        ("went on", {}),
        ("fired", {"fault": "kill", "key": 3, "pid": 7, "worker": 1}),
        *batch(0, 1),
        ("raised", {"error": "InjectedError: injected"}),
    )

    rows = {row.fault: row.survived for row in survival.judge(story, PLAIN, None, set(), 1).rows}

    assert rows == {"slow": 1, "raise": 0, "kill": 0}


def test_an_epoch_that_the_program_leaves_has_survived_its_faults():
    """It had seen enough of it, and ended well."""
    rows = [("begun", {}), ("drawn", {"keys": [0, 1]}), ("fired", {"fault": "kill", "key": 1}), *batch(0)]

    (left,) = survival.judge(notes(*rows), notes(*rows[:2], *batch(0)), (), set(), 0).rows
    (died,) = survival.judge(notes(*rows), PLAIN, (), set(), 1).rows

    assert (left.survived, left.recovery_s, died.survived) == (1, (), 0)


def test_the_table_has_both_runs_side_by_side():
    """A line for each fault of either, and one for all."""
    ours = notes(("begun", {}), ("fired", {"fault": "kill", "key": 1}), ("went on", {"pid": 2}), ("ended", {}))
    theirs = notes(("begun", {}), ("fired", {"fault": "segv", "key": 1}))

    lines = survival.table(judged(ours), survival.judge(theirs, PLAIN, None, set(), 1))

    assert [line.split()[0] for line in lines if line[0] != "─"] == ["fault", "segv", "kill", "all"]
    assert lines[3].split() == ["kill", "1", "0", "1", "0", "1.0", "s", "1.0", "s", "0", "–", "–"]


def test_a_report_keeps_to_the_width_of_its_terminal():
    """What stock torch did stands below where it has no room beside; what was around the program is named."""
    ours = notes(("begun", {}), ("fired", {"fault": "kill", "key": 1}), ("went on", {"pid": 2}), ("ended", {}))
    plan = plans.Plan(plans.parse_faults("kill,cpus:1,disk"))
    timeline = around.timeline(plan.around, 0, 1.0)
    theirs = survival.judge(ours, PLAIN, None, set(), 1)
    report = chaos.Report(plan, ("train.py",), judged(ours), theirs, 1, 1, {}, timeline, ("cpus: too few",))

    wide, narrow = chaos.lines(report), chaos.lines(report, 80)

    assert max(map(len, narrow)) <= 80 < max(map(len, wide))
    assert [line.split()[:2] for line in narrow if line.startswith("kill")] == [["kill", "1"], ["kill", "1"]]
    assert "on stock torch:" in narrow
    assert wide[-2:] == narrow[-2:] == ["around      cpus to the end, disk", "not done    cpus: too few"]
