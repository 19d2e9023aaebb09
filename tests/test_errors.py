"""The records and errors in words: each shape of each message, printed once and looked at.

Reads   messages, and the fields beside them.
Writes  nothing.
Never   a process, except to see a real end in its wait status.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
from pathlib import Path
from typing import Any

import pytest

import outlive
from outlive import errors
from outlive._forensics.ledger import Quarantine, StreamIndex
from outlive.incident import Exit, Failure, Incident, IncidentKind, InHand, Stage, first_line
from outlive.loader.raising import note, rebuilt
from outlive.plain import plain
from outlive.statistics import SlotStatistics, Statistics

PACKAGE = Path(outlive.__file__).parent

STACK = f"""Fatal Python error: Segmentation fault

Current thread 0x00007f26 (most recent call first):
  File "/data/project/dataset.py", line 88 in decode
  File "/data/project/dataset.py", line 61 in __getitem__
  File "{PACKAGE}/loader/jobs.py", line 203 in _fetch
  File "{PACKAGE}/_worker/loop.py", line 160 in main
"""

STACK_WITH_THREADS = """Fatal Python error: Segmentation fault

Thread 0x00007f25 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 320 in wait
  File "/usr/lib/python3.11/queue.py", line 171 in get

Current thread 0x00007f26 (most recent call first):
  File "/data/project/dataset.py", line 88 in decode
  File "/data/project/dataset.py", line 61 in __getitem__
