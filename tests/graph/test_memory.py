"""All processes together hold a graph once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from deadlines import wait_until
from outlive._system import choice
from outlive.graph import NeighborLoader, NeighborSampler, SharedGraph
from transport.process_inspection import NOTHING, mapped_cells

NODES = 50_000
COLUMNS = 512


def make(share: float, folder: Path | None) -> SharedGraph:
    """About 100 MiB, nearly all of it features."""
    dice = np.random.default_rng(3)
    nodes = int(NODES * share)
    graph = SharedGraph.from_edge_index(
        dice.integers(0, nodes, (2, 4 * nodes)),
        nodes,
        node_features={"x": dice.random((nodes, COLUMNS), np.float32)},
        threads=1,
    )
    if folder is None:
        return graph
    graph.save(folder / f"{share}.graph")
    return SharedGraph.open(folder / f"{share}.graph")


def held_bytes(graph: SharedGraph) -> int:
    """PSS of this process and all its descendants when four workers have read every row."""
    loader = NeighborLoader(
        graph,
        NeighborSampler([2]),
        np.tile(np.arange(graph.num_nodes[""]), NODES // graph.num_nodes[""]),
        batch_size=500,
        num_workers=4,
        multiprocessing_context="spawn",
        persistent_workers=True,
        prefetch_factor=1,
    )
    for batch in loader:
        assert batch["x"].shape[1] == COLUMNS
    del batch
    children = psutil.Process().children(recursive=True)
    # Workers let go of their batches a moment after us.
    assert wait_until(lambda: all(mapped_cells(child.pid) == NOTHING for child in children))
    held = sum(_pss(process.pid) for process in [psutil.Process(), *children])
    loader.close()
    return held


def _pss(pid: int) -> int:
    with open(f"/proc/{pid}/smaps_rollup") as lines:
        return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


@pytest.mark.filterwarnings("ignore:This DataLoader will create 4 worker")
@pytest.mark.alone
@pytest.mark.skipif(choice.PORTABLE, reason="the loader has other processes there")
@pytest.mark.parametrize("saved", [False, True])
def test_four_spawned_workers_hold_a_graph_once(tmp_path: Any, saved: bool) -> None:
    """Against the same with a graph of a hundredth of its size: no more than 1.1 copies, in memory or in a file."""
    folder = tmp_path if saved else None
    small = held_bytes(make(0.01, folder))
    graph = make(1, folder)
    large = held_bytes(graph)

    assert graph.nbytes > 100e6
    assert 0.9 * graph.nbytes < large - small < 1.1 * graph.nbytes
