"""Ranks that agree: two real ones, with gloo between them."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import warm_server
from deadlines import wait_until
from outlive._system.bond import GAVE_UP, Bond, Fallen
from rank_meeting import Rendezvous, three_ranks
from rank_program import BATCH, SAMPLES

PROGRAM = Path(__file__).parent / "rank_program.py"
DEADLINE_S = 120


class RankResult(NamedTuple):
    status: int
    out: str
    err: str


def job(tmp_path: Path, mode: str, *, first_to_end: int = 1) -> tuple[RankResult, RankResult]:
    """Both ranks of a job, as they ended; the meeting place tells the other when `first_to_end` has."""
    meeting = tmp_path / "meeting"
    ranks = []
    for rank in (0, 1):
        command = [sys.executable, str(PROGRAM), str(rank), str(meeting), mode]
        pipe = subprocess.PIPE
        ranks.append(warm_server.Popen(command, stdout=pipe, stderr=pipe, text=True))
    ended: dict[int, RankResult] = {}
    try:
        for rank in (first_to_end, 1 - first_to_end):
            out, err = ranks[rank].communicate(timeout=DEADLINE_S)
            ended[rank] = RankResult(ranks[rank].returncode, out, err)
            meeting.with_name("meeting.ended").touch()
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    return ended[0], ended[1]


def batches_of(ended: RankResult) -> list[list[float]]:
    found = re.search(r"rank \d: \d+ batches (\[.*\])", ended.out)
    assert found, ended.err[-3000:]
    batches: list[list[float]] = eval(found[1])
    return batches


@pytest.mark.parametrize("mode", ["map", "stream", "inline"])
def test_ranks_deliver_as_many_batches_each_whatever_one_leaves_out(tmp_path: Path, mode: str) -> None:
    """Else the job would hang in the collective that only one of them comes to. Exceptions, and a death."""
    well, faulty = job(tmp_path, mode)

    assert (well.status, faulty.status) == (0, 0), faulty.err[-3000:]
    assert len(batches_of(well)) == SAMPLES // BATCH
    batches = batches_of(faulty)
    assert len(batches) == len(batches_of(well))
    # Each sample that is good, once, in order; for batches without one the first that had some, where they were or at
    # the end.
    first = [2.0, 3.0]
    rest = [batch for batch in batches if batch != first]
    assert rest == [
        [4.0, 5.0],
        [6.0, 7.0],
        [10.0, 11.0],
        [12.0],
        [14.0, 15.0],
        [16.0, 17.0],
        [18.0, 19.0],
        [20.0, 21.0],
    ]
    assert batches.count(first) == 4


def test_a_rank_apart_is_told_that_it_has_fewer_batches(tmp_path: Path) -> None:
    """It is left as it is; once it is said what will come of it, and what to do."""
    well, faulty = job(tmp_path, "apart")

    assert len(batches_of(well)) - len(batches_of(faulty)) == 3
    assert faulty.err.count('FaultPolicy(ranks="agree")') == 1
    assert "ranks=" not in well.err


def test_the_others_hear_of_a_rank_that_gave_up_when_they_ask_for_a_batch(tmp_path: Path) -> None:
    """Whoever is not in a collective ends with an error that names it."""
    well, faulty = job(tmp_path, "gives-up-apart")

    assert faulty.status == 1
    assert "TooManyFaultsError" in faulty.err
    assert well.status == 1
    assert "RankFailedError: rank 1 gave up: TooManyFaultsError: " in well.err


def test_the_others_end_although_they_wait_in_a_collective(tmp_path: Path) -> None:
    """The one that gave up lives on: nothing else would ever wake them."""
    well, faulty = job(tmp_path, "caught", first_to_end=0)

    assert well.status == 1
    assert "outlive: rank 1 gave up: TooManyFaultsError: " in well.err
    assert "has stood still for 1 s" in well.err
    assert "all_reduce" in well.err
    assert faulty.status == 1


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        ("gives-up", "rank 1 gave up: TooManyFaultsError: "),
        ("raises", "rank 1 failed: KeyError: 'a bug in the training step'"),
        ("killed", "rank 1 is gone: its process ended without a word"),
    ],
)
def test_a_collective_that_fails_for_a_lost_rank_names_it(tmp_path: Path, mode: str, words: str) -> None:
    """Of gloo's own words nobody knows which rank it was, and why."""
    well, lost = job(tmp_path, mode)

    assert well.status == 1, (well, lost)
    assert f"outlive: {words}" in well.err or f"RankFailedError: {words}" in well.err, (well.err[-3000:], lost)


