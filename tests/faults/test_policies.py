"""What a fault policy decides: callables, retries, budgets, intensity, empty batches, later epochs."""

from __future__ import annotations

import itertools
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from faults.expectations import (
    BAD,
    BAD_BATCH,
    BAD_OF_STREAM,
    BAD_SLOT,
    ScriptedDecider,
    all_batches,
    assert_cause,
    assert_explains,
    is_reachable,
    loader_with,
    real_incidents,
    rows,
    without_bad,
)
from faults.faulty_datasets import (
    BATCH,
    SIZE,
    FaultPlacement,
    Samples,
    all_indices,
    all_values,
    arguments,
    draw,
    flat,
    make_loader,
    outcomes_of,
    undisturbed,
)
from faults.table import FAULTS, INIT_SITES, SITES, TORN, Fault, FaultSite, Moment, PlantedFault
from outlive import FaultPolicy, Incident, IncidentKind, TooManyFaultsError, WorkerCrashedError, WorkerStartError

GETITEM = FaultSite(Moment.GETITEM)
EXCEPTION, SIGKILL = FAULTS["exception"], FAULTS["sigkill"]
QUICK = pytest.mark.parametrize("fault", [EXCEPTION, SIGKILL], ids=lambda fault: fault.name)


# ---------------------------------------------------------------- callables


@rows(SITES, is_reachable, lambda fault, site: fault in (EXCEPTION, SIGKILL))
def test_the_callable_s_word_holds_when_it_says_skip(fault: Fault, site: FaultSite) -> None:
    """A callable is given the incident of the bad sample, in the trainer, and its "skip" is one."""
    rule = ScriptedDecider("skip")
    loader = loader_with(fault, site, rule)

    delivered = all_indices(loader)

    assert delivered == without_bad(site)
    assert len(rule.asked) == 1
    assert_explains(rule.asked[0], fault, site)
    assert list(loader.quarantine) == [BAD_OF_STREAM if site.stream else BAD]


