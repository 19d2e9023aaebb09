"""The command `outlive`: what it prints, how it ends, and that it needs no torch.

Reads   a journal in a temporary folder; standard output.
Writes  that journal.
Never   the user's own.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from hypothesis import HealthCheck, given, settings

import outlive
import warm_server
from forensics import example_incidents
from outlive._forensics import journal, words
from outlive.cli import VERBS, explain, main
from outlive.verdicts import Name, Verdict

SOURCES = Path(outlive.__file__).parents[1]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("OUTLIVE_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    yield tmp_path / "home"
    assert journal.flush()


@pytest.fixture
def two(home: Path) -> Path:
    """A crash of two hours ago, and an exception of five minutes ago."""
    exception = Verdict(Name.EXCEPTION, "OSError: image file is truncated")
    keep(example_incidents.segfault(when=time.time() - 7300))
    keep(example_incidents.raised(id="81bc0011", when=time.time() - 305, indices=(101,), verdict=exception))
    return home


def keep(*incidents: outlive.Incident) -> None:
    for incident in incidents:
        journal.add(incident)
    assert journal.flush()


def ask(*args: str, **more: Any) -> Result:
    result = CliRunner().invoke(main, args, prog_name="outlive", **more)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exc_info
    return result


# ---------------------------------------------------------------- incidents


def test_incidents_are_listed_newest_first(two):
    """Job, id, verdict, when, and the sentence."""
    result = ask("incidents")

    lines = result.output.splitlines()
    assert result.exit_code == 0
    assert f"(pid {os.getpid()} on " in lines[0]
    assert [re.sub(" +", " ", line.strip()) for line in lines[1:6]] == [
        "81bc0011 exception 5 minutes ago",
        "worker 3 raised OSError: image file is truncated while fetching sample 101:",
        "left out",
        "7f3a12cd null-pointer 2 hours ago",
        "worker 3 died of SIGSEGV while fetching sample 18204: left out",
    ]
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize(
    ("options", "ids"),
    [
        (["--verdict", "null-pointer"], ["7f3a12cd"]),
        (["--since", "1h"], ["81bc0011"]),
        (["--since", "1d 2h"], ["81bc0011", "7f3a12cd"]),
        (["--sample", "18204"], ["7f3a12cd"]),
        (["--job", "pytest"], ["81bc0011", "7f3a12cd"]),
        (["--limit", "1"], ["81bc0011"]),
    ],
)
def test_incidents_are_filtered(two, options, ids):
    """Each option alone."""
    result = ask("incidents", "--json", *options)

    assert result.exit_code == 0
    assert [json.loads(line)["id"] for line in result.output.splitlines()] == ids


@pytest.mark.parametrize("options", [["--sample", "1820"], ["--verdict", "killed"], ["--job", "nobody's"]])
def test_the_exit_status_is_1_when_nothing_is_found(two, options):
    """So that a script can ask."""
    result = ask("incidents", *options)

    assert result.exit_code == 1
    assert f"no such incidents in {two}" in result.output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--verdict", "kiled"], "kiled"),
        (["--since", "yesterday"], "'yesterday' is no span of time; write 90s, 30m, 2h, 30d or 1w"),
        (["--limit", "0"], "0"),
        (["--no-such"], "--no-such"),
    ],
)
def test_the_exit_status_is_2_when_the_usage_is_wrong(two, options, message):
    """With a sentence that says what is right."""
    result = ask("incidents", *options)

    assert result.exit_code == 2
    assert message in result.output


def test_there_is_more_when_the_list_is_cut(two):
    """And which option shows it."""
    assert "--limit shows more" in ask("incidents", "--limit", "1").output
    assert "--limit shows more" not in ask("incidents", "--limit", "2").output


# ---------------------------------------------------------------- report


def test_a_report_has_everything_in_80_columns(two):
    """Cause, facts, stacks, instruction, memory, machine."""
    result = ask("report", "7f3")

    assert result.exit_code == 0
    for part in (
        *("worker 3 died of SIGSEGV while fetching sample 18204", "  cause     read of address 0x0", "2 hours ago"),
        *("the instruction reads [rdi], and rdi is 0", "outlive explain null-pointer", "dataset.py:88 decode"),
        *(
            "cv::imdecode+0x1f in libimgcodecs.so.4",
            "48 8b 07 c3",
            "rax 0x00007f0000000000  rbx 0x00007f0000000001",
            "marker not found",
        ),
        *("peak      900 MiB", "limit     1.0 GiB", "340 MiB → 840 MiB", "141 batches done", "nofile 1024", "left out"),
    ):
        assert part in result.output
    assert max(map(len, result.output.splitlines())) <= 80


def test_the_newest_is_reported_when_no_id_is_given(two):
    """What just happened."""
    assert ask("report").output == ask("report", "last").output == ask("report", "81bc").output


def test_a_report_is_json_for_programs(two):
    """The incident comes back from it, and its job."""
    told = json.loads(ask("report", "7f3a", "--json").output)

    assert told["job"]["pid"] == os.getpid()
    assert outlive.Incident.from_dict(told).evidence == example_incidents.segfault().evidence


@pytest.mark.parametrize(
    ("args", "file"),
    [
        (["7f3a", "--html"], "outlive-7f3a12cd.html"),
        (["--html", "7f3a"], "outlive-7f3a12cd.html"),
        (["7f3a", "--html", "page.html"], "page.html"),
    ],
)
def test_a_report_is_one_page(two, args, file):
    """Named by its id, or as one likes."""
    result = ask("report", *args)

    assert (result.exit_code, result.output) == (0, f"{file}\n")
    assert "read of address 0x0" in Path(file).read_text(encoding="utf-8")


def test_a_page_can_go_to_standard_output(two):
    """For a mail, or another machine."""
    assert ask("report", "7f3a", "--html", "-").output.startswith("<!DOCTYPE html>")


@pytest.mark.parametrize(
    ("args", "status", "message"),
    [
        (["ffff"], 1, "no incident ffff in "),
        (["7f3a", "--html", "no/such/folder.html"], 1, "no/such/folder.html cannot be written: No such file"),
        (["7f3a", "--html", "a", "--json"], 2, "two answers; choose one"),
    ],
)
def test_a_report_that_cannot_be_given_says_why(two, args, status, message):
    """One sentence, no traceback."""
    result = ask("report", *args)

    assert result.exit_code == status
    assert message in result.output


def test_an_id_that_is_not_clear_is_answered_with_all_it_could_be(two):
    """Two that begin alike."""
    keep(example_incidents.segfault(id="7f3b0000"))

    result = ask("report", "7f3")

    assert result.exit_code == 2
    assert "7f3 is the beginning of 2 incidents: 7f3a12cd, 7f3b0000" in result.output


def test_a_damaged_journal_is_one_sentence(home):
    """What is wrong, and that it mends itself."""
    home.mkdir()
    (home / "journal.sqlite3").write_bytes(b"no database" * 1000)

    for verb in ("incidents", "report"):
        result = ask(verb)
        assert result.exit_code == 1
        assert "cannot be read" in result.output
        assert "begins a new one" in result.output


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(example_incidents.incidents)
def test_any_incident_can_be_reported_and_steers_no_terminal(home, incident):
    """Whatever is missing, whatever characters are in it."""
    journal.forget()
    keep(incident)

    for args in (["incidents"], ["report"], ["report", "--html", "-"]):
        result = ask(*args)
        assert result.exit_code == 0
        assert not re.search(r"[^\n\t\x20-\x7e\xa0-\U0010ffff]", result.output)
        assert result.output.encode("utf-8")


# ---------------------------------------------------------------- forget


def test_incidents_are_forgotten_by_id(two):
    """All or none: a wrong id deletes nothing."""
    assert ask("forget", "7f3a", "ffff").exit_code == 1
    assert len(journal.find()) == 2

    result = ask("forget", "7f3a")

    assert (result.exit_code, result.output) == (0, "1 incident deleted\n")
    assert [entry.id for entry in journal.find()] == ["81bc0011"]


def test_old_incidents_are_forgotten(two):
    """Older than a span of time."""
    assert ask("forget", "--before", "30d").exit_code == 1
    assert ask("forget", "--before", "1h").output == "1 incident deleted\n"
    assert [entry.id for entry in journal.find()] == ["81bc0011"]


def test_everything_is_forgotten_only_on_a_yes(two):
    """A slip of the finger costs nothing."""
    refused = ask("forget", "--all", input="n\n")
    assert refused.exit_code == 1
    assert "Delete all 2 incidents" in refused.output
    assert len(journal.find()) == 2

    assert ask("forget", "--all", input="y\n").output.endswith("2 incidents deleted\n")
    assert ask("forget", "--all").exit_code == 1
    keep(example_incidents.segfault())
    assert ask("forget", "--all", "--yes").output == "1 incident deleted\n"


@pytest.mark.parametrize("args", [[], ["--all", "7f3a"], ["--before", "1d", "--all"]])
def test_forget_wants_one_thing_said(two, args):
    """Nothing, or two things, is a wrong usage."""
    result = ask("forget", *args)

    assert result.exit_code == 2
    assert "say what to forget: one or more ids, or --before 30d, or --all" in result.output
    assert len(journal.find()) == 2


# ---------------------------------------------------------------- explain


@pytest.fixture
def installed_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    page = tmp_path / "null-pointer.md"
    words_of_it = "A pointer that points nowhere was followed, " * 8
    page.write_text(f"# Null pointer\n\n{words_of_it}\n\n- first\n- second\n\n```\ncode  as it is\n```\n")
    monkeypatch.setattr(explain, "PAGE_FOLDERS", (tmp_path / "none", tmp_path))
    return tmp_path


def test_a_verdict_is_explained_in_80_columns(installed_pages):
    """Its page, with paragraphs wrapped and code as it stands."""
    result = ask("explain", "null-pointer")

    assert result.exit_code == 0
    assert result.output.startswith("# Null pointer\n\nA pointer that")
    assert "\n- first\n- second\n" in result.output
    assert "\n    code  as it is\n" in result.output
    assert max(map(len, result.output.splitlines())) <= 80


def test_all_verdicts_are_listed(installed_pages):
    """With the first sentence of each one's page."""
    result = ask("explain")

    assert [line.split()[0] for line in result.output.splitlines()[: len(Name)]] == [name.value for name in Name]
    assert re.search(r"null-pointer +A pointer that points nowhere was followed, .*…\n", result.output)


