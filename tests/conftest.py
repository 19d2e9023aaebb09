"""What every test gets: the leak check, and Hypothesis without a clock.

Reads   the outcome of each test, and what `outlive.testing.leaks` finds after it.
Writes  a failure that names what leaked; journal and boards, in a temporary folder and never the user's own.
Never   anything a test could come to depend on.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Generator, Iterator

import hypothesis
import pytest

import selection
from outlive.testing import leaks, plugin

_RAISED = pytest.StashKey[bool]()

# Two cores under load: how long one example took says nothing about the code.
hypothesis.settings.register_profile("outlive", deadline=None, print_blob=True)
hypothesis.settings.load_profile("outlive")


_journal = tempfile.TemporaryDirectory(prefix="outlive-tests-", ignore_cleanup_errors=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shuffle", type=int, metavar="SEED", help="run modules, and tests in them, in a random order")


def pytest_configure(config: pytest.Config) -> None:
    if not config.pluginmanager.is_registered(plugin):  # by its entry point, where outlive was installed with it
        config.pluginmanager.register(plugin)
    # A shell starts background jobs with these ignored. The programs that tests start would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
    leaks.adopt_orphans()
    # Zygotes that the fork server starts have all this already; those of spawn import it, as users' do.
    multiprocessing.set_forkserver_preload(["torch", "numpy", "outlive.engines.local.zygote", "outlive.loader.streams"])
    os.environ["OUTLIVE_HOME"] = _journal.name  # of workers and programs, too: they inherit it
    os.environ["OUTLIVE_RUNTIME"] = os.path.join(_journal.name, "runtime")


def pytest_unconfigure() -> None:
    _journal.cleanup()


@pytest.hookimpl(tryfirst=True)  # before `-m` and `-k` choose: rows are counted over whole tests
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    selection.mark_repetitions(items)
    if config.option.shuffle is not None:
        selection.shuffle(items, config.option.shuffle)


def pytest_collection_finish() -> None:
    """Start what tests share before the first of them, so that the leak check takes it for granted."""
    if "warm_server" in sys.modules:
        sys.modules["warm_server"].begin()
    # Thousands of tests and their modules live to the end. Without them, a collection takes 1 ms instead of 100.
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if call.excinfo is not None:
        item.stash[_RAISED] = True
    return report


@pytest.fixture(autouse=True)
def _nothing_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves a process, thread, descriptor or shared memory behind."""
    if request.node.get_closest_marker("leaks_allowed"):
        yield
        return
    leaks.reap_zombies()
    before = leaks.take_snapshot()
    yield
    # The traceback of a failed test keeps its locals alive, and with them all they own: one failure is enough.
    if request.node.stash.get(_RAISED, False):
        return
    complaint = leaks.complaint(before)
    if complaint:
        pytest.fail(f"{complaint}, or mark it `leaks_allowed` where the leak is its subject.", pytrace=False)
