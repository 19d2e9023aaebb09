"""What notebooks show: tables in which no text of the user's is markup.

Reads   HTML, by a real parser.
Writes  nothing.
Never   a browser.
"""

from __future__ import annotations

from html.parser import HTMLParser

import pytest
from hypothesis import given

from forensics import example_incidents
from outlive import errors
from outlive._forensics import page
from outlive._forensics.job import Job
from outlive._forensics.ledger import Incidents, Quarantine
from outlive.incident import Failure, Incident
from outlive.pool.mapping import Failed, Failures
from outlive.verdicts import Name, Verdict

HOSTILE = "<script>alert('\"&')</script><img src=x onerror=alert(1)>\x1b[31m\0\udc80"


class ParsedPage(HTMLParser):
    """The elements, attributes and text of a document."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.open: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        if tag not in ("meta", "line", "polyline", "polygon", "circle"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def hostile() -> Incident:
    """Every text of it wants to be markup."""
    verdict = Verdict(Name.UNKNOWN, HOSTILE, (HOSTILE,), (HOSTILE,))
    failure = Failure(HOSTILE, HOSTILE, f'  File "{HOSTILE}", line 1\n{HOSTILE}')
    return example_incidents.segfault(
        indices=(HOSTILE,),
        action=HOSTILE,
        id=HOSTILE,
        verdict=verdict,
        failure=failure,
        stack=f"{example_incidents.STACK}{HOSTILE}",
    )


def shown(kind: str, incident: Incident) -> str:
    quarantine = Quarantine()
    quarantine.put(1, incident)
    job = Job(HOSTILE, HOSTILE, 1, HOSTILE, 2)
    return {
        "incident": incident._repr_html_,
        "incidents": Incidents([incident, incident])._repr_html_,
        "quarantine": quarantine._repr_html_,
        "failures": Failures([Failed((HOSTILE,), errors.WorkerCrashedError(HOSTILE, incident))])._repr_html_,
        "crash error": lambda: errors.WorkerCrashedError("m", incident)._repr_html_() or "",
        "limit error": errors.TooManyFaultsError("m", [incident])._repr_html_,
        "page": lambda: page.of_incident(incident, job, now=0.0, version=HOSTILE),
    }[kind]()


KINDS = ["incident", "incidents", "quarantine", "failures", "crash error", "limit error", "page"]
ALLOWED = {
    *("table", "caption", "thead", "tbody", "tr", "th", "td", "p"),
    *("html", "head", "meta", "title", "style", "body", "main", "h1", "h2", "span", "section", "dl", "dt", "dd", "pre"),
    *("footer", "svg", "line", "text", "polyline", "polygon", "circle"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_hostile_texts_are_shown_and_not_obeyed(kind):
    """A file name or a message that is markup stays text."""
    seen = ParsedPage(shown(kind, hostile()))

    assert seen.tags <= ALLOWED
    assert not {name for name in seen.attributes if name.startswith("on") or name in ("src", "href")}
    assert "<script>alert" in seen.text
    assert not {"\x1b", "\0", "\udc80"} & set(seen.text)
    assert seen.open == []


@given(example_incidents.incidents)
def test_any_incident_can_be_shown(incident):
    """Whatever is missing or odd: balanced markup that can be written to a file."""
    for kind in KINDS:
        text = shown(kind, incident)
        assert ParsedPage(text).open == []
        assert text.encode("utf-8")


def test_a_table_says_what_why_where_and_what_to_do():
    """The rows that one looks for, in this order."""
    text = ParsedPage(example_incidents.segfault()._repr_html_()).text

    parts = [
        *("died of SIGSEGV while fetching sample 18204", "null-pointer (likely)", "read of address 0x0"),
        *("dataset.py:88 decode", "cv::imdecode+0x1f", "left out", "pip install -U", "outlive report 7f3a12cd"),
    ]
    places = [text.index(part) for part in parts]
    assert places == sorted(places)


def test_an_exception_shows_the_line_that_raised():
    """There is no stack of a dead process, but a traceback."""
    assert 'File "a.py", line 3, in decode' in ParsedPage(example_incidents.raised()._repr_html_()).text


def test_a_long_list_is_cut():
    """A notebook stays usable after 5,000 bad samples."""
    text = Incidents([example_incidents.raised()] * 150)._repr_html_()

    assert text.count("<tr>") == 101
    assert "and 50 more" in text
    assert Incidents()._repr_html_() == "<p>no incidents</p>"


def test_columns_are_named_for_what_is_in_them():
    """Samples of workers, tasks of workers, ranks."""
    sample, task = example_incidents.segfault(), example_incidents.segfault(noun="task")
    rank = example_incidents.segfault(role="rank", indices=(), index=None)

    def head(*incidents):
        return ParsedPage(Incidents(incidents)._repr_html_().partition("</thead>")[0] + "</thead></table>").text

    assert head(sample) == "idworkersampleverdictcausewhat was done"
    assert head(sample, task) == "idworkersample or taskverdictcausewhat was done"
    assert head(rank) == "idrankverdictcausewhat was done"


def test_failures_show_arguments_and_cause():
    """Of deaths the verdict, of exceptions their text; a long list is cut."""
    crashed = Failed(("a.jpg", 3), errors.WorkerCrashedError("m", example_incidents.segfault()))
    raised = Failed((HOSTILE, [1]), ValueError("no such key\nand more"))

    text = ParsedPage(Failures([crashed, raised] * 51)._repr_html_()).text
    for part in ("'a.jpg', 3", "WorkerCrashedError", "null-pointer", "7f3a12cd", "<list>", "ValueErrorno such key"):
        assert part in text
    assert "and more" not in text
    assert text.endswith("and 2 more")
    assert Failures()._repr_html_() == "<p>no failures</p>"


def test_an_error_without_an_incident_has_no_table():
    """IPython then falls back to text."""
    assert errors.WorkerCrashedError("m")._repr_html_() is None


def test_the_page_needs_nothing_from_elsewhere():
    """One file: it can be mailed, and opened where there is no network."""
    text = page.of_incident(
        example_incidents.segfault(), Job("train.py", "/data", 9, "node7", 3), now=1_700_007_200, version="1"
    )

    assert "default-src 'none'" in text
    assert not {word for word in ("http:", "https:", "url(", "@import", "<script", "<link") if word in text}
    seen = ParsedPage(text)
    assert "svg" in seen.tags
    for part in ("peak 900 MiB", "limit of the cgroup 1.0 GiB", "2 hours ago", "mov rax,[rdi]", "rank 3", "left out"):
        assert part in seen.text
