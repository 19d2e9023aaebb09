"""FaultPolicy and `faults=`: what may be set, and the words for what may not.

Reads   the messages of settings that were refused.
Writes  nothing.
Never   a loader.
"""

from __future__ import annotations

import dataclasses
import math
import pickle

import numpy as np
import pytest
import torch

import outlive
from outlive.incident import Decision
from outlive.settings import FaultPolicy, decision_of, fault_policy

RULE = 'must be "raise", "skip", "replace" or a callable'

REFUSED = [
    ({"on_error": "ignore"}, ValueError, f"on_error {RULE}, got 'ignore'"),
    ({"on_error": "retry"}, ValueError, f"on_error {RULE}, got 'retry'"),
    ({"on_error": None}, ValueError, f"on_error {RULE}, got None"),
    ({"on_crash": "ignore"}, ValueError, f"on_crash {RULE}, got 'ignore'"),
    ({"on_crash": 3}, ValueError, f"on_crash {RULE}, got 3"),
    ({"retries": -1}, ValueError, "retries must be at least 0, got -1"),
    ({"retries": 1.5}, TypeError, "retries must be a whole number, got 1.5"),
    ({"retries": True}, TypeError, "retries must be a whole number, got True"),
    (
        {"retry_on": (OSError, "ValueError")},
        TypeError,
        "retry_on takes exception types such as OSError, got 'ValueError'",
    ),
    ({"retry_on": (int,)}, TypeError, "retry_on takes exception types such as OSError, got <class 'int'>"),
    ({"backoff_s": -0.1}, ValueError, "backoff_s must be at least 0, got -0.1"),
    ({"backoff_s": math.inf}, ValueError, "backoff_s must be at most 2e+06, got inf"),
    ({"backoff_s": "1"}, TypeError, "backoff_s must be a number, got '1'"),
    ({"backoff_max_s": -1}, ValueError, "backoff_max_s must be at least 0, got -1"),
    ({"jitter": -0.5}, ValueError, "jitter must be at least 0, got -0.5"),
    ({"jitter": 1.5}, ValueError, "jitter is a share of the pause, 0 to 1, got 1.5"),
    ({"sample_timeout": -1}, ValueError, "sample_timeout must be at least 0, got -1"),
    (
        {"sample_timeout": 0},
        ValueError,
        'sample_timeout must be more than 0 seconds (None: never; "auto": the default), got 0',
    ),
    ({"sample_timeout": "never"}, TypeError, "sample_timeout must be a number, got 'never'"),
    ({"sample_timeout": math.nan}, TypeError, "sample_timeout must be a number, got nan"),
    ({"hang_floor_s": 0}, ValueError, "hang_floor_s must be at least 0.01, got 0"),
    ({"hang_wait_s": 0}, ValueError, "hang_wait_s must be at least 0.01, got 0"),
    ({"hang_wait_max_s": -1}, ValueError, "hang_wait_max_s must be at least 0.01, got -1"),
    ({"hang_busy_s": "auto"}, TypeError, "hang_busy_s must be a number, got 'auto'"),
    ({"max_restarts": -1}, ValueError, "max_restarts must be at least 0, got -1"),
    ({"max_restarts": 10**5000}, ValueError, "max_restarts must be less than 2**62, got a number of 16610 bits"),
    ({"max_restarts": 2.0}, TypeError, "max_restarts must be a whole number, got 2.0"),
    ({"restart_window_s": 0}, ValueError, "restart_window_s must be at least 0.001, got 0"),
    ({"max_bad": -1}, ValueError, "max_bad must be at least 0, got -1"),
    ({"max_bad": "10%"}, TypeError, "max_bad must be a number, got '10%'"),
    (
        {"max_bad": 12.5},
        ValueError,
        "max_bad is a share between 0.0 and 1.0 when it is a float, got 12.5 (for a count, write max_bad=13)",
    ),
    (
        {"max_bad": math.inf},
        ValueError,
        "max_bad is a share between 0.0 and 1.0 when it is a float, got inf (for no limit, write max_bad=None)",
    ),
    ({"ranks": "together"}, ValueError, 'ranks must be "apart" or "agree", got \'together\''),
    ({"ranks_grace_s": -1}, ValueError, "ranks_grace_s must be at least 0, got -1"),
    ({"breaker_patience": -1}, ValueError, "breaker_patience must be at least 0, got -1"),
    ({"breaker_patience": "5min"}, TypeError, "breaker_patience must be a number, got '5min'"),
]