"""


def incident(kind: IncidentKind = IncidentKind.CRASH, **more: Any) -> Incident:
    fields: dict[str, Any] = {
        "slot": 3,
        "incarnation": 2,
        "pid": 4127,
        "batch": 142,
        "in_hand": InHand(Stage.FETCHING, 142, 5, 0.02),
        "indices": (18204,),
        "epoch": 1,
        "exit": Exit(signal=signal.SIGSEGV),
        "attempt": 2,
        "attempts_allowed": 2,
    }
    return Incident(kind=kind, **{**fields, **more})


FAILURE = Failure("ValueError", "bad pixel\nmore", "Traceback (most recent call last):\nValueError: bad pixel\nmore\n")


# ---------------------------------------------------------------- ends of processes


@pytest.mark.parametrize(
    ("number", "name"),
    [(signal.SIGKILL, "SIGKILL"), (signal.SIGSEGV, "SIGSEGV"), (signal.SIGXCPU, "SIGXCPU"), (40, "signal 40")],
)
def test_a_signal_is_named(number, name):
    """Real-time signals have no name of their own."""
    assert Exit(signal=int(number)).words == f"died of {name}"
    assert Exit(signal=int(number)).signal_name == name


def test_an_exit_code_is_told():
    """sys.exit(3), os._exit(3)."""
    assert Exit(code=3).words == "exited with code 3"
    assert Exit(code=3).signal_name is None


def test_an_unobserved_end_is_reported_as_unknown():
    """The zygote was killed, and took the status with it."""
    assert Exit().words == "disappeared together with the process that started it"
    assert Exit().explanation == "its zygote was killed"


EXPLAINED = {
    signal.SIGKILL: "OOM killer",
    signal.SIGSEGV: "segmentation fault",
    signal.SIGBUS: "truncated",
    signal.SIGILL: "illegal instruction",
    signal.SIGFPE: "division by zero",
    signal.SIGABRT: "abort()",
    signal.SIGTERM: "terminated from outside",
    signal.SIGSYS: "system call",
    signal.SIGXCPU: "CPU time",
    signal.SIGUSR1: "User defined signal 1",
}


@pytest.mark.parametrize(("number", "words"), EXPLAINED.items(), ids=[s.name for s in EXPLAINED])
def test_a_signal_is_explained(number, words):
    """What such an end usually means."""
    assert words in Exit(signal=int(number)).explanation


def test_an_exit_code_is_explained():
    """1 is what Python exits with after an error; the rest somebody chose."""
    assert "sys.exit or os._exit" in Exit(code=3).explanation
    assert "error outside" in Exit(code=1).explanation
    assert Exit(signal=64).explanation


@pytest.mark.parametrize(
    ("act", "end"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), Exit(signal=9)),
        (lambda: os._exit(3), Exit(code=3)),
        (lambda: os._exit(0), Exit(code=0)),
        (lambda: os._exit(255), Exit(code=255)),
    ],
    ids=["SIGKILL", "3", "0", "255"],
)
def test_an_end_is_read_from_a_real_wait_status(act, end):
    """As the kernel reports it."""
    pid = os.fork()
    if pid == 0:
        act()
    _, status = os.waitpid(pid, 0)

    assert Exit.from_wait_status(status) == end


def test_a_core_dump_does_not_hide_the_signal():
    """The kernel sets a bit for it."""
    assert Exit.from_wait_status(0x80 | signal.SIGSEGV) == Exit(signal=int(signal.SIGSEGV))


# ---------------------------------------------------------------- incidents


@pytest.mark.parametrize("stage", list(Stage))
def test_every_stage_has_words(stage):
    """They end up in sentences: «died of SIGKILL while …»."""
    assert stage.words
    assert str(incident(in_hand=InHand(stage, 142, 5)))


SENTENCES = [
    (incident(action="left out"), "worker 3 died of SIGSEGV while fetching sample 18204: left out"),
    (incident(), "worker 3 died of SIGSEGV while fetching sample 18204"),
    (incident(exit=Exit(code=3)), "worker 3 exited with code 3 while fetching sample 18204"),
    (
        incident(exit=Exit()),
        "worker 3 disappeared together with the process that started it while fetching sample 18204",
    ),
    (incident(exit=None), "worker 3 ended in an unknown way while fetching sample 18204"),
    (
        incident(IncidentKind.HANG, in_hand=InHand(Stage.FETCHING, 142, 5, 31.24)),
        "worker 3 hung for 31.2 s while fetching sample 18204",
    ),
    (
        incident(IncidentKind.SUSPECTED_HANG, in_hand=InHand(Stage.FETCHING, 142, 5, 31.24)),
        "worker 3 has shown no progress for 31.2 s while fetching sample 18204",
    ),
    (
        incident(IncidentKind.EXCEPTION, failure=FAILURE),
        "worker 3 raised ValueError: bad pixel while fetching sample 18204",
    ),
    (
        incident(IncidentKind.START, failure=FAILURE, exit=None, indices=(), in_hand=InHand(Stage.PREPARING)),
        "worker 3 could not start: ValueError: bad pixel while running worker_init_fn or iter(dataset)",
    ),
    (incident(in_hand=InHand(Stage.IDLE), indices=()), "worker 3 died of SIGSEGV while idle"),
    (
        incident(in_hand=InHand(Stage.COLLATING, 142), indices=(1, 2)),
        "worker 3 died of SIGSEGV while collating batch 142",
    ),
    (
        incident(in_hand=InHand(Stage.COLLATING, 142), indices=(7,)),
        "worker 3 died of SIGSEGV while collating batch 142 (sample 7)",
    ),
    (
        incident(in_hand=InHand(Stage.FETCHING_MANY, 142), indices=(1, 2)),
        "worker 3 died of SIGSEGV while fetching batch 142",
    ),
    (incident(in_hand=InHand(Stage.SENDING, 142), indices=()), "worker 3 died of SIGSEGV while sending batch 142"),
    (
        incident(in_hand=InHand(Stage.FORWARDING), indices=()),
        "worker 3 died of SIGSEGV while fast-forwarding its iterator",
    ),
    (
        incident(indices=(StreamIndex(3, 12),)),
        "worker 3 died of SIGSEGV while fetching sample 12 of worker 3's stream",
    ),
    (incident(indices=("train/0001.png",)), "worker 3 died of SIGSEGV while fetching sample train/0001.png"),
]


@pytest.mark.parametrize(("what", "sentence"), SENTENCES, ids=[sentence for _, sentence in SENTENCES])
def test_an_incident_is_one_sentence(what, sentence):
    """Who, how, doing what, what was done about it."""
    assert str(what) == sentence


def test_an_incident_names_eight_samples_at_most():
    """A batch may have thousands."""
    assert incident(indices=tuple(range(20))).sample == "samples 0, 1, 2, 3, 4, 5, 6, 7, …"
    assert incident(indices=(1, 2)).sample == "samples 1, 2"
    assert incident(indices=()).sample == ""


def test_an_incident_becomes_plain_values():
    """A log can take all of it as JSON, whatever the indices are."""
    fields = incident(IncidentKind.EXCEPTION, failure=FAILURE, indices=(1, ("a", 2), None), action="left out").to_dict()

    assert json.loads(json.dumps(fields)) == fields
    assert fields["indices"] == [1, "('a', 2)", None]
    assert (fields["exception"], fields["signal"], fields["stage"]) == ("ValueError", "SIGSEGV", "fetching")


def test_an_incident_has_fields_instead_of_text_to_parse():
    """error.incident.signal, and the like."""
    assert incident().signal == signal.SIGSEGV
    assert incident(exit=None).signal is None
    assert incident(in_hand=InHand(Stage.FETCHING, 1, 1, 2.5)).seconds_in_hand == 2.5


def test_long_and_empty_messages_fit_into_a_line():
    """What a user's exception says may be a page, or nothing."""
    assert first_line("a\nb") == "a"
    assert first_line("  \n ") == ""
    assert len(first_line("x" * 1000)) == 200
    assert first_line("x" * 1000).endswith("…")


