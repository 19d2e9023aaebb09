"""The pytest plugin: fixtures for tests of code that has workers, and a check that they leave nothing behind.

Reads   the fixtures and markers that a test asks for.
Writes  a failure that names what leaked.
Never   does anything for tests that ask for none of it; imports nothing of weight: it is loaded in everybody's pytest.

outlive_leaks    a fixture, or the marker `@pytest.mark.outlive_leaks`: no process, thread, descriptor or shared
                  memory is left after the test
outlive_journal  a journal of incidents for this test alone; its folder
outlive_server   makes servers on loopback that can be slow, refuse or fail
"""

from __future__ import annotations

import pytest

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path
    from typing import Any

_LEAKS = "outlive_leaks"
_RAISED = "_outlive_raised"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "outlive_leaks: fail when a process, thread, descriptor or shared memory is left after the test"
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        names = getattr(item, "fixturenames", None)
        if names is None or not (item.get_closest_marker(_LEAKS) or _LEAKS in names):
            continue
        # After fixtures that outlive the test, whose things are no leak, and before its own: then it is torn down last.
        if _LEAKS in names:
            names.remove(_LEAKS)
        known = getattr(getattr(item, "_fixtureinfo", None), "name2fixturedefs", {})
        own = (place for place, name in enumerate(names) if known.get(name) and known[name][-1].scope == "function")
        names.insert(next(own, len(names)), _LEAKS)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item, call: Any) -> None:
    if call.excinfo is not None:
        setattr(item, _RAISED, True)  # not the stash, nor a wrapper: old versions of pytest have neither


@pytest.fixture
def outlive_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves a process, thread, descriptor or shared memory behind."""
    from outlive.testing import leaks

    leaks.adopt_orphans()
    leaks.reap_zombies()
    before = leaks.take_snapshot()
    yield
    # The traceback of a failed test keeps its locals alive, and with them all they own: one failure is enough.
    if getattr(request.node, _RAISED, False):
        return
    complaint = leaks.complaint(before)
    if complaint:
        pytest.fail(f"{complaint}.", pytrace=False)


@pytest.fixture
def outlive_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Incidents of this test go to a journal of its own, in the folder that this is."""
    home = tmp_path / "outlive-journal"
    monkeypatch.setenv("OUTLIVE_HOME", str(home))
    monkeypatch.delenv("OUTLIVE_JOURNAL", raising=False)
    return home


@pytest.fixture
def outlive_server() -> Iterator[Callable[..., Any]]:
    """Makes servers: `server = outlive_server({"/0": b"…"})`, as `outlive.testing.serving` has them."""
    import contextlib

    from outlive.testing.network import serving

    with contextlib.ExitStack() as stack:
        yield lambda content, seed=0: stack.enter_context(serving(content, seed))