@pytest.mark.parametrize(("wrong", "kind", "message"), REFUSED, ids=[case[2][:60] for case in REFUSED])
def test_a_setting_that_makes_no_sense_is_refused_in_words_that_help(wrong, kind, message):
    """The message names the setting, what it takes, and what it got."""
    with pytest.raises(kind) as caught:
        FaultPolicy(**wrong)

    assert str(caught.value) == message


def test_every_setting_has_a_refusal_among_these():
    """A new field of FaultPolicy is checked, or this fails."""
    assert {field.name for field in dataclasses.fields(FaultPolicy)} == {
        name for wrong, _, _ in REFUSED for name in wrong
    }


ALLOWED = [
    {},
    {"on_error": "skip"},
    {"on_error": "replace", "on_crash": "raise"},
    {"on_error": lambda incident: "skip"},
    {"retries": 0},
    {"retry_on": (OSError, TimeoutError)},
    {"backoff_s": 0, "backoff_max_s": 0, "jitter": 0},
    {"jitter": 1},
    {"sample_timeout": None},
    {"sample_timeout": "auto"},
    {"sample_timeout": 0.5},
    {"sample_timeout": math.inf},
    {"max_restarts": 0},
    {"max_bad": None},
    {"breaker_patience": None},
    {"ranks": "agree", "ranks_grace_s": 0},
    {"breaker_patience": 0},
    {"max_bad": 0},
    {"max_bad": 5},
    {"max_bad": 0.0},
    {"max_bad": 1.0},
]


@pytest.mark.parametrize("right", ALLOWED, ids=[", ".join(right) or "nothing" for right in ALLOWED])
def test_a_setting_that_makes_sense_is_kept_as_it_is(right):
    """Limits included."""
    policy = FaultPolicy(**right)

    assert {name: getattr(policy, name) for name in right} == right


def test_one_exception_type_stands_for_a_tuple_of_it():
    """retry_on=OSError is what people write."""
    assert FaultPolicy(retry_on=OSError).retry_on == (OSError,)
    assert FaultPolicy(retry_on=[OSError, KeyError]).retry_on == (OSError, KeyError)


def test_deaths_follow_on_error_unless_on_crash_says_otherwise():
    """on_crash=None: as on_error."""
    assert FaultPolicy(on_error="skip").crash_rule == "skip"
    assert FaultPolicy(on_error="skip", on_crash="raise").crash_rule == "raise"


