"""Check the tables of docs/reference against the code, in both directions.

Reads:   docs/reference, signatures, click parameters, and the source of the package as text.
Writes:  nothing.
Never:   starts a process.

Each check returns complaints. `test_a_wrong_table_is_found` sees to it that each of them can complain.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import functools
import inspect
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import click
import pytest
import torch

import outlive
from outlive import cli
from outlive.adoption import options
from outlive.launch.group import SpawnContext
from outlive.pool.executor import policy_of

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "docs" / "reference"
CODE = re.compile(r"`([^`]+)`")
Rows = dict[str, list[str]]


# ---------------------------------------------------------------- reading the pages


def text_of(page: str) -> str:
    return (REFERENCE / page).read_text(encoding="utf-8")


def sections(text: str) -> dict[str, str]:
    """Return the text below each heading, by heading."""
    parts = re.split(r"^#+ (.+)$", text, flags=re.M)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def table(text: str, heading: str) -> Rows:
    """Return the rows of the table below a heading, by their first cell."""
    lines = [line for line in sections(text)[heading].splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    rows = cells[2:]  # without the head and the line below it
    assert all(len(row) == len(cells[0]) for row in rows), f"{heading}: a row has too many or too few cells"
    firsts = [row[0] for row in rows]
    assert len(firsts) == len(set(firsts)), f"{heading}: a row occurs twice"
    return {row[0]: row[1:] for row in rows}


def compare(documented: Iterable[Any], real: Iterable[Any]) -> list[str]:
    """Return a complaint for each entry that only one side has."""
    documented, real = set(documented), set(real)
    missing = [f"missing: {entry}" for entry in sorted(real - documented, key=str)]
    return missing + [f"stale: {entry}" for entry in sorted(documented - real, key=str)]


def without_sentence(rows: Rows) -> list[str]:
    """Return a complaint for each row whose last cell is not a sentence."""
    return [f"no sentence: {name}" for name, cells in rows.items() if not re.fullmatch(r"\S.*[.)]", cells[-1])]


# ---------------------------------------------------------------- parameters


def shown(value: Any) -> str:
    """Return a default as the pages write it."""
    if value is inspect.Parameter.empty:
        return "required"
    if isinstance(value, enum.Enum):
        return f"`{type(value).__module__}.{value.name}`".replace("Signals", "signal")
    return f"`{value!r}`".replace("'", '"')


def parameters(function: Callable[..., Any]) -> dict[str, str]:
    """Return the parameters of a function with their defaults."""
    found = inspect.signature(function).parameters
    return {f"`{name}`": shown(parameter.default) for name, parameter in found.items() if name != "self"}


def only(names: Iterable[str], function: Callable[..., Any]) -> dict[str, str]:
    return {name: default for name, default in parameters(function).items() if name in names}


def complaints_about_parameters(text: str, heading: str, real: dict[str, str]) -> list[str]:
    rows = table(text, heading)
    documented = {name: cells[0] for name, cells in rows.items()}
    return compare(documented.items(), real.items()) + without_sentence(rows)


OF_TORCH = parameters(torch.utils.data.DataLoader).keys()
OF_OUTLIVE = parameters(outlive.DataLoader).keys() - OF_TORCH
TABLES: dict[tuple[str, str], dict[str, str]] = {
    ("dataloader.md", "Arguments of torch"): only(OF_TORCH, outlive.DataLoader),
    ("dataloader.md", "Arguments of outlive"): only(OF_OUTLIVE, outlive.DataLoader),
    ("fault-policy.md", "`outlive.FaultPolicy`"): parameters(outlive.FaultPolicy),
    ("pool.md", "`Pool`"): parameters(outlive.Pool),
    ("pool.md", "`Pool.map`"): parameters(outlive.Pool.map),
    ("spawn.md", "`spawn`"): parameters(outlive.spawn),
}


@pytest.mark.parametrize(("page", "heading"), TABLES)
def test_every_parameter_is_listed_with_its_default(page, heading):
    """Names and defaults are those of the signature."""
    assert complaints_about_parameters(text_of(page), heading, TABLES[page, heading]) == []


def test_the_arguments_of_torch_come_first():
    """The pages say that they stand in the same place as in torch and in concurrent.futures."""
    theirs = list(inspect.signature(torch.multiprocessing.spawn).parameters)

    assert list(inspect.signature(outlive.spawn).parameters)[: len(theirs)] == theirs == list(parameter_names("spawn"))
    assert "The first six parameters are those of torch" in text_of("spawn.md")


def parameter_names(heading: str) -> list[str]:
    return [name.strip("`") for name in table(text_of(f"{heading}.md"), f"`{heading}`")][:6]


def test_a_policy_is_made_of_its_parameters():
    """FaultPolicy has no field that the constructor does not take."""
    assert {f"`{field.name}`" for field in dataclasses.fields(outlive.FaultPolicy)} == set(
        parameters(outlive.FaultPolicy)
    )


# ---------------------------------------------------------------- methods and properties


def members(cls: type, parent: type) -> dict[str, str]:
    """Return the public members that a class adds to its parent, as the pages write them."""
    assigned = re.findall(r"^ {8}self\.([a-z]\w*)\b[^()\n]*=", inspect.getsource(cls.__init__), re.M)  # type: ignore[misc]
    names = {name for name in dir(cls) if not name.startswith("_")} - set(dir(parent))
    names |= {name for name in assigned if name not in inspect.signature(cls).parameters}
    return {name: call(name, getattr(cls, name, None)) for name in names}


def call(name: str, member: Any) -> str:
    """Return `name`, or `name(parameter, other=default)` if it is a method."""
    if not callable(member):
        return name
    words = []
    for parameter in list(inspect.signature(member).parameters.values())[1:]:
        stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        default = "" if parameter.default is parameter.empty else f"={shown(parameter.default).strip('`')}"
        words.append(f"{stars}{parameter.name}{default}")
    return f"{name}({', '.join(words)})"


def complaints_about_members(text: str, heading: str, cls: type, parent: type) -> list[str]:
    rows = table(text, heading)
    real = members(cls, parent)
    for name in rows:
        if name.endswith(", ...)`"):  # its options have a table of their own
            short = name.partition("(")[0].strip("`")
            assert f"`{cls.__name__}.{short}`" in sections(text)
            real[short] = name.strip("`")
    return compare([name.strip("`") for name in rows], real.values()) + without_sentence(rows)


@pytest.mark.parametrize(
    ("page", "heading", "cls", "parent"),
    [
        ("dataloader.md", "Methods and properties", outlive.DataLoader, torch.utils.data.DataLoader),
        ("pool.md", "Methods and properties", outlive.Pool, object),
        ("spawn.md", "`SpawnContext`", SpawnContext, object),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_every_method_and_property_is_listed(page, heading, cls, parent):
    """What a class adds is listed, with the parameters of its methods."""
    assert complaints_about_members(text_of(page), heading, cls, parent) == []


OTHER_VALUES: dict[str, Any] = {
    **{"on_error": "skip", "on_crash": "skip", "retries": 2, "retry_on": (OSError,), "backoff_s": 1.0},
    **{"backoff_max_s": 1.0, "jitter": 0.5, "sample_timeout": 1.0, "hang_floor_s": 1.0, "max_restarts": 1},
    **{"hang_wait_s": 1.0, "hang_wait_max_s": 1.0, "hang_busy_s": 1.0},
    **{"restart_window_s": 1.0, "max_bad": 1, "breaker_patience": 1.0, "ranks": "agree", "ranks_grace_s": 1.0},
}


def test_the_fields_that_a_pool_refuses_are_listed():
    """A pool takes every other field of a FaultPolicy."""
    refused = []
    for field in dataclasses.fields(outlive.FaultPolicy):
        try:
            policy_of(outlive.FaultPolicy(**{field.name: OTHER_VALUES[field.name]}), None, None)
        except ValueError:
            refused.append(f"`{field.name}`")

    assert compare(table(text_of("pool.md"), "Fields of `FaultPolicy`"), refused) == []


# ---------------------------------------------------------------- the command line


def names_of(cell: str) -> frozenset[str]:
    """Return the options that a first cell names: `--json`, or `-h`, `--help`."""
    return frozenset(code.split()[0] for code in CODE.findall(cell))


def command_of(verb: str) -> click.Command:
    command = cli.main.get_command(click.Context(cli.main), verb)
    assert command is not None
    return command


def default_of(option: click.Option, command: click.Command) -> str:
    """Return the default of an option as the page writes it. An empty text stands for any words."""
    default = option.get_default(click.Context(command))
    if option.is_flag:
        return "on" if default else "off"
    return f"`{default}`" if default not in (None, "", ()) and not str(default).startswith("Sentinel") else ""


def options_of(verb: str) -> dict[frozenset[str], str]:
    """Return the options of a verb with their defaults."""
    if verb == "run":
        return options_of_run()
    command = command_of(verb) if verb else cli.main
    found = [each for each in command.get_params(click.Context(command)) if isinstance(each, click.Option)]
    if verb:
        found = [option for option in found if not option.hidden and "--help" not in option.opts]
    helps = frozenset(command.context_settings.get("help_option_names", ["--help"]))
    return {
        helps if "--help" in option.opts else frozenset([*option.opts, *option.secondary_opts]): default_of(
            option, command
        )
        for option in found
    }


def options_of_run() -> dict[frozenset[str], str]:
    """Return what `outlive run` takes: it parses its options itself."""
    defaults = {
        **{field.name: field.default for field in dataclasses.fields(outlive.FaultPolicy)},
        **{name: it.default for name, it in inspect.signature(outlive.DataLoader).parameters.items()},
    }
    flags = {"share_dataset": "off", "dash": "off", "journal": ""}
    plain = {name: f"`{value}`" if value not in (None, ()) else "" for name, value in defaults.items()}
    names = [*options.NAMES, "journal", "dash"]
    return {frozenset([f"--{name.replace('_', '-')}"]): {**plain, **flags}[name] for name in names}


def complaints_about_options(text: str, verb: str) -> list[str]:
    heading = f"`outlive {verb}`" if verb else "The command `outlive`"
    real = options_of(verb)
    if "It has no options." in sections(text)[heading]:
        return compare([], real)
    rows = table(text, heading)
    documented = {names_of(name): cells[0] for name, cells in rows.items()}
    found = compare(map(sorted_words, documented), map(sorted_words, real)) + without_sentence(rows)
    for names in documented.keys() & real.keys():
        said = documented[names]
        if said != real[names] if real[names] else (not said or "`" in said):
            found.append(f"default of {sorted_words(names)}: the page says {said}, the code {real[names] or 'none'}")
    return found


def sorted_words(names: frozenset[str]) -> str:
    return " ".join(sorted(names))


def test_every_verb_has_a_section():
    """No verb is missing, and no section describes a verb that is gone."""
    headings = [heading for heading in sections(text_of("command-line.md")) if heading.startswith("`outlive ")]

    assert headings == [f"`outlive {verb}`" for verb in cli.VERBS]


@pytest.mark.parametrize("verb", ["", *cli.VERBS])
def test_every_option_is_listed_with_its_default(verb):
    """Options and defaults are those of the command."""
    assert complaints_about_options(text_of("command-line.md"), verb) == []


def test_the_options_that_run_explains_are_listed():
    """The help of `outlive run` names no option that the page lacks."""
    explained = re.findall(r"^ +(--[a-z-]+)", command_of("run").help or "", re.M)

    assert explained
    assert {frozenset([name]) for name in explained} <= options_of_run().keys()


@pytest.mark.parametrize("verb", cli.VERBS)
def test_the_exit_status_is_that_of_the_help(verb):
    """Page and `--help` list the same numbers."""
    helped = (command_of(verb).help or "").partition("Exit status:")[2]
    documented = sections(text_of("command-line.md"))[f"`outlive {verb}`"].partition("Exit status:")[2]

    assert re.findall(r"\d+", documented)
    assert set(re.findall(r"\b\d+\b", documented)) == set(re.findall(r"\b\d+\b", helped))


# ---------------------------------------------------------------- environment variables


@functools.cache
def variables() -> frozenset[str]:
    """Return each variable that the package names: as a whole string in Python, in a call of getenv in C."""
    found = {options.variable(name) for name in options.NAMES}
    for path in (ROOT / "src" / "outlive").rglob("*.py"):
        strings = (node.value for node in ast.walk(ast.parse(path.read_bytes())) if isinstance(node, ast.Constant))
        found |= {text for text in strings if isinstance(text, str) and re.fullmatch(r"OUTLIVE(_[A-Z]+)*", text)}
    for path in (ROOT / "src" / "outlive").rglob("*.[ch]"):
        found |= set(re.findall(r'getenv\("(OUTLIVE\w*)"', path.read_text(encoding="utf-8")))
    return frozenset(found)


VARIABLE_TABLES = ("General", "Options of `outlive run`", "Set by outlive")


def complaints_about_variables(text: str) -> list[str]:
    documented = [name.strip("`") for heading in VARIABLE_TABLES for name in table(text, heading)]
    twice = {name for name in documented if documented.count(name) > 1}
    return compare(documented, variables()) + [f"listed twice: {name}" for name in sorted(twice)]


def test_every_variable_is_listed():
    """The tables name exactly the variables that the source names."""
    assert complaints_about_variables(text_of("environment.md")) == []


def test_each_option_of_run_has_its_variable():
    """The table pairs each option with the variable of the same name."""
    rows = table(text_of("environment.md"), "Options of `outlive run`")
    documented = {name.strip("`"): CODE.findall(cells[0])[0] for name, cells in rows.items()}

    assert documented == {options.variable(name): f"--{name.replace('_', '-')}" for name in options.NAMES}


def test_no_variable_outside_of_the_reference_is_unknown():
    """Other documents name no variable that does not exist, tests aside."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    named = {name for page in pages for name in re.findall(r"\bOUTLIVE(?:_[A-Z]+)*\b", page.read_text("utf-8"))}

    assert named - variables() == set()


