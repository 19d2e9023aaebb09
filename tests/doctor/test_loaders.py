"""What the doctor says of loaders, datasets and samples: each finding provoked for real, and none where all is well.

Reads   what examinations in processes of their own found; each process goes through many situations, for its start is
        dear, and each situation is a test of its own.
Writes  nothing.
Never   an examination in pytest's own process.
"""

from __future__ import annotations

import importlib.util
import resource
from pathlib import Path

import pytest
import torch

import control_groups
from doctor.examination import Found, examined, examined_in
from doctor.test_machine import limited, with_shm
from outlive.doctor import sampling
from outlive.doctor.fetching import Look
from outlive.doctor.plan import Plan
from outlive.doctor.sampling import Sampled

pytestmark = [pytest.mark.timeout(400)]
memory_group = control_groups.memory_group

CLEAN = ("clean_stock", "clean_ours", "clean_spawned", "clean_stream", "clean_alone")
# situation → findings with their ranks, and words that they say
FOUND: dict[str, tuple[dict[str, str], tuple[str, ...]]] = {
    "bad_samples": (
        {"sample-kills": "will kill", "sample-hangs": "will kill", "sample-raises": "will kill"},
        (
            "sample 21 kills the worker that fetches it",
            "a null pointer",
            "sample 42 hangs the worker that fetches it",
            "that nobody sets, after 5 s",
            "sample 63 raises ValueError: image file is truncated (situations.py:",
            'DataLoader(…, faults="skip")',
        ),
    ),
    "bad_samples_left_out": (
        {"sample-kills": "changes data", "sample-raises": "changes data"},
        ("sample 21 kills the worker that fetches it, and is left out", "outlive check "),
    ),
    "counting": ({"hidden-state": "changes data"}, ("sample 0 is another one when it is fetched again (4 of 4",)),
    "own_generator": (
        {"hidden-state": "changes data"},
        ("dataset.rng (numpy.random.Generator) is copied", "dataset.rng = numpy.random.default_rng("),
    ),
    "unseeded": ({"unseeded-randomness": "changes data"}, ("whatever the seed (4 of 4 are)",)),
    "by_process": ({"differs-between-processes": "changes data"}, ("(4 of 4 are)", "PYTHONHASHSEED=0")),
    "racing": ({"thread-unsafe": "changes data"}, ("was another one", "num_workers=2, no ThreadPoolExecutor")),
    "dying_in_company": (
        {"thread-unsafe": "may kill"},
        ("samples must not be fetched from several threads at once: read of address 0x0",),
    ),
    "unstartable": ({"workers-do-not-start": "will kill"}, ("a field of an older version",)),
    "empty": ({"no-samples": "changes data"}, ("dataset has no sample (its len() is 0)", "matches no file")),
    "empty_stream": ({"no-samples": "changes data"}, ("the stream of dataset ends before its first sample",)),
    "drawing_none": ({"no-samples": "changes data"}, ("dataset has samples, but its sampler draws none",)),
    "straggling": ({"uneven-samples": "slows down"}, ("sample 0 took ", "prefetch_factor=")),
    "stream_that_kills": ({"sample-kills": "will kill"}, ("a sample of the stream kills", "SIGKILL")),
    "deadly_length": ({"length-kills": "will kill"}, ("len(dataset) kills", "a null pointer")),
    "lambda_inside": (
        {"unpicklable-dataset": "will kill"},
        (
            "dataset.transform.transforms[2].fn (function): a lambda has no name",
            "def fn(…) at the top of a module",
            'multiprocessing_context="fork"',
        ),
    ),
    "lambda_inside_but_forked": ({}, ()),
    "lambda_collates": (
        {"unpicklable-dataset": "will kill"},
        ("what workers need cannot be sent to them by spawn: collate_fn (function)",),
    ),
    "own_keys": ({}, ()),
    "killing_the_trainer": (
        {"sample-kills": "will kill", "sample-raises": "will kill"},
        ("sample 21 kills the trainer itself", "num_workers=1, faults="),
    ),
    "large_to_pickle": (
        {"large-pickle": "slows down"},
        ("300 MiB of dataset are pickled for 2 workers", "dataset = outlive.share(dataset)"),
    ),
    "python_objects": (
        {"copied-on-read": "slows down"},
        (
            "dataset.paths: a list of 300000 elements",
            "dataset.names: a ndarray of 300000 elements",
            "dataset.paths = outlive.share(dataset.paths)",
            "dataset.names = outlive.share(dataset.names.tolist())",
        ),
    ),
    "python_objects_shared": ({}, ()),
    "things_held": (
        {
            "lock-in-dataset": "will kill",
            "open-file": "may kill",
            "open-socket": "may kill",
            "open-database": "may kill",
        },
        (
            "dataset.lock is held just now",
            "dataset.file (_io.BufferedReader) is open, and 2 forked workers share it",
            "dataset.sockets['upstream'] (socket.socket) is open",
            "dataset.reader.args[0] (sqlite3.Connection) is open",
            "open dataset.file in worker_init_fn",
        ),
    ),
    "things_held_but_closed": ({}, ()),
    "lock_at_rest": ({}, ()),
    "many_threads": ({"too-many-threads": "slows down"}, ("2 workers × ", "worker_threads=1")),
    "many_workers": ({"too-many-workers": "slows down"}, ("of their time", "num_workers=")),
    "many_workers_that_wait": ({}, ()),
    "openmp_worked": ({"openmp-before-fork": "may kill"}, ("and worker_threads=2", "worker_threads=1")),
    "openmp_worked_but_one_thread": ({}, ()),
    "threads_run": (
        {"threads-before-fork": "may kill"},
        ("1 thread runs while workers are forked: 'feeder' at threading.py:", 'multiprocessing_context="forkserver"'),
    ),
    "threads_run_but_spawned": ({}, ()),
    "lock_and_threads": (
        {"threads-before-fork": "may kill", "lock-in-dataset": "may kill"},
        ("2 threads run while workers are forked", "dataset.guard.fn may be held by another thread"),
    ),
}
ODD = ("odd", "unmeasurable", "too_slow_for_all")