def test_a_policy_cannot_be_changed():
    """Workers have copies of it."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        FaultPolicy().retries = 3  # type: ignore[misc]


def test_a_policy_travels_to_workers_without_its_callables():
    """A lambda does not pickle; the trainer keeps it, and is asked."""
    policy = FaultPolicy(on_error=lambda incident: "skip", on_crash=lambda incident: "raise", retries=7, max_bad=3)

    plain = pickle.loads(pickle.dumps(policy.without_callables()))

    assert (plain.on_error, plain.on_crash, plain.retries, plain.max_bad) == ("raise", "raise", 7, 3)
    assert FaultPolicy(on_error="skip").without_callables() == FaultPolicy(on_error="skip")


@pytest.mark.parametrize("word", ["raise", "skip", "replace"])
def test_a_word_stands_for_a_policy(word):
    """faults="skip" is FaultPolicy(on_error="skip")."""
    assert fault_policy(word) == FaultPolicy(on_error=word)


def test_a_callable_and_a_policy_stand_for_themselves():
    """faults= takes all three."""

    def decide(incident):
        return "skip"

    policy = FaultPolicy(retries=4)

    assert fault_policy(decide).on_error is decide
    assert fault_policy(policy) is policy


@pytest.mark.parametrize("faults", [None, 3, ["skip"], True], ids=repr)
def test_faults_that_are_none_of_these_are_refused(faults):
    """The message lists what may be given."""
    with pytest.raises(TypeError) as caught:
        fault_policy(faults)

    said = 'faults must be "raise", "skip", "replace", a callable or a FaultPolicy'
    assert str(caught.value) == f"{said}, got {faults!r}"


def test_a_wrong_word_for_faults_is_refused_by_the_loader_too():
    """Before torch looks at anything."""
    with pytest.raises(ValueError) as caught:
        outlive.DataLoader([1, 2], faults="ignore", num_workers=-1)

    assert str(caught.value) == f"faults {RULE}, got 'ignore'"


HUGE = "9" * 400
LOADER_REFUSED = [
    ({"num_workers": 1.5}, TypeError, 'num_workers must be an int or "auto", got 1.5'),
    ({"num_workers": "2"}, TypeError, "num_workers must be an int or \"auto\", got '2'"),
    ({"num_workers": None}, TypeError, 'num_workers must be an int or "auto", got None'),
    ({"num_workers": math.nan}, TypeError, 'num_workers must be an int or "auto", got nan'),
    ({"num_workers": "atuo"}, TypeError, 'num_workers must be an int or "auto", got \'atuo\' (did you mean "auto"?)'),
    ({"num_workers": 10**5000}, ValueError, "num_workers must be less than 2**62, got a number of 16610 bits"),
    ({"prefetch_factor": 1.5}, TypeError, "prefetch_factor must be an int, got 1.5"),
    (
        {"timeout": math.nan},
        ValueError,
        "timeout must be at most 2000000 seconds (0: wait as long as it takes), got nan",
    ),
    ({"timeout": 1e999}, ValueError, "timeout must be at most 2000000 seconds (0: wait as long as it takes), got inf"),
    ({"memory_limit": HUGE}, ValueError, f"memory_limit must be less than 4 EiB, got {HUGE[:40]!r}"),
    ({"memory_limit": int(HUGE)}, ValueError, "memory_limit must be less than 2**62, got a number of 1329 bits"),
    (
        {"memory_limit": "1e999"},
        TypeError,
        "memory_limit must be a size such as \"4GiB\" or a number of bytes, got '1e999'",
    ),
    ({"memory_budget": HUGE + "GiB"}, ValueError, f"memory_budget must be less than 4 EiB, got {HUGE[:40]!r}"),
    ({"recycle_after": 10**5000}, ValueError, "recycle_after must be less than 2**62, got a number of 16610 bits"),
    ({"journal_every": 10**5000}, ValueError, "journal_every must be less than 2**62, got a number of 16610 bits"),
]


@pytest.mark.parametrize(("wrong", "kind", "message"), LOADER_REFUSED, ids=[case[2][:45] for case in LOADER_REFUSED])
def test_a_number_that_makes_no_sense_is_refused_by_the_loader(wrong, kind, message):
    """When it is made, not at the first batch, and with no error of Python's arithmetic."""
    with pytest.raises(kind) as caught:
        outlive.DataLoader([1, 2], **{"num_workers": 1, **wrong})

    assert str(caught.value) == message


@pytest.mark.parametrize("number", [np.int64(2), torch.tensor(2), True], ids=repr)
def test_whole_numbers_of_any_make_are_taken_as_torch_takes_them(number):
    """What has an index is one."""
    assert outlive.DataLoader([1, 2], num_workers=number, prefetch_factor=number).num_workers == number


@pytest.mark.parametrize("decision", list(Decision))
def test_a_callable_may_answer_with_each_of_the_four_words(decision):
    """As a word or as the enum."""
    assert decision_of(decision.value) is decision
    assert decision_of(decision) is decision


@pytest.mark.parametrize("answer", [None, "ignore", 3, True, "SKIP"], ids=repr)
def test_another_answer_of_a_callable_is_refused(answer):
    """With what it answered."""
    with pytest.raises(ValueError) as caught:
        decision_of(answer)

    assert str(caught.value) == f'a fault callable must return "raise", "skip", "replace" or "retry", got {answer!r}'