def test_plain_values_stay_and_others_become_their_repr():
    """For logs and JSON."""
    assert [plain(v) for v in (1, 1.5, "a", True, None, (1,), b"x")] == [1, 1.5, "a", True, None, "(1,)", "b'x'"]


def test_statistics_become_plain_values():
    """Nested records too."""
    slots = (SlotStatistics(0, "ready", 12, 1, "idle", -1, 0.5, 2),)

    assert json.loads(json.dumps(Statistics(delivered=3, slots=slots).to_dict()))["slots"][0]["doing"] == "idle"


def test_the_quarantine_is_a_readable_mapping():
    """By index, whatever kind of index; a printout says why."""
    quarantine = Quarantine()
    quarantine.put(7, incident(action="left out"))
    quarantine.put([1, 2], incident(IncidentKind.EXCEPTION, failure=FAILURE))

    assert set(quarantine) == {7, "[1, 2]"}
    assert quarantine[7].signal == signal.SIGSEGV
    assert len(quarantine) == 2
    assert "died of SIGSEGV" in repr(quarantine)
    assert quarantine.is_deadly(7)
    assert not quarantine.is_deadly([1, 2])


# ---------------------------------------------------------------- errors


def test_a_crash_error_says_all_there_is_to_say():
    """Facts first, advice last; torch's own sentence is in it, for code that looks for that."""
    error = errors.crash_error(incident(stack=STACK), healthy_slots=7, delivered=141)

    assert str(error) == (
        "worker 3 died of SIGSEGV while fetching sample 18204\n"
        "\n"
        "  cause    a segmentation fault in native code, or a native stack overflow\n"
        "           DataLoader worker (pid 4127) is killed by signal: Segmentation fault.\n"
        "  python   dataset.py:88 decode  ←  dataset.py:61 __getitem__\n"
        "  task     batch 142 of epoch 1; this sample has now cost 2 of 2 workers\n"
        "  state    the other 7 workers go on; 141 batches delivered; next() goes on with the batch after this\n"
        '  next     faults="skip"            leave this sample out and finish the epoch\n'
        '           faults="replace"         put another sample in its place, so that batches keep their size\n'
    )
    assert type(error) is errors.WorkerCrashedError
    assert isinstance(error, RuntimeError)
    assert error.incident is not None
    assert error.incident.signal == signal.SIGSEGV


CRASH_PARTS = [
    (incident(exit=Exit(code=3)), 1, "DataLoader worker (pid(s) 4127) exited unexpectedly"),
    (incident(exit=Exit(code=3)), 1, "something called sys.exit or os._exit"),
    (incident(exit=Exit(code=3)), 1, "the other worker goes on; "),
    (incident(exit=None), 0, "cause    unknown"),
    (incident(in_hand=InHand(Stage.FETCHING, 142, 5, 2.34)), 1, "2 of 2 workers, 2.3 s in hand"),
    (incident(indices=(1, 2), in_hand=InHand(Stage.COLLATING, 142)), 1, "leave these samples out"),
    (incident(indices=(1, 2), in_hand=InHand(Stage.COLLATING, 142)), 1, "these samples have now cost 2 of 2 workers"),
    (incident(stuck=True), 2, "the rest of worker 3's stream cannot be reached"),
    (incident(stuck=True), 2, "give the iterator a method skip(n)"),
]