def test_a_verdict_without_a_page_and_one_that_does_not_exist_are_told_apart(installed_pages):
    """1 and 2; with a guess at what was meant."""
    assert ask("explain", "killed").exit_code == 1

    result = ask("explain", "kiled")

    assert result.exit_code == 2
    assert "kiled is no verdict; did you mean killed?" in result.output


def test_pages_are_found_in_a_checkout():
    """Where people read them, under docs/crashes."""
    assert (SOURCES.parent / "docs" / "crashes") in explain.PAGE_FOLDERS


# ---------------------------------------------------------------- the command itself


@pytest.mark.parametrize("verb", VERBS)
def test_the_help_of_a_verb_is_its_files_docstring(verb):
    """In 80 columns, with the exit status."""
    result = ask(verb, "--help")

    assert result.exit_code == 0
    assert f"outlive {verb}" in result.output
    assert "Exit status:" in result.output
    assert max(map(len, result.output.splitlines())) <= 80


def test_the_command_lists_its_verbs():
    """`outlive` alone says what there is."""
    output = ask("--help").output

    assert all(verb in output for verb in VERBS)


def test_journal_and_command_need_no_torch(two):
    """A login node has none; neither has who only uses the pool."""
    program = (
        "import sys; sys.modules['torch'] = None; sys.argv = ['outlive', 'report', '7f3a']\n"
        "import outlive.__main__; outlive.__main__.main()"
    )
    environment = {**os.environ, "PYTHONPATH": str(SOURCES)}
    out = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60)

    assert out.returncode == 0, out.stderr
    assert "read of address 0x0" in out.stdout


