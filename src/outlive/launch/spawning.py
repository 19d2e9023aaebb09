"""`spawn`: torch.multiprocessing.spawn, whose errors explain themselves.

Reads   its arguments.
Writes  nothing by itself; the group does.
Never   means anything else by an argument than torch does.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
from collections.abc import Callable, Sequence
from typing import Any

from outlive._forensics import unpicklable
from outlive._forensics.heralds import Herald
from outlive._system import choice
from outlive.errors import OutliveError
from outlive.incident import Incident
from outlive.launch import inside, ranks
from outlive.launch.call import Call
from outlive.launch.group import UNGUARDED, SpawnContext
from outlive.launch.ranks import Plan
from outlive.quantities import parse_bytes
from outlive.settings import check_listeners, check_number

_METHODS = ("spawn", "fork", "forkserver")
_GUARD = (
    "outlive.spawn was called while this process, which multiprocessing has started, imports the main module: it "
    'would start processes without end. Put the call under   if __name__ == "__main__":'
)


def spawn(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    nprocs: int = 1,
    join: bool = True,
    daemon: bool = False,
    start_method: str | None = "spawn",
    *,
    max_restarts: int = 0,
    memory_limit: int | str | None = None,
    timeout: float | None = None,
    prefix_output: bool = True,
    on_incident: Callable[[Incident], object] | Sequence[Callable[[Incident], object]] = (),
) -> SpawnContext | None:
    """Run `fn(rank, *args)` in `nprocs` processes, and wait for them.

    When one fails, the others are ended, and the error says which was the first, and why. Functions of a notebook or a
    prompt, lambdas and closures work under every start method. Arguments of torch's have torch's meaning
    (`start_method` "fork" and "forkserver" serve, too). These are new:

    max_restarts  so often all ranks are started again, together, after one has failed
    memory_limit  private memory of a rank, such as "8GiB": beyond it allocations fail, with MemoryError
    timeout      seconds that a rank may take, start included; one that takes longer is looked at, and all are ended
    prefix_output  «[rank 1] » before each line that a rank prints; False: ranks print as they like, to our own streams
    on_incident  a callable, or several, that are given the `Incident` of each failure; what they raise is logged

    Ranks find RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT and RESTART_COUNT in their
    environment, as under torchrun. Returns None, or the `SpawnContext` where `join=False`.
    """
    if choice.PORTABLE:
        raise NotImplementedError("outlive.spawn needs Linux (pidfd, memfd); torch.multiprocessing.spawn runs here")
    plan = Plan(
        call=Call(_callable(fn), _tuple(args)),
        context=multiprocessing.get_context(_method(start_method)),
        nprocs=_count(nprocs),
        daemon=bool(daemon),
        memory_bytes=None if memory_limit is None else parse_bytes("memory_limit", memory_limit),
        prefix_output=bool(prefix_output),
    )
    check_number("max_restarts", max_restarts, least=0, whole=True)
    if timeout is not None:
        check_number("timeout", timeout, least=0)
        if timeout == 0:
            raise ValueError("timeout must be more than 0 seconds (None: no limit), got 0")
    herald = Herald(check_listeners(on_incident))
    if inside.is_importing_main():
        if multiprocessing.current_process().name.startswith(ranks.NAME):
            os._exit(UNGUARDED)  # whoever started us says it, once for all ranks
        raise OutliveError(_GUARD)
    try:
        context = SpawnContext(plan, herald, max_restarts=max_restarts, timeout_s=timeout, threaded=not join)
    except (TypeError, AttributeError, pickle.PicklingError) as error:
        if plan.context.get_start_method() != "fork":
            _explain(error, plan.call)
        raise
    if not join:
        return context
    try:
        while not context.join():
            pass
    except BaseException:
        context.stop()  # an interrupt may come between two joins; after an error there is nothing left to stop
        raise
    return None


def _explain(error: Exception, call: Call) -> None:
    """Say which part of the arguments or the function cannot be pickled, if that is why."""
    found = [*unpicklable.find(call.args, "args"), *unpicklable.find(call.fn, "fn")]
    for part in [part for part in found if part.type_name != "function"][:1]:  # those travel
        text = f"outlive: {part.path} is a {part.type_name}, which cannot be sent to a rank; make it inside of fn"
        if hasattr(error, "add_note"):
            error.add_note(text)


# ---------------------------------------------------------------- arguments


def _callable(fn: Any) -> Callable[..., Any]:
    if not callable(fn):
        raise TypeError(f"fn must be a function that takes the rank and args, got {fn!r}")
    return fn  # type: ignore[no-any-return]


def _tuple(args: Any) -> tuple[Any, ...]:
    try:
        return tuple(args)
    except TypeError:
        raise TypeError(
            f"args must be a tuple of what fn takes after the rank, such as (model,), got {args!r}"
        ) from None


def _count(nprocs: Any) -> int:
    check_number("nprocs", nprocs, least=1, whole=True)
    return int(nprocs)


def _method(start_method: Any) -> str | None:
    if start_method is not None and start_method not in _METHODS:
        raise ValueError(f'start_method must be "spawn", "fork" or "forkserver", got {start_method!r}')
    return start_method  # type: ignore[no-any-return]  # None: whatever multiprocessing is set to
