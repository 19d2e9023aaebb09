"""`outlive.check`: exactly the bad samples are found, whatever they do; figures, shards, streams, going on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

import outlive
from checking.datasets import KINDS, MIB, BadSamples, Stream, UnevenCosts, planted
from deadlines import wait_until
from outlive.checking import jobs as check_jobs
from outlive.checking.report import CheckReport, Figures, lines
from outlive.cli import main
from outlive.errors import PositionError
from outlive.loader.fingerprint import Fingerprint
from outlive.loader.quarantine_file import BadSample

TESTS = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("size", "method", "retries"),
    [
        (10_000, "fork", 1),
        (10_000, "spawn", 0),
        pytest.param(100_000, "fork", 0, marks=pytest.mark.full),
        pytest.param(100_000, "spawn", 1, marks=pytest.mark.full),
    ],
)
def test_exactly_the_planted_samples_are_found_of_ten_kinds(size, method, retries, tmp_path):
    """Fifty of many, five of each kind, among them neighbors and both ends; each with its verdict. Also where the
    first death of a sample is its last.
    """
    kinds = list(KINDS) * 5
    places = [0, 1, 2, 500, size - 1, *(700 + size // 50 * number for number in range(45))]
    dataset = BadSamples(size, dict(zip(places, kinds, strict=True)))

    report = outlive.check(
        dataset,
        workers=2,
        start_method=method,
        retries=retries,
        sample_timeout=0.8,
        memory_limit="300MiB",
        output=tmp_path / "quarantine.json",
    )

    assert {sample.index: dataset.planted[sample.index] for sample in report.bad} == dataset.planted
    judged = {(dataset.planted[sample.index], sample.verdict) for sample in report.bad}
    assert [pair for pair in judged if pair[1] not in KINDS[pair[0]]] == []
    assert (report.checked, report.total, report.complete, report.good) == (size, size, True, False)
    loader = outlive.DataLoader(dataset, 500, num_workers=2, quarantine=tmp_path / "quarantine.json")
    delivered = [int(index) for batch in loader for index in batch]
    assert delivered == [index for index in range(size) if index not in dataset.planted]
    assert not loader.incidents  # nobody has tried them
    assert (loader.statistics().spared, loader.statistics().quarantined) == (50, 50)


def test_slow_and_huge_samples_are_named_and_figures_are_right():
    """One of 400 is slow, one is huge; all else is as usual, also where a busy machine holds some of them up."""
    report = outlive.check(UnevenCosts(), workers=2, start_method="fork")

    assert report.good
    assert [each.index for each in report.slow] == [123]
    assert [each.index for each in report.huge] == [77]
    assert report.seconds.max_index == 123
    assert 0.35 <= report.seconds.max == report.slow[0].value  # it may have waited for a CPU when it woke up
    assert report.seconds.p50 <= report.seconds.p99 < report.seconds.threshold
    assert (report.bytes.max_index, report.bytes.beyond) == (77, 1)
    assert report.bytes.p50 == pytest.approx(118, rel=0.05)
    assert report.bytes.max == 3 * MIB + 18
    assert "max 3 MiB (sample 77)" in str(report)


def test_a_sample_that_waited_for_a_cpu_is_not_slow(monkeypatch):
    """Of its time, only the rest counts; the time of short samples is left as it is."""
    starved = iter([5_000, 9_005_000, 9_005_000, 9_305_000_000])
    monkeypatch.setattr(check_jobs, "_starved_ns", lambda: next(starved))
    monkeypatch.setattr(check_jobs, "time", SimpleNamespace(monotonic_ns=lambda: 1_000_000_000))
    clock = check_jobs.FairClock()

    taken = [clock.taken(400_000_000, 2_000_000_000), clock.taken(400_000_000, 3_000_000_000)]
    short = clock.taken(1_000, 4_000_000_000)

    assert taken == [391_000_000, 400_000_000]
    assert short == 1_000
    assert clock.since(999_999_000) == 1_000  # nobody looks before it is time


def test_a_page_keeps_to_the_width_of_its_terminal():
    """A cause has a line of its own where there is no room beside the sample; in a file it has."""
    bad = BadSample(7, verdict="exception", cause="OSError: " + "far too long " * 20, incident="0123abcd")
    none = Figures()
    report = CheckReport(
        "data", 9, 9, (bad,), none, none, (), (), (), ("x" * 200,), 1.0, 1, "", Fingerprint("D", "map", 9)
    )

    narrow, wide = lines(report, 80), lines(report)

    assert max(map(len, narrow)) == 80
    assert narrow[6].startswith("      OSError: far too long")
    assert max(map(len, wide)) == 120
    assert wide[5].startswith("    7                    exception            0123abcd  OSError: far too long")


def test_shards_are_the_whole_and_a_sample_is_spread_evenly(caplog):
    """Eight machines check everything once between them; a share of it has some of every part."""
    found = [outlive.check(planted, workers=1, shard=(n, 3), start_method="fork") for n in (1, 2, 3)]
    some = outlive.check(planted, workers=1, sample="5%", start_method="fork", seed=3)

    assert sum(report.checked for report in found) == 2000
    assert [[sample.index for sample in report.bad] for report in found] == [[7, 500], [], [1999]]
    assert found[0].choice == "shard 1 of 3"
    assert (some.checked, some.choice) == (100, "5 %")
    assert not caplog.records  # reports have the bad ones


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_stream_is_checked_by_worker_and_place(method):
    """Sample 9 of 40 is the fifth of worker 1; one that kills is stepped over where the iterator can."""
    report = outlive.check(Stream(40, bad=(9,), deadly=(20,)), workers=2, start_method=method)

    assert [(sample.worker, sample.index) for sample in report.bad] == [(0, 10), (1, 4)]
    assert (report.checked, report.complete, report.stream_workers) == (40, True, 2)


def test_what_a_stream_cannot_reach_is_told():
    """An iterator that cannot step over a killer: the rest of its worker's stream was not checked, and that is said."""
    report = outlive.check(Stream(40, deadly=(20,), skips=False), workers=2, start_method="fork")

    assert [(sample.worker, sample.index) for sample in report.bad] == [(0, 10)]
    assert (report.good, report.complete, report.checked) == (False, False, 21)
    assert "worker 0's stream from its sample 0 on: sample 10 ends the worker" in report.unreached[0]


