"""Ranks that agree: each delivers as many batches as the others, and hears of it when another gives up.

Reads   torch.distributed's default group, and its store, once.
Writes  a batch a second time, where one is left without a sample.
Never   communicates for the number of batches: it is that of a run without faults, by construction.

Under "skip" a batch loses samples, but it counts. One that has lost all of them is given as the epoch's first
delivered batch again, as DistributedSampler fills up with its first samples; before there is one, at the end.

    gives up  ─► told to all ─► RankFailedError from their next(); one that stands still, waiting for the lost rank in a
                                collective, is ended with a message after `ranks_grace_s`
"""

from __future__ import annotations

import copy
import logging
import os
import pickle
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

import torch.distributed as dist

from outlive import errors
from outlive._system import bond as bonds
from outlive._system.bond import Bond, Fallen
from outlive.settings import FaultPolicy

log = logging.getLogger("outlive")
NOTHING: Any = object()
_ABORT_S = 5.0  # for the collective to raise after its group was aborted
_AWAIT_S = 5.0  # for the word of another rank, when this one fails because of it
_MEETING_S = 15.0  # for rank 0 to make its loader: who is killed before they have met is not missed
_COLLECTIVE = ("/torch/distributed/", "/torch/nn/parallel/")


class Apart:
    """A rank on its own, or one whose user wants no agreement."""

    owed = 0  # batches to be given at the end, for those without a sample before the first

    def __init__(self, policy: FaultPolicy) -> None:
        self._warns = _world_size() > 1 and "skip" in (policy.on_error, policy.crash_rule)

    def look(self) -> None:
        """Called for every batch."""

    def given(self, batch: Any) -> Any:
        """The batch that is delivered passes here."""
        return batch

    def emptied(self) -> Any:
        """A batch has lost all its samples: what to deliver in its place, or NOTHING."""
        if self._warns:
            self._warns = False
            log.warning(
                "rank %d has one batch fewer than the other ranks now, for all samples of it were left out; the job "
                'may hang in its last step. FaultPolicy(ranks="agree") keeps the number equal',
                dist.get_rank(),
            )
        return NOTHING

    def ended(self) -> Any:
        """The epoch is over: what is still to be delivered, or NOTHING."""
        return NOTHING

    def gave_up(self, error: BaseException) -> None:
        """This pass ends with an error."""


class Agreement(Apart):
    """A rank among others, for one pass."""

    def __init__(self, policy: FaultPolicy) -> None:
        self._bond = _bond_of_job(policy.ranks_grace_s)
        self._kept: Callable[[], Any] | None = None
        self.owed = 0

    def look(self) -> None:
        if self._bond.fallen is not None:
            RankWatch.heeded.set()
            raise errors.rank_error(dist.get_rank(), self._bond.fallen.rank, self._bond.fallen.words)

    def given(self, batch: Any) -> Any:
        if self._kept is None:
            self._kept = _copies_of(batch)
        return batch

    def emptied(self) -> Any:
        if self._kept is not None:
            return self._kept()
        self.owed += 1
        return NOTHING

    def ended(self) -> Any:
        if not self.owed:
            return NOTHING
        if self._kept is None:
            self.owed = 0
            raise errors.TooManyFaultsError(
                f"rank {self._bond.rank} has lost every sample of this epoch: there is no batch that could be "
                "given in place of those that other ranks have"
            )
        self.owed -= 1
        return self._kept()

    def gave_up(self, error: BaseException) -> None:
        if not isinstance(error, errors.RankFailedError):
            self._bond.tell(bonds.GAVE_UP, _said(error))


def agreement_of(policy: FaultPolicy) -> Apart:
    """For one pass over a loader."""
    return Agreement(policy) if policy.ranks == "agree" and _world_size() > 1 else Apart(policy)


def _world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _copies_of(batch: Any) -> Callable[[], Any]:
    """Makes copies of a batch as it is now: the user may change the one that he is given."""
    try:
        pickled = pickle.dumps(batch, 5)
        return lambda: pickle.loads(pickled)
    except Exception:
        kept = copy.deepcopy(batch)
        return lambda: copy.deepcopy(kept)


