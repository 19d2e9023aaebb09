"""Workers that were forked from a trainer with threads and wait for one: all of them are replaced, nothing is lost.

Reads   batches, incidents, statistics.
Writes  nothing.
Never   a hang that is played: the lock is held, the thread is the trainer's.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import outlive
import warm_server
from deadlines import wait_until
from faults import datasets_with_threads as datasets
from outlive import FaultPolicy, IncidentKind
from outlive.verdicts import Name

FLOOR_S = 0.5


def arguments(dataset: Any, **more: Any) -> dict[str, Any]:
    given = {"batch_size": 2, "num_workers": 2, "multiprocessing_context": "fork"}
    return {"dataset": dataset, "generator": torch.Generator().manual_seed(5), **given, **more}


def loader_of(dataset: Any, floor_s: float = FLOOR_S, **more: Any) -> outlive.DataLoader[Any]:
    policy = FaultPolicy(on_error="skip", retries=0, max_restarts=0, hang_floor_s=floor_s)
    return outlive.DataLoader(**arguments(dataset, **{"faults": policy, **more}))


def stock(dataset: Any, epochs: int = 1, **more: Any) -> list[torch.Tensor]:
    loader = torch.utils.data.DataLoader(**arguments(dataset, **more))
    return [batch for _ in range(epochs) for batch in loader]


def assert_same(delivered: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(delivered) == len(expected)
    assert all(map(torch.equal, delivered, expected))


def assert_healed(loader: outlive.DataLoader[Any]) -> None:
    (incident,) = loader.incidents
    assert incident.verdict is not None
    assert incident.verdict.name is Name.FORKED_WITH_THREADS
    assert incident.kind is IncidentKind.HANG
    assert incident.indices == ()
    assert dict(loader.quarantine) == {}
    assert (loader.statistics().healed, loader.statistics().retries) == (1, 0)


@pytest.mark.parametrize("first", [0, pytest.param(13, marks=pytest.mark.full)])
def test_a_healed_epoch_has_the_batches_of_torch_under_fork(first: int, caplog: pytest.LogCaptureFixture) -> None:
    """Bit for bit and in order, augmentation included, and so has the epoch after it, which does not hang again. One
    warning says what happened and how to avoid it."""
    expected = stock(datasets.Augmented(first), epochs=2, shuffle=True)
    loader = loader_of(datasets.Augmented(first), shuffle=True)

    with datasets.held_by_a_thread():
        delivered = [batch for _ in range(2) for batch in loader]

    assert_same(delivered, expected)
    assert_healed(loader)
    (warned,) = (record.getMessage() for record in caplog.records if "clean process" in record.getMessage())
    words = ("datasets_with_threads.py", "datasets_with_threads.LOCK", 'multiprocessing_context="spawn"', "lazily")
    assert [word for word in words if word not in warned] == []


@pytest.mark.full
def test_a_healed_stream_goes_on_where_it_was() -> None:
    """It is forwarded, as after any death."""
    expected = stock(datasets.AugmentedStream(9))
    loader = loader_of(datasets.AugmentedStream(9))

    with datasets.held_by_a_thread():
        delivered = list(loader)

    assert_same(delivered, expected)
    assert_healed(loader)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (datasets.executor, "dataset.source (a ThreadPoolExecutor)"),
        (datasets.prefetching, "dataset.source.thread (the thread prefetch)"),
        pytest.param(datasets.event_loop, "fsspec's thread fsspecIO", marks=pytest.mark.leaks_allowed),  # it stays
    ],
)
def test_a_dataset_that_cannot_be_sent_is_one_error_that_names_the_part(make: Any, named: str) -> None:
    """What is waited for, what cannot be pickled, and both remedies; no sample is blamed, whatever the policy."""
    if make is datasets.event_loop:
        pytest.importorskip("fsspec")
    dataset = datasets.Asking(make)
    loader = loader_of(dataset)

    with pytest.raises(outlive.WorkerHungError) as caught:
        list(loader)

    told = str(caught.value)
    words = (named, "dataset.source", "cannot be pickled", 'multiprocessing_context="spawn"', "lazily")
    assert [word for word in words if word not in told] == []
    assert caught.value.incident is not None
    assert caught.value.incident.verdict is not None
    assert caught.value.incident.verdict.name is Name.FORKED_WITH_THREADS
    assert dict(loader.quarantine) == {}
    assert loader.statistics().healed == 0
    if make is datasets.executor:
        dataset.source.shutdown()
    elif make is datasets.prefetching:
        dataset.source.end.set()


def test_a_worker_that_waits_for_threads_of_its_own_is_left_alone() -> None:
    """However long, and with a pool of the trainer's in the dataset."""
    dataset = datasets.WaitingRightly()
    loader = loader_of(dataset, num_workers=1, faults=FaultPolicy(hang_floor_s=0.1, sample_timeout=None))
    iterator = iter(loader)

    assert wait_until(lambda: loader.statistics().slots[0].seconds > 1.0)
    dataset.over.set()

    assert [batch.tolist() for batch in iterator] == [[0, 1]]
    assert loader.incidents == ()
    dataset.left_behind.shutdown()


def test_a_pool_heals_as_a_loader_does() -> None:
    """Tasks in hand are done again by workers from a clean process; none has failed."""
    with outlive.Pool(2, mp_context="fork", faults=FaultPolicy(hang_floor_s=FLOOR_S)) as pool:
        with datasets.held_by_a_thread():
            done = list(pool.map(datasets.take_lock, range(6)))
        (incident,) = pool.incidents

    assert done == [0, 10, 20, 30, 40, 50]
    assert incident.verdict is not None
    assert incident.verdict.name is Name.FORKED_WITH_THREADS
    assert 'mp_context="spawn"' in incident.action
    assert incident.indices == ()


