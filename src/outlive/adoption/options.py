"""The options of supervision as text: on the command line, and in OUTLIVE_… variables.

Reads   words; the environment.
Writes  nothing.
Never   means anything else than the option of the same name of `DataLoader` and `FaultPolicy`, whose checks apply.
"""

from __future__ import annotations

import builtins
import dataclasses
import importlib
import os
from collections.abc import Mapping, Sequence
from typing import Any

from outlive import limits
from outlive.settings import FaultPolicy, check_threads

PREFIX = "OUTLIVE_"
# faults=, and the options of DataLoader that a text can say.
LOADER_OPTIONS = ("worker_threads", "memory_limit", "memory_budget", "recycle_after", "share_dataset", "quarantine")
POLICY_OPTIONS = tuple(field.name for field in dataclasses.fields(FaultPolicy) if field.name != "on_error")
NAMES = ("faults", *POLICY_OPTIONS, *LOADER_OPTIONS)


def variable(name: str) -> str:
    """max_restarts → OUTLIVE_MAX_RESTARTS."""
    return PREFIX + name.upper()


def from_environment() -> dict[str, Any]:
    """What the OUTLIVE_… variables say, as options of `DataLoader`."""
    return loader_options({name: text for name in NAMES if (text := os.environ.get(variable(name), "").strip())})


def loader_options(texts: Mapping[str, str]) -> dict[str, Any]:
    """Options of `DataLoader` from texts; a text that says nothing is an error that names its variable."""
    values = {name: _value(name, text) for name, text in texts.items()}
    policy = {name: values.pop(name) for name in POLICY_OPTIONS if name in values}
    if "faults" in values:
        policy["on_error"] = values.pop("faults")
    try:
        if policy:
            values["faults"] = FaultPolicy(**policy)
        limits.limits_of(values.get("memory_limit"), values.get("recycle_after"))
        limits.budget_of(values.get("memory_budget"))
        check_threads(values.get("worker_threads", 1))
        if "quarantine" in values:
            from outlive.loader import quarantine_file

            quarantine_file.check(values["quarantine"])
    except (ValueError, TypeError) as error:
        named = ", ".join(f"{variable(name)}={text}" for name, text in texts.items())
        raise type(error)(f"{error} (from {named})") from None
    return values


def _value(name: str, text: str) -> Any:
    if name == "retry_on":
        return tuple(_exception(word.strip()) for word in text.split(",") if word.strip())
    if name == "quarantine":
        return tuple(path for path in text.split(os.pathsep) if path)
    word = text.lower()
    if name == "share_dataset":
        if word in ("1", "true", "yes", "on", "0", "false", "no", "off"):
            return word in ("1", "true", "yes", "on")
        raise ValueError(f"{variable(name)} must be 1 or 0, got {text!r}")
    if word == "none":
        return None
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _exception(name: str) -> type[BaseException]:
    """«OSError», or «package.module.Error»."""
    module, _, last = name.rpartition(".")
    try:
        found = getattr(importlib.import_module(module) if module else builtins, last)
    except (ImportError, AttributeError):
        found = None
    if not (isinstance(found, type) and issubclass(found, BaseException)):
        raise ValueError(
            f"{variable('retry_on')} takes names of exceptions, such as OSError or requests.exceptions.Timeout, "
            f"separated by commas; got {name!r}"
        )
    return found


def parse(words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Options at the beginning of a command line, as texts by name, and what follows them.

    Every option has a value, behind it or after «=», except --share-dataset and --dash. The last one of a name counts,
    except that files of --quarantine are obeyed together; they are told by their whole names, for a program may go
    elsewhere.
    """
    texts: dict[str, str] = {}
    rest = list(words)
    while rest and rest[0].startswith("--") and rest[0] != "--":
        word = rest.pop(0)
        name, equals, text = word[2:].partition("=")
        name = name.replace("-", "_")
        if name not in (*NAMES, "journal", "dash"):
            raise ValueError(f"there is no option {word}; see `outlive run --help`")
        if name == "dash" and equals:
            raise ValueError(f"--dash takes no value, got {word}; `outlive dash` by itself has options")
        if not equals and name in ("share_dataset", "dash"):
            text = "1"
        elif not equals:
            if not rest:
                raise ValueError(f"{word} needs a value")
            text = rest.pop(0)
        if name == "quarantine":
            given = [os.path.abspath(path) for path in text.split(os.pathsep) if path]
            if not given:
                raise ValueError(f"{word} names no file; make one with `outlive check module:dataset --output FILE`")
            text = os.pathsep.join([*([texts[name]] if name in texts else []), *given])
        texts[name] = text
    return texts, rest
