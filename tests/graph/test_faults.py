"""A sampler of the user's may do to its worker what it likes: the epoch ends, and only its own seeds are missing.

Under `OUTLIVE_SYSTEM=portable` the same tests run without fork and memfd.
"""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from graph.example_graphs import (
    NODES,
    Faulty,
    HopSampler,
    SubgraphDataset,
    UserSampler,
    as_lists,
    deadlock,
    fail,
    hang,
    kill,
    leave,
    make_graph,
    segfault,
)
from outlive import DataLoader, FaultPolicy
from outlive._system import choice
from outlive.graph import NeighborLoader, SharedGraph

METHODS = ("spawn",) if choice.PORTABLE else ("fork", "spawn", "forkserver")
SEEDS = np.arange(NODES - 1, NODES - 41, -1)  # a seed is not its position
BATCH = 5
DEADLY = {SEEDS[1]: segfault, SEEDS[12]: kill, SEEDS[13]: fail, SEEDS[27]: leave}
SLOW = pytest.mark.skipif(choice.PORTABLE, reason="each death costs seconds there, and no other code is tried")
HANGING = {SEEDS[3]: deadlock, SEEDS[17]: hang}


def make(graph: SharedGraph, sampler: Any, **options: Any) -> NeighborLoader:
    options = {"num_workers": 2, "batch_size": BATCH, "seed": 11, **options}
    return NeighborLoader(graph, sampler, SEEDS, **options)