def _said(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


# ---------------------------------------------------------------- one per process


class RankWatch:
    """What this process does about the failure of another rank."""

    bond: Bond | None = None
    group: Any = None  # the default group that the bond belongs to
    grace_s = 30.0
    heeded = threading.Event()  # the main thread knows
    hook: Any = None  # sys.excepthook as it was


def _bond_of_job(grace_s: float) -> Bond:
    RankWatch.grace_s = grace_s
    group = dist.group.WORLD
    if RankWatch.bond is not None and RankWatch.group is group:
        return RankWatch.bond
    if RankWatch.bond is not None:
        RankWatch.bond.close()
    RankWatch.heeded.clear()
    store = dist.distributed_c10d.PrefixStore("outlive/ranks", dist.distributed_c10d._get_default_store())

    def find() -> bytes | None:
        found: bytes | None = store.get("address") if store.check(["address"]) else None
        return found

    RankWatch.bond = Bond(
        dist.get_rank(), lambda told: store.set("address", told.decode()), find, hosts=_hosts(), heard=_watch
    )
    RankWatch.group = group
    if RankWatch.hook is None:
        RankWatch.hook, sys.excepthook = sys.excepthook, _name_the_rank
    return RankWatch.bond


def _hosts() -> tuple[str, ...]:
    """Where other ranks may find this one."""
    master = os.environ.get("MASTER_ADDR", "localhost")
    one_machine = os.environ.get("LOCAL_WORLD_SIZE") == str(dist.get_world_size())
    if one_machine or master in ("localhost", "127.0.0.1", "::1"):
        return ("127.0.0.1",)
    return tuple(dict.fromkeys((master, socket.gethostname(), socket.getfqdn())))


def _name_the_rank(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """This process ends with an exception: because of another rank, or the others are to know."""
    bond = RankWatch.bond
    if bond is not None and not isinstance(error, errors.RankFailedError):
        RankWatch.heeded.set()
        in_collective = trace is not None and _is_collective(_last(trace))
        fallen = bond.await_fallen(_AWAIT_S if in_collective else 0.0)
        if fallen is None:
            bond.tell(bonds.FAILED, _said(error))
        elif sys.version_info >= (3, 11):
            error.add_note(f"outlive: {fallen.words}")
        else:
            print(f"outlive: {fallen.words}", file=sys.stderr)
    RankWatch.hook(kind, error, trace)


def _last(trace: TracebackType) -> FrameType:
    while trace.tb_next is not None:
        trace = trace.tb_next
    return trace.tb_frame


def _is_collective(frame: FrameType | None) -> bool:
    while frame is not None:
        if any(part in frame.f_code.co_filename for part in _COLLECTIVE):
            return True
        frame = frame.f_back
    return False


def _watch(fallen: Fallen) -> None:
    """Called by the bond's thread, which must go on."""
    threading.Thread(target=_end_if_it_stands_still, args=(fallen,), name="outlive-ranks-end", daemon=True).start()


def _end_if_it_stands_still(fallen: Fallen) -> None:
    """End a process that waits in a collective for the rank that is lost.

    One that goes on comes to next(), or to its end, and is told there. Of a rank that is gone without a word it is not
    known whether it was done: only who waits in a collective is ended then.
    """
    where = _place()

    def stands_still() -> bool:
        if RankWatch.heeded.is_set() or _place() != where or RankWatch.bond is None or RankWatch.bond.is_closed:
            return False
        return fallen.how != bonds.GONE or _is_collective(sys._current_frames().get(_main()))

    while not RankWatch.heeded.is_set() and RankWatch.bond is not None and not RankWatch.bond.is_closed:
        if not bonds.wait_while(stands_still, RankWatch.grace_s):
            if RankWatch.heeded.wait(0.5):
                return
            where = _place()
            continue
        abort = getattr(dist.distributed_c10d, "_abort_process_group", None)
        if abort is not None and dist.is_initialized() and dist.get_backend() != "gloo":
            abort()
            if RankWatch.heeded.wait(_ABORT_S):
                return
        sys.stderr.write(
            f"outlive: {fallen.words}\n"
            f"outlive: this rank, {dist.get_rank()}, has stood still for {RankWatch.grace_s:g} s since then, "
            "waiting for it; its process ends here:\n"
        )
        frame = sys._current_frames().get(_main())
        if frame is not None:
            traceback.print_stack(frame)
        sys.stderr.flush()
        os._exit(1)


def _main() -> int:
    return threading.main_thread().ident or 0


def _place() -> tuple[int, int] | None:
    frame = sys._current_frames().get(_main())
    return None if frame is None else (id(frame), frame.f_lasti)
