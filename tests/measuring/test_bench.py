"""`outlive.bench`: figures of a user's own loader, where its time goes, and settings that follow from them."""

from __future__ import annotations

import json
import mmap
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import outlive
from measuring import loaders
from outlive.cli import main
from outlive.measuring import trial as measuring
from outlive.measuring.bench import next_number
from outlive.measuring.report import BenchReport, lines, recommended
from outlive.measuring.trial import PARTS, Trial, twin_of


class Looks:
    """Counts how often bench looks at its workers. Stages last so many looks, not so many seconds.

    A busy machine makes looks rarer, so shares of looks stay the same there. Shares of seconds would not.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._words = memoryview(mmap.mmap(-1, 16)).cast("q")  # shared with workers, which are forked
        stages, begin, end = measuring.Timed.stages, measuring._Sampler.begin, measuring._Sampler.end

        def look(batches: Any) -> Any:
            self._words[0] += 1
            return stages(batches)

        def measure(sampler: Any, is_measured: bool, original: Any) -> None:
            self._words[1] = is_measured
            original(sampler)

        monkeypatch.setattr(measuring.Timed, "stages", look)
        monkeypatch.setattr(measuring._Sampler, "begin", lambda sampler: measure(sampler, True, begin))
        monkeypatch.setattr(measuring._Sampler, "end", lambda sampler: measure(sampler, False, end))

    def wait(self, count: int) -> None:
        """Until there were so many more, or none is made."""
        until = self._words[0] + count
        while self._words[1] and self._words[0] < until:
            time.sleep(0.001)  # between two looks at the counter


class Held(torch.utils.data.Dataset[int]):
    """Each sample is in hand for so many looks; who fetched is written down."""

    def __init__(self, looks: Looks, count: int, folder: Path) -> None:
        self.looks, self.count, self.folder = looks, count, folder

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> int:
        (self.folder / str(os.getpid())).touch()
        self.looks.wait(self.count)
        return index


def test_time_is_found_where_it_goes(tmp_path, monkeypatch):
    """In fetching here, in collating there; with a step to feed, workers are idle and the consumer does not wait."""
    looks = Looks(monkeypatch)

    def collate(samples: list[Any]) -> Any:
        looks.wait(30)
        return torch.utils.data.default_collate(samples)

    def loader(fetching: int, **more: Any) -> Any:
        (tmp_path / str(fetching)).mkdir(exist_ok=True)
        dataset = Held(looks, fetching, tmp_path / str(fetching))
        return outlive.DataLoader(dataset, 4, num_workers=1, multiprocessing_context="fork", **more)

    fetch = outlive.bench(loader(8), workers=[1, 2], prefetch=[2], batches=6, seconds=60)
    fetchers = len(list((tmp_path / "8").iterdir()))
    collate = outlive.bench(loader(0, collate_fn=collate), workers=[1], prefetch=[2], batches=6, seconds=60)
    step = SimpleNamespace(monotonic=time.monotonic, sleep=lambda seconds: looks.wait(30))
    monkeypatch.setattr(measuring, "time", step)
    fed = outlive.bench(loader(0), workers=[1], prefetch=[2], batches=6, seconds=60, step=0.1)

    assert [trial.workers for trial in fetch.trials] == [1, 2]
    assert fetchers == 1 + 2
    for trial in fetch.trials:
        assert trial.batches_per_s == pytest.approx(trial.batches / trial.seconds)
    assert max(fetch.trials[0].shares, key=fetch.trials[0].shares.__getitem__) == "fetch"
    assert max(collate.trials[0].shares, key=collate.trials[0].shares.__getitem__) == "collate"
    assert sum(collate.trials[0].shares.values()) == pytest.approx(1)
    assert set(collate.trials[0].shares) == set(PARTS)
    assert max(fed.trials[0].shares, key=fed.trials[0].shares.__getitem__) == "idle"
    assert fed.trials[0].waiting < 0.5 < fetch.trials[0].waiting
    assert fetch.trials[1].memory_bytes > fetch.trials[1].worker_bytes > 0


@pytest.mark.parametrize("loader", [loaders.stream, loaders.batches, loaders.tiny], ids=["stream", "batches", "tiny"])
def test_any_loader_is_measured_and_left_as_it_is(loader):
    """Streams, samplers of batches, epochs of three batches that end again and again."""
    before = dict(vars(loader))

    report = outlive.bench(loader, workers=[1], prefetch=[2], batches=50)

    assert report.trials[0].problem == ""
    assert report.trials[0].batches > 0
    assert vars(loader) == before


def test_a_loader_of_ours_keeps_its_options_and_its_quarantine_to_itself(caplog):
    """Trials have incidents of their own, and the log has none of them."""
    loader = outlive.DataLoader(Bad(), 4, num_workers=3, faults="skip", multiprocessing_context="fork")

    report = outlive.bench(loader, workers=[0, 1], prefetch=[3], batches=8)

    assert [trial.incidents > 0 for trial in report.trials] == [True, True]
    assert (report.trials[0].prefetch, report.trials[0].shares) == (None, {})
    assert not loader.incidents
    assert not loader.quarantine
    assert not caplog.records
    twin = twin_of(loader, 2, 5)
    assert (twin.num_workers, twin.prefetch_factor, twin.faults) == (2, 5, "skip")
    assert (loader.num_workers, loader.prefetch_factor) == (3, 2)


class Bad(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> int:
        if index == 7:
            raise ValueError("seven is bad")
        return index


def test_a_loader_that_gives_nothing_is_given_up_on_time():
    """Not after the hour that its samples take; it is said that there are no figures."""
    report = outlive.bench(loaders.hanging, workers=[1], prefetch=[2], seconds=0.5)

    assert report.recommended is None
    assert report.trials[0].problem == "no batch came in time"
    assert "no trial had a batch in time: give it more --seconds" in str(report)


def test_a_loader_whose_samples_all_raise_says_what_they_raise():
    """More seconds would be of no use."""
    report = outlive.bench(loaders.gone, workers=[1], prefetch=[2], seconds=8)

    text = lines(report)

    assert report.recommended is None
    assert "the source is gone: " in " ".join(" ".join(text).split())
    assert "raised OSError: no such bucket" in " ".join(" ".join(text).split())
    assert text[-1] == "  nothing was measured"
    assert max(map(len, text)) <= 80


# ---------------------------------------------------------------- settings


def trial(workers: int, rate: float, prefetch: int = 2, waiting: float = 1.0) -> Trial:
    return Trial(workers, prefetch, 100, rate, 0.1, dict.fromkeys(PARTS, 0.25), waiting, 0.0, 1 << 30, 1 << 28)


@pytest.mark.parametrize(
    ("tried", "step", "chosen"),
    [
        ([trial(1, 10), trial(2, 19), trial(4, 20), trial(8, 12)], 0.0, (2, 2)),  # nearly as fast with half of them
        ([trial(2, 20), trial(2, 20, 1), trial(2, 20.5, 8)], 0.0, (2, 1)),
        ([trial(1, 9, waiting=0.4), trial(2, 9.9, waiting=0.04), trial(4, 10, waiting=0.0)], 0.1, (2, 2)),
        ([trial(1, 5, waiting=0.6), trial(2, 8, waiting=0.3)], 0.1, (2, 2)),  # none is enough: the fastest
        ([Trial(1, 2, problem="no batch came in time"), trial(2, 1)], 0.0, (2, 2)),
        ([trial(1, 10), Trial(8, 2, 9, 500.0)], 0.0, (1, 2)),  # nine batches of eight workers say nothing
    ],
)
def test_settings_are_the_least_that_serve(tried, step, chosen):
    """Workers cost memory and CPUs."""
    found = recommended(tried, step)

    assert found is not None
    assert (found.workers, found.prefetch) == chosen


@pytest.mark.parametrize(
    ("idle", "waiting", "said"),
    [
        (0.6, 0.0, "are idle 60% of their time: the consumer is the slower"),
        (0.5, 0.95, "though the consumer waits: some batches take far longer"),
        (0.0, 0.95, "spend most of their time in fetch"),
    ],
)
def test_idle_workers_are_explained_by_what_the_consumer_does(idle, waiting, said):
    shares = {"fetch": 0.9 - idle, "collate": 0.05, "transport": 0.05, "idle": idle}
    tried = replace(trial(2, 100.0, waiting=waiting), shares=shares)

    text = lines(BenchReport("mine", (tried,), (2, 2)))

    assert said in " ".join(" ".join(text).split())
    assert max(map(len, text)) <= 80


def test_the_table_has_every_trial_and_says_which_is_yours():
    """And what is recommended instead."""
    report = BenchReport("train:loader", (trial(2, 1000), trial(8, 1010)), (8, 2), 0.0, 12.0, 4.0)

    text = lines(report)

    assert text[4].split() == ["2", "2", "1,000", "0.10", "s", *["25"] * 4, "100", "1", "GiB"]
    assert (text[4][0], text[5][0], text[6]) == (" ", "*", "  * yours")
    assert max(map(len, text)) <= 80
    assert "  recommended   num_workers=2, prefetch_factor=2   1,000 batches/s, 1 GiB" in text
    assert "  yours         num_workers=8, prefetch_factor=2   1,010 batches/s, 1 GiB" in text


@pytest.mark.parametrize(
    ("more", "error", "said"),
    [
        ({"workers": [-1]}, ValueError, "workers must be at least 0"),
        ({"workers": []}, ValueError, "one or more numbers"),
        ({"prefetch": [0]}, ValueError, "prefetch must be at least 1"),
        ({"seconds": 0}, ValueError, "seconds must be at least"),
        ({"plot": "bench.txt"}, ValueError, ".svg, .png or .pdf"),
        ({"plot": "/nowhere/bench.svg"}, FileNotFoundError, "no folder /nowhere"),
    ],
)
def test_what_makes_no_sense_is_refused(more, error, said):
    """Before anything is measured."""
    with pytest.raises(error, match=said):
        outlive.bench(loaders.fetching, **more)


# ---------------------------------------------------------------- the command


def ask(*arguments: str) -> Any:
    return CliRunner().invoke(main, ["bench", *arguments])


def test_the_command_prints_a_table_and_draws_it(tmp_path):
    """After as many batches as it is told."""
    plot = tmp_path / "bench.svg"

    few = ["--seconds", "30", "--batches", "9", "--workers", "1", "--prefetch", "2"]
    result = ask("measuring.loaders:fetching", *few, "--plot", str(plot))

    assert result.exit_code == 0, result.output
    assert "measuring.loaders:fetching: 1 trial in" in result.output
    assert "recommended   num_workers=1, prefetch_factor=2" in result.output
    assert plot.read_text().lstrip().startswith("<?xml")


def test_the_command_answers_programs_and_says_by_its_status_what_went_wrong(monkeypatch):
    """JSON; 1 where there is nothing to tell, 2 where it is asked in vain."""
    fast = ["--workers", "1", "--prefetch", "2", "--json"]

    told = ask("measuring.loaders:collating", "--batches", "9", *fast)
    nothing = ask("measuring.loaders:hanging", "--seconds", "0.3", *fast)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    unplotted = ask("measuring.loaders:fetching", "--plot", "bench.png")

    assert json.loads(told.output)["recommended"] == {"num_workers": 1, "prefetch_factor": 2}
    assert (told.exit_code, nothing.exit_code) == (0, 1)
    assert unplotted.exit_code == 2
    assert "pip install matplotlib" in unplotted.output
    dataset, empty = ask("checking.datasets:good"), ask("measuring.loaders:empty", *fast[:-1])
    assert (dataset.exit_code, empty.exit_code) == (2, 1)
    assert "checking.datasets:good is a dataset, and a DataLoader is measured: give --batch-size" in dataset.output
    assert "nothing was measured: it gives no batches; has its dataset samples?" in empty.output


@pytest.mark.parametrize(
    ("tried", "more"),
    [
        ([trial(1, 10)], 2),
        ([trial(1, 10), trial(2, 19)], 4),
        ([trial(2, 19), trial(1, 18)], 0),  # one more was of no use
        ([trial(1, 10), Trial(2, 2, problem="no batch came in time")], 0),
        ([trial(32, 10), trial(64, 20)], 0),
    ],
)
def test_more_workers_are_tried_while_they_are_of_use(tried, more):
    """Those that wait for a disk need no CPU; there is an end to it."""
    assert next_number(tried) == more
