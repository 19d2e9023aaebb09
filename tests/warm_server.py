"""Start test programs in a process that has imported torch already: 0.8 s of processor time each instead of 2 s.

Reads:   the command, environment, folder and descriptors of each program to start.
Writes:  nothing. One server per pytest process imports torch, NumPy and outlive once, and forks each program.
Never:   serves a program that needs a true fresh interpreter: interpreter options, variables that Python, torch or
         outlive read while they start, or a test that looks for its programs by the environment in /proc. Use
         `subprocess` for those, and say why.

`Popen` and `run` take what those of `subprocess` take, with `sys.executable` first. The server forks twice, and pytest
is a subreaper: a program is a child of pytest itself, so waiting, signals and pidfds work as for any other child.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import json
import os
import runpy
import secrets
import signal
import socket
import subprocess
import sys
import time
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_READ_AT_START = (
    "PYTHON",
    "LD_PRELOAD",
    "OMP_",
    "MKL_",
    "OPENBLAS_",
    "GLIBC_",
    "MALLOC_",
    "OUTLIVE_SYSTEM",
    "LC_",
    "LANG",
)
_HEADER_BYTES = 8
_DESCRIPTORS = 16


class Popen(subprocess.Popen):
    """A child of this process that runs `[sys.executable, …]`, forked from the warm server."""

    # Only the start differs. What holds pipes, communicates and waits is the standard library's.
    def _execute_child(self, args: Any, *rest: Any) -> None:
        (executable, before, _, pass_fds, cwd, env, _, _, shell) = rest[:9]
        (stdin, _, _, stdout, _, stderr) = rest[9:15]
        new_session = rest[20]
        command = [os.fspath(word) for word in args]
        env = dict(os.environ if env is None else env)
        refuse = _reason_for_fresh_interpreter(command, env)
        if executable is not None or before is not None or shell or refuse:
            raise ValueError(f"start this program with subprocess: {refuse or 'it is not just a Python program'}")
        streams = [own if given == -1 else given for given, own in zip((stdin, stdout, stderr), (0, 1, 2))]
        request = {
            "command": command[1:],
            "environment": env,
            "folder": os.fspath(cwd) if cwd is not None else os.getcwd(),
            "passed": list(pass_fds),
            "new_session": bool(new_session),
        }
        try:
            self.pid = _server().start(request, [*streams, *pass_fds])
            self._child_created = True
        finally:
            self._close_pipe_fds(*rest[9:15])


def run(
    command: Sequence[Any],
    *,
    input: Any = None,
    capture_output: bool = False,
    timeout: float | None = None,
    **options: Any,
) -> subprocess.CompletedProcess:
    """Run a program to its end, as `subprocess.run` does."""
    check = options.pop("check", False)
    if capture_output:
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    if input is not None:
        options["stdin"] = subprocess.PIPE
    with Popen(command, **options) as process:
        try:
            stdout, stderr = process.communicate(input, timeout=timeout)
        except BaseException:
            process.kill()
            raise
    ended = subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)
    if check:
        ended.check_returncode()
    return ended


def check_output(command: Sequence[Any], **options: Any) -> Any:
    """What a program that must end well writes to standard output."""
    return run(command, stdout=subprocess.PIPE, check=True, **options).stdout


def _reason_for_fresh_interpreter(command: list[str], env: dict[str, str]) -> str:
    """Why a fork of the server would not be what a fresh interpreter is; empty: it would."""
    if command[0] != sys.executable:
        return f"it runs {command[0]}"
    first = command[1] if len(command) > 1 else "-"
    if first.startswith("-") and first not in ("-c", "-m"):
        return f"the interpreter's option {first} takes effect while it starts"
    differs = sorted(
        name
        for name in env.keys() | os.environ.keys()
        if name.startswith(_READ_AT_START) and name != "PYTHONPATH" and env.get(name) != _environment.get(name)
    )
    return f"{', '.join(differs)} takes effect while an interpreter starts" if differs else ""


# ---------------------------------------------------------------- this process's end of it


class _Server:
    """The server's process. Each request opens a connection: tests fork, and their forks inherit open sockets."""

    def __init__(self) -> None:
        self._address = f"\0outlive-warm-server-{os.getpid()}-{secrets.token_hex(8)}"  # abstract: no file is left
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(self._address)
            listening.listen()
            fd = listening.fileno()
            # stdin, stdout and stderr of the server are never used: each program brings its own.
            command = [sys.executable, __file__, str(fd)]
            self._process = subprocess.Popen(command, pass_fds=[fd], stdin=subprocess.DEVNULL)
        self._owner = os.getpid()
        atexit.register(self.close)

    def start(self, request: dict[str, Any], descriptors: list[int]) -> int:
        body = json.dumps(request).encode()
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(self._address)
            socket.send_fds(connection, [len(body).to_bytes(_HEADER_BYTES, "little")], descriptors)
            connection.sendall(body)
            answer = _read(connection, _HEADER_BYTES)
        return int.from_bytes(answer, "little")

    def close(self) -> None:
        if os.getpid() == self._owner:
            self._process.kill()
            self._process.wait()