@pytest.mark.parametrize(("what", "others", "part"), CRASH_PARTS, ids=[part for _, _, part in CRASH_PARTS])
def test_a_crash_error_says_what_fits_the_case(what, others, part):
    """Codes, several samples, time in hand, a stream that cannot go on."""
    message = str(errors.crash_error(what, healthy_slots=others, delivered=9))

    assert part in message
    assert "next     " in message


def test_a_crash_error_does_not_speak_of_other_workers_when_there_are_none():
    """And of one batch in the singular."""
    message = str(errors.crash_error(incident(), healthy_slots=0, delivered=1))

    assert "  state    1 batch delivered; next() goes on" in message
    assert "python" not in message


def test_a_hang_error_offers_a_timeout_that_would_have_let_it_pass():
    """Its own class, so that it can be caught; the number to set is in it."""
    hung = incident(IncidentKind.HANG, exit=Exit(signal=9), in_hand=InHand(Stage.FETCHING, 142, 5, 31.24))

    error = errors.crash_error(hung, healthy_slots=1, delivered=0)

    assert type(error) is errors.WorkerHungError
    assert "no progress for 31.2 s (worker pid 4127)" in str(error)
    assert "FaultPolicy(sample_timeout=312)   if such a sample is only slow" in str(error)


def test_the_python_line_ends_where_outlive_begins():
    """The user's frames, innermost first, three at most."""
    deep = STACK.replace(
        "in decode\n", 'in decode\n  File "/a/codec.py", line 5 in inner\n  File "/a/b.py", line 6 in g\n'
    )

    assert errors.python_line(STACK) == "dataset.py:88 decode  ←  dataset.py:61 __getitem__"
    assert errors.python_line(deep) == "dataset.py:88 decode  ←  codec.py:5 inner  ←  b.py:6 g"
    assert errors.python_line("") == ""
    assert errors.python_line("nothing that faulthandler wrote") == ""


def test_the_python_line_is_that_of_the_thread_that_died():
    """Other threads of the worker, which faulthandler may list first, only waited."""
    assert errors.python_line(STACK_WITH_THREADS) == "dataset.py:88 decode  ←  dataset.py:61 __getitem__"


def test_the_python_line_is_there_when_the_users_project_is_called_outlive():
    """Only frames of the package itself are left out."""
    stack = 'Current thread 0x1 (most recent call first):\n  File "/home/me/outlive/train.py", line 7 in __getitem__\n'

    assert errors.python_line(stack) == "train.py:7 __getitem__"


def test_a_start_error_shows_the_death():
    """A worker that died before its first task."""
    died = incident(IncidentKind.START, indices=(), batch=-1, in_hand=InHand(Stage.PREPARING), stack=STACK)

    error = errors.start_error(died, 2)

    assert type(error) is errors.WorkerStartError
    assert str(error).startswith("worker 3 (pid 4127) could not be started in 2 attempts\n")
    assert "it died of SIGSEGV while running worker_init_fn or iter(dataset): a segmentation fault" in str(error)
    assert "python   dataset.py:88 decode" in str(error)
    assert "DataLoader worker (pid 4127) is killed by signal: Segmentation fault." in str(error)
    assert "next     run worker_init_fn and dataset[0] once in this process" in str(error)


def test_a_start_error_shows_the_exception():
    """One that arose before a worker had a pid, with its traceback."""
    failed = incident(IncidentKind.START, failure=FAILURE, exit=None, pid=-1, in_hand=InHand(Stage.STARTING))

    message = str(errors.start_error(failed, 1))

    assert message.startswith("worker 3 could not be started in 1 attempts: ValueError: bad pixel\n")
    assert "Traceback (most recent call last)" in message
    assert 'if __name__ == "__main__":' in message


def test_a_start_error_without_any_cause_says_so():
    """Never an empty line."""
    message = str(errors.start_error(incident(IncidentKind.START, exit=None, in_hand=InHand(Stage.STARTING)), 1))

    assert "cause    it ended while starting: unknown" in message


