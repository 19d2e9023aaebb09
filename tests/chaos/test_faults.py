"""`outlive.testing`: every fault does what it says, at its moment and as often as it says.

Reads   incidents, quarantine and batches of real loaders with real workers; a pool.
Writes  nothing.
Never   a fault in this process.
"""

from __future__ import annotations

import dataclasses
import pickle
import signal
import warnings
from collections.abc import Callable
from typing import Any

import psutil
import pytest

import outlive
from chaos.datasets import Numbers, NumbersAtOnce, Stream, received
from outlive import DataLoader, FaultPolicy, Incident, IncidentKind
from outlive import testing as t
from outlive.testing.faults import CATALOGUE, Fault
from outlive.verdicts import Name

METHODS = ("fork", "spawn")
SIZE, BATCH = 100, 4
# What each fault must be found to be.
DEATHS: dict[str, tuple[Fault, Name, int | None]] = {
    "segv": (t.Segfault(), Name.NULL_POINTER, signal.SIGSEGV),
    "ill": (t.IllegalInstruction(), Name.DELIBERATE_TRAP, signal.SIGILL),
    "bus": (t.BusError(), Name.TRUNCATED_FILE, signal.SIGBUS),
    "abort": (t.Abort(), Name.ABORTED, signal.SIGABRT),
    "fpe": (t.DivideByZero(), Name.ARITHMETIC_FAULT, signal.SIGFPE),
    "stack": (t.StackOverflow(), Name.STACK_OVERFLOW, signal.SIGSEGV),
    "kill": (t.Kill(), Name.KILLED, signal.SIGKILL),
    "term": (t.Kill("SIGTERM"), Name.KILLED, signal.SIGTERM),
    "oom": (t.OutOfMemory("32MiB"), Name.KILLED, signal.SIGKILL),
    "exit": (t.Exit(7), Name.EXITED, None),
    "sys.exit": (t.Exit(8, cleanly=True), Name.EXITED, None),
    "hang": (t.Hang(), Name.SLEEPING, signal.SIGKILL),
    "deadlock": (t.Deadlock(), Name.WAITING_FOR_LOCK, signal.SIGKILL),
    "spin": (t.Spin(), Name.SPINNING_IN_PYTHON, signal.SIGKILL),
    "native spin": (t.Spin(native=True), Name.SPINNING_IN_NATIVE_CODE, signal.SIGKILL),
    "stop": (t.Stop(), Name.STOPPED, signal.SIGKILL),
}
OTHERS: dict[str, tuple[Fault, Name]] = {
    "raise": (t.Raise(ValueError("torn")), Name.EXCEPTION),
    "unpicklable": (t.Unpicklable(), Name.UNPICKLABLE_RESULT),
}
PLACES = {name: BATCH * place + 1 for place, name in enumerate([*DEATHS, *OTHERS, "close", "slow", "leave"])}


def policy(**options: Any) -> FaultPolicy:
    return FaultPolicy(**{"on_error": "skip", "retries": 0, "sample_timeout": 1.0, "backoff_s": 0.01, **options})


def loader_of(faulty: t.Faulty, method: str = "fork", **options: Any) -> DataLoader[Any]:
    policies = {name: options.pop(name) for name in list(options) if name in {f.name for f in _POLICY}}
    given = {"batch_size": BATCH, "num_workers": 2, **faulty.hooks(), **options}
    return DataLoader(faulty, multiprocessing_context=method, faults=policy(**policies), **given)


_POLICY = dataclasses.fields(FaultPolicy)


