"""Where ranks of one process find each other: in place of the store of `torch.distributed`.

Reads   the address that rank 0 publishes.
Writes  nothing.
Never   torch.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from deadlines import wait_until
from outlive._system.bond import Bond


class Rendezvous:
    """Where ranks of one process meet."""

    def __init__(self) -> None:
        self.address: bytes | None = None

    def publish(self, told: bytes) -> None:
        self.address = told

    def find(self) -> bytes | None:
        return self.address

    @property
    def found(self) -> dict[str, Any]:
        assert self.address is not None
        found: dict[str, Any] = json.loads(self.address)
        return found

    def connect(self) -> socket.socket:
        return socket.create_connection((self.found["hosts"][0], self.found["port"]), 60)


@contextmanager
def three_ranks(meeting: Rendezvous) -> Iterator[list[Bond]]:
    """Ranks 0, 1 and 2, who know each other."""
    made = [Bond(rank, meeting.publish, meeting.find) for rank in (2, 1, 0)][::-1]  # rank 0 comes last
    try:
        assert all(bond.await_meeting(60) for bond in made)
        assert wait_until(lambda: made[0].linked_ranks == {1, 2}, 60)
        yield made
    finally:
        for bond in made:
            bond.close()
