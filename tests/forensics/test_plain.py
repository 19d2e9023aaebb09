"""Incidents as plain values: complete, and the same when they come back.

Reads   incidents made by Hypothesis.
Writes  nothing.
Never   a process.
"""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given

from forensics import example_incidents
from outlive._forensics.ledger import StreamIndex
from outlive.evidence import Evidence, Worked
from outlive.incident import Incident
from outlive.plain import plain
from outlive.verdicts import Name


@given(example_incidents.incidents)
def test_an_incident_comes_back_from_json_as_it_was(incident):
    """Every field of every part, whatever characters and numbers are in it."""
    assert Incident.from_json(incident.to_json()) == incident
    assert Incident.from_dict(incident.to_dict()) == incident


@given(example_incidents.incidents)
def test_json_is_one_line_of_ascii(incident):
    """File names that are no UTF-8 pass through every file and socket."""
    text = incident.to_json()

    assert text.isascii()
    assert "\n" not in text
    assert json.loads(text) == incident.to_dict()


def test_the_dictionary_has_the_words_that_people_look_for():
    """Names and hexadecimal numbers as every other tool prints them; no part is missing."""
    told = example_incidents.segfault().to_dict()

    assert (told["kind"], told["signal"], told["stage"], told["indices"]) == ("crash", "SIGSEGV", "fetching", [18204])
    assert told["verdict"]["name"] == "null-pointer"
    assert told["verdict"]["confidence"] == "likely"
    assert told["verdict"]["page"] == "docs/crashes/null-pointer.md"
    assert told["crash"]["instruction"].startswith("488b07c3")
    assert told["crash"]["registers"]["rax"] == "0x7f0000000000"
    assert told["evidence"]["worked"]["memory"][0]["seconds_before"] == 60.0
    assert told["evidence"]["examined"]["place"]["function"] == "cv::imdecode"


class Unspeakable:
    def __repr__(self) -> str:
        raise RuntimeError("no")


@pytest.mark.parametrize(
    ("index", "told"),
    [
        (np.int64(7), 7),
        (np.str_("a"), "a"),
        (np.float64(1.5), 1.5),
        (math.nan, "nan"),
        (("a", 2), "('a', 2)"),
        (StreamIndex(3, 12), "12 of worker 3's stream"),
        (b"x", "b'x'"),
        (Unspeakable(), "<Unspeakable: its repr raised RuntimeError>"),
        ("x" * 9999, "x" * 9999),
        (tuple(range(9999)), repr(tuple(range(9999)))[:499] + "…"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_index_that_is_not_plain_comes_back_as_words(index, told):
    """Whole numbers of any make stay numbers; the incident reads the same afterwards."""
    incident = example_incidents.segfault(indices=(index,), evidence=Evidence(worked=Worked(recent_indices=(index,))))

    again = Incident.from_json(incident.to_json())

    assert plain(index) == told
    assert type(plain(index)) is type(told)
    assert again.indices == again.evidence.worked.recent_indices == (told,)


def test_what_a_newer_version_wrote_can_be_read():
    """Fields and verdicts that nobody knows yet are passed over."""
    told: dict[str, Any] = example_incidents.raised().to_dict() | {"future": 1}
    told["verdict"]["name"] = "cosmic-ray"
    told["evidence"]["future"] = told["failure"]["future"] = told["in_hand"]["future"] = 1

    incident = Incident.from_dict(told)

    assert incident.verdict is not None
    assert incident.verdict.name is Name.UNKNOWN
    assert incident.failure == example_incidents.raised().failure


def test_what_an_older_version_wrote_can_be_read():
    """What is not told keeps its default."""
    told = example_incidents.segfault().to_dict()
    for name in ("verdict", "evidence", "crash", "in_hand", "exit", "hung", "id"):
        del told[name]

    incident = Incident.from_dict(told)

    assert incident.verdict is None
    assert incident.evidence == Evidence()
    assert incident.indices == (18204,)
