"""What a user may set about faults, checked when it is set.

Reads   what the user passed.
Writes  nothing.
Never   guesses: a value that makes no sense is an error that says which values do.
"""

from __future__ import annotations

import difflib
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from outlive.incident import Decision, Incident
from outlive.quantities import check_size

FaultRule: TypeAlias = Literal["raise", "skip", "replace"] | Callable[[Incident], str]
_WORDS = ("raise", "skip", "replace")
_LONGEST_S = 2_000_000  # that the system can be told to wait: 2**31 milliseconds are a little more


@dataclass(frozen=True)
class FaultPolicy:
    """What is done about exceptions, deaths and hangs of workers.

    on_error        "raise", "skip" or "replace" for exceptions, or a callable that takes the
                    `Incident` and returns one of these or "retry"
    on_crash        the same for deaths and hangs; None: as on_error
    retries         how often a fault may be tried again: a sample that was in hand at
                    retries + 1 deaths is poison; an exception is retried only if its type is in retry_on
    retry_on        exception types that are retried, such as (OSError, TimeoutError)
    backoff_s       pause before the first retry of an exception; doubles each time
    backoff_max_s   the longest such pause
    jitter          share by which each pause is varied, so that workers do not retry in step
    sample_timeout  seconds a sample may take; "auto": it depends on what the worker does, as the next four say, and on
                    how long samples usually take (what 199 of 200 of the last 1,000 stay below); None: never
    hang_floor_s    seconds before a hang is suspected, and a worker ended that can never go on: it is stopped, or no
                    living process can release what all its threads wait for
    hang_wait_s     "auto" ends a worker that sleeps or waits after the longer of this and 20 times what samples
                    usually take; None: 4 times hang_floor_s
    hang_wait_max_s   but never later than this; None: 60 times hang_floor_s
    hang_busy_s     "auto" ends a worker that uses the CPU after the longer of this and 20 times what samples usually
                    take; None: 10 times hang_floor_s
    max_restarts    so many restarts within restart_window_s seconds end the epoch with TooManyFaultsError
    max_bad         so many bad samples (int), or this share of the samples drawn (float; looked at
                    once there are 20 bad ones), end the epoch with TooManyFaultsError; None: no limit
    breaker_patience  seconds that are waited for a source that is gone (different samples fail alike, and some that
                    had been fetched before) until the epoch ends with SourceUnavailableError; None: for ever
    ranks           "agree": in a job of several ranks each delivers as many batches as without faults, and when one
                    gives up the others end with RankFailedError; "apart": each for itself
    ranks_grace_s   seconds that a rank may wait in a collective for one that gave up, before its process is ended
    """

    on_error: FaultRule = "raise"
    on_crash: FaultRule | None = None
    retries: int = 1
    retry_on: tuple[type[BaseException], ...] = ()
    backoff_s: float = 0.1
    backoff_max_s: float = 10.0
    jitter: float = 0.25
    sample_timeout: float | Literal["auto"] | None = "auto"
    hang_floor_s: float = 30.0
    hang_wait_s: float | None = None
    hang_wait_max_s: float | None = None
    hang_busy_s: float | None = None
    max_restarts: int = 100
    restart_window_s: float = 60.0
    max_bad: int | float | None = 0.25
    breaker_patience: float | None = 300.0
    ranks: Literal["apart", "agree"] = "apart"
    ranks_grace_s: float = 30.0

    def __post_init__(self) -> None:
        _check_rule("on_error", self.on_error)
        if self.on_crash is not None:
            _check_rule("on_crash", self.on_crash)
        check_number("retries", self.retries, least=0, whole=True)
        if isinstance(self.retry_on, type):
            object.__setattr__(self, "retry_on", (self.retry_on,))
        object.__setattr__(self, "retry_on", tuple(self.retry_on))
        for kind in self.retry_on:
            if not (isinstance(kind, type) and issubclass(kind, BaseException)):
                raise TypeError(f"retry_on takes exception types such as OSError, got {kind!r}")
        check_number("backoff_s", self.backoff_s, least=0, most=_LONGEST_S)
        check_number("backoff_max_s", self.backoff_max_s, least=0, most=_LONGEST_S)
        check_number("jitter", self.jitter, least=0)
        if self.jitter > 1:
            raise ValueError(f"jitter is a share of the pause, 0 to 1, got {self.jitter}")
        if self.sample_timeout not in ("auto", None):
            check_number("sample_timeout", self.sample_timeout, least=0)
            if self.sample_timeout == 0:
                raise ValueError('sample_timeout must be more than 0 seconds (None: never; "auto": the default), got 0')
        check_number("hang_floor_s", self.hang_floor_s, least=0.01)
        for name in ("hang_wait_s", "hang_wait_max_s", "hang_busy_s"):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name), least=0.01)
        check_number("max_restarts", self.max_restarts, least=0, whole=True)
        check_number("restart_window_s", self.restart_window_s, least=0.001)
        if self.max_bad is not None:
            check_number("max_bad", self.max_bad, least=0)
            if type(self.max_bad) is float and self.max_bad > 1:
                meant = f"for a count, write max_bad={math.ceil(self.max_bad)}" if self.max_bad < math.inf else None
                raise ValueError(
                    f"max_bad is a share between 0.0 and 1.0 when it is a float, got {self.max_bad} "
                    f"({meant or 'for no limit, write max_bad=None'})"
                )
        if self.breaker_patience is not None:
            check_number("breaker_patience", self.breaker_patience, least=0)
        if self.ranks not in ("apart", "agree"):
            raise ValueError(f'ranks must be "apart" or "agree", got {self.ranks!r}')
        check_number("ranks_grace_s", self.ranks_grace_s, least=0)

    @property
    def crash_rule(self) -> FaultRule:
        return self.on_error if self.on_crash is None else self.on_crash

    def without_callables(self) -> FaultPolicy:
        """The same policy as plain data for a worker; callables stay in the trainer, which is asked."""
        return replace(
            self,
            on_error="raise" if callable(self.on_error) else self.on_error,
            on_crash="raise" if callable(self.on_crash) else self.on_crash,
        )


