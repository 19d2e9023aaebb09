"""`outlive run`: becomes the program that it is given, with the environment that has its loaders supervised.

Reads   the command line, PYTHONPATH.
Writes  OUTLIVE_… variables and PYTHONPATH, for the program and all that it starts.
Never   stays: the program takes this process over, with its pid, its streams, its signals and its exit status.

    outlive run train.py  →  python train.py, and in each Python of it:
        startup/sitecustomize.py → hook (waits for torch) → installing (patches it) → adopted iterators
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import MutableMapping, Sequence
    from typing import NoReturn

STARTUP = os.path.join(os.path.dirname(os.path.abspath(__file__)), "startup")
_DASH = "--dash"  # among settings, where no variable has such a name
_NOT_FOUND, _NOT_EXECUTABLE = 127, 126  # as shells have it


class UsageError(Exception):
    """The command line says nothing that can be run."""


def run(words: Sequence[str]) -> NoReturn:
    """Become the program that `words` name, options of ours before it."""
    settings, rest = _settings(words)
    command = command_of(rest)
    with_dashboard = settings.pop(_DASH, "")
    environment = dict(os.environ)
    prepare(environment, settings)
    if with_dashboard:
        _start_dashboard({**os.environ, **settings})
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execvpe(command[0], command, environment)
    except OSError as error:
        print(f"outlive run: {command[0]}: {error.strerror}", file=sys.stderr)
        raise SystemExit(_NOT_FOUND if isinstance(error, FileNotFoundError) else _NOT_EXECUTABLE) from None


def prepare(environment: MutableMapping[str, str], settings: dict[str, str]) -> None:
    """Have Pythons that are started with this environment supervise their loaders."""
    environment.update(settings)
    others = environment.get("PYTHONPATH", "")
    entries = [entry for entry in others.split(os.pathsep) if entry != STARTUP] if others else []
    environment["PYTHONPATH"] = os.pathsep.join([STARTUP, *entries])


def _settings(words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """The variables that our options mean, checked, and the words after them."""
    if not words or not words[0].startswith("--") or words[0] == "--":
        return {}, list(words)  # without the cost of reading options
    from outlive.adoption import options

    try:
        texts, rest = options.parse(words)
        journal, dash = texts.pop("journal", ""), texts.pop("dash", "")
        options.loader_options(texts)
    except (ValueError, TypeError) as error:
        raise UsageError(str(error)) from None
    settings = {options.variable(name): text for name, text in texts.items()}
    if journal.lower() in ("off", "0", "no"):
        settings["OUTLIVE_JOURNAL"] = "0"
    elif journal:
        settings["OUTLIVE_HOME"] = os.path.abspath(journal)
    return ({**settings, _DASH: dash} if dash else settings), rest


def _start_dashboard(environment: dict[str, str]) -> None:
    """A server that says where it is, goes into the background and ends some time after this process does."""
    import subprocess

    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    command = [sys.executable, *flags, "-m", "outlive", "dash", "--beside", str(os.getpid())]
    if subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, check=False).returncode:
        print("outlive run: the program runs without its dashboard", file=sys.stderr)


def command_of(rest: list[str]) -> list[str]:
    """What is to be executed: a script or a module by this very Python, or the command behind «--»."""
    if rest[:1] == ["--"]:
        command = rest[1:]
    elif rest and (rest[0] in ("-m", "-c") or not rest[0].startswith("-")):
        command = [sys.executable, *_interpreter_flags(), *rest]
    elif rest:
        raise UsageError(f"there is no option {rest[0]}; options of python go behind --: outlive run -- python …")
    else:
        command = []
    if not command:
        raise UsageError("say what to run: a script, -m module, or -- and a command")
    return command


def _interpreter_flags() -> list[str]:
    """Those of this very Python: `python -W error -m outlive run train.py` means them for the program."""
    if len(sys.orig_argv) > 1 and sys.orig_argv[1].startswith("-") and sys.orig_argv[1] != "-m":
        import subprocess

        return subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined,no-any-return]
    return []
