"""The recorder's source: what its handler may call, and where it compiles.

Reads   recorder.c as text.
Writes  small libraries, compiled with cc.
Never   installs the recorder in the process that runs the tests.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

from outlive._capture import blackbox, crash

SOURCE = Path(crash.__file__).with_name("recorder.c")


# man 7 signal-safety; plus bare system calls, which hold neither memory nor locks.
SAFE = {
    *("clock_gettime", "close", "getpid", "memcpy", "memset", "open", "poll", "pthread_sigmask", "raise", "read"),
    *("sigaction", "sigaddset", "sigemptyset", "write", "_exit"),
    "syscall",
}


NO_CALLS = {"if", "while", "for", "return", "sizeof", "switch"}


def unsafe_calls(source: str, start: str = "on_fatal_signal") -> set[str]:
    """What the handler calls, by itself or through its own functions, that is not async-signal-safe."""
    source = re.sub(r"/\*.*?\*/|//[^\n]*", " ", source, flags=re.S)
    source = re.sub(r"^#.*$", " ", source, flags=re.M)
    source = re.sub(r'"(\\.|[^"\\])*"', '""', source)
    bodies = dict(re.findall(r"^static [^;{}()=]*?(\w+)\([^;{}]*\)\n\{\n(.*?)^\}", source, re.S | re.M))
    waiting, seen, unsafe = [start], set(), set()
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        for called in re.findall(r"\b([A-Za-z_]\w*)\s*\(", bodies[name]):
            if called in bodies:
                waiting.append(called)
            elif called not in SAFE | NO_CALLS and not called.startswith(("__atomic_", "__builtin_ia32_")):
                unsafe.add(called)
    return unsafe


@pytest.mark.parametrize("handler", ["on_fatal_signal", "on_ending_signal"])
def test_a_handler_calls_only_what_is_async_signal_safe(handler):
    """It may have interrupted anything: malloc, the dynamic linker, Python."""
    assert unsafe_calls(SOURCE.read_text(), handler) == set()


@pytest.mark.parametrize(
    ("place", "line", "found"),
    [
        ("    save_maps();\n", '    printf("%s", "saved (");\n', "printf"),
        ("    int before = errno;\n", "    free(maps);\n", "free"),
        ("    uint32_t count = 0;\n", "    PyErr_Print ();\n", "PyErr_Print"),
    ],
)
def test_an_unsafe_call_is_found(place, line, found):
    """A check that cannot fail checks nothing; calls in functions that the handler calls count, comments do not."""
    source = SOURCE.read_text()
    assert place in source

    assert unsafe_calls(source.replace(place, place + line)) == {found}
    assert unsafe_calls(source.replace(place, f"{place}    /*{line.strip()}*/\n")) == set()


def test_the_recorder_is_built_where_there_is_a_compiler():
    """Optional means that its absence is no error, not that a broken one goes unseen."""
    headers = Path(sysconfig.get_path("include")) / "Python.h"
    if shutil.which("cc") is None or not headers.exists():
        pytest.skip("no C compiler, or no headers of Python")

    assert crash.AVAILABLE, "build it: make setup, or python setup.py build_ext --inplace"
    assert crash.RECORD_SIZE <= blackbox.CRASH_ROOM


@pytest.mark.parametrize("compiler", ["aarch64-linux-gnu-gcc"])
def test_the_source_compiles_for_the_other_architecture(compiler):
    """Without a warning, where there is a compiler for it."""
    if shutil.which(compiler) is None:
        pytest.skip(f"no {compiler}")
    flags = ["-std=c11", "-Wall", "-Wextra", "-Werror", "-fsyntax-only", "-DPy_LIMITED_API=0x030A0000"]

    ended = subprocess.run(
        [compiler, *flags, f"-I{sysconfig.get_path('include')}", str(SOURCE)], capture_output=True, text=True
    )

    assert ended.returncode == 0, ended.stderr