def fault_policy(faults: Any) -> FaultPolicy:
    """The policy that `faults=` means: a word, a callable, or a FaultPolicy."""
    if isinstance(faults, FaultPolicy):
        return faults
    if isinstance(faults, str) or callable(faults):
        _check_rule("faults", faults)
        return FaultPolicy(on_error=faults)
    raise TypeError(f'faults must be "raise", "skip", "replace", a callable or a FaultPolicy, got {faults!r}')


def decision_of(answer: Any) -> Decision:
    """What a user's callable answered, as a decision."""
    try:
        return Decision(answer)
    except ValueError:
        raise ValueError(
            f'a fault callable must return "raise", "skip", "replace" or "retry", got {answer!r}'
        ) from None


def check_callable(name: str, value: Any) -> Any:
    if value is not None and not callable(value):
        raise TypeError(f"{name} must be a function index → text, got {value!r}")
    return value


def check_listeners(value: Any) -> tuple[Callable[[Incident], object], ...]:
    """`on_incident=`: one callable, or several."""
    listeners = (value,) if callable(value) else tuple(value) if isinstance(value, (list, tuple)) else (value,)
    for listener in listeners:
        if not callable(listener):
            raise TypeError(f"on_incident must be a callable that takes an Incident, or several, got {value!r}")
    return listeners


def check_threads(value: Any) -> int | None:
    if value is not None:
        check_number("worker_threads", value, least=1, whole=True)
    return value  # type: ignore[no-any-return]


def _check_rule(name: str, rule: Any) -> None:
    if callable(rule) and not isinstance(rule, str):
        return
    if rule not in _WORDS:
        raise ValueError(f'{name} must be "raise", "skip", "replace" or a callable, got {rule!r}')


def check_number(name: str, value: Any, *, least: float, most: float = math.inf, whole: bool = False) -> None:
    kinds: Any = int if whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds) or value != value:
        raise TypeError(f"{name} must be {'a whole number' if whole else 'a number'}, got {value!r}")
    check_size(name, value)
    if value < least:
        raise ValueError(f"{name} must be at least {least:g}, got {value}")
    if value > most:
        raise ValueError(f"{name} must be at most {most:g}, got {value}")


def check_count(name: str, value: Any, words: str) -> None:
    """Where torch takes a whole number of any make: say at once what it would stumble over later."""
    try:
        check_size(name, operator.index(value))
    except TypeError:
        close = difflib.get_close_matches(value, ["auto"]) if isinstance(value, str) and "auto" in words else []
        hint = ' (did you mean "auto"?)' if close else ""
        raise TypeError(f"{name} must be {words}, got {value!r}{hint}") from None


def check_timeout(timeout: Any) -> None:
    check_size("timeout", timeout)
    if isinstance(timeout, (int, float)) and not timeout <= _LONGEST_S:  # below 0, torch has its own words
        raise ValueError(f"timeout must be at most {_LONGEST_S} seconds (0: wait as long as it takes), got {timeout}")
