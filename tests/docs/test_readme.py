"""Run README.md as a reader would: every block, and every command of its table.

Reads:   README.md, the Makefile, pyproject.toml, and the source of the demo as text.
Writes:  the example as a file in a temporary folder.
Never:   runs the demo or the whole test suite, and downloads nothing.
"""

from __future__ import annotations

import ast
import io
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from docs.programs import run_python, run_shell

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SHELL, PYTHON, OUTPUT = "shell", "python", "output"


def blocks() -> list[tuple[str, str]]:
    """Return each block with its kind."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.M | re.S)
    return [(language or (SHELL if is_shell(text) else OUTPUT), text) for language, text in found]


def is_shell(text: str) -> bool:
    return text.split()[0] in ("pip", "make", "outlive")


def commands() -> list[str]:
    """Return each line of the shell blocks without its comment."""
    lines = [line for kind, text in blocks() if kind == SHELL for line in text.splitlines()]
    return [line.partition("#")[0].strip() for line in lines]


def block_with(words: str) -> str:
    (found,) = (text for _, text in blocks() if words in text)
    return found


def table_below(heading: str) -> list[list[str]]:
    """Return the rows of the table in a section."""
    section = README.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


EXAMPLE = block_with("class Numbers")
OUTLIVE_LINE = re.compile(r"^from outlive import DataLoader  # instead of: (.*)$", re.M)


def stock_example() -> str:
    """Return the example as it was before outlive: with the import of torch, and without `faults=` and quarantine."""
    before = OUTLIVE_LINE.sub(r"\1", EXAMPLE).replace(', faults="skip"', "")
    return re.sub(r"\n +for index, incident in .*", "\n", before, flags=re.S)


# ---------------------------------------------------------------- the text


def test_the_readme_is_short():
    """A stranger understands it in thirty seconds, and finds it by the error message."""
    assert len(README.splitlines()) <= 150
    assert re.search(
        r"DataLoader worker \(pid \d+\) is killed by signal: Killed", "".join(README.splitlines(keepends=True)[:10])
    )


def test_every_block_is_tested():
    """The kinds of blocks are those that the tests below run."""
    assert [kind for kind, _ in blocks()] == [OUTPUT, SHELL, SHELL, PYTHON, OUTPUT, SHELL]
    assert {line.split()[0] for line in commands()} == {"pip", "make", "outlive"}


# ---------------------------------------------------------------- the demo


def demo_lines() -> list[re.Pattern[str]]:
    """Return each text that the demo prints, as a pattern with a gap for each value."""
    found = []
    for path in (ROOT / "demo").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_bytes())):
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            texts = [part.value if isinstance(part, ast.Constant) else None for part in parts]
            if all(text is None or isinstance(text, str) for text in texts) and len("".join(filter(None, texts))) > 5:
                found.append(re.compile("".join(".+" if text is None else re.escape(text) for text in texts)))
    return found


@pytest.fixture
def demo(monkeypatch):
    """The module of the demo, imported but not run."""
    pytest.importorskip("rich")
    pytest.importorskip("PIL")
    monkeypatch.syspath_prepend(str(ROOT / "demo"))
    import demo as module

    yield module
    for name in ("demo", "digits", "training"):
        sys.modules.pop(name, None)


def printed(demo: Any, show: Any) -> list[str]:
    """Return what the demo prints at its usual width, line by line."""
    console = demo.Console(file=io.StringIO(), width=100, highlight=False)
    show(console)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def test_the_output_of_the_demo_is_what_it_prints(demo):
    """Each line of the block has the form that the demo gives it, and the table is the table of the demo."""
    lines = block_with("torch.utils.data.DataLoader ─").splitlines()
    table = lines[lines.index("Bad samples (loader.quarantine)") :]
    patterns = demo_lines()
    wrong = []
    for line in lines[: -len(table)]:
        text = line.strip()
        if line.startswith("─"):
            title = text.strip("─ ")
            right = line in printed(demo, lambda console, title=title: console.rule(title))
            right = right and any(pattern.fullmatch(title) for pattern in patterns)
        elif text.startswith("worker "):
            continue  # test_the_example_prints_what_the_readme_says compares these with a real log
        elif text.startswith("epoch "):
            right = re.fullmatch(r"epoch \d ━{40} (\d+)/\1 loss \d\.\d{3} \d:\d\d:\d\d", text) is not None
        else:
            of_torch = re.match(r"(RuntimeError|ConnectionResetError): ", text)
            right = text == "…" or of_torch or any(pattern.fullmatch(text) for pattern in patterns)
        wrong += [] if right else [line]

    assert wrong == []
    assert table == printed(demo, lambda console: console.print(quoted_table(demo, table)))


def quoted_table(demo: Any, lines: list[str]) -> Any:
    """Return the table of the demo, made from the rows of the README."""
    quarantine: dict[int, Any] = {}
    files: dict[int, Any] = {}
    for line in lines:
        cells = [cell.strip() for cell in line.strip("│").split("│")]
        if len(cells) == 6 and cells[0].isdigit():
            number = int(cells[0])
            files[number] = SimpleNamespace(name=cells[1])
            quarantine[number] = SimpleNamespace(slot=cells[2], cause=cells[3], action=cells[4], attempt=cells[5])
        elif len(cells) == 6 and cells[3]:  # the rest of a cause that is broken into two lines
            quarantine[number].cause += f" {cells[3]}"
    assert set(quarantine) == set(demo.PLANTED)
    return demo.table_of(SimpleNamespace(quarantine=quarantine), SimpleNamespace(files=files))


# ---------------------------------------------------------------- installing


def extras() -> set[str]:
    return set(tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"])


def test_the_extras_are_those_of_the_package():
    """The table and the sentence below it name each extra once."""
    sentence = re.search(r"The extras (.*?) are for contributors", README)
    assert sentence is not None
    for_users = [row[0].strip("`") for row in table_below("Install")]

    assert sorted([*for_users, *re.findall(r"`(\w+)`", sentence[1])]) == sorted(extras())


def test_every_extra_that_the_documents_install_exists():
    """`pip install 'outlive[...]'` names an extra of the package, everywhere."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "src" / "outlive").rglob("*.py")]
    named = [
        extra
        for page in pages
        for group in re.findall(r"(?:outlive|'\.)\[(\w+(?:,\w+)*)\]'", page.read_text(encoding="utf-8"))
        for extra in group.split(",")
    ]

    assert set(named) >= {"torch", "dash", "forensics"}
    assert set(named) <= extras()


