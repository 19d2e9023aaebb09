"""Datasets of jobs that are watched, and what tests ask of them.

Reads   nothing.
Writes  nothing.
Never   a sleep where a gate can be waited for.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch

from outlive._metrics import viewing

DEADLINE_S = 60.0


class Gated(torch.utils.data.Dataset[int]):
    """Sample `held` is not ready before the gate is open; `faulty`: sample 1 raises."""

    def __init__(self, gate: Path, held: int, size: int = 64, faulty: bool = False) -> None:
        self.gate, self.held, self.size, self.faulty = gate, held, size, faulty

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        if index == 1 and self.faulty:
            raise ValueError("no such picture")
        while index == self.held and not self.gate.exists():
            time.sleep(0.005)
        return index


class Faulty(torch.utils.data.Dataset[int]):
    """Sample 9 raises, sample 21 ends its worker whenever it is fetched."""

    def __init__(self, size: int = 64) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        if index == 9:
            raise ValueError("no such picture")
        if index == 21:
            os._exit(7)
        return index


def only_job(folder: Path | None = None) -> viewing.Job:
    found = viewing.jobs(folder=folder)
    assert len(found) == 1, found
    return found[0]


def kinds(job: viewing.Job) -> list[str]:
    return [event["kind"] for event in job.events(limit=10_000)[0]]


def of_kind(job: viewing.Job, kind: str) -> list[dict[str, Any]]:
    return [event for event in job.events(limit=10_000)[0] if event["kind"] == kind]


def snapshot_of(slots: int, **more: Any) -> dict[str, Any]:
    """A made-up one."""
    row = {
        **{"pid": 7, "incarnation": 1, "state": "ready", "doing": "fetching a sample", "stage": "fetching", "batch": 3},
        **{"sample": 5, "seconds": 1.0, "queued": 1, "restarts": 0, "cpu": 0.5, "descriptors": 9, "threads": 1},
        **{"cells": 0, "load": None},
    }
    memory = {"private": 1 << 30, "shared": 0, "limit": 2 << 30, "slope": 0}
    counts = dict.fromkeys(("restarts", "retries", "quarantined", "recycled", "epoch", "delivered"), 1)
    told = {"time": 1.0, "alive": True, **counts, "workers": slots, "breaker": "closed", "advice": ""}
    rows = [{"slot": number, **row, "memory": dict(memory)} for number in range(slots)]
    return {
        **told,
        "wait_seconds": 1.0,
        "trainer_seconds": 1.0,
        "cells": {"bytes": 0, "count": 0},
        **more,
        "slots": rows,
    }