@pytest.fixture(scope="module")
def found() -> dict[str, Found]:
    """Every situation, once; those that leave threads behind come last."""
    return examined(*CLEAN, *ODD, *FOUND, deadline_s=350.0)


def words_of(found: Found) -> str:
    return "\n".join(found.text(name) for name in found.by_name)


@pytest.mark.parametrize("name", CLEAN)
def test_nothing_is_found_where_all_is_well(found, name):
    """Stock torch, NumPy, pandas and pyarrow, their threads included; a stream; a list of arrays."""
    assert found[name].ranks == {}
    assert found[name].unseen == []
    assert not found[name].told["kills"]


@pytest.mark.parametrize("name", FOUND)
def test_each_finding_is_provoked(found, name):
    """With its rank, its path, its values; and nothing else is."""
    ranks, words = FOUND[name]

    assert found[name].ranks == ranks
    assert [word for word in words if word not in words_of(found[name])] == []
    assert found[name].told["kills"] == any(rank.endswith("kill") for rank in ranks.values())
    assert found[name].unseen == []


def test_samples_are_measured(found):
    """How long they take and how large they are, a worker's memory, a whole batch."""
    samples = found["clean_stock"].told["samples"]
    waiting = found["many_workers_that_wait"].told["samples"]

    assert (samples["total"], samples["fetched"]) == (20_000, 8)
    assert 2000 < samples["bytes"]["p50"] <= samples["bytes"]["max"] < 4000  # 500 numbers and some words
    assert samples["batch_bytes"] >= 4 * 2000
    assert samples["worker_bytes"] > 0
    assert waiting["seconds"]["p50"] >= 0.02
    assert found["straggling"].told["samples"]["seconds"]["max"] >= 1.2
    assert waiting["cpu_share"] < 0.5 < found["many_workers"].told["samples"]["cpu_share"]


def test_a_sample_that_waited_for_a_cpu_is_not_slow():
    """A busy machine is no fault of the dataset's."""
    quick = [Look(index, seconds=0.001) for index in range(4)]
    held_up, slow = Look(4, seconds=3.0, starved_s=2.999), Look(5, seconds=2.0, starved_s=0.5)

    assert list(sampling.findings(Plan(), Sampled(looks=[*quick, held_up]), [])) == []
    (uneven,) = sampling.findings(Plan(), Sampled(looks=[*quick, held_up, slow]), [])
    assert uneven.title == "sample 5 took 1.5 s, the median is 1 ms"


