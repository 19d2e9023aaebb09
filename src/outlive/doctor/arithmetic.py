"""The loader's arithmetic: workers × prefetch × batch, against the memory, shared memory and CPUs that there are.

Reads   what was seen of machine, plan and samples.
Writes  nothing.
Never   measures anything itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from outlive.doctor.findings import Finding, Rank
from outlive.doctor.machine import Machine, more_memory, more_shm
from outlive.doctor.plan import Plan
from outlive.doctor.sampling import Sampled
from outlive.quantities import in_words

_INTERPRETER = 200 << 20  # a Python with torch in it, where nothing is shared by fork
_COMFORTABLE = 0.8
_WAITING = 0.5  # of a sample's time: those who wait leave their CPU to others
_PINNED = 2  # batches that wait in pinned memory


@dataclass(frozen=True)
class Needs:
    """What the loader takes, in bytes, when all of it is under way."""

    worker: int
    batch: int
    workers: int
    batches: int

    @property
    def total(self) -> int:
        return self.worker * self.workers + self.batch * self.batches

    def words(self, left: int | None) -> str:
        of = f" of {in_words(left)} left" if left is not None else ""
        return (
            f"{self.workers} worker{'' if self.workers == 1 else 's'} × {in_words(self.worker)}"
            f" + {self.batches} batches × {in_words(self.batch)} = {in_words(self.total)}{of}"
        )


def needs_of(plan: Plan, seen: Sampled) -> Needs | None:
    """None where no sample was seen, or no worker is planned."""
    if not plan.workers or seen.batch_bytes is None:
        return None
    apart = _INTERPRETER if not plan.is_ours and plan.start_method != "fork" else 0
    return Needs(
        seen.own_bytes + apart,
        seen.batch_bytes,
        plan.workers,
        plan.batches_under_way + (_PINNED if plan.pinned else 0),
    )


def findings(plan: Plan, machine: Machine, seen: Sampled) -> Iterator[Finding]:
    needs = needs_of(plan, seen)
    if needs is not None:
        yield from _of_memory(plan, machine, needs)
        if not plan.is_ours:
            yield from _of_shm(plan, machine, needs)
            yield from _of_descriptors(plan, machine, seen)
    yield from _of_workers(plan, machine, seen)


def _of_memory(plan: Plan, machine: Machine, needs: Needs) -> Iterator[Finding]:
    left = machine.left_bytes
    if left is None or needs.total <= left * _COMFORTABLE:
        return
    remedies = []
    each = needs.worker + plan.prefetch * needs.batch
    fewer = math.floor((left * _COMFORTABLE - needs.batch) / each) if each else 0
    if 1 <= fewer < plan.workers:
        remedies.append(f"num_workers={fewer}")
    with_one = needs.worker * needs.workers + needs.batch * (plan.workers + 1)
    if plan.prefetch > 1 and with_one <= left * _COMFORTABLE:
        remedies.append("prefetch_factor=1")
    if plan.batch_size is not None and plan.batch_size > 1 and needs.batch:
        room = left * _COMFORTABLE - needs.worker * needs.workers
        smaller = math.floor(room / needs.batches / (needs.batch / plan.batch_size))
        if 1 <= smaller < plan.batch_size:
            remedies.append(f"batch_size={smaller}")
    used = (machine.memory_bytes or left) - left
    remedies.append(more_memory(machine, used + round(needs.total / _COMFORTABLE)))
    too_much = needs.total > left
    facts = [needs.words(left)]
    if plan.is_ours and too_much:
        facts.append("outlive goes on with fewer workers where memory is short; batch_size is what it cannot change")
    yield Finding(
        "too-little-memory",
        Rank.WILL_KILL if too_much and not plan.is_ours else Rank.MAY_KILL,
        f"the loader takes {in_words(needs.total)} of memory, and {in_words(left)} are left",
        tuple(facts),
        tuple(remedies),
    )


def _of_shm(plan: Plan, machine: Machine, needs: Needs) -> Iterator[Finding]:
    free = machine.shm_free_bytes
    needed = needs.batch * needs.batches
    if free is None or needed <= free * _COMFORTABLE:
        return
    remedies = [more_shm(machine, needed * 2 + ((machine.shm_bytes or free) - free))]
    fit = math.floor((free * _COMFORTABLE / needs.batch - 1) / plan.prefetch)
    if 1 <= fit < plan.workers:
        remedies.append(f"num_workers={fit}")
    remedies.append("from outlive import DataLoader (it does not use /dev/shm)")
    yield Finding(
        "shm-too-small",
        Rank.WILL_KILL if needed > free else Rank.MAY_KILL,
        f"batches take {in_words(needed)} in /dev/shm, and {in_words(free)} are free",
        (
            f"{needs.batches} batches × {in_words(needs.batch)} are under way at a time",
            "a worker that finds it full dies of SIGBUS («insufficient shared memory»)",
        ),
        tuple(remedies),
    )


def _of_descriptors(plan: Plan, machine: Machine, seen: Sampled) -> Iterator[Finding]:
    limit = machine.descriptors
    needed = seen.batch_leaves * plan.batches_under_way + machine.descriptors_open
    if limit is None or needed <= limit * _COMFORTABLE:
        return
    enough = max(4096, 2 ** math.ceil(math.log2(needed * 2)))
    yield Finding(
        "descriptor-per-tensor",
        Rank.WILL_KILL if needed > limit else Rank.MAY_KILL,
        f"batches take {needed} descriptors, and there may be {limit}",
        (f"torch keeps one for each tensor: {seen.batch_leaves} in a batch, {plan.batches_under_way} batches",),
        (
            f"ulimit -n {enough}",
            'torch.multiprocessing.set_sharing_strategy("file_system")',
            "from outlive import DataLoader (it keeps none)",
        ),
    )


def _of_workers(plan: Plan, machine: Machine, seen: Sampled) -> Iterator[Finding]:
    if plan.assumed or plan.workers <= machine.cpus + 1:
        return
    if not seen.good:
        if plan.workers <= 2 * machine.cpus:
            return
        fact = "more workers than CPUs are of use only where they wait for a disk or a network"
    elif seen.cpu_share < _WAITING:
        return
    else:
        fact = f"they compute {seen.cpu_share:.0%} of their time"
    yield Finding(
        "too-many-workers",
        Rank.SLOWS_DOWN,
        f"{plan.workers} workers share {machine.cpus:.3g} CPU{'' if machine.cpus == 1 else 's'}",
        (fact,),
        (f"num_workers={max(1, math.floor(machine.cpus))}", 'num_workers="auto" (outlive)'),
    )
