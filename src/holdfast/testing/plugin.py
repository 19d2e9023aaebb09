"""The pytest plugin: fixtures for tests of code that has workers, and a check that they leave nothing behind.

Reads   the fixtures and markers that a test asks for.
Writes  a failure that names what leaked.
Never   does anything for tests that ask for none of it; imports nothing of weight: it is loaded in everybody's pytest.

holdfast_leaks    a fixture, or the marker `@pytest.mark.holdfast_leaks`: no process, thread, descriptor or shared
                  memory is left after the test
holdfast_journal  a journal of incidents for this test alone; its folder
holdfast_server   makes servers on loopback that can be slow, refuse or fail
"""

from __future__ import annotations

import pytest

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator
    from pathlib import Path
    from typing import Any

_RAISED = pytest.StashKey[bool]()
_ADOPTS = pytest.StashKey[bool]()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "holdfast_leaks: fail when a process, thread, descriptor or shared memory is left after the test"
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        names = getattr(item, "fixturenames", None)
        if names is not None and item.get_closest_marker("holdfast_leaks") and "holdfast_leaks" not in names:
            names.insert(0, "holdfast_leaks")  # first: it is then the last to be torn down


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: Any) -> Generator[None, Any, Any]:
    report = yield
    if call.excinfo is not None:
        item.stash[_RAISED] = True
    return report


@pytest.fixture
def holdfast_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves a process, thread, descriptor or shared memory behind."""
    from holdfast.testing import leaks

    if not request.config.stash.get(_ADOPTS, False):
        request.config.stash[_ADOPTS] = True
        leaks.adopt_orphans()
    leaks.reap_zombies()
    before = leaks.take_snapshot()
    yield
    # The traceback of a failed test keeps its locals alive, and with them all they own: one failure is enough.
    if request.node.stash.get(_RAISED, False):
        return
    complaint = leaks.complaint(before)
    if complaint:
        pytest.fail(f"{complaint}.", pytrace=False)


@pytest.fixture
def holdfast_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Incidents of this test go to a journal of its own, in the folder that this is."""
    home = tmp_path / "holdfast-journal"
    monkeypatch.setenv("HOLDFAST_HOME", str(home))
    monkeypatch.delenv("HOLDFAST_JOURNAL", raising=False)
    return home


@pytest.fixture
def holdfast_server() -> Iterator[Callable[..., Any]]:
    """Makes servers: `server = holdfast_server({"/0": b"…"})`, as `holdfast.testing.serving` has them."""
    import contextlib

    from holdfast.testing.network import serving

    with contextlib.ExitStack() as stack:
        yield lambda content, seed=0: stack.enter_context(serving(content, seed))