def test_python_m_outlive_is_the_command(two):
    """For an environment whose scripts are not on the path."""
    environment = {**os.environ, "PYTHONPATH": str(SOURCES)}
    command = [sys.executable, "-m", "outlive", "incidents", "--limit", "1"]
    out = warm_server.run(command, env=environment, capture_output=True, text=True, timeout=60)

    assert out.returncode == 0, out.stderr
    assert "81bc0011" in out.stdout


# ---------------------------------------------------------------- words


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (-60, "in the future"),
        (0, "just now"),
        (30, "30 seconds ago"),
        (60, "1 minute ago"),
        (7300, "2 hours ago"),
        (86400 * 3, "3 days ago"),
        (86400 * 800, "2 years ago"),
    ],
)
def test_times_are_told_as_people_do(seconds, said):
    """Whole units, the largest that fits."""
    assert words.ago(1000.0, 1000.0 + seconds) == said


@pytest.mark.parametrize(
    ("count", "said"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (900 << 20, "900 MiB"),
        (1 << 30, "1.0 GiB"),
        (3 << 40, "3.0 TiB"),
    ],
)
def test_sizes_have_units(count, said):
    """Binary ones, as limits are set in them."""
    assert words.size(count) == said


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("1h30m", 5400), ("2d", 172800), ("1.5 h", 5400), ("1w", 604800)]
)
def test_spans_of_time_can_be_written(text, seconds):
    """One or more numbers with units."""
    assert words.span_s(text) == seconds


@pytest.mark.parametrize("text", ["", "5", "h", "-2h", "2h!", "2 hours"])
def test_what_is_no_span_of_time_is_refused(text):
    """Rather than guessed at."""
    with pytest.raises(ValueError, match="is no span of time"):
        words.span_s(text)
