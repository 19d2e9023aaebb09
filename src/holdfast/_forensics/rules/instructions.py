"""Verdicts on SIGILL, SIGTRAP, SIGFPE and SIGSYS: which instruction.

Reads   incidents.
Writes  nothing.
Never   a process, a file, a lock, the clock.
"""

from __future__ import annotations

from collections.abc import Callable

from holdfast.incident import Incident
from holdfast.verdicts import Verdict

RULES: tuple[Callable[[Incident], Verdict | None], ...] = ()
