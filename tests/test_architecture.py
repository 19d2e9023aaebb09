"""Holds the source to the rows of the house: imports point down, the deciders are pure, modules stay small.

Reads   src/outlive as text, through `ast`; one test imports it, in a fresh interpreter.
Writes  small bad houses in temporary folders, to see that each check complains.
Never   imports the package here.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
HOUSE = TESTS.parent / "src" / "outlive"
ROWS = (
    {
        *("records", "orders", "incident", "evidence", "verdicts", "crashes", "plain", "tables", "quantities"),
        *("limits", "errors", "settings", "statistics", "trends", "places", "printable", "private"),
    },
    {"_system", "_capture"},
    {"_fleet", "_transport", "_worker", "_forensics", "_metrics", "_share"},
    {"engines"},
    {"loader", "pool", "launch"},
    {"graph", "adoption"},
    {"dashboard", "testing", "doctor", "checking", "measuring"},
    {"cli"},
    {"__main__"},
)
ROW_OF = {name: row for row, names in enumerate(ROWS) for name in names}
ALLOWED_SIDEWAYS = {("_worker", "_transport")}
PURE = {
    *("_fleet/machine.py", "_fleet/policy.py", "_fleet/growth.py", "_fleet/load.py"),
    *("_forensics/verdict.py", "_metrics/fold.py"),
    *("_fleet/renewal.py", "_forensics/rules/forked_threads.py"),
    *("_fleet/breaker.py", "pool/progress.py", "dashboard/telling.py", "dashboard/story.py"),
    *(f"_forensics/rules/{name}.py" for name in ("aborts", "faults", "growth", "hangs", "instructions", "kills")),
    *("_forensics/rules/python.py", "_forensics/rules/starts.py", "_forensics/frames.py"),
}
IMPURE = {
    *("os", "io", "pathlib", "signal", "time", "mmap", "ctypes", "psutil", "torch", "numpy"),
    *("threading", "asyncio", "socket", "select", "selectors", "subprocess", "multiprocessing"),
}
BANNED_NAMES = {"utils", "common", "core", "base", "helpers", "api"}
MAX_LINES = 499
MAX_TEST_LINES = 600


def modules(root: Path) -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(root.rglob("*.py")):
        yield path.relative_to(root).as_posix(), ast.parse(path.read_text(encoding="utf-8"))


def imports(name: str, tree: ast.Module) -> Iterator[str]:
    """Full dotted names that a module imports, anywhere in it, for types only or by import_module as well."""
    folder = ["outlive", *Path(name).parent.parts]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            home = folder[: len(folder) - node.level + 1] if node.level else []
            home += [node.module] if node.module else []
            yield from (".".join([*home, alias.name]) for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            yield from (arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str))


def wrong_imports(root: Path) -> list[str]:
    """Imports that point up or sideways, or through the package's own front door."""
    wrong = []
    for name, tree in modules(root):
        here = Path(name).parts[0].removesuffix(".py")
        if here == "__init__":
            continue  # The front door: it names everything, and loads it late.
        if here not in ROW_OF:
            wrong.append(f"{name}: {here!r} stands in no row; give it one in ROWS")
            continue
        for target in imports(name, tree):
            package, _, rest = target.partition(".")
            there = rest.partition(".")[0]
            if package != "outlive" or there == here:
                continue
            if there not in ROW_OF:
                wrong.append(f"{name}: imports {target}; import from the module that defines it")
            elif ROW_OF[there] >= max(ROW_OF[here], 1) and (here, there) not in ALLOWED_SIDEWAYS:
                wrong.append(f"{name}: row {ROW_OF[here]} imports {target} of row {ROW_OF[there]}")
    return wrong


def impurities(root: Path) -> list[str]:
    """What the pure modules, or neighbours they lean on, import or call that could see or change the world."""
    trees = dict(modules(root))
    wrong = []
    waiting, seen = sorted(PURE & trees.keys()), set()  # `missing_pure_modules` finds the others
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        for target in imports(name, trees[name]):
            top, _, rest = target.partition(".")
            if top == "outlive" and rest.partition(".")[0] == Path(name).parts[0]:
                # A neighbour, or a name in it: it is held to the same rule.
                path = rest.replace(".", "/")
                waiting += {f"{path}.py", f"{path.rpartition('/')[0]}.py"} & trees.keys()
            elif top in IMPURE or (top == "outlive" and rest.partition(".")[0] not in ROWS[0]):
                wrong.append(f"{name}: must be pure, but imports {target}")
        calls = [ast.unparse(node.func) for node in ast.walk(trees[name]) if isinstance(node, ast.Call)]
        wrong += [f"{name}: must be pure, but calls open()"] * calls.count("open")
    return wrong


def missing_pure_modules(root: Path) -> list[str]:
    """Names in PURE without a module: after a rename, `impurities` would no longer look at it."""
    return [
        f"{name}: stands in PURE, but there is no such module" for name in sorted(PURE) if not (root / name).exists()
    ]


def untidy_modules(root: Path) -> list[str]:
    """Modules that are too long, say nothing about themselves, or have a name that says nothing."""
    wrong = []
    for name, tree in modules(root):
        lines = len((root / name).read_text(encoding="utf-8").splitlines())
        if lines > MAX_LINES:
            wrong.append(f"{name}: {lines} lines, at most {MAX_LINES}; split it by what it does")
        if not ast.get_docstring(tree):
            wrong.append(f"{name}: starts with no docstring")
        for part in Path(name).with_suffix("").parts:
            if part.strip("_") in BANNED_NAMES:
                wrong.append(f"{name}: {part!r} says nothing; name it for what it does")
    return wrong