def test_a_limit_message_counts_causes_and_names_first_samples():
    """How many, which causes, first samples, which knob."""
    happened = [incident(indices=(n,)) for n in range(7)]
    happened += [incident(IncidentKind.EXCEPTION, failure=FAILURE, indices=(n,)) for n in (50, 51)]
    happened += [incident(IncidentKind.HANG, indices=(60,), in_hand=InHand(Stage.FETCHING, 1, 1, 40))]

    message = errors.limit_message("10 samples are bad", happened, "FaultPolicy(max_bad=…)")

    assert message == (
        "10 samples are bad\n"
        "\n"
        "      7 ×  died of SIGSEGV while fetching a sample  (sample 0, sample 1, sample 2, sample 3, sample 4, …)\n"
        "      2 ×  ValueError  (sample 50, sample 51)\n"
        "      1 ×  hang while fetching a sample  (sample 60)\n"
        "\n"
        "  next     FaultPolicy(max_bad=…)\n"
        "           loader.incidents     every one of them, with stacks\n"
    )


def test_a_limit_message_stays_short_when_causes_are_many():
    """The six most frequent; the rest is counted."""
    happened = [incident(exit=Exit(code=n), indices=()) for n in range(2, 12)]

    message = errors.limit_message("too much", happened, "…")

    assert "and 4 more causes" in message
    assert message.count("×") == 6


def test_a_limit_message_does_not_promise_more_samples_than_there_are():
    """The same sample many times is one sample."""
    message = errors.limit_message("too much", [incident(indices=(4,)) for _ in range(9)], "…")

    assert "(sample 4)" in message


@pytest.mark.parametrize(
    "error",
    [
        errors.WorkerCrashedError("m", incident()),
        errors.WorkerHungError("m", incident()),
        errors.WorkerStartError("m", incident()),
        errors.TooManyFaultsError("m", [incident()]),
        errors.ForkedLoaderError("m"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_survives_pickling_with_its_fields(error):
    """Libraries send errors from process to process."""
    again = pickle.loads(pickle.dumps(error))

    assert type(again) is type(error)
    assert str(again) == "m"
    assert vars(again) == vars(error)
    assert isinstance(error, (errors.OutliveError, RuntimeError))
    assert isinstance(error, RuntimeError)


# ---------------------------------------------------------------- what a worker raised


def raised(kind: Any = ValueError, **more: Any) -> BaseException:
    failure = Failure(kind.__name__, "bad", "Traceback …\nValueError: bad\n", pickle.dumps(kind))
    return rebuilt(incident(IncidentKind.EXCEPTION, failure=failure, exit=None, **more))


def test_a_workers_exception_carries_a_note_with_sample_worker_and_batch():
    """And the incident itself, for programs."""
    error = raised()

    assert type(error) is ValueError
    assert str(error) == "Caught ValueError in DataLoader worker process 3.\nOriginal Traceback …\nValueError: bad\n"
    assert error.__notes__ == ["outlive: sample 18204, batch 142 of epoch 1, worker 3 (pid 4127)"]
    assert error.incident.index is None  # type: ignore[attr-defined]


def test_the_note_says_what_is_known_where_no_sample_is():
    """worker_init_fn belongs to no batch."""
    nowhere = incident(indices=(), batch=-1, pid=-1, in_hand=InHand(Stage.PREPARING))

    assert note(nowhere) == "outlive: running worker_init_fn or iter(dataset), worker 3"


def test_a_class_that_the_trainer_does_not_know_becomes_a_runtime_error():
    """Its name and text are kept."""
    failure = Failure("Local", "bad", "Traceback …\nLocal: bad\n", b"cnowhere\nLocal\n.")

    error = rebuilt(incident(IncidentKind.EXCEPTION, failure=failure))

    assert type(error) is RuntimeError
    assert "Caught Local in DataLoader worker process 3." in str(error)


class Sealed(Exception):
    __slots__ = ()


def test_a_class_without_room_for_fields_is_still_raised():
    """Whatever can be added is; nothing is lost for what cannot."""
    assert isinstance(raised(Sealed), Sealed)