def test_a_rank_that_is_done_alarms_no_other_rank(tmp_path: Path) -> None:
    well, faulty = job(tmp_path, "done")

    assert (well.status, faulty.status) == (0, 0), well.err[-3000:]
    assert "rank 0 is well" in well.out
    assert "outlive:" not in well.err


# ---------------------------------------------------------------- the bond itself


@pytest.fixture
def meeting() -> Rendezvous:
    return Rendezvous()


@pytest.fixture
def bonds(meeting: Rendezvous) -> Iterator[list[Bond]]:
    with three_ranks(meeting) as made:
        yield made


@pytest.mark.parametrize("who", [0, 1, 2])
def test_a_failure_of_any_rank_reaches_all_others(bonds: list[Bond], who: int) -> None:
    bonds[who].tell(GAVE_UP, "why")

    for other in (bond for bond in bonds if bond.rank != who):
        assert other.await_fallen(10.0) == Fallen(who, GAVE_UP, "why")
    assert bonds[who].fallen is None


def test_a_late_rank_receives_earlier_messages(bonds: list[Bond], meeting: Rendezvous) -> None:
    bonds[1].tell(GAVE_UP, "why")
    assert bonds[0].await_fallen(10.0) is not None
    late = Bond(3, meeting.publish, meeting.find)

    assert late.await_fallen(10.0) == Fallen(1, GAVE_UP, "why")
    late.close()


RANK_3 = """
import sys, time
from outlive._system.bond import Bond
bond = Bond(3, print, lambda: sys.argv[1].encode())
time.sleep(600)
"""


def test_a_rank_is_missed_only_when_it_leaves_without_goodbye(bonds: list[Bond], meeting: Rendezvous) -> None:
    bonds[2].close()
    assert wait_until(lambda: bonds[0].linked_ranks == {1})
    assert bonds[0].fallen is None

    assert meeting.address is not None
    killed = subprocess.Popen([sys.executable, "-c", RANK_3, meeting.address.decode()])
    try:
        assert wait_until(lambda: bonds[0].linked_ranks == {1, 3}, 60)
    finally:
        killed.kill()
        killed.wait()

    assert bonds[0].await_fallen(60) == Fallen(3, "gone")
    assert bonds[1].await_fallen(60) == Fallen(3, "gone")


@pytest.mark.parametrize(
    "line", [b'{"token": "wrong", "rank": 7}\n', b"GET / HTTP/1.1\r\n\r\n", b"\xff\n", b"x" * 200_000]
)
def test_a_foreign_connection_is_rejected_and_has_no_effect(
    bonds: list[Bond], meeting: Rendezvous, line: bytes
) -> None:
    """Another process finds the port, but does not know the token."""
    with meeting.connect() as stranger:
        stranger.settimeout(10)
        try:
            stranger.sendall(line + b'{"rank": 1, "how": "gave up", "said": "nonsense"}\n')
            assert stranger.recv(1) == b""
        except ConnectionError:
            pass  # likewise

    assert bonds[0].linked_ranks == {1, 2}
    assert all(bond.fallen is None for bond in bonds)


def test_no_thread_is_left(bonds: list[Bond]) -> None:
    for bond in bonds:
        bond.close()

    assert not [thread for thread in threading.enumerate() if thread.name == "outlive-ranks"]