def long_tests(root: Path) -> list[str]:
    """Modules of tests, and helpers beside them, that are too long to be read in one go."""
    wrong = []
    for path in sorted(root.rglob("*.py")):
        lines = len(path.read_text(encoding="utf-8").splitlines())
        if lines > MAX_TEST_LINES:
            name = path.relative_to(root).as_posix()
            wrong.append(f"{name}: {lines} lines, at most {MAX_TEST_LINES}; split it by subject")
    return wrong


@pytest.mark.parametrize("check", [wrong_imports, impurities, missing_pure_modules, untidy_modules])
def test_the_source_follows_the_rules(check):
    """The rows and rules of ARCHITECTURE.md, line by line."""
    assert check(HOUSE) == []


def test_no_test_module_is_too_long():
    """A test is found by its file's name: a file has one subject."""
    assert long_tests(TESTS) == []


@pytest.mark.parametrize(
    ("check", "name", "source"),
    [
        (wrong_imports, "_system/fds.py", "import outlive._fleet.machine"),
        (wrong_imports, "_system/fds.py", "from outlive import loader"),
        (wrong_imports, "_system/fds.py", "def late():\n    from outlive.loader import DataLoader"),
        (wrong_imports, "_system/fds.py", "from ..engines import local"),
        (wrong_imports, "_system/fds.py", "importlib.import_module('outlive.engines')"),
        (wrong_imports, "_fleet/runner.py", "from outlive._transport import cells"),
        (wrong_imports, "_transport/cells.py", "from outlive._worker import loop"),
        (wrong_imports, "records.py", "from outlive._system import memory"),
        (wrong_imports, "engines/local.py", "from outlive import DataLoader"),
        (wrong_imports, "attic.py", ""),
        (impurities, "_fleet/machine.py", "import os"),
        (impurities, "_fleet/machine.py", "import os.path as p"),
        (impurities, "_fleet/policy.py", "def jitter():\n    from time import monotonic"),
        (impurities, "_forensics/verdict.py", "import numpy as np"),
        (impurities, "_metrics/fold.py", "def read():\n    return open('x')"),
        (impurities, "_fleet/machine.py", "from outlive._system import memory"),
        (untidy_modules, "records.py", "x = 1"),
        (untidy_modules, "records.py", '"""Doc."""' + "\n" * 500),
        (untidy_modules, "_fleet/_utils.py", '"""Doc."""'),
        (untidy_modules, "core/queue.py", '"""Doc."""'),
    ],
)
def test_a_check_complains_once_when_its_rule_is_broken(tmp_path, check, name, source):
    """A check that cannot fail checks nothing."""
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(source)

    complaints = check(tmp_path)

    assert len(complaints) == 1
    assert complaints[0].startswith(f"{name}: ")


def test_a_pure_module_is_missed_when_it_is_renamed(tmp_path):
    """Else renaming it would end the check of it."""
    for name in PURE:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert missing_pure_modules(tmp_path) == []

    (tmp_path / "_fleet/machine.py").rename(tmp_path / "_fleet/engine.py")

    assert missing_pure_modules(tmp_path) == ["_fleet/machine.py: stands in PURE, but there is no such module"]


@pytest.mark.parametrize("name", ["test_long.py", "machine/helper.py"])
def test_a_long_test_module_is_found(tmp_path, name):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("\n" * MAX_TEST_LINES)
    assert long_tests(tmp_path) == []

    (tmp_path / name).write_text("\n" * (MAX_TEST_LINES + 1))

    assert long_tests(tmp_path) == [f"{name}: 601 lines, at most 600; split it by subject"]


@pytest.mark.parametrize("line", ["from outlive._fleet import clock", "from outlive._fleet.clock import now"])
def test_impurity_is_found_when_a_neighbour_brings_it(tmp_path, line):
    """Nobody makes the machine impure by moving the clock next door."""
    (tmp_path / "_fleet").mkdir()
    (tmp_path / "_fleet/machine.py").write_text(line)
    (tmp_path / "_fleet/clock.py").write_text("import time")

    assert impurities(tmp_path) == ["_fleet/clock.py: must be pure, but imports time"]


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("_worker/loop.py", "from outlive._transport import cells\nfrom outlive._capture import blackbox"),
        ("errors.py", "from outlive.records import Incident"),
        ("_fleet/machine.py", "from outlive.records import Incident\nfrom outlive._fleet.policy import decide"),
        ("_fleet/machine.py", "from . import policy\nimport dataclasses"),
        ("__init__.py", "from outlive.loader import DataLoader"),
    ],
)
def test_no_check_complains_of_what_is_allowed(tmp_path, name, source):
    """The rules forbid no more than the design does."""
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(f'"""Doc."""\n{source}')

    assert wrong_imports(tmp_path) + impurities(tmp_path) + untidy_modules(tmp_path) == []


def test_import_is_light_in_a_fresh_interpreter(tmp_path):
    """`import outlive` costs nobody a second: it loads itself, and all else when first needed; torch above all."""
    program = (
        "import json, sys; before = set(sys.modules); import outlive; print(json.dumps([*set(sys.modules) - before]))"
    )

    answer = subprocess.check_output([sys.executable, "-c", program], cwd=tmp_path, stdin=subprocess.DEVNULL)

    assert set(json.loads(answer)) - {"__future__"} == {"outlive"}