def test_two_shards_of_a_stream_share_it_as_twice_as_many_workers_would():
    """The dataset's own splitting serves: it sees four workers."""
    found = [outlive.check(Stream(41, bad=(9,)), workers=2, shard=f"{n}/2", start_method="fork") for n in (1, 2)]

    assert sum(report.checked for report in found) == 41
    assert [(sample.worker, sample.index) for report in found for sample in report.bad] == [(1, 2)]
    assert found[0].stream_workers == 4


# ---------------------------------------------------------------- killed, and going on


class InterruptedCheck:
    """A check of many samples, which is killed in the middle, and once more begun."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.state, self._log = folder / f"{kind}.json", folder / f"{kind}.log"
        self._command = [
            sys.executable,
            "-m",
            "outlive",
            "check",
            f"{TESTS}/checking/slow_datasets.py:{kind}",
            "--json",
        ]
        self._command += ["--state", str(self.state), "--workers", "2", "--start-method", "fork"]
        self._environment = os.environ | {"CHECK_LOG": str(self._log), "PYTHONPATH": os.pathsep.join(sys.path)}
        self._first = subprocess.Popen(
            self._command, env=self._environment | {"CHECK_HOLD": "150"}, stderr=subprocess.DEVNULL
        )

    def kill(self) -> None:
        try:
            assert wait_until(lambda: self.state.exists() and self._told()["checked"] >= 50, 60.0)
        finally:
            self._first.send_signal(signal.SIGKILL)
            self._first.wait()
        self.done = self._told()["checked"]
        self._log.unlink()
        self._second = subprocess.Popen(
            [*self._command, "--resume"], env=self._environment, stdout=subprocess.PIPE, text=True
        )

    def end(self) -> None:
        self.report = json.loads(self._second.communicate(timeout=60)[0])
        self.status = self._second.returncode
        self.tried = set(self._log.read_text().split())

    def _told(self) -> Any:
        return json.loads(self.state.read_text())


def test_a_check_that_is_killed_goes_on_where_it_was(tmp_path):
    """Not from the beginning: what was checked is not tried again, what was found bad is not forgotten."""
    checks = {
        kind: InterruptedCheck(kind, tmp_path) for kind in ("slow", "slow_stream")
    }  # at the same time: they mostly wait
    for check in checks.values():
        check.kill()
    for check in checks.values():
        check.end()

        assert check.status == 1
        assert (check.report["checked"], check.report["complete"]) == (200, True)
        assert len(check.report["bad"]) == 1
        assert not check.state.exists()
    # A stream without a state of its own is taken from the start, and thrown away.
    assert len(checks["slow"].tried) == 200 - checks["slow"].done - 1
    assert checks["slow"].report["bad"][0]["index"] == 3


def test_a_state_of_another_choice_is_refused(tmp_path):
    """In words."""
    from outlive.checking.plan import choice_of
    from outlive.checking.state import Progress, StateFile
    from outlive.loader import fingerprint

    StateFile(tmp_path / "state", fingerprint.of(planted), choice_of("5%", None)).write(Progress())

    with pytest.raises(PositionError, match=r"is of a check of 5 %; go on with the same choice"):
        outlive.check(planted, state_file=tmp_path / "state", resume=True)


# ---------------------------------------------------------------- what is no good


@pytest.mark.parametrize(
    ("more", "error", "said"),
    [
        ({"sample": "0%"}, ValueError, "more than"),
        ({"sample": "some"}, TypeError, '"5%" or 0.05'),
        ({"shard": "9/8"}, ValueError, 'from "1/8" to "8/8"'),
        ({"shard": 3}, TypeError, "the first of eight"),
        ({"workers": 0}, ValueError, "workers must be at least 1"),
        ({"huge": "big"}, TypeError, "huge must be a size"),
        ({"output": "/nowhere/at/all.json"}, FileNotFoundError, "no folder /nowhere/at"),
    ],
)
def test_what_makes_no_sense_is_refused(more, error, said):
    """Before anything is started."""
    with pytest.raises(error, match=said):
        outlive.check(planted, **more)


def test_what_cannot_be_checked_is_refused():
    """With the reason."""
    with pytest.raises(TypeError, match="is an iterator, and can be gone through once only"):
        outlive.check(iter([1, 2]))
    with pytest.raises(ValueError, match="sample= needs a map-style dataset"):
        outlive.check(Stream(3), sample="5%")


# ---------------------------------------------------------------- the command


def ask(*arguments: str) -> Any:
    return CliRunner().invoke(main, ["check", *arguments, "--start-method", "fork"])


def test_the_command_lists_the_bad_and_writes_them(tmp_path, monkeypatch):
    """Exit status 1, three rows, and a file that a loader obeys."""
    monkeypatch.setenv("OUTLIVE_HOME", str(tmp_path))
    output = tmp_path / "bad.json"

    result = ask("checking.datasets:loader", "--output", str(output))

    assert result.exit_code == 1, result.output
    assert "checking.datasets:loader: 3 bad samples" in result.output
    assert "500                  exited  " in result.output
    assert f'DataLoader(..., quarantine="{output}")' in result.output
    assert [sample["index"] for sample in json.loads(output.read_text())["samples"]] == [7, 500, 1999]
    batch = next(iter(outlive.DataLoader(planted, 1000, num_workers=0, quarantine=output)))
    assert batch.tolist()[6:9] == [6, 8, 9]


def test_the_command_says_by_its_status_that_all_is_well_or_usage_wrong(tmp_path, monkeypatch):
    """0, 2 and 2; 3 where there is nothing to be checked, for whoever is told that all is well believes it."""
    monkeypatch.setenv("OUTLIVE_HOME", str(tmp_path))

    good = ask("checking.datasets:good", "--json")

    assert (good.exit_code, json.loads(good.output)["good"]) == (0, True)
    empty = ask("checking.datasets:empty")
    assert (empty.exit_code, empty.output.splitlines()[0]) == (3, "checking.datasets:empty: it has no samples")
    assert ask("checking.datasets:good", "--sample", "200%").exit_code == 2
    assert ask("checking.datasets:nothing").exit_code == 2


def test_a_source_that_is_gone_ends_the_check_with_a_status_of_its_own(tmp_path, monkeypatch):
    """Nothing is condemned for it."""
    monkeypatch.setenv("OUTLIVE_HOME", str(tmp_path))

    result = ask("checking.datasets:gone", "--patience", "0.2")

    assert result.exit_code == 3
    assert "SourceUnavailableError" in result.output
    assert "with --resume goes on" in result.output