@pytest.fixture
def checkout(tmp_path):
    """A copy of what an installation reads."""
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", "MANIFEST.in", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("*.so", "__pycache__", "*.egg-info"))
    return tmp_path


def test_the_install_command_is_one_that_pip_accepts(checkout):
    """pip finds the package and the extra, and would install it."""
    (command,) = (line for line in commands() if line.startswith("pip install"))
    dry = command.replace("pip install", "python -m pip install --dry-run --no-deps --no-index --no-build-isolation -I")

    done = run_shell(dry, checkout)

    assert done.returncode == 0, done.stderr
    assert "Would install outlive" in done.stdout
    assert "does not provide the extra" not in done.stdout + done.stderr


def test_the_make_commands_are_targets():
    """`make demo` and `make test` exist."""
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
    named = [line.split()[1] for line in commands() if line.startswith("make ")]

    assert named == ["demo", "test"]
    assert set(named) <= set(targets)


# ---------------------------------------------------------------- the example


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the example as `train.py`, and a journal and a board of its own."""
    folder = tmp_path_factory.mktemp("reader")
    (folder / "train.py").write_text(EXAMPLE, encoding="utf-8")
    return folder


def paste(command: str, folder: Path) -> Any:
    return run_shell(
        command, folder, OUTLIVE_HOME=str(folder / "journal"), OUTLIVE_RUNTIME=str(folder / "runtime"), COLUMNS="100"
    )


def test_the_example_prints_what_the_readme_says(folder):
    """Pasted into a file, it runs as a program."""
    done = paste("python train.py", folder)

    assert done.returncode == 0, done.stderr
    assert done.stdout == block_with("999 samples")
    logged = {shape(line) for line in done.stderr.splitlines() if line.startswith("worker ")}
    assert len(logged) == 2
    assert {shape(line.strip()) for line in README.splitlines() if line.startswith("  worker ")} == logged


def shape(line: str) -> str:
    """Return a line of the log without its numbers, its cause, and what the README shortens."""
    line = re.sub(r"died of SIG\w+|hung for [\d.]+ s", "CAUSE", line)
    return re.sub(r" \(.*\)$| …$", "", re.sub(r"\d+", "N", line))


def test_a_program_with_stock_torch_runs_unchanged(folder):
    """`outlive run` supervises the loader of stock torch in the same program."""
    (command,) = (line for line in commands() if line.startswith("outlive run"))
    assert stock_example().count("outlive") == 0
    (folder / "stock").mkdir()
    (folder / "stock" / "train.py").write_text(stock_example(), encoding="utf-8")

    done = paste(command, folder / "stock")

    assert done.returncode == 0, done.stderr
    assert done.stdout == "999 samples\n"
    assert "1 sample left out or replaced: 421" in done.stderr


# ---------------------------------------------------------------- what else it does


def lines_of_table() -> list[str]:
    """Return the command or the code of each row."""
    return [row[1].strip("`") for row in table_below("What else it does")]


def start_of(line: str) -> str:
    """Return `outlive check` or `outlive.Pool` of a longer line."""
    return re.sub(r"^(outlive[ .]\w+).*", r"\1", line)


# What a reader has already: functions, files, a graph.
BEFORE = """
import outlive, torch
from outlive.graph import NeighborSampler, SharedGraph

