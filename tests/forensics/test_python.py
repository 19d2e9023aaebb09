"""What Python itself says: real exceptions, unpicklable results and exhausted resources in real workers."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import replace
from typing import Any

import pytest
from torch.utils.data import Dataset

import outlive
from forensics.worker_exits import ERRORS, ExitingDataset, Unreadable, as_they_are
from outlive import FaultPolicy, Incident
from outlive._forensics import verdict
from outlive._forensics.rules import python
from outlive.evidence import Evidence, Surroundings, Worked
from outlive.incident import Exit, Failure, IncidentKind, InHand, Stage
from outlive.loader import culprits
from outlive.verdicts import Confidence, Name

METHODS = ("fork", "spawn")

EXPECTED: dict[str, tuple[Name, tuple[str, ...]]] = {
    "raise_value_error": (
        Name.EXCEPTION,
        ("ValueError: label 7 is not below 5, at worker_exits.py:", "raise_value_error"),
    ),
    "raise_in_library": (
        Name.EXCEPTION,
        ("JSONDecodeError: Expecting property", "worker_exits.py:", " raise_in_library"),
    ),
    "raise_without_words": (Name.EXCEPTION, ("OddError: 1 is not 2", "raise_without_words")),
    "raise_connection_reset": (Name.EXCEPTION, ("ConnectionResetError",)),
    "open_too_many": (Name.DESCRIPTORS_EXHAUSTED, ("open files", "worker_exits.py:", "open_too_many")),
    "ask_python_for_too_much": (Name.EXCEPTION, ("MemoryError: no memory", "ask_python_for_too_much")),
    "ask_numpy_for_too_much": (Name.EXCEPTION, ("no memory", "ask_numpy_for_too_much")),
    "ask_torch_for_too_much": (Name.EXCEPTION, ("no memory for an allocation of 1048576.0 GiB", "worker_exits.py:")),
    "write_a_megabyte": (Name.RESOURCE_LIMIT, ("RLIMIT_FSIZE", "write_a_megabyte")),
    "return_lambda": (Name.UNPICKLABLE_RESULT, ("a lambda", "at batch[0]['crop']")),
    "return_lock": (Name.UNPICKLABLE_RESULT, ("type _thread.lock", "at batch[0]['meta'][1]['guard']")),
    "return_generator": (Name.UNPICKLABLE_RESULT, ("type generator", "at batch[0]['boxes']")),
    "return_object_with_lock": (Name.UNPICKLABLE_RESULT, ("type _thread.lock", "at batch[0][1].file")),
}
REMEDIES = {
    "raise_connection_reset": "retry_on=(ConnectionResetError,)",
    "raise_value_error": "dataset[1]",
    "open_too_many": "ulimit -n 65536",
    "write_a_megabyte": "ulimit -f unlimited",
    "return_lambda": "__getitem__",
}


@pytest.fixture(scope="module", params=METHODS)
def raised(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Incident]:
    """Every error, once: its incident."""
    loader: outlive.DataLoader[Any] = outlive.DataLoader(
        ExitingDataset(list(ERRORS), tmp_path_factory.mktemp(request.param)),
        batch_size=1,
        num_workers=2,
        multiprocessing_context=request.param,
        collate_fn=as_they_are,
        faults=FaultPolicy(on_error="skip", retries=0, max_bad=None),
    )
    delivered = [index for batch in loader for index in batch]
    assert delivered == list(range(0, 2 * len(ERRORS), 2))
    return {name: loader.quarantine[2 * place + 1] for place, name in enumerate(ERRORS)}


@pytest.mark.parametrize("name", ERRORS)
def test_the_verdict_says_what_was_raised_and_where(raised: dict[str, Incident], name: str) -> None:
    """The user's own line, not the library's below it; the sample is right."""
    incident = raised[name]
    expected, words = EXPECTED[name]
    judged = incident.verdict

    assert judged is not None
    assert judged.name is expected, judged
    assert judged.confidence is Confidence.CERTAIN
    assert [word for word in words if word not in judged.cause] == [], judged.cause
    assert REMEDIES.get(name, "") in " ".join(judged.remedies)
    assert judged.remedies
    assert incident.indices == (2 * list(ERRORS).index(name) + 1,)


class OneUnreadable(Dataset[Any]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return Unreadable() if index == 2 else index


@pytest.mark.parametrize("method", METHODS)
def test_a_batch_that_cannot_be_unpickled_here_is_told_from_one_that_cannot_be_sent(method: str) -> None:
    """Both go through pickle; the remedy differs."""
    loader: outlive.DataLoader[Any] = outlive.DataLoader(
        OneUnreadable(),
        num_workers=1,
        multiprocessing_context=method,
        collate_fn=as_they_are,
        faults=FaultPolicy(on_error="skip", max_bad=None),
    )
    assert [batch[0] for batch in loader] == [0, 1, 3]

    judged = loader.incidents[0].verdict
    assert judged is not None
    assert judged.name is Name.UNPICKLABLE_RESULT
    assert "cannot be unpickled in the trainer, at worker_exits.py:" in judged.cause
    assert loader.incidents[0].indices == (2,)


# ---------------------------------------------------------------- what cannot be had here at will

TRACEBACK = """Traceback (most recent call last):
  File "/home/u/train/data.py", line 61, in __getitem__
    return self.decode(index)
  File "/usr/lib/python3.11/subprocess.py", line 1885, in _execute_child
    self.pid = _fork_exec(
"""


def failure(kind: str, message: str, stage: Stage = Stage.FETCHING, traceback: str = TRACEBACK) -> Incident:
    fault = Failure(kind, message, f"{traceback}{kind}: {message}\n", stage=stage)
    return Incident(IncidentKind.EXCEPTION, 0, 0, 1, 0, InHand(stage, 0, 0), failure=fault, index=5, indices=(5,))


def death(words: str, exit: Exit, **more: Any) -> Incident:
    evidence = Evidence(last_words=words, **more)
    return Incident(IncidentKind.CRASH, 0, 0, 1, 0, InHand(Stage.FETCHING, 0, 0), exit=exit, evidence=evidence)


ABORT, ONE = Exit(signal=6), Exit(code=1)
SHM = "unable to open shared memory object </torch_1_2_3> in read-write mode: Too many open files (24)"
FULL_TABLE = [
    (failure("RuntimeError", SHM), Name.DESCRIPTORS_EXHAUSTED),
    (failure("RuntimeError", "received 0 items of ancdata"), Name.DESCRIPTORS_EXHAUSTED),
    # The table of the whole machine: filling it would stop every other process.
    (failure("OSError", "[Errno 23] Too many open files in system: 'x'"), Name.DESCRIPTORS_EXHAUSTED),
    (death("terminate called\n  what():  Too many open files\n", ABORT), Name.DESCRIPTORS_EXHAUSTED),
    (failure("BlockingIOError", "[Errno 11] Resource temporarily unavailable"), Name.PROCESSES_EXHAUSTED),
    (failure("RuntimeError", "can't start new thread"), Name.PROCESSES_EXHAUSTED),
    # libgomp, OpenBLAS and a C++ runtime without threads left: which of them is loaded depends on the wheels.
    (death("libgomp: Thread creation failed: Resource temporarily unavailable\n", ONE), Name.PROCESSES_EXHAUSTED),
    (death("OpenBLAS blas_thread_init: pthread_create failed for thread 3 of 64\n", ONE), Name.PROCESSES_EXHAUSTED),
    (failure("OSError", "[Errno 12] Cannot allocate memory"), Name.EXCEPTION),
]


@pytest.mark.parametrize(("incident", "name"), FULL_TABLE, ids=lambda value: str(value)[:60])
def test_exhaustion_is_known_by_its_words(incident: Incident, name: Name) -> None:
    """Whoever says them: Python, torch, a C library before it ends the process."""
    judged = verdict.judge(incident)

    assert judged.name is name
    assert judged.remedies


def test_a_socket_without_news_is_no_want_of_processes() -> None:
    """EAGAIN has two meanings; only a fork makes it this one."""
    quiet = TRACEBACK.replace("_fork_exec(", "sock.recv(4)").replace("_execute_child", "receive")

    judged = verdict.judge(failure("BlockingIOError", "[Errno 11] Resource temporarily unavailable", traceback=quiet))

    assert judged.name is Name.EXCEPTION


def test_a_start_without_processes_says_so() -> None:
    """The zygote's own words, when it cannot fork."""
    start = replace(
        failure("BlockingIOError", "[Errno 11] Resource temporarily unavailable\n(no process can be started: …)"),
        kind=IncidentKind.START,
    )

    assert verdict.judge(start).name is Name.PROCESSES_EXHAUSTED


def test_the_limit_is_told_where_it_is_known() -> None:
    """And the advice is twice as much, at least 65536."""
    around = Surroundings(limits={"nofile": 100_000})
    judged = verdict.judge(death("Too many open files\n", ONE, surroundings=around, worked=Worked(descriptors=99_999)))

    assert "limit of 100000 of open files" in judged.cause
    assert "its limit is 100000, 99999 were open when last seen" in judged.facts
    assert "ulimit -n 200000" in judged.remedies[0]
    assert judged.confidence is Confidence.LIKELY


def test_what_was_written_long_before_is_not_blamed() -> None:
    """A worker may write a lot; only its last lines say why it ended."""
    words = "Too many open files\n" + "epoch goes on\n" * 20

    assert verdict.judge(death(words, ONE)).name is not Name.DESCRIPTORS_EXHAUSTED


@pytest.mark.parametrize(
    ("text", "frame"),
    [
        ("", ""),
        ("no traceback at all", ""),
        (TRACEBACK, "data.py:61 __getitem__"),
        ('Traceback (most recent call last):\n  File "<frozen os>", line 3, in f\n', "<frozen os>:3 f"),
        (
            TRACEBACK + "\nDuring handling …\n\nTraceback (most recent call last):\n" + '  File "/u/b.py", line 1\n',
            "b.py:1",
        ),
    ],
)
def test_the_users_frame_is_found(text: str, frame: str) -> None:
    """Of the last traceback, outside of libraries, without failing on any text."""
    assert python.user_frame(text) == frame


def test_newer_pythons_tell_the_place_themselves() -> None:
    """Python 3.14 adds notes, innermost first; older ones say nothing and the worker looks for it."""
    notes = "when serializing dict item 'guard'\nwhen serializing list item 1\n"
    incident = failure("TypeError", "cannot pickle '_thread.lock' object", Stage.SENDING, TRACEBACK + notes)

    assert "at batch[1]['guard']" in verdict.judge(incident).cause


Boxes = namedtuple("Boxes", ["corners", "labels"])


class Bad:
    """Stands for what cannot be pickled; shows in the text of all that holds it."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "<bad>"


@pytest.mark.parametrize(
    ("batch", "place"),
    [
        ([1, {"a": (2, Bad())}], "[1]['a'][1]"),
        (Boxes([1], {"x": [[Bad()]]}), ".labels['x'][0][0]"),
        ([[n] for n in range(300)] + [[Bad()]], ""),  # too far to look for it
        (Bad(), ""),
    ],
)
def test_the_place_of_what_cannot_be_pickled_is_found_by_trying_its_parts(batch: Any, place: str) -> None:
    """Through dicts, lists, tuples and attributes, and not for ever."""
    tries: list[Any] = []

    def packs(part: Any) -> bool:
        tries.append(part)
        return "<bad>" not in repr(part)

    assert culprits.place_in(batch, packs) == place
    assert len(tries) <= 256


def test_a_streams_state_that_fails_is_no_unpicklable_result() -> None:
    """It is asked for between collating and sending."""
    incident = failure("ValueError", "no state yet", Stage.SENDING)

    assert verdict.judge(incident).name is Name.EXCEPTION


def test_every_error_has_its_row() -> None:
    """None is forgotten, none is only in the table."""
    assert set(EXPECTED) == set(ERRORS)