_servers: list[_Server] = []
_environment = dict(os.environ)  # of the server; those variables that an interpreter reads at its start


def begin() -> None:
    """Start the server before the first test, so that the leak check takes it for granted."""
    if not _servers:
        _environment.clear()
        _environment.update(os.environ)
        _servers.append(_Server())


def _server() -> _Server:
    begin()
    return _servers[0]


def _read(channel: socket.socket, count: int) -> bytes:
    body = b""
    while len(body) < count:
        part = channel.recv(count - len(body))
        if not part:
            raise EOFError("the warm server has ended; its error is on standard error")
        body += part
    return body


# ---------------------------------------------------------------- the server


def _serve(listening: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Fork a program for each request. Returns in the program's process; the server itself never returns."""
    while True:
        connection, _ = listening.accept()
        with connection:
            header, descriptors, _, _ = socket.recv_fds(connection, _HEADER_BYTES, _DESCRIPTORS)
            request = json.loads(_read(connection, int.from_bytes(header, "little")))
            reader, writer = os.pipe()
            between = os.fork()
            if between == 0:
                between = os.getpid()
                program = os.fork()
                if program:
                    os.write(writer, program.to_bytes(_HEADER_BYTES, "little"))
                    os._exit(0)
                while os.getppid() == between:  # begin as pytest's child: a program may look at its parent
                    time.sleep(0.0005)
                return request, descriptors
            os.waitpid(between, 0)
            connection.sendall(os.read(reader, _HEADER_BYTES))
            for fd in (reader, writer, *descriptors):
                os.close(fd)


def _become(request: dict[str, Any], descriptors: list[int]) -> None:
    """Make of this fork what a fresh interpreter with this command would be."""
    targets = [0, 1, 2, *request["passed"]]
    above = max(targets) + 1  # no copy may lie where another one belongs
    copies = [fcntl.fcntl(fd, fcntl.F_DUPFD, above) for fd in descriptors]
    for copy, target in zip(copies, targets, strict=True):
        os.dup2(copy, target)
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in targets:
            with contextlib.suppress(OSError):  # the descriptor of the listing
                os.close(int(name))
    if request["new_session"]:
        os.setsid()
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    multiprocessing.process.ORIGINAL_DIR = request["folder"]  # spawned workers begin there
    random.seed()
    numpy.random.seed()
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def _run(command: list[str]) -> None:
    """Run a script, `-c code` or `-m module` as `python` does."""
    sys.orig_argv = [sys.executable, *command]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    how = command[0]
    searched = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    try:
        if how == "-m":
            sys.argv = command[1:]
            sys.path[:] = [os.getcwd(), *searched, *_PATH]
            runpy._run_module_as_main(command[1])  # what `python -m` calls
            return
        if how == "-c":
            sys.argv = ["-c", *command[2:]]
            sys.path[:] = ["", *searched, *_PATH]
            code = compile(command[1], "<string>", "exec")
        else:
            sys.argv = list(command)
            sys.path[:] = [str(Path(how).resolve().parent), *searched, *_PATH]
            main.__file__ = how
            main.__cached__ = None
            code = compile(Path(how).read_bytes(), how, "exec")
        exec(code, main.__dict__)
    except Exception as error:
        # As the interpreter reports it: without the frames of this file.
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error.with_traceback(trace), trace
        sys.excepthook(type(error), error, trace)
        sys.exit(1)


if __name__ == "__main__":
    import builtins
    import fcntl
    import multiprocessing.process
    import random

    import numpy

    import outlive
    import outlive.__main__

    for _name in outlive.__all__:
        getattr(outlive, _name)
    del sys.modules["outlive.__main__"]  # its imports stay; `-m outlive` runs it as `__main__`

    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: the server ends with pytest
    _PATH = [path for path in sys.path[1:] if path not in os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    gc.collect()
    gc.freeze()
    _listening = socket.socket(fileno=int(sys.argv[1]))
    _request, _given = _serve(_listening)
    _listening.close()
    _become(_request, _given)
    _run(_request["command"])
