"""Cells in a real kernel: what they define works in workers, an interrupt leaves nothing, the next cell works."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import psutil
import pytest

from deadlines import wait_until
from notebooks.kernels import DEADLINE_S, Kernel, error_of, printed
from outlive.testing.leaks import POLL_S, Patience

pytestmark = [pytest.mark.full, pytest.mark.alone]
METHODS = ("fork", "spawn", "forkserver")
LEAVE_S = 2.0  # from the interrupt on, in seconds in which they have CPUs


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    """One for all: that the next cell works is part of every test."""
    made = Kernel()
    made.run(
        "import collections, enum, os, signal, time, torch, outlive\n"
        "from outlive import DataLoader, Pool, SpawnError, spawn\n"
        "from multiprocessing import forkserver, resource_tracker\n"
        "forkserver.ensure_running(), resource_tracker.ensure_running()\n"  # Python's own: they stay
    )
    yield made
    made.close()


DEFINED = """
Sample = collections.namedtuple("Sample", "image label")
FACTOR = 3

class Oddity(ValueError):
    pass

class Kind(enum.Enum):
    EVEN = 0
    ODD = 1

def scaled(number):
    if number == 5:
        raise Oddity("five")
    return FACTOR * number, Kind(number % 2)

class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        number, kind = scaled(index)
        return Sample(torch.tensor(number), kind.value)

def together(samples):
    return Sample([int(s.image) for s in samples], [Kind(s.label) for s in samples])

def rank_is_known(rank, kind):
    assert (scaled(rank)[1] is kind) == (rank == 1), Kind
"""

USED = """
loader = DataLoader(Numbers(), batch_size=4, num_workers=2, faults="skip", multiprocessing_context={method!r})
print([(type(batch) is Sample, batch.image.tolist()) for batch in loader], list(loader.quarantine))
loader = DataLoader(Numbers(), 4, num_workers=2, collate_fn=together, multiprocessing_context={method!r})
try:
    for batch in loader:
        print(type(batch) is Sample, batch.image, batch.label[1] is Kind.ODD)
except Oddity as error:
    print("raised", type(error))
with Pool(2, {method!r}) as pool:
    print(list(pool.map(scaled, range(3), progress=True)) == [(0, Kind.EVEN), (3, Kind.ODD), (6, Kind.EVEN)])
    print(pool.submit(lambda: FACTOR).result())
    print(type(pool.submit(scaled, 5).exception()) is Oddity)
spawn(rank_is_known, args=(Kind.ODD,), nprocs=2, start_method={method!r})
print("all")
"""


@pytest.mark.parametrize("method", METHODS)
def test_what_cells_define_works_in_workers(kernel, method):
    """Functions, classes of samples and batches, enums, exceptions; no worker can import any of them."""
    kernel.run(DEFINED)

    outputs = kernel.run(USED.format(method=method))

    assert error_of(outputs) == "", outputs
    assert printed(outputs).splitlines() == [
        "[(True, [0, 3, 6, 9]), (True, [12, 18, 21])] [5]",
        "True [0, 3, 6, 9] True",
        "raised <class '__main__.Oddity'>",
        *("True", "3", "True"),
        "all",
    ]
    assert kernel.descendants() == []


RUNNING = {
    "pool": """
def work(number):
    if number == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.2 if number < 20 else 600)  # this is the work, until it is interrupted
    return number
with Pool(2, {method!r}) as pool:
    for number in pool.map(work, range(10_000), faults="skip", progress=True):
        print("at work", flush=True)
""",
    "loader": """
class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 10_000
    def __getitem__(self, index):
        time.sleep(0.2 if index < 20 else 600)
        return index
for batch in DataLoader(Slow(), batch_size=2, num_workers=2, multiprocessing_context={method!r}):
    print("at work", flush=True)
""",
    "spawn": """
def train(rank):
    while True:
        print("at work", flush=True)
        time.sleep(0.2)
spawn(train, nprocs=2, start_method={method!r})
""",
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("what", RUNNING)
def test_nothing_is_left_when_a_cell_is_interrupted(kernel, what, method):
    """Workers go within two seconds, though the notebook keeps the traceback; the cell after it works."""
    seen: list[int] = []
    left: list[list[psutil.Process]] = []

    def watch() -> None:
        """From the interrupt on, while the cell ends."""
        patience = Patience(LEAVE_S)
        while True:
            found = kernel.descendants()
            if not found or patience.is_over(process.pid for process in (kernel.process, *found)):
                left.append(found)
                return
            time.sleep(POLL_S)  # between two looks, with a deadline

    watcher = threading.Thread(target=watch)

    def stop(text: str) -> None:
        if "at work" in text and not seen:
            seen.append(len(kernel.descendants()))
            kernel.interrupt()
            watcher.start()

    outputs = kernel.run(RUNNING[what].format(method=method), stop)

    assert error_of(outputs) == "KeyboardInterrupt"
    assert seen[0] >= 2
    watcher.join()
    assert left == [[]]
    assert printed(kernel.run("print(6 * 7)")) == "42\n"
    if what == "pool":
        bars = [content["data"]["text/plain"] for kind, content in outputs if kind.endswith("display_data")]
        assert "interrupted after" in bars[-1] or "stopped after" in bars[-1]


def test_a_loop_that_computes_lets_go_of_its_workers_too(kernel):
    """The interrupt comes in the step, not in `next`; with a loader that another cell still holds."""
    kernel.run("loader = DataLoader(list(range(10_000)), batch_size=2, num_workers=2)")
    interrupted: list[str] = []

    def stop(text: str) -> None:
        if text and not interrupted:
            interrupted.append(text)
            kernel.interrupt()

    outputs = kernel.run("for batch in loader:\n    print(batch, flush=True)\n    time.sleep(600)", stop)

    assert error_of(outputs) == "KeyboardInterrupt"
    assert wait_until(lambda: kernel.descendants() == [], DEADLINE_S), kernel.descendants()
    assert printed(kernel.run("print(len([batch for batch in loader]))")) == "5000\n"


def test_a_pool_of_an_earlier_cell_can_be_used_after_an_interrupt(kernel):
    """It has no `with`, and stays; what the interrupted cell wanted and nobody has begun is dropped."""
    kernel.run("def slow(number):\n    time.sleep(0.2)\n    return number\npool = Pool(2)")
    interrupted: list[str] = []

    def stop(text: str) -> None:
        if text and not interrupted:
            interrupted.append(text)
            kernel.interrupt()

    outputs = kernel.run("for number in pool.map(slow, range(10_000)):\n    print(number, flush=True)", stop)

    assert error_of(outputs) == "KeyboardInterrupt"
    assert printed(kernel.run("print(pool.submit(abs, -3).result())\npool.shutdown()")) == "3\n"
    assert wait_until(lambda: kernel.descendants() == [], DEADLINE_S), kernel.descendants()


def test_the_doctor_does_not_mind_the_threads_of_a_kernel(kernel):
    """They are in every notebook; a thread of the user's is told."""
    kernel.run(
        "import threading\n"
        "def findings(): return [f.name for f in outlive.doctor.examine(\n"
        "    [1, 2, 3], start_method='fork', samples=2, compiled=False).findings]"
    )
    alone = printed(kernel.run("print(findings())"))
    together = printed(
        kernel.run(
            "done = threading.Event(); thread = threading.Thread(target=done.wait); thread.start()\n"
            "print(findings()); done.set(); thread.join()"
        )
    )

    assert alone == "[]\n"
    assert together == "['threads-before-fork']\n"
