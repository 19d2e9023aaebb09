"""The example trains to its accuracy while its sampler kills, hangs and raises, on each system layer."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "graphsage.py"


@pytest.mark.timeout(600)
@pytest.mark.parametrize("system", ["", pytest.param("portable", marks=pytest.mark.full)])
def test_the_example_reaches_its_accuracy(system):
    """It says which nodes were left out, and why; the rest it learns from, to the same accuracy on both layers."""
    pytest.importorskip("sklearn")
    environment = {**os.environ, "OUTLIVE_SYSTEM": system} if system else os.environ
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", EXAMPLE],
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
        stdin=subprocess.DEVNULL,
    )

    assert ended.returncode == 0, ended.stderr[-2000:]
    assert "node 300: read of address 0x0" in ended.stdout
    assert "node 600: waits at graphsage.py" in ended.stdout
    assert "node 900: ValueError" in ended.stdout
    assert "596 of 599 seeds in the last epoch; left out: [300, 600, 900]" in ended.stdout
    assert float(ended.stdout.split()[-1]) >= 0.95