def test_a_pool_whose_initializer_cannot_be_sent_says_which_part() -> None:
    """Everything that waits ends with that error."""
    pool = outlive.Pool(
        1, initializer=print, initargs=(threading.Lock(),), mp_context="fork", faults=FaultPolicy(hang_floor_s=FLOOR_S)
    )
    with pool, datasets.held_by_a_thread(), pytest.raises(outlive.PoolBrokenError) as caught:
        pool.submit(datasets.take_lock, 1).result()

    words = ("initargs[0]", "_thread.lock", 'mp_context="spawn"', "lazily")
    assert [word for word in words if word not in str(caught.value)] == []


@pytest.mark.full
def test_a_clean_process_that_is_killed_while_it_loads_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next one is no fork of the trainer, either."""
    monkeypatch.setenv(datasets.DIE_ONCE, str(tmp_path / "died"))
    expected = stock(datasets.Augmented(0))
    loader = loader_of(datasets.Augmented(0), faults=FaultPolicy(hang_floor_s=FLOOR_S))

    with datasets.held_by_a_thread():
        delivered = list(loader)

    assert (tmp_path / "died").exists()
    assert_same(delivered, expected)
    assert dict(loader.quarantine) == {}
    assert loader.statistics().healed == 1


@pytest.mark.full
def test_a_clean_process_that_cannot_load_the_dataset_is_an_error_with_the_reason() -> None:
    """It is what the clean process says, and it comes once."""
    loader = loader_of(datasets.Unloadable(0))

    with datasets.held_by_a_thread(), pytest.raises(ImportError, match="of_the_trainer_only"):
        list(loader)

    assert dict(loader.quarantine) == {}


@pytest.mark.full
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_workers_get_an_interpreter_each_where_a_clean_process_is_not_clean(method: str) -> None:
    """Imports may leave behind there what threads of the trainer leave behind in a fork."""
    expected = stock(datasets.Augmented(0), shuffle=True)
    # An interpreter that starts is watched, too, and may take ten times as long.
    loader = loader_of(datasets.HeldByImport(0), floor_s=3.0, shuffle=True, multiprocessing_context=method)

    assert_same(list(loader), expected)

    (incident,) = (incident for incident in loader.incidents if incident.kind is IncidentKind.HANG)
    assert incident.verdict is not None
    assert incident.verdict.name is Name.INHERITED_LOCK  # by the only thread there was
    assert "an interpreter of its own" in incident.action
    assert dict(loader.quarantine) == {}
    assert loader.statistics().healed == 1


LIBRARIES = {
    "torch": "torch.set_num_threads(2)\ndef use(index): return torch.full((1000, 1000), index).exp().sum().item()",
    "polars": "import polars\ndef use(index): return polars.LazyFrame({'a': [index]}).sum().collect()['a'][0]",
}


@pytest.mark.full
@pytest.mark.parametrize("library", LIBRARIES)
def test_a_library_with_threads_that_the_trainer_has_used_heals(tmp_path: Path, library: str) -> None:
    """OpenMP in torch, rayon in polars: a program as users write it."""
    if library == "polars":
        pytest.importorskip("polars")
    program = tmp_path / "program.py"
    program.write_text(
        f"import torch, outlive\n{LIBRARIES[library]}\nuse(1)\n"
        "class Using(torch.utils.data.Dataset):\n"
        "    def __len__(self): return 8\n"
        "    def __getitem__(self, index): return use(index)\n"
        "policy = outlive.FaultPolicy(hang_floor_s=0.5)\n"
        "loader = outlive.DataLoader(Using(), num_workers=2, worker_threads=None, multiprocessing_context='fork', "
        "faults=policy)\n"
        "print(sum(len(batch) for batch in loader), *{i.verdict.name.value for i in loader.incidents})\n"
    )

    done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=120)

    assert done.stdout.split() == ["8", "forked-with-threads"], done.stderr


PROGRAM = """
import torch, outlive
from faults import datasets_with_threads as datasets

print("the main module runs", flush=True)
SCALE = 1
MORE

class Doubled(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        USED
        return SCALE * datasets.take_lock(index)

def main():
    global SCALE
    SCALE = 2
    policy = outlive.FaultPolicy(hang_floor_s=0.5)
    loader = outlive.DataLoader(Doubled(), num_workers=1, multiprocessing_context="fork", faults=policy)
    with datasets.held_by_a_thread():
        print([int(batch) for batch in loader], loader.statistics().healed)

"""


@pytest.mark.parametrize(
    ("more", "used", "call", "says"),
    [
        ("", "", "main()", ["the main module runs", "[0, 20, 40, 60] 1"]),
        pytest.param(
            "import threading\nOWN = threading.Lock()",
            "OWN.locked()",
            'if __name__ == "__main__":\n    main()',
            ["the main module runs", "the main module runs", "[0, 10, 20, 30] 1"],
            marks=pytest.mark.full,
        ),
    ],
)
def test_the_main_module_runs_again_only_where_it_is_written_for_that(
    tmp_path: Path, more: str, used: str, call: str, says: list[str]
) -> None:
    """What it defines travels by value, as it is now. Where it cannot, and has a guard, it is imported as by spawn."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.replace("MORE", more).replace("USED", used) + call + "\n")
    tests = str(Path(__file__).parent.parent)

    done = warm_server.run(
        [sys.executable, str(program)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": tests},
    )

    assert done.stdout.splitlines() == says, done.stderr
