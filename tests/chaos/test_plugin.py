"""The pytest plugin: cheap for those who do not ask for it, and a leak check for those who do.

Reads   what a small pytest run with it prints.
Writes  small tests, into temporary folders.
Never   leaves what they leak.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

PLUGIN = ("-p", "outlive.testing.plugin")
ENVIRONMENT = {
    **{key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")},
    "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # else it may come twice
    "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry),
}
TESTS = """
import os, subprocess, threading
import pytest

def test_without_fixture(): os.memfd_create("let pass")
def test_process(outlive_leaks): subprocess.Popen(["sleep", "60"])
def test_clean(outlive_leaks): os.close(os.memfd_create("closed"))

@pytest.fixture(scope="module")
def lasting():
    fd = os.memfd_create("of the module")
    yield
    os.close(fd)

@pytest.fixture
def passing():
    fd = os.memfd_create("of the test")
    yield
    os.close(fd)

def test_fixtures(passing, lasting, outlive_leaks): pass

@pytest.mark.outlive_leaks
def test_fixtures_marked(passing, lasting): pass

@pytest.mark.outlive_leaks
def test_marked(): os.memfd_create("forgotten")

@pytest.mark.outlive_leaks
def test_failing(): assert not os.memfd_create("held by the traceback")

def test_others(outlive_journal, outlive_server):
    from outlive._forensics import journal
    import urllib.request
    assert journal.home() == outlive_journal
    with urllib.request.urlopen(outlive_server({"/": b"here"}).url + "/") as answer:
        assert answer.read() == b"here"
"""


def run(folder: Path, *options: str) -> str:
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider", "--strict-markers", *options],
        cwd=folder,
        env=ENVIRONMENT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
    ).stdout


def test_only_tests_that_ask_are_checked_and_only_those_that_leak_fail(tmp_path):
    """By fixture or by marker; a test that failed by itself fails once; what fixtures close, or keep, is no leak."""
    (tmp_path / "test_victims.py").write_text(TESTS)
    (tmp_path / "conftest.py").write_text("from outlive.testing import leaks\nleaks.DEADLINE_S = 0.5\n")  # not 3 s each

    said = run(tmp_path, *PLUGIN)

    assert "1 failed, 7 passed, 2 errors" in said
    for name in ("test_process", "test_marked"):
        assert f"ERROR test_victims.py::{name}" in said
    assert "→ /memfd:forgotten (deleted)" in said
    assert "): sleep 60" in said
    assert "Close it in the test." in said


def test_it_costs_a_run_that_does_not_use_it_nearly_nothing(tmp_path):
    """It imports nothing but itself: neither torch nor numpy nor psutil, nor most of outlive, nor what pytest lacks."""
    program = (
        "import json, sys, pytest; before = set(sys.modules); import outlive.testing.plugin;"
        "print(json.dumps(sorted(set(sys.modules) - before)))"
    )

    imported = json.loads(subprocess.check_output([sys.executable, "-c", program], cwd=tmp_path, env=ENVIRONMENT))

    assert imported == ["outlive", "outlive.testing", "outlive.testing.plugin"]


def test_it_is_registered_when_outlive_is_installed():
    """As an entry point of pytest's."""
    configured = (Path(__file__).parents[2] / "pyproject.toml").read_text()

    assert '[project.entry-points.pytest11]\noutlive = "outlive.testing.plugin"\n' in configured
