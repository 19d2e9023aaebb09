"""Shared memory, as this system has it: nameless on Linux, named elsewhere. Both offer the same.

Reads   nothing.
Writes  nothing; see `nameless` and `named`.
Never   anything of its own.

    maker: create → attach → handle to the other side → let_go      (or discard, if it is never handed on)
    other side: adopt, or attach_whole → discard

    for many: create → publish → attach → a ticket to each → withdraw
    each of them: redeem → attach → withdraw
"""

from __future__ import annotations

from outlive._system import choice
from outlive._system.nameless import Handle, punch

if choice.PORTABLE:
    from outlive._system.named import (
        adopt,
        attach,
        attach_whole,
        create,
        discard,
        is_own,
        let_go,
        publish,
        redeem,
        sweep,
        ticket,
        withdraw,
    )
else:
    from outlive._system.nameless import (
        adopt,
        attach,
        attach_whole,
        create,
        discard,
        is_own,
        let_go,
        publish,
        redeem,
        sweep,
        ticket,
        withdraw,
    )

__all__ = [
    "Handle",
    "adopt",
    "attach",
    "attach_whole",
    "create",
    "discard",
    "is_own",
    "let_go",
    "publish",
    "punch",
    "redeem",
    "sweep",
    "ticket",
    "withdraw",
]
