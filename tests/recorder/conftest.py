"""Gives each test a black box for a process that is to die."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from outlive._capture import blackbox, stacks
from outlive._capture.blackbox import BlackBox
from outlive._system import memory
from recorder.dying_process import DyingProcess


@pytest.fixture
def box() -> Iterator[DyingProcess]:
    fd = memory.create(blackbox.SIZE)
    mapped = memory.attach(fd)
    os.close(fd)
    made = DyingProcess(mapped, BlackBox(mapped), memory.create(stacks.SIZE))
    yield made
    made.box.release()
    os.close(made.stack_fd)
