"""Every call that deletes or replaces a file, or unpickles, stands in a module that was reviewed for it.

Reads   src/outlive as text, through `ast`.
Writes  nothing.
Never   imports the package.

A new one needs a row in docs/design/safety.md, and then its module here.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "outlive"
PAGE = SOURCE.parents[1] / "docs" / "design" / "safety.md"
REVIEWED = {
    "removes a whole folder": {"testing/chaos.py"},
    "removes a file or an empty folder": {
        *("_metrics/runtime.py", "_system/safe_files.py", "_system/named.py", "checking/state.py"),
        *("engines/portable/engine.py", "engines/portable/worker.py", "testing/chaos.py", "testing/marks.py"),
        "dashboard/links.py",
    },
    "replaces or renames a file": {"_metrics/history.py", "_system/safe_files.py", "_forensics/journal_file.py"},
}
CALLS = {
    "removes a whole folder": {"rmtree"},
    "removes a file or an empty folder": {"unlink", "rmdir", "shm_unlink", "removedirs"},
    "replaces or renames a file": {"rename", "renames"},
}
OF_OS = {"remove": "removes a file or an empty folder", "replace": "replaces or renames a file"}


def reviewed_calls(tree: ast.Module) -> Iterator[str]:
    """What a module does of it: `list.remove` and `str.replace` are something else than `os.remove`."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute):
            continue
        yield from (what for what, names in CALLS.items() if node.attr in names)
        if isinstance(node.value, ast.Name) and node.value.id == "os" and node.attr in OF_OS:
            yield OF_OS[node.attr]


def test_only_reviewed_modules_do_what_costs_files():
    """outlive deletes what it provably made, and nothing else."""
    found: dict[str, set[str]] = {what: set() for what in REVIEWED}
    for path in SOURCE.rglob("*.py"):
        for what in reviewed_calls(ast.parse(path.read_text(encoding="utf-8"))):
            found[what].add(path.relative_to(SOURCE).as_posix())

    assert found == REVIEWED


def test_the_page_names_the_helper_and_the_marks():
    """By which a reader finds what is ours."""
    page = PAGE.read_text(encoding="utf-8")

    assert "_system/safe_files.py" in page
    assert all(mark in page for mark in (".outlive-runtime", ".outlive-chaos"))
