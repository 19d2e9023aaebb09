"""What a worker does for a graph loader: sample around the seeds of a batch, and gather their features into its cell.

Reads   the graph.
Writes  batches, through its desk.
Never   depends on who it is: what it draws is decided by the loader's seed, the epoch and the batch alone.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from outlive._worker.loop import Desk, Restored
from outlive.graph.batch import Choice, assemble
from outlive.graph.checking import ONE_KIND
from outlive.graph.rooms import Room, Tensors
from outlive.graph.sampled import Sampled
from outlive.graph.shared import SharedGraph
from outlive.loader.jobs import JobSettings, batch_seed
from outlive.loader.samples import MapJob


class Made(Sequence[int]):
    """A batch, and beside it the positions of its seeds: where it cannot be sent, they are tried in parts."""

    def __init__(self, batch: Any, positions: Sequence[int]) -> None:
        self.batch = batch
        self._positions = positions

    def __len__(self) -> int:
        return len(self._positions)

    def __getitem__(self, place: Any) -> Any:
        return self._positions[place]


class Neighborhoods(Dataset[Any]):
    """The seeds of a loader as a dataset: its samples are positions in them, a batch of these is a neighbourhood."""

    def __init__(
        self,
        graph: SharedGraph,
        sampler: Any,
        seeds: NDArray[Any],
        kind: str,
        input_ids: NDArray[Any] | None,
        seed: int,
        choice: Choice,
        seed_times: NDArray[Any] | None,
    ) -> None:
        self.graph = graph
        self.sampler = sampler
        self.seeds = seeds
        self.kind = kind
        self.seed = seed
        self._input_ids = input_ids
        self._choice = choice
        self._seed_times = seed_times
        self._takes = _keywords(sampler)
        self._room: Room | None = None
        self._epoch = 0
        self._number = 0

    def __len__(self) -> int:
        return len(self.seeds)

    def __getitem__(self, position: int) -> Any:
        return self.make([position])

    def __getitems__(self, positions: list[int]) -> Made:
        return Made(self.make(positions), positions)

    def collate(self, data: Any) -> Any:
        """What is sent: the batch as it was made, or one of the seeds that are left of it."""
        return data.batch if isinstance(data, Made) else self.make(data)

    def stand_at(self, epoch: int, number: int) -> None:
        """The batch that is asked for next."""
        self._epoch, self._number = epoch, number

    def write_into(self, room: Room) -> None:
        """Where arrays are made from now on."""
        self._room = room

    def describe(self, position: int) -> str:
        """A seed, for messages and reports."""
        seed = self.seeds[position]
        if np.ndim(seed):
            return f"edge {' → '.join(map(str, seed))}"
        return f"{self.kind or 'node'} {seed}"

    def make(self, positions: Sequence[int]) -> Any:
        """A batch around these seeds."""
        chosen = np.asarray(positions, np.int64)
        seeds = self.seeds[chosen]
        times = None if self._seed_times is None else self._seed_times[chosen]
        given: dict[str, Any] = {
            "seed": batch_seed(self.seed, self._epoch, 0),
            "batch": self._number,
            "seed_times": times,
        }
        keywords = {name: given[name] for name in self._takes if name != "seed_times" or times is not None}
        asked: Any = {self.kind: seeds} if self.graph.is_heterogeneous and self.kind != ONE_KIND else seeds
        if "seed" in keywords:
            sampled = self.sampler.sample(self.graph, asked, **keywords)
        else:
            with _seeded(batch_seed(self.seed, self._epoch, self._number), kept=self._room is None):
                sampled = self.sampler.sample(self.graph, asked, **keywords)
        if not isinstance(sampled, Sampled):
            return sampled  # the user's own kind of batch
        return assemble(
            self.graph,
            sampled,
            seeds,
            kind=self.kind,
            input_ids=chosen if self._input_ids is None else self._input_ids[chosen],
            choice=self._choice,
            room=self._room or Tensors(),
            epoch=self._epoch,
            number=self._number,
            seed_times=times,
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_room": None}


def _keywords(sampler: Any) -> tuple[str, ...]:
    """Which of `seed`, `batch` and `seed_times` a sampler wants to be told."""
    try:
        parameters = inspect.signature(sampler.sample).parameters
    except (TypeError, ValueError):  # written in C: it is told nothing
        return ()
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    return tuple(name for name in ("seed", "batch", "seed_times") if takes_any or name in parameters)


@contextmanager
def _seeded(seed: int, kept: bool) -> Iterator[None]:
    """Seeds the generators that a user's sampler may draw from; `kept`: the trainer's own, which go on as before."""
    before = (random.getstate(), np.random.get_state(), torch.get_rng_state()) if kept else None
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.manual_seed(seed)
    try:
        yield
    finally:
        if before is not None:
            random.setstate(before[0])
            np.random.set_state(before[1])
            torch.set_rng_state(before[2])


class SamplingJob(MapJob):
    """Map-style fetching, told which batch of which epoch it makes, and where to put it."""

    def __init__(self, settings: JobSettings, first_epoch: int) -> None:
        super().__init__(settings)
        self._first_epoch = first_epoch
        self.collate_fn = settings.dataset.collate

    def prepare(self, desk: Desk, slot: int, restored: Restored) -> None:
        super().prepare(desk, slot, restored)
        self.dataset.write_into(Tensors(desk.arena))

    def run(self, seq: int, body: memoryview, probe: bool) -> None:
        # Workers that stay for several epochs are told which it is; those of the first one are not.
        self.dataset.stand_at(max(self._first_epoch, self.desk.epoch), seq)
        super().run(seq, body, probe)