def here(graph: SharedGraph, without: Any = (), **options: Any) -> list[Any]:
    """What must be delivered: made in this process, without the seeds that are to be missing."""
    loader = make(graph, UserSampler(), num_workers=0, **options)
    made = []
    for number in range(len(SEEDS) // BATCH):
        places = range(number * BATCH, (number + 1) * BATCH)
        loader.dataset.stand_at(0, number)
        made.append(as_lists(loader.dataset.make([place for place in places if SEEDS[place] not in without])))
    return made


@pytest.mark.parametrize("method", METHODS)
def test_the_epoch_ends_without_the_seeds_at_which_a_sampler_dies(method):
    """By SIGSEGV, SIGKILL, an exit, an exception; each incident names its seed, and all others come bit for bit."""
    graph = make_graph()
    loader = make(graph, Faulty(DEADLY), faults=FaultPolicy("skip", retries=0), multiprocessing_context=method)

    delivered = [as_lists(batch) for batch in loader]

    assert delivered == here(graph, without=DEADLY)
    assert {SEEDS[position] for position in loader.quarantine} == set(DEADLY)
    told = {incident.described[0]: incident for incident in loader.quarantine.values()}
    assert set(told) == {f"node {seed}" for seed in DEADLY}
    assert told[f"node {SEEDS[1]}"].exit.signal == signal.SIGSEGV
    assert told[f"node {SEEDS[12]}"].exit.signal == signal.SIGKILL
    assert told[f"node {SEEDS[13]}"].failure.type_name.endswith("KeyError")
    assert told[f"node {SEEDS[27]}"].exit.code == 3


@pytest.mark.parametrize("method", METHODS)
def test_the_epoch_ends_without_the_seeds_at_which_a_sampler_hangs(method):
    """On a lock that it holds already, and in a wait that never ends."""
    graph = make_graph()
    policy = FaultPolicy("skip", retries=0, sample_timeout=0.7)
    loader = make(graph, Faulty(HANGING), faults=policy, multiprocessing_context=method)

    delivered = [as_lists(batch) for batch in loader]

    assert delivered == here(graph, without=HANGING)
    assert {SEEDS[position] for position in loader.quarantine} == set(HANGING)
    assert all(incident.hung for incident in loader.quarantine.values())
    assert any("deadlock" in incident.stack for incident in loader.incidents)


@pytest.mark.parametrize("method", METHODS)
def test_not_one_bit_differs_when_samplers_die_once(tmp_path, method):
    """What they drew before is drawn again: under each start method, what no worker at all delivers."""
    graph = make_graph()
    faults = {seed: fault for seed, fault in DEADLY.items() if fault is not fail}
    loader = make(graph, Faulty(faults, tmp_path), multiprocessing_context=method)

    assert [as_lists(batch) for batch in loader] == here(graph)
    assert loader.statistics().restarts == len(faults)
    assert len(loader.quarantine) == 0


@SLOW
def test_not_one_bit_differs_when_workers_are_killed_at_random():
    """Whoever is killed, and whenever, over two epochs with workers that stay."""
    graph = make_graph(columns=4096)  # batches travel in cells
    undisturbed = make(graph, HopSampler(), num_workers=0, shuffle=True)
    loader = make(
        graph,
        HopSampler(),
        shuffle=True,
        persistent_workers=True,
        multiprocessing_context=METHODS[0],
        faults=FaultPolicy(retries=20, max_restarts=1000),
    )
    dice = random.Random(6)
    killed = 0
    for _ in range(2):
        expected = [summary(batch) for batch in undisturbed]
        delivered = []
        for batch in loader:
            delivered.append(summary(batch))
            pids = [slot.pid for slot in loader.statistics().slots if slot.pid is not None]
            if pids and len(delivered) % 2:
                killed += end(dice.choice(pids))

        assert delivered == expected
    assert killed >= 3
    assert loader.statistics().restarts >= 1


def summary(batch: Any) -> Any:
    """All that is in a batch; of its wide features the columns, if they are alike."""
    assert bool((batch["x"] == batch["x"][:, :1]).all())
    return as_lists(batch.map(lambda tensor: tensor[:, :2] if tensor.ndim == 2 and tensor.shape[1] == 4096 else tensor))


def end(pid: int) -> int:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return 0  # it had ended by itself
    return 1


@pytest.mark.parametrize("method", METHODS)
def test_a_plain_dataset_on_a_shared_graph_is_supervised_as_any(tmp_path, method):
    """`__getitem__` that takes a subgraph, as people write it for DGL; the graph lies in a file here."""
    graph = make_graph()
    graph.save(tmp_path / "g.graph")
    opened = SharedGraph.open(tmp_path / "g.graph")
    faults = {2: segfault, 9: deadlock, 20: fail}
    policy = FaultPolicy("skip", retries=0, sample_timeout=1.0)
    loader = DataLoader(
        SubgraphDataset(opened, faults),
        batch_size=None,
        num_workers=2,
        multiprocessing_context=method,
        faults=policy,
        collate_fn=tuple,
    )

    delivered = list(loader)

    clean = SubgraphDataset(graph, {})
    assert delivered == [clean[index] for index in range(len(clean)) if index not in faults]
    assert set(loader.quarantine) == set(faults)


class UnpicklableBatches(UserSampler):
    """Of some seeds it makes what cannot be sent."""

    def sample(self, graph: Any, seeds: Any) -> Any:
        found = super().sample(graph, seeds)
        return [found.nodes[""].tolist(), lambda: None] if SEEDS[7] in seeds else [found.nodes[""].tolist(), None]


@SLOW
def test_a_seed_whose_batch_cannot_be_sent_is_left_out():
    """Also of a sampler that makes its own kind of batch; found by trying its seeds in parts."""
    graph = make_graph()
    loader = make(graph, UnpicklableBatches(), faults="skip", multiprocessing_context=METHODS[0])

    delivered = [nodes[: BATCH if number != 1 else BATCH - 1] for number, (nodes, _) in enumerate(loader)]

    assert [node for nodes in delivered for node in nodes] == [seed for seed in SEEDS if seed != SEEDS[7]]
    assert set(loader.quarantine) == {7}


@SLOW
def test_a_seed_is_named_when_its_death_ends_the_epoch():
    """Under «raise», which is the default."""
    graph = make_graph()
    loader = make(graph, Faulty({SEEDS[8]: segfault}), multiprocessing_context=METHODS[0])

    with pytest.raises(RuntimeError, match=f"node {SEEDS[8]}"):
        list(loader)


def test_nothing_of_the_graph_is_left_when_its_last_user_is_gone():
    """Neither a descriptor nor a name."""
    make_graph()

    names = os.listdir("/dev/shm") if Path("/dev/shm").exists() else []
    assert [name for name in names if name.startswith(f"outlive-{os.getpid()}-")] == []
