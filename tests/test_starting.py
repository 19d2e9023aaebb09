"""A new interpreter is ready soon: it imports without looking for garbage all the while, and looks for it as ever
afterwards; and it imports no more of outlive than a worker needs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from deadlines import wait_until

PROGRAM = """
import gc
AT_IMPORT = gc.get_threshold()
{says}
import multiprocessing, sys
import outlive

class Thresholds:
    def __len__(self):
        return 1
    def __getitem__(self, index):
        return AT_IMPORT, gc.get_threshold()

def as_it_is(batch):
    return batch[0]

def rank(index, path):
    open(path, "w").write(repr((AT_IMPORT, gc.get_threshold())))

if __name__ == "__main__":
    way, path = sys.argv[1:]
    if way == "ranks":
        outlive.spawn(rank, (path,))
        print(open(path).read())
    else:
        loader = outlive.DataLoader(Thresholds(), num_workers=1, collate_fn=as_it_is, multiprocessing_context=way)
        print(*loader)
"""


def thresholds(folder: Path, way: str, says: str = "", **environment: str) -> Any:
    """As a worker's main module is imported, and when it is at work."""
    program = folder / "program.py"
    program.write_text(PROGRAM.format(says=says))
    out = run(str(program), way, str(folder / "rank"), **environment)
    return eval(out)


def run(*arguments: str, **environment: str) -> str:
    return subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | environment,
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    ).stdout


USUAL = eval(run("-c", "import gc; print(gc.get_threshold())"))


@pytest.mark.parametrize("way", ["spawn", "forkserver", "ranks"])
def test_garbage_is_looked_for_rarely_while_it_imports_and_as_ever_afterwards(tmp_path: Path, way: str) -> None:
    while_importing, at_work = thresholds(tmp_path, way)

    assert while_importing[0] > 10 * USUAL[0]
    assert at_work == USUAL


@pytest.mark.full
def test_garbage_is_looked_for_as_ever_in_a_worker_of_the_portable_layer(tmp_path: Path) -> None:
    while_importing, at_work = thresholds(tmp_path, "spawn", OUTLIVE_SYSTEM="portable")

    assert while_importing[0] > 10 * USUAL[0]
    assert at_work == USUAL


def test_garbage_is_looked_for_as_ever_in_a_worker_of_its_own_interpreter(tmp_path: Path) -> None:
    """Its imports open a file, which forks cannot share."""
    while_importing, at_work = thresholds(tmp_path, "spawn", says=f"held = open({str(tmp_path / 'held')!r}, 'w')")

    assert while_importing[0] > 10 * USUAL[0]
    assert at_work == USUAL


@pytest.mark.parametrize("way", ["spawn", "forkserver", "ranks"])
def test_what_a_program_says_about_it_holds(tmp_path: Path, way: str) -> None:
    _, at_work = thresholds(tmp_path, way, says="gc.set_threshold(5000, 20, 30)")

    assert at_work == (5000, 20, 30)


NEEDS_LITTLE = """
import sys
import outlive

class Modules:
    def __len__(self):
        return 1
    def __getitem__(self, index):
        return sorted(sys.modules)

def as_it_is(batch):
    return batch[0]

if __name__ == "__main__":
    (seen,) = outlive.DataLoader(Modules(), num_workers=1, collate_fn=as_it_is, multiprocessing_context="spawn")
    print(*seen)
"""


def test_a_first_batch_does_not_wait_for_what_it_does_not_need(tmp_path):
    """What looks at deaths, judges, shows or pickles by value takes as long to import as some of torch."""
    program = tmp_path / "program.py"
    program.write_text(NEEDS_LITTLE)

    seen = run(str(program)).split()

    assert {"outlive._worker.loop", "outlive.loader.jobs"} < set(seen)
    assert [name for name in seen if name in ("outlive.records", "numpy.typing", "statistics", "cloudpickle")] == []
    unneeded = ("outlive._forensics.hanging", "outlive._forensics.verdict", "outlive._metrics", "outlive.dashboard")
    assert [name for name in seen if name.startswith(unneeded)] == []


@pytest.mark.parametrize(
    ("front_end", "method"),
    [
        ("pool", "spawn"),
        ("pool", "forkserver"),
        pytest.param("spawn", "spawn", marks=pytest.mark.full),
        pytest.param("spawn", "forkserver", marks=pytest.mark.full),
    ],
)
def test_what_still_imports_goes_with_a_program_that_is_killed(front_end, method, tmp_path):
    """The zygote, a rank, and under forkserver multiprocessing's own server, which imports the main module first."""
    program = Path(__file__).with_name("importing_program.py")
    environment = {**os.environ, "IMPORTING_FOLDER": str(tmp_path)}
    job = subprocess.Popen(
        [sys.executable, str(program), front_end, method], env=environment, stderr=subprocess.DEVNULL
    )
    try:
        assert wait_until(lambda: bool(os.listdir(tmp_path)), 60)
        importing = [psutil.Process(int(name)) for name in os.listdir(tmp_path)]
    finally:
        job.kill()
        job.wait()

    assert not psutil.wait_procs(importing, 15)[1]
    assert "came to its end" not in os.listdir(tmp_path)
