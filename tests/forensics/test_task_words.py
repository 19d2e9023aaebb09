"""What is said about a task of a pool: no sentence of any verdict speaks of samples, batches or a loader.

Reads   the sentences of all rules, through `ast`; real verdicts are in tests/pool.
Writes  nothing.
Never   a sentence by hand: one that is added to a rule tomorrow is looked at, too.
"""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import outlive
from forensics import example_incidents
from outlive import errors, tables
from outlive._forensics import report, task_words
from outlive.evidence import NO_EVIDENCE
from outlive.incident import Exit, Failure, Incident, IncidentKind, InHand, Stage
from outlive.verdicts import Name, Verdict

HOUSE = Path(outlive.__file__).parent
SPOKEN = [*sorted((HOUSE / "_forensics/rules").glob("*.py")), HOUSE / "_forensics/verdict.py"]
# Words of a loader; «batch system» and «sbatch» are somebody else's.
FOREIGN = re.compile(
    r"\bsamples?\b|dataset|\bbatch(?:es)?\b(?! system)|__getitem|loader|collate|worker_init_fn|prefetch|num_workers|"
    r"\bepoch|trainer|training|sample_timeout|multiprocessing_context|quarantine",
    re.IGNORECASE,
)
OTHERS_STAGES = (Stage.FORWARDING, Stage.FETCHING_MANY, Stage.COLLATING, Stage.PROBING, Stage.RUNNING)
KEYS = {"worker_init_fn", "unpickling the dataset", "iter(dataset)"}  # steps: they come out as «… raised ValueError»


class Sentences(ast.NodeVisitor):
    """Every text of a module, and whether it is a remedy."""

    def __init__(self, remedy: bool) -> None:
        self.found: list[tuple[str, bool]] = []
        self._remedy = remedy

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        body = node.body[1:] if ast.get_docstring(node) else node.body
        self._within(any(word in node.name for word in ("remed", "_slow", "_use_less", "_make_room")), body)

    def visit_Assign(self, node: ast.Assign) -> None:
        name = ast.unparse(node.targets[0])
        self._within((name.isupper() and name != "_IN") or "remed" in name or name == "wrap", [node.value])

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self._within(True, [node.value] if node.value else [])

    def visit_Call(self, node: ast.Call) -> None:
        is_verdict = isinstance(node.func, ast.Name) and node.func.id == "Verdict"
        appended = ast.unparse(node.func) == "remedies.append"
        for at, argument in enumerate(node.args):
            self._within(appended or (is_verdict and at == 3), [argument])
        for keyword in node.keywords:
            self._within(keyword.arg == "remedies", [keyword.value])

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        self.found.append(("".join(v.value if isinstance(v, ast.Constant) else "7" for v in node.values), self._remedy))

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str):
            self.found.append((node.value, self._remedy))

    def _within(self, remedy: bool, nodes: list[ast.stmt] | list[ast.expr]) -> None:
        before, self._remedy = self._remedy, self._remedy or remedy
        for node in nodes:
            self.visit(node)
        self._remedy = before


def sentences() -> Iterator[tuple[str, str, bool]]:
    for path in SPOKEN:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        visitor = Sentences(path.name == "instruction_remedies.py")
        for node in tree.body[1:]:
            visitor.visit(node)
        yield from ((path.name, text, remedy) for text, remedy in visitor.found if " " in text)


def a_task(**more: object) -> Incident:
    incident = Incident(
        IncidentKind.CRASH, 3, 2, 4127, -1, InHand(Stage.FETCHING), indices=(7,), index=7, described=("f(3)",)
    )
    return dataclasses.replace(incident, noun="task", exit=Exit(signal=11), **more)  # type: ignore[arg-type]


def test_no_rule_speaks_of_a_loader_to_a_pool():
    """Each sentence of each rule, as a remedy or as a fact, whichever it is."""
    looked_at, foreign = 0, []
    for where, text, remedy in sentences():
        if text in KEYS:
            continue
        looked_at += 1
        verdict = Verdict(Name.UNKNOWN, *(("", (), (text,)) if remedy else (text,)))
        told = task_words.for_task(verdict, a_task())
        for line in (told.cause, *told.remedies):
            if FOREIGN.search(line):
                foreign.append(f"{where}: {line}")

    assert looked_at > 300
    assert "\n".join(foreign) == ""


@pytest.mark.parametrize("step", sorted(KEYS))
def test_steps_of_a_start_are_named_as_a_pool_has_them(step):
    verdict = Verdict(Name.PREPARATION_FAILED, f"{step} raised ValueError: sample 3 of the dataset")

    told = task_words.for_task(verdict, a_task())

    assert told.cause.endswith("raised ValueError: sample 3 of the dataset")  # the user's words stay
    assert not FOREIGN.search(told.cause.partition(" raised ")[0])


def test_the_users_own_words_are_left_alone():
    failure = Failure("ValueError", "bad sample in batch 3: the loader says so", "Traceback …\n")
    verdict = Verdict(Name.EXCEPTION, "ValueError: bad sample in batch 3: the loader says so")

    told = task_words.for_task(verdict, a_task(kind=IncidentKind.EXCEPTION, failure=failure))

    assert told.cause == verdict.cause
    assert told.remedies == ('pool.map(…, faults="skip")   to go on without such tasks; pool.failures then has them',)


@pytest.mark.parametrize("stage", [s for s in Stage if s not in OTHERS_STAGES])
def test_errors_reports_and_tables_of_a_task_speak_of_tasks(stage):
    """In every stage that a pool's worker can be in, with a task in hand and without."""
    whole = a_task(
        in_hand=InHand(stage), evidence=example_incidents.segfault().evidence, verdict=Verdict(Name.KILLED, "so")
    )
    for incident in (whole, dataclasses.replace(whole, index=None, indices=(), evidence=NO_EVIDENCE)):
        texts = [str(incident), errors.task_message(incident), str(errors.start_error(incident, 3))]
        texts += [str(report.summary(incident)), *map(str, report.sections(incident))]
        texts += [incident._repr_html_(), tables.of_incidents([incident])]

        for text in texts:
            assert not FOREIGN.search(text), text
