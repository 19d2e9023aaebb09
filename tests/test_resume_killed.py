"""A trainer that is killed, again and again, ends where one ends that is not.

Reads   what the program `killed_trainer` prints.
Writes  checkpoints and positions, in a temporary folder.
Never   a tolerance: weights are compared as bits.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

import warm_server

PROGRAM = Path(__file__).with_name("killed_trainer.py")


@pytest.mark.parametrize(("workers", "kills"), [(2, 20), (0, 8)])
def test_weights_are_those_of_an_undisturbed_run_when_the_trainer_is_killed(tmp_path, workers, kills):
    """At random moments: in a step, while a checkpoint or a position is written, before the first of either."""
    arguments = [str(tmp_path), "8", str(kills), str(workers)]
    ended = warm_server.run(
        [sys.executable, str(PROGRAM), *arguments], capture_output=True, text=True, timeout=240, env=os.environ
    )
    assert ended.returncode == 0, ended.stderr
    told = json.loads(ended.stdout)

    assert told["kills"] == kills
    assert told["killed"] == told["undisturbed"] != ""
    # Where a file system has no files without names, a kill may leave one that begins with .outlive-
    named = {name for name in told["left"] if not name.startswith(".outlive-")}
    assert named <= {"checkpoint", "new", "position", "weights"}