# ---------------------------------------------------------------- the checks themselves

CHECKS: list[tuple[str, str, Callable[[str], list[str]]]] = [
    (
        "dataloader.md",
        "`describe`",
        lambda text: complaints_about_parameters(
            text, "Arguments of outlive", TABLES["dataloader.md", "Arguments of outlive"]
        ),
    ),
    ("spawn.md", "`pids()`", lambda text: complaints_about_members(text, "`SpawnContext`", SpawnContext, object)),
    ("command-line.md", "`--interval SECONDS`", lambda text: complaints_about_options(text, "top")),
    ("command-line.md", "`--jitter SHARE`", lambda text: complaints_about_options(text, "run")),
    ("environment.md", "`OUTLIVE_HOME`", complaints_about_variables),
]


@pytest.mark.parametrize(("page", "name", "check"), CHECKS, ids=[f"{page} {name}" for page, name, _ in CHECKS])
def test_a_wrong_row_is_found(page, name, check):
    """A check that cannot fail checks nothing."""
    text = text_of(page)
    (row,) = (line for line in text.splitlines(keepends=True) if line.startswith(f"| {name} |"))
    renamed = row.replace(name, "`--made-up`")

    assert check(text) == []
    assert any(complaint.startswith("missing") for complaint in check(text.replace(row, "")))
    assert any(complaint.startswith("stale") for complaint in check(text.replace(row, row + renamed)))
    assert len(check(text.replace(row, renamed))) == 2


@pytest.mark.parametrize(
    ("page", "row", "right", "wrong", "check"),
    [
        (*("dataloader.md", "`worker_threads`", "`1`", "`2`"), CHECKS[0][2]),
        (*("command-line.md", "`--interval SECONDS`", "`1.0`", "`2.0`"), CHECKS[2][2]),
        (*("command-line.md", "`--ended`", "off", "on"), CHECKS[2][2]),
        (*("command-line.md", "`--jitter SHARE`", "`0.25`", "`0.5`"), CHECKS[3][2]),
    ],
)
def test_a_wrong_default_is_found(page, row, right, wrong, check):
    """Defaults are compared too."""
    assert check(text_of(page).replace(f"| {row} | {right} |", f"| {row} | {wrong} |"))