def test_odd_objects_cost_only_themselves(found):
    """Properties that raise, traps for whoever asks, cycles, 10¹⁵ samples, a pickle that refuses: all is gone through,
    and what was not looked at is said.
    """
    odd, unmeasurable = found["odd"], found["unmeasurable"]

    assert odd.ranks == {"copied-on-read": "slows down"}
    assert odd.told["samples"]["total"] == 10**15
    assert "dataset.many: 2000 of 300000 elements were looked at" in odd.unseen
    assert "samples: 3 of 3 hold objects that cannot be compared" in odd.unseen
    assert unmeasurable.ranks["unpicklable-dataset"] == "will kill"
    assert unmeasurable.told["samples"]["fetched"] == 3
    assert any("the time was up after " in text for text in found["too_slow_for_all"].unseen)


def test_batches_are_held_against_what_there_is(memory_group):
    """In a container: torch's workers will be killed there; ours stay within it, and one is told what to set."""
    found = examined_in(memory_group, "large_batches", "large_batches_of_ours")
    stock, ours = found["large_batches"], found["large_batches_of_ours"]

    assert stock.ranks["too-little-memory"] == "will kill"
    assert "9 batches × 64 MiB" in stock.text("too-little-memory")
    assert any(remedy.startswith("num_workers=") for remedy in stock.remedies("too-little-memory"))
    assert any("--memory=" in remedy for remedy in stock.remedies("too-little-memory"))
    assert ours.ranks["too-little-memory"] == "may kill"
    assert "fewer workers where memory is short" in ours.text("too-little-memory")


def test_batches_are_held_against_shm_and_descriptors():
    """Torch's own loader puts them there, tensor by tensor; ours does not."""
    found = examined(
        "large_batches",
        "large_batches_of_ours",
        "many_tensors",
        before=with_shm("64m"),
        prepare=limited(resource.RLIMIT_NOFILE, 450, 450),
    )
    stock, ours, many = found["large_batches"], found["large_batches_of_ours"], found["many_tensors"]

    assert stock.ranks["shm-too-small"] == "will kill"
    assert "batches take 576 MiB in /dev/shm, and 64 MiB are free" in stock.text("shm-too-small")
    assert "--shm-size=2g" in stock.remedies("shm-too-small")[0]
    assert many.ranks["descriptor-per-tensor"] == "will kill"
    assert "100 in a batch, 5 batches" in many.text("descriptor-per-tensor")
    assert "ulimit -n 4096" in many.remedies("descriptor-per-tensor")
    assert not {"shm-too-small", "small-shm", "descriptor-per-tensor"} & ours.ranks.keys()


@pytest.mark.skipif(importlib.util.find_spec("grpc") is None, reason="grpc is not installed")
def test_a_channel_of_grpc_is_found_before_a_fork():
    """A worker that uses it aborts."""
    found = examined("grpc_worked")["grpc_worked"]

    named = ("threads-before-fork", "grpc-before-fork", "open-channel")
    assert found.ranks == dict.fromkeys(named, "may kill")
    assert "dataset.channel (grpc.Channel) is open" in found.text("open-channel")
    assert 'multiprocessing_context="forkserver"' in found.remedies("grpc-before-fork")


@pytest.mark.skipif(importlib.util.find_spec("polars") is None, reason="polars is not installed")
def test_the_pool_of_polars_is_found_before_a_fork():
    """A worker that uses it waits for ever."""
    found = examined("polars_worked")["polars_worked"]

    assert found.ranks == {"polars-before-fork": "may kill"}


@pytest.mark.skipif(importlib.util.find_spec("cv2") is None, reason="OpenCV is not installed")
def test_threads_of_opencv_are_counted_in_stock_workers():
    """Torch limits its own threads there, and nobody else's."""
    found = examined("opencv_takes_all")["opencv_takes_all"]

    assert found.ranks == {"too-many-threads": "slows down"}
    assert "cv2.setNumThreads(0) in worker_init_fn" in found.remedies("too-many-threads")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_cuda_is_found_before_a_fork():
    """Initialised, and held by the dataset."""
    found = examined("cuda_is_on", "cuda_held")

    assert found["cuda_is_on"].ranks["cuda-before-fork"] == "may kill"
    assert found["cuda_held"].ranks["cuda-tensor-held"] == "will kill"
    assert "dataset.weights = dataset.weights.cpu()" in found["cuda_held"].remedies("cuda-tensor-held")


def test_the_program_is_where_it_is_looked_for():
    """Every situation above is a function there: a name that is misspelt tests nothing."""
    text = Path(__file__).with_name("situations.py").read_text()
    assert [name for name in (*CLEAN, *ODD, *FOUND) if f"def {name}()" not in text] == []