@QUICK
def test_the_callable_s_word_holds_when_it_says_replace(fault: Fault) -> None:
    """Its "replace" keeps the batch's size, and the bad sample is in quarantine."""
    loader = loader_with(fault, GETITEM, ScriptedDecider("replace"))

    delivered = all_indices(loader)

    assert [len(batch) for batch in delivered] == [BATCH] * (SIZE // BATCH)
    assert BAD not in delivered[BAD_BATCH]
    assert list(loader.quarantine) == [BAD]


@QUICK
def test_the_callable_s_word_holds_when_it_says_raise(fault: Fault) -> None:
    """Its "raise" is the error in the batch's place; the other batches come."""
    loader = loader_with(fault, GETITEM, ScriptedDecider("raise"))

    outcomes = outcomes_of(loader)

    assert isinstance(outcomes.pop(BAD_BATCH), fault.raises)
    assert outcomes == all_batches(GETITEM)[:BAD_BATCH] + all_batches(GETITEM)[BAD_BATCH + 1 :]


@QUICK
@pytest.mark.parametrize("site", [GETITEM, FaultSite(Moment.COLLATE)], ids=str)
def test_not_one_bit_differs_when_the_callable_says_retry_until_it_works(
    fault: Fault, site: FaultSite, tmp_path: Path
) -> None:
    """The word "retry" does the batch again with the random state it had, however often it takes."""
    rule = ScriptedDecider("retry")
    planted = PlantedFault(fault.name, str(tmp_path / "fired"), times=4)
    placement = FaultPlacement.at(site.moment, {BAD: planted})
    loader = make_loader(placement, FaultPolicy(on_error=rule, backoff_s=0.01))

    delivered = all_values(loader)

    assert delivered == undisturbed(Samples)
    assert dict(loader.quarantine) == {}
    assert 1 <= len(rule.asked) <= 4


@QUICK
@pytest.mark.parametrize("site", [GETITEM, FaultSite(Moment.COLLATE)], ids=str)
def test_the_callable_can_count_when_it_says_retry(fault: Fault, site: FaultSite) -> None:
    """`incident.attempt` grows with each attempt, so that a callable can stop retrying."""
    attempts: list[int] = []

    def rule(incident: Incident) -> str:
        attempts.append(incident.attempt)
        return "retry" if incident.attempt < 4 else "skip"

    loader = loader_with(fault, site, rule)

    delivered = all_indices(loader)

    assert delivered == without_bad(site)
    assert attempts == sorted(set(attempts))
    assert attempts[-1] == 4


def test_deaths_have_their_own_rule_when_on_crash_is_given() -> None:
    """on_error and on_crash may differ."""
    placement = FaultPlacement(getitem={5: PlantedFault("exception"), BAD: PlantedFault("sigkill")})
    loader = make_loader(placement, FaultPolicy(on_error="skip", on_crash="raise"))

    outcomes = outcomes_of(loader)

    assert isinstance(outcomes.pop(BAD_BATCH), WorkerCrashedError)
    assert outcomes[1] == [4, 6, 7]
    assert list(loader.quarantine) == [5]


@QUICK
def test_a_wrong_answer_is_an_error_when_a_callable_gives_it(fault: Fault) -> None:
    """An answer that is no decision is told to the user; the sample is never silently lost."""
    loader = loader_with(fault, GETITEM, ScriptedDecider("perhaps"))

    outcomes = outcomes_of(loader)

    errors = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
    assert any(isinstance(error, ValueError) and "perhaps" in str(error) for error in errors)
    assert any(isinstance(error, fault.raises) for error in errors)
    delivered = [outcome for outcome in outcomes if isinstance(outcome, list)]
    assert delivered == all_batches(GETITEM)[:BAD_BATCH] + all_batches(GETITEM)[BAD_BATCH + 1 :]


# ---------------------------------------------------------------- retries


def test_pauses_double_when_an_exception_is_retried(tmp_path: Path) -> None:
    """retries and retry_on: so many more attempts, each pause twice the one before, within its jitter."""
    dataset = AlwaysFails(tmp_path / "attempts")
    policy = FaultPolicy(retry_on=(TimeoutError,), retries=3, backoff_s=0.1, jitter=0.1)
    loader = make_loader(FaultPlacement(), policy, dataset=dataset)

    outcomes = outcomes_of(loader)

    assert isinstance(outcomes[0], TimeoutError)
    times = [float(line) for line in dataset.notes.read_text().split()]
    pauses = [after - before for before, after in itertools.pairwise(times)]
    assert len(times) == 4
    assert pauses[0] >= 0.09
    assert pauses[1] >= 0.18
    assert pauses[2] >= 0.36
    assert [incident.attempt for incident in real_incidents(loader)] == [1, 2, 3, 4]
    assert loader.statistics().retries == 3


class AlwaysFails(Samples):
    """Sample 0 never comes; when it was asked for is written down."""

    def __init__(self, notes: Path) -> None:
        super().__init__(SIZE, FaultPlacement())
        self.notes = notes

    def __getitem__(self, index: int) -> Any:
        if index == 0:
            with self.notes.open("a") as file:
                file.write(f"{time.monotonic()}\n")
            raise TimeoutError(TORN)
        return super().__getitem__(index)


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_retried_exception_is_told_when_the_next_attempt_kills(tmp_path: Path, method: str) -> None:
    """What a worker knows of its first attempt does not die with it."""
    dataset = RaisesThenKills(tmp_path / "attempts")
    policy = FaultPolicy(retry_on=(TimeoutError,), retries=2, backoff_s=0.01)
    loader = make_loader(FaultPlacement(), policy, dataset=dataset, multiprocessing_context=method)

    outcomes = outcomes_of(loader)

    assert [incident.kind for incident in real_incidents(loader)] == [IncidentKind.EXCEPTION, IncidentKind.CRASH]
    assert [incident.positions for incident in real_incidents(loader)] == [(0,), (0,)]
    assert loader.statistics().retries == 2
    assert outcomes == all_batches(GETITEM)


class RaisesThenKills(Samples):
    """Sample 0 raises at first, then kills, then comes."""

    def __init__(self, notes: Path) -> None:
        super().__init__(SIZE, FaultPlacement())
        self.notes = notes

    def __getitem__(self, index: int) -> Any:
        if index == 0:
            with self.notes.open("a+") as file:
                file.seek(0)
                attempts = len(file.read())
                file.write("x")
            if attempts == 0:
                raise TimeoutError(TORN)
            if attempts == 1:
                os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


def test_other_exceptions_are_not_retried_when_retry_on_names_one() -> None:
    """Only the types in retry_on are tried again; others are final at once."""
    loader = loader_with(EXCEPTION, GETITEM, "skip", retry_on=(OSError,))

    all_indices(loader)

    (incident,) = real_incidents(loader)
    assert incident.action == "left out"
    assert loader.statistics().retries == 0


@pytest.mark.parametrize("retries", [0, 3])
def test_a_sample_is_poison_when_it_has_cost_one_worker_more_than_retries(retries: int) -> None:
    """`retries` counts for deaths, too: retries + 1 workers are lost to a poison, not one more."""
    loader = loader_with(SIGKILL, GETITEM, "skip", retries=retries)

    delivered = all_indices(loader)

    assert delivered == without_bad(GETITEM)
    assert [incident.attempt for incident in real_incidents(loader)] == list(range(1, retries + 2))
    assert loader.statistics().restarts == retries + 1


# ---------------------------------------------------------------- limits


@QUICK
def test_one_error_sums_up_when_more_samples_are_bad_than_max_bad_counts(fault: Fault) -> None:
    """A count: one more than it ends the epoch, with causes and first samples in the text."""
    placement = FaultPlacement(getitem={index: PlantedFault(fault.name) for index in (1, 6, BAD)})
    loader = make_loader(placement, FaultPolicy(on_error="skip", max_bad=2))

    with pytest.raises(TooManyFaultsError) as caught:
        all_indices(loader)

    assert "3 samples are bad; the policy allows 2" in str(caught.value)
    assert "sample 1" in str(caught.value)
    assert {incident.index for incident in caught.value.incidents} == {1, 6, BAD}


@QUICK
def test_one_error_sums_up_when_a_greater_share_is_bad_than_max_bad(fault: Fault) -> None:
    """A share is looked at once there are 20 bad samples: a disk that is away does not eat the dataset."""
    placement = FaultPlacement(getitem={index: PlantedFault(fault.name) for index in range(0, 400, 2)})
    loader = make_loader(placement, FaultPolicy(on_error="skip", max_bad=0.25), size=400)

    with pytest.raises(TooManyFaultsError) as caught:
        all_indices(loader)

    assert "25%" in str(caught.value)
    assert 20 <= len(caught.value.incidents) < 40


def test_the_epoch_ends_well_when_fewer_samples_are_bad_than_max_bad_allows() -> None:
    """Forty bad samples of four hundred are within a budget of a quarter."""
    placement = FaultPlacement(getitem={index: PlantedFault("exception") for index in range(0, 400, 10)})
    loader = make_loader(placement, FaultPolicy(on_error="skip", max_bad=0.25), size=400)

    delivered = flat(all_indices(loader))

    assert delivered == [index for index in range(400) if index % 10]
    assert len(loader.quarantine) == 40


def test_one_error_comes_soon_when_every_worker_dies_at_once() -> None:
    """Restart intensity: never a spin, never a hang, and the text says how often and of what.

    Soon is after eleven deaths. No time is measured: each sample kills a thousand times, which no test would wait for.
    """
    placement = FaultPlacement(getitem={index: PlantedFault("sigsegv") for index in range(SIZE)})
    # An hour, so that it does not matter how fast this machine starts workers.
    policy = FaultPolicy(on_error="skip", retries=1000, max_restarts=10, restart_window_s=3600, max_bad=None)
    loader = make_loader(placement, policy)

    with pytest.raises(TooManyFaultsError) as caught:
        all_indices(loader)

    assert "more than 10 times within 3600 s" in str(caught.value)
    assert "SIGSEGV" in str(caught.value)
    assert len(caught.value.incidents) == 11


def test_the_default_limit_holds_when_every_sample_kills() -> None:
    """Without a word about limits a hopeless epoch ends by itself, with one error."""
    placement = FaultPlacement(getitem={index: PlantedFault("os-exit") for index in range(400)})
    loader = make_loader(placement, "skip", size=400)

    with pytest.raises(TooManyFaultsError):
        all_indices(loader)

    assert loader.statistics().restarts <= FaultPolicy().max_restarts < 2 * 400  # which is what all of them would cost


def test_a_new_epoch_begins_when_the_last_one_was_given_up() -> None:
    """A loader that gave up is not lost: iter() starts over, with fresh limits."""
    placement = FaultPlacement(getitem={index: PlantedFault("exception") for index in (1, 6, BAD)})
    loader = make_loader(placement, FaultPolicy(on_error="skip", max_bad=2), persistent_workers=True)
    for _ in range(2):
        with pytest.raises(TooManyFaultsError):
            all_indices(loader)

    with pytest.raises(TooManyFaultsError) as caught:
        all_indices(loader)

    assert len(caught.value.incidents) == 3


# ---------------------------------------------------------------- worker_init_fn


@rows(INIT_SITES[:1])
def test_one_error_comes_soon_when_worker_init_fn_always_fails(fault: Fault, site: FaultSite) -> None:
    """No sample is to blame, so no policy can skip it: the exception itself, or WorkerStartError with the cause."""
    loader = loader_with(fault, site, "skip")

    with pytest.raises(WorkerStartError if fault.kills else fault.raises) as caught:
        all_indices(loader)

    assert dict(loader.quarantine) == {}
    attempts = [incident.attempt for incident in real_incidents(loader)]
    assert attempts == list(range(1, caught.value.incident.attempts_allowed + 1))
    for incident in (*real_incidents(loader), caught.value.incident):
        assert incident.slot == BAD_SLOT
        assert_cause(incident, fault, site)


# ---------------------------------------------------------------- batches


def test_an_empty_batch_is_not_delivered_when_all_of_its_samples_are_skipped() -> None:
    """A batch left empty is left out of the epoch, and counted."""
    placement = FaultPlacement(
        getitem={
            12: PlantedFault("sigkill"),
            13: PlantedFault("exception"),
            14: PlantedFault("os-exit"),
            15: PlantedFault("abort"),
        }
    )
    loader = make_loader(placement, FaultPolicy(on_error="skip", max_bad=None))

    delivered = all_indices(loader)

    assert delivered == [batch for batch in all_batches(GETITEM) if batch != [12, 13, 14, 15]]
    assert set(loader.quarantine) == {12, 13, 14, 15}
    assert loader.statistics().emptied == 1


@pytest.mark.parametrize("site", [site for site in SITES if not site.stream], ids=str)
def test_the_rest_of_a_batch_is_delivered_when_several_of_its_samples_are_bad(site: FaultSite) -> None:
    """Each bad sample of a batch is found on its own account; the one healthy sample is delivered."""
    names = {12: "sigsegv", 13: "exception", 15: "os-exit", 20: "abort", 23: "sigkill"}
    planted_faults = {index: PlantedFault(name) for index, name in names.items()}
    loader = make_loader(FaultPlacement.at(site.moment, planted_faults), FaultPolicy(on_error="skip", max_bad=None))

    delivered = all_indices(loader)

    assert delivered == [[i for i in batch if i not in planted_faults] for batch in all_batches(GETITEM)]
    assert set(loader.quarantine) == set(planted_faults)
    kinds = {index: incident.kind for index, incident in loader.quarantine.items()}
    assert kinds.pop(13) is IncidentKind.EXCEPTION
    assert set(kinds.values()) == {IncidentKind.CRASH}


@QUICK
def test_a_bad_sample_is_searched_in_few_steps_when_its_batch_is_large(fault: Fault) -> None:
    """Halving: among 64 samples the deadly one is found with a handful of deaths, not with 64."""
    placement = FaultPlacement(getitems={100: PlantedFault(fault.name)})
    loader = make_loader(placement, "skip", size=256, batch_size=64)

    delivered = flat(all_indices(loader))

    assert delivered == [index for index in range(256) if index != 100]
    assert list(loader.quarantine) == [100]
    assert loader.statistics().restarts <= 2 + 7


def test_a_batch_is_left_out_as_a_whole_when_no_single_sample_is_to_blame() -> None:
    """Samples that kill only together cannot be told apart: the batch goes, and all of it is named."""
    loader = make_loader(FaultPlacement(), "skip", collate_fn=FullBatchKills())

    delivered = all_indices(loader)

    assert delivered == [batch for batch in all_batches(GETITEM) if 12 not in batch]
    assert set(loader.quarantine) == {12, 13, 14, 15}


class FullBatchKills:
    """Dies over batch 12…15 when it is whole, not over any part of it."""

    def __call__(self, samples: list[Any]) -> Any:
        if [int(values[0]) for values, _ in samples] == [12, 13, 14, 15]:
            PlantedFault("sigkill")()
        return {"samples": torch.stack([values for values, _ in samples])}


@QUICK
@pytest.mark.parametrize("batched", [True, False], ids=["batches", "single"])
def test_the_quarantine_speaks_the_sampler_s_language_when_indices_are_no_integers(fault: Fault, batched: bool) -> None:
    """Names, tuples, whatever the sampler draws: the quarantine and the incident have it as it was drawn."""
    names = [f"img-{n:03}" for n in range(SIZE)]
    dataset = NamedSamples({"img-013": PlantedFault(fault.name)})
    options: dict[str, Any] = {} if batched else {"batch_size": None, "collate_fn": None}
    loader = make_loader(FaultPlacement(), "skip", dataset=dataset, sampler=names, **options)

    delivered = flat(all_indices(loader)) if batched else [int(values[0]) for values, _ in loader]

    assert delivered == [n for n in range(SIZE) if n != 13]
    assert list(loader.quarantine) == ["img-013"]
    assert loader.quarantine["img-013"].index == "img-013"


class NamedSamples(torch.utils.data.Dataset[Any]):
    def __init__(self, planted_faults: dict[str, PlantedFault]) -> None:
        self.planted_faults = planted_faults

    def __getitem__(self, name: str) -> Any:
        return draw(int(name[4:]), self.planted_faults.get(name), None)


@QUICK
def test_not_one_bit_differs_from_torch_when_shuffled_batches_lose_a_worker(fault: Fault, tmp_path: Path) -> None:
    """Shuffling, a drop_last and big tensors change nothing about it."""
    options: dict[str, Any] = {"shuffle": True, "drop_last": True, "batch_size": 5}
    theirs = all_values(torch.utils.data.DataLoader(**arguments(FaultPlacement(), **options)))
    placement = FaultPlacement(getitem={BAD: PlantedFault(fault.name, str(tmp_path / "fired"))})
    loader = make_loader(placement, FaultPolicy(retry_on=(Exception,), backoff_s=0.01), **options)

    ours = all_values(loader)

    assert ours == theirs
    assert len(real_incidents(loader)) == 1


# ---------------------------------------------------------------- later epochs


@pytest.mark.parametrize("persistent", [True, False], ids=["persistent", "fresh"])
@pytest.mark.parametrize("moment", [Moment.GETITEM, Moment.COLLATE], ids=lambda m: m.value)
def test_no_worker_dies_again_when_a_deadly_sample_is_known(persistent: bool, moment: Moment) -> None:
    """A second epoch leaves out what killed workers in the first, without trying it."""
    loader = make_loader(
        FaultPlacement.at(moment, {BAD: PlantedFault("sigkill")}), "skip", persistent_workers=persistent
    )
    first = all_indices(loader)
    before = loader.statistics()

    second = all_indices(loader)

    assert second == first == without_bad(GETITEM)
    assert loader.statistics().restarts == before.restarts
    assert loader.statistics().incidents == before.incidents
    assert list(loader.quarantine) == [BAD]


def test_batches_keep_their_size_when_a_known_deadly_sample_is_replaced() -> None:
    """A second epoch replaces what killed workers in the first, without trying it."""
    loader = make_loader(FaultPlacement(getitem={BAD: PlantedFault("sigkill")}), "replace", persistent_workers=True)
    all_indices(loader)
    before = loader.statistics().restarts

    second = all_indices(loader)

    assert [len(batch) for batch in second] == [BATCH] * (SIZE // BATCH)
    assert BAD not in second[BAD_BATCH]
    assert loader.statistics().restarts == before


def test_an_exception_is_tried_again_when_the_next_epoch_comes(tmp_path: Path) -> None:
    """Errors come and go: a sample that raised is given another chance in the next epoch."""
    placement = FaultPlacement(getitem={BAD: PlantedFault("exception", str(tmp_path / "fired"))})
    loader = make_loader(placement, "skip")
    first = all_indices(loader)

    second = all_indices(loader)

    assert first == without_bad(GETITEM)
    assert second == all_batches(GETITEM)