files, config = [3, 1, 2], 7

def parse(file):
    return file + 1

def train(rank, number):
    print("rank", rank, "got", number)

graph = SharedGraph.from_edge_index(torch.tensor([[0, 1, 2], [1, 2, 0]]))
sampler = NeighborSampler([2])
"""
AROUND = {
    "outlive.Pool": "assert list({code}) == [4, 2, 3]",
    "outlive.spawn": "assert {code} is None",
    "outlive.graph": "assert len(list({code})) == 3",
}


def test_the_lines_of_code_run():
    """Each line of Python in the table does what its row says."""
    codes = [line for line in lines_of_table() if line.startswith("outlive.")]
    body = [AROUND[start_of(code)].format(code=code) for code in codes]

    done = run_python("\n".join([BEFORE, *body]), "README.md")

    assert done.returncode == 0, done.stderr
    assert len(codes) == len(AROUND)
    assert sorted(done.stdout.splitlines()) == [f"[rank {rank}] rank {rank} got 7" for rank in range(4)]


@pytest.mark.parametrize(
    ("start", "bounded", "status", "words"),
    [
        ("outlive check", "", 1, "1 bad sample"),
        ("outlive chaos", "", 0, "999 samples received, 0 lost"),
        ("outlive top", " --once --ended", 0, "loader Numbers"),
    ],
    ids=["check", "chaos", "top"],
)
def test_the_commands_run(folder, start, bounded, status, words):
    """Each command of the table works on the example. One that would not end is asked for a single answer."""
    (command,) = (line for line in lines_of_table() if line.startswith(start))
    if bounded:
        assert paste("python train.py", folder).returncode == 0  # a job to look at

    done = paste(command + bounded, folder)

    assert done.returncode == status, done.stdout + done.stderr
    assert words in done.stdout


def test_every_line_of_the_table_is_tested():
    """The table has six rows, and the tests above run all of them."""
    starts = sorted(start_of(line) for line in lines_of_table())

    assert starts == sorted([*AROUND, "outlive check", "outlive chaos", "outlive top"])