@pytest.fixture(scope="module", params=METHODS)
def all_at_once(request: pytest.FixtureRequest) -> tuple[list[int], dict[int, list[Incident]]]:
    """A run over a dataset with every fault in it: what arrived, and the incidents of each sample."""
    planted: dict[int, Fault] = {PLACES[name]: row[0] for name, row in {**DEATHS, **OTHERS}.items()}
    planted |= {
        PLACES["close"]: t.CloseDescriptors(),
        PLACES["slow"]: t.Slow(0.2),
        PLACES["leave"]: t.LeaveProcesses(2),
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This DataLoader will create")  # more workers than CPUs: they mostly hang
        loader = loader_of(t.Faulty(Numbers(SIZE), planted), request.param, num_workers=3)
        arrived = received(loader)
    incidents: dict[int, list[Incident]] = {}
    for incident in loader.incidents:
        for index in incident.indices:
            incidents.setdefault(index, []).append(incident)
    return arrived, incidents


@pytest.mark.parametrize("name", DEATHS)
def test_a_death_is_found_for_what_it_is(all_at_once, name):
    """The verdict and the signal are those of the fault that was planted, under fork and under spawn."""
    _, incidents = all_at_once
    fault, verdict, number = DEATHS[name]
    (incident,) = incidents[PLACES[name]]

    assert incident.kind is (IncidentKind.HANG if fault.hangs else IncidentKind.CRASH)
    assert incident.verdict is not None
    assert (incident.verdict.name, incident.signal) == (verdict, number)
    if isinstance(fault, t.Exit):
        assert incident.exit is not None
        assert incident.exit.code == fault.code


@pytest.mark.parametrize("name", OTHERS)
def test_an_exception_is_found_for_what_it_is(all_at_once, name):
    """Nobody dies of it, and its sample is named."""
    (incident,) = all_at_once[1][PLACES[name]]

    assert (incident.kind, incident.verdict.name) == (IncidentKind.EXCEPTION, OTHERS[name][1])


def test_every_other_sample_arrives_whatever_is_planted(all_at_once):
    """Each fault costs its own sample; a slow one, and one that leaves processes behind, cost none."""
    arrived, incidents = all_at_once
    bad = {place for name, place in PLACES.items() if name not in ("slow", "leave")}

    assert arrived == [index for index in range(SIZE) if index not in bad]
    assert incidents[PLACES["close"]][-1].kind is IncidentKind.CRASH
    assert not {PLACES["slow"], PLACES["leave"]} & incidents.keys()


def test_every_fault_of_the_catalogue_is_tested_above():
    """A new one needs its row."""
    tested = {row[0].name for row in (*DEATHS.values(), *OTHERS.values())}

    assert CATALOGUE.keys() - tested == {"close-descriptors", "slow", "leak", "leak-descriptors", "leave-processes"}


def _growth(fault: Fault) -> tuple[int, int]:
    """What a process has more of after the fault: bytes, descriptors."""
    process = psutil.Process()
    before = process.memory_info().rss, process.num_fds()
    fault()
    return process.memory_info().rss - before[0], process.num_fds() - before[1]


def test_leaks_stay_in_the_process_that_has_them_and_faults_are_tasks_of_a_pool():
    """Memory is really touched, files stay open; a pool survives its tasks."""
    with outlive.Pool(1) as pool:
        memory = pool.submit(_growth, t.Leak("40MiB")).result()[0]
        files = pool.submit(_growth, t.LeakDescriptors(12)).result()[1]
        with pytest.raises(outlive.TaskCrashedError):
            pool.submit(t.Segfault()).result()

    assert memory > 36 << 20
    assert files == 12


@pytest.mark.parametrize("method", METHODS)
def test_a_transient_fault_costs_nothing_at_any_moment(method):
    """Fired once or as often as said, in whichever process; then everything is delivered, in order."""
    faults = {
        1: t.Once(t.Kill()),
        5: t.At("collate", t.Once(t.Kill())),
        10: t.Once(t.At("send", t.Exit(3))),
        17: t.Times(2, t.Segfault()),
        22: t.Once(t.Raise(OSError("away"))),
        30: [t.Once(t.Kill()), t.At("send", t.Once(t.Kill()))],
    }
    start = t.Once(t.Kill())
    faults[0] = t.At("start", start)  # when worker 0 starts
    loader = loader_of(t.Faulty(Numbers(40), faults), method, retries=2, retry_on=(OSError, t.InjectedError))

    assert received(loader) == list(range(40))
    assert [faults[key].fired for key in (1, 10, 17, 22)] == [1, 1, 2, 1]
    assert start.fired == 1
    assert not loader.quarantine
    kinds = [incident.kind for incident in loader.incidents]
    assert (kinds.count(IncidentKind.CRASH), kinds.count(IncidentKind.EXCEPTION)) == (7, 1)


def test_samples_are_chosen_by_the_seed_and_kept_in_every_try():
    """Sometimes fires at the same samples in every run; another seed chooses others."""
    fault = t.Sometimes(0.2, t.Raise(), seed=3)
    chosen = [index for index in range(60) if fault.chooses(f"fetch {index}")]
    loader = loader_of(t.Faulty(Numbers(60), fault))

    assert received(loader) == [index for index in range(60) if index not in chosen]
    assert set(loader.quarantine) == set(chosen)
    assert 4 <= len(chosen) <= 20
    assert chosen != [index for index in range(60) if t.Sometimes(0.2, t.Raise(), seed=4).chooses(f"fetch {index}")]


def test_streams_have_faults_by_number_and_by_worker():
    """A number means that of every worker; a pair means one worker."""
    faulty = t.Faulty(Stream(40), {3: t.Raise(), (1, 5): t.Once(t.Kill()), (0, 7): t.Kill()})
    loader = loader_of(faulty, retries=1)

    # Number 3 of worker w is 2 * 3 + w; number 7 of worker 0 is 14.
    assert sorted(received(loader)) == [number for number in range(40) if number not in (6, 7, 14)]
    assert not hasattr(faulty, "__len__")


def test_a_source_that_fails_for_a_while_opens_the_breaker_and_nothing_is_lost():
    """An outage that begins and ends by itself; one that lasts as long as a block."""
    outage = t.Outage(after=20, seconds=1.0)  # longer than a worker may wait for a CPU between two samples
    loader = loader_of(t.Faulty(Numbers(60), outage), backoff_max_s=0.05)

    assert received(loader) == list(range(60))
    kinds = {incident.kind for incident in loader.incidents} - {IncidentKind.RECYCLED}
    assert kinds == {IncidentKind.BREAKER}
    assert not outage.is_on()
    lasting = t.Outage(OSError("the mount is gone"))
    with lasting:
        assert lasting.is_on()
        with pytest.raises(OSError, match="the mount is gone"):
            t.Faulty(Numbers(3), lasting)[0]
    assert not lasting.is_on()


@pytest.mark.parametrize(("kind", "many"), [(Numbers, False), (NumbersAtOnce, True)])
def test_a_faulty_dataset_is_else_the_dataset_it_was(kind, many):
    """Length, attributes, __getitems__ where there is one; through pickle, too; assignments reach the dataset."""
    original = kind(12)
    faulty = pickle.loads(pickle.dumps(t.Faulty(original, {3: t.Once(t.Kill()), 5: t.Raise()})))

    faulty.flavour = "another"

    assert (len(faulty), faulty.size, faulty.original.flavour) == (12, 12, "another")
    assert hasattr(faulty, "__getitems__") == many
    assert not hasattr(faulty, "state_dict")
    assert (faulty[4].item(), original.flavour) == (4, "plain")
    with pytest.raises(t.InjectedError):
        faulty[5]


def test_faults_fire_in_getitems_where_the_dataset_has_it():
    """The batch is searched for them, and one that fires once costs nothing."""
    loader = loader_of(t.Faulty(NumbersAtOnce(24), {6: t.Raise(), 13: t.Once(t.Kill())}), retries=1)

    assert received(loader) == [index for index in range(24) if index != 6]


def test_the_trainer_is_not_killed_where_there_are_no_workers():
    """A deadly fault in the process that made it would end the tests."""
    faulty = t.Faulty(Numbers(8), {3: t.Kill(), 4: t.Slow(0.0)})

    assert faulty[4].item() == 4
    with pytest.raises(RuntimeError, match="use a loader with num_workers=1 or more"):
        faulty[3]
    with pytest.raises(RuntimeError, match=r"use DataLoader\(faulty, …, \*\*faulty.hooks\(\)\)"):
        t.Faulty(Numbers(8), {3: t.At("send", t.Kill())})[3]


def test_marks_outlive_copies_and_tell_when_their_process_is_gone():
    """Who is first is decided between processes, not by memory of one."""
    once = t.Once(t.Raise())
    copy = pickle.loads(pickle.dumps(once))

    assert copy.due("fetch 1") is not None
    assert once.due("fetch 1") is None
    assert once.due("fetch 2") is not None
    assert once.fired == copy.fired == 2
    del once
    with pytest.raises(RuntimeError, match="gone with the process that made it"):
        copy.due("fetch 3")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: t.Faulty(Numbers(3), {1: t.Kill}), r"got <class .*; write Kill\(\)"),
        (lambda: t.Faulty(Numbers(3), {1: "kill"}), r"faults such as Segfault\(\)"),
        (lambda: t.Faulty(t.Kill(), Numbers(3)), "takes the dataset first"),
        (lambda: t.Once(t.Kill), r"Once takes a fault such as Kill\(\).*; write Kill\(\)"),
        (lambda: t.Times(0, t.Kill()), "count must be at least 1"),
        (lambda: t.At("lunch", t.Kill()), "one of 'start', 'fetch', 'collate', 'send'"),
        (lambda: t.At("fetch", t.Unpicklable()), "fires while a batch is sent"),
        (lambda: t.Sometimes(2, t.Kill()), r"2 % is 0.02"),
        (lambda: t.Raise("torn"), "an exception or a type of exceptions"),
        (lambda: t.Kill("SIGNOTHING"), "is no signal"),
        (lambda: t.Exit(300), "between 0 and 255"),
        (lambda: t.Leak("50MuB"), "must be a size"),
        (lambda: t.Slow(-1), "seconds must be at least 0"),
        (lambda: t.LeaveProcesses(1000), "at most 100"),
        (lambda: t.Outage(after=3), "must end by itself"),
    ],
)
def test_what_makes_no_sense_is_an_error_that_says_what_does(make: Callable[[], Any], words):
    """When it is made, not when it fires."""
    with pytest.raises((TypeError, ValueError), match=words):
        make()


def test_every_public_name_is_there_and_none_needs_this_process(tmp_path):
    """`from outlive.testing import *` works; faults are picklable."""
    assert all(getattr(t, name) is not None for name in t.__all__)
    for kind in CATALOGUE.values():
        fault = kind()
        again = pickle.loads(pickle.dumps(fault))
        assert type(again) is type(fault)
