"""Findings: what is wrong with a job, in words that need no other page. Pure.

Reads   a story, a snapshot, the verdicts of the journal, how many CPUs there are.
Writes  nothing; answers with findings, the worst first.
Never   the clock, a file.

    each says   which sample, which worker, since when, what it cost, what to change
    level       bad: work or samples are lost; warn: it costs time; note: it is good to know
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from outlive.dashboard.finding import (
    Finding,
    counted,
    mean_of,
    named,
    remedies_of,
    seconds_in_words,
    upper,
    with_words,
)
from outlive.dashboard.story import DEADLY, Memory, Story, Trouble
from outlive.quantities import in_words

_LEVELS = ("bad", "warn", "good", "note")
_GROWING = ("leak", "copy-on-read", "cells-grow", "descriptor-leak", "thread-leak", "memory-limit")
_FIRST = ("given-up", "breaker", "start")  # what explains the rest
_LONG_S = 10.0  # that a worker has had one sample in hand
_WAITING, _ON_DISK, _STARVED, _IDLE = 0.4, 0.5, 0.3, 0.5  # shares of a worker's time
_NO_WORKER = "none: with num_workers=0 the trainer loads its batches itself"
_MOST_WORKERS = 64


def findings(
    story: Story,
    snapshot: Mapping[str, Any],
    *,
    remedies: Mapping[str, Sequence[str]] | None = None,
    cpus: int = 1,
    noun: str = "sample",
    unreadable: int = 0,
) -> list[Finding]:
    """`remedies`: of incidents, by id, as far as the journal has them. `unreadable`: events that were passed over."""
    known = remedies or {}
    found: list[Finding] = []
    if story.given_up is not None:
        found.append(_given_up(story.given_up))
    found += _breaker(story, snapshot)
    for trouble in story.troubles.values():
        if trouble.verdict not in _GROWING or trouble.workers_lost:
            found.append(_of_trouble(trouble, known, noun, here=bool(snapshot.get("here"))))
    found += _memory(story, snapshot, known, noun)
    found += _long_in_hand(snapshot, noun)
    found += _in_kernel(snapshot)
    found += _behind(story, snapshot, cpus, noun)
    found += _idle(snapshot)
    if not [each for each in found if each.level != "note"]:
        found.insert(0, _all_well(story, snapshot, noun))
    if unreadable:
        found.append(_unreadable(unreadable))
    return sorted(found, key=_order)


def _order(finding: Finding) -> tuple[int, bool, bool]:
    return _LEVELS.index(finding.level), finding.kind not in _FIRST, "kill" not in finding.title


def _unreadable(count: int) -> Finding:
    return Finding(
        "unreadable",
        "note",
        f"{counted(count, 'event')} of this job cannot be read",
        "",
        "",
        0.0,
        "what is shown here is incomplete",
        ("show the page with the newest version of outlive that a job uses",),
        "they are damaged, or a newer version of outlive wrote them",
    )


# ---------------------------------------------------------------- samples that kill, hang or raise


def _of_trouble(trouble: Trouble, known: Mapping[str, Sequence[str]], noun: str, *, here: bool = False) -> Finding:
    hangs = "hang" in trouble.kind
    deadly = trouble.workers_lost > 0
    guilty = trouble.condemned or (trouble.samples if trouble.kind == "exception" else {})
    again = "again" in trouble.action or trouble.action == "retried"
    subject = upper(named(guilty or trouble.samples, noun))
    if guilty:
        verb = "hang" if hangs else "kill" if deadly or trouble.kind in DEADLY else "raise"
        what = {"hang": "and cost{s} its worker", "kill": "its worker", "raise": "an exception"}[verb]
        one = len(guilty) == 1
        what = what.format(s="s" if one else "") if one else what.format(s="").replace("its worker", "their workers")
        title = f"{subject} {verb}{'s' if one else ''} {what}"
        kind = "hang" if hangs else "poison"
    elif trouble.kind == "suspected hang":
        title, kind = f"Worker {_slots(trouble)} shows no progress", "hang"
    elif trouble.kind == "failed start":
        title, kind = "Workers cannot start", "start"
    else:
        count = trouble.workers_lost or trouble.incidents
        title = f"{count} worker{'s' * (count != 1)} died ({trouble.verdict}); nobody's sample is to blame so far"
        kind = "death"
    level = "bad" if guilty or deadly or kind == "start" else "warn"
    if not guilty and again and trouble.kind == "exception":
        level = "warn"
    return Finding(
        kind,
        level,
        title,
        with_words(trouble.samples, guilty or trouble.samples, noun) or f"no {noun}: none was in hand",
        _NO_WORKER if here else _workers(trouble),
        trouble.since,
        _cost(trouble, noun),
        _changes(trouble, known, noun),
        why=trouble.cause or trouble.sentence,
        incidents=tuple(trouble.ids),
        at=trouble.at if noun == "sample" else "",
    )


def _cost(trouble: Trouble, noun: str) -> str:
    parts = []
    if trouble.workers_lost:
        parts.append(f"{counted(trouble.workers_lost, 'worker')} lost and replaced")
    if trouble.seconds >= 0.05:
        parts.append(f"{seconds_in_words(trouble.seconds)} of a worker's time until work went on")
    replaced = sum(trouble.condemned.values())
    left_out = len(trouble.condemned) - replaced
    if left_out:
        parts.append(f"{counted(left_out, noun)} left out")
    if replaced:
        parts.append(f"{counted(replaced, noun)} replaced by others")
    if not trouble.condemned and not trouble.workers_lost and trouble.incidents:
        parts.append(counted(trouble.incidents, "time") + (f": {trouble.action}" if trouble.action else ""))
    return "; ".join(parts) or "nothing so far"


def _changes(trouble: Trouble, known: Mapping[str, Sequence[str]], noun: str) -> tuple[str, ...]:
    # What is done already needs no telling.
    remedies = remedies_of(trouble.ids, known)
    out = [each for each in remedies if not (trouble.condemned and each.startswith(("faults=", "on_crash=")))]
    if trouble.condemned and noun == "sample":
        out.append(f"mend or remove {named(trouble.condemned, noun)}")
        out.append(
            "`outlive check module:dataset --output bad.json`, then "
            'DataLoader(quarantine="bad.json"): never tried again'
        )
    elif trouble.kind in ("exception", *DEADLY) and noun == "sample" and trouble.samples and not trouble.condemned:
        out.append('faults="skip" leaves such a sample out, faults="replace" takes another in its place')
    if trouble.kind in ("hang", "suspected hang"):
        out.append("FaultPolicy(sample_timeout=…) says how many seconds a sample may take")
    return tuple(dict.fromkeys(out)) or (f"outlive explain {trouble.verdict}",)


def _workers(trouble: Trouble) -> str:
    slots = [(slot, count) for slot, count in sorted(trouble.slots.items()) if slot >= 0]
    if not slots:
        return "—"
    shown = ", ".join(f"worker {slot}" + (f" ({count} times)" if count > 1 else "") for slot, count in slots[:8])
    return shown + (f" and {len(slots) - 8} more" if len(slots) > 8 else "")


def _slots(trouble: Trouble) -> str:
    return ", ".join(str(slot) for slot in sorted(trouble.slots) if slot >= 0) or "?"


def _in_kernel(snapshot: Mapping[str, Any]) -> list[Finding]:
    """Workers that SIGKILL has not ended."""
    stuck = snapshot.get("stuck", "")
    if not stuck:
        return []
    remedy = "have the drive answer, or unmount it by force (umount -f): until then they hold what they hold"
    return [Finding("hang", "warn", stuck[:1].upper() + stuck[1:], "", "", 0.0, "others have their slots", (remedy,))]


def _long_in_hand(snapshot: Mapping[str, Any], noun: str) -> list[Finding]:
    held = [
        slot
        for slot in snapshot.get("slots", ())
        if slot["stage"] in ("fetching", "fetching_many", "collating", "at_work") and slot["seconds"] >= _LONG_S
    ]
    if not held or not snapshot.get("alive"):
        return []
    worst = max(held, key=lambda slot: slot["seconds"])
    sample = worst["sample"]
    which = f"{noun} {sample}" if sample is not None else f"batch {worst['batch']}"
    here = bool(snapshot.get("here"))
    until = f"; it is ended at {seconds_in_words(worst['limit'])}" if worst.get("limit") else ""
    remedy = f"FaultPolicy(sample_timeout={max(1, round(worst['seconds'] / 2))}) would end it and go on"
    return [
        Finding(
            "hang",
            "warn",
            f"{'The trainer' if here else 'Worker ' + str(worst['slot'])} has had {which} in hand for "
            f"{seconds_in_words(worst['seconds'])}",
            which,
            _NO_WORKER if here else ", ".join(f"worker {slot['slot']} (pid {slot['pid']})" for slot in held),
            snapshot["time"] - worst["seconds"],
            f"{seconds_in_words(worst['seconds'])} of {'the trainer' if here else 'this worker'} so far{until}",
            (
                "the button «stacks» in its row says which line it is at",
                f"num_workers=1: then {remedy}" if here else remedy,
            ),
        )
    ]


# ---------------------------------------------------------------- memory


def _memory(story: Story, snapshot: Mapping[str, Any], known: Mapping[str, Sequence[str]], noun: str) -> list[Finding]:
    grown = [story.troubles[name] for name in _GROWING if name in story.troubles and name != "memory-limit"]
    recycled = {slot: memory for slot, memory in story.memory.items() if memory.recycled}
    rising = {slot: memory for slot, memory in story.memory.items() if memory.is_rising}
    if not grown and not recycled and not rising:
        return []
    slots = sorted({*recycled, *rising, *(slot for trouble in grown for slot in trouble.slots)})
    since = min(
        [trouble.since for trouble in grown]
        + [memory.began or memory.since for memory in (*recycled.values(), *rising.values())]
    )
    times = sum(memory.recycled for memory in recycled.values())
    seconds = sum(memory.seconds for memory in recycled.values())
    rates = [story.memory[slot].rate for slot in slots if slot in story.memory and story.memory[slot].rate > 0]
    rate = max(rates, default=0.0)
    limit = snapshot.get("memory_limit")
    ids = tuple(ident for trouble in grown for ident in trouble.ids)
    change = list(remedies_of(ids, known))
    largest = max((memory.last[1] for memory in story.memory.values()), default=0)
    if not any("cache" in text for text in change):
        change.insert(0, "in the dataset: look for caches without a bound and lists that are only appended to")
    if limit and times:
        size = in_words(2 * limit).replace(" ", "")
        change.append(f'until that is mended, memory_limit="{size}" recycles half as often, where there is room')
    elif not limit and not any("memory_limit" in text for text in change):
        size = in_words(max(2 * largest, 256 << 20)).replace(" ", "")
        change.append(
            f'until that is mended, memory_limit="{size}" recycles a worker in time; the epoch does not notice'
        )
    parts = []
    if times:
        parts.append(f"{counted(times, 'worker')} recycled in time, none died of it")
        if seconds >= 0.05:
            parts.append(f"{seconds_in_words(seconds)} until the new ones were ready")
    if rate > 0:
        parts.append(f"a worker grows by {in_words(rate)} a second")
    if rate > 0 and limit and not times:
        parts.append(f"about {seconds_in_words(max(0.0, 0.85 * limit - largest) / rate)} until it is recycled")
    each = _each_leaves(sum(rates), story.sample_rate, noun)
    names = ", ".join(_with_count(slot, recycled) for slot in slots[:8])
    what = {"descriptor-leak": "open descriptors", "thread-leak": "threads"}
    thing = what.get(grown[-1].verdict, "memory") if grown else "memory"
    why = grown[-1].cause if grown else "the private memory of workers rises, and does not fall"
    if each and thing == "memory":  # also once there is a diagnosis: that counts by batch
        why += f": {each}" if not grown else f"; {each}"
    return [
        Finding(
            "leak",
            "warn",
            f"Workers leak {thing}" if thing != "memory" else "The memory of workers grows and grows",
            "no single one: it grows with every batch",
            names + (f" and {len(slots) - 8} more" if len(slots) > 8 else ""),
            since,
            "; ".join(parts) or "nothing so far",
            tuple(dict.fromkeys(change)),
            why=why,
            incidents=ids,
        )
    ]


def _each_leaves(rate: float, samples: float, noun: str) -> str:
    """Of all workers and all samples, a second; "" while nobody knows."""
    return f"each {noun} leaves about {in_words(rate / samples)} behind" if rate > 0 and samples > 0 else ""


def _with_count(slot: int, recycled: Mapping[int, Memory]) -> str:
    return f"worker {slot}" + (f" (recycled {counted(recycled[slot].recycled, 'time')})" if slot in recycled else "")


# ---------------------------------------------------------------- waiting


def _behind(story: Story, snapshot: Mapping[str, Any], cpus: int, noun: str) -> list[Finding]:
    """The trainer is kept waiting: by a source that is slow, by too few workers, or for want of CPUs."""
    if not story.behind_since or (not snapshot.get("alive", True) and story.share < 0.2):
        return []
    loads = [slot["load"] for slot in snapshot.get("slots", ()) if slot.get("load")]
    workers = max(1, snapshot.get("workers") or len(snapshot.get("slots", ())))
    mean = {name: mean_of([load[name] for load in loads]) for name in ("on_cpu", "starved", "waiting", "idle", "disk")}
    wait = snapshot["wait_seconds"] - story.behind_from[0]
    own = snapshot["trainer_seconds"] - story.behind_from[1]
    share = wait / (wait + own) if wait + own > 0 else 0.0
    if wait < 1.0 or share < 0.1:
        return []
    wanted = min(_MOST_WORKERS, math.ceil(workers * min((wait + own) / max(own, 1e-9), 8) * 1.1))
    # From the pace, not from the sums: those have the time before it was slow in them, too.
    fetch = workers / story.rate if story.rate else _batch_seconds(snapshot, "fetch")
    cost = f"the trainer waited {seconds_in_words(wait)} since then, {share:.0%} of its time"
    if story.rate:
        before = f"before that {story.good_rate:.3g}" if story.good_rate > story.rate else _could(story, share)
        cost += f"; it gets {story.rate:.3g} batches a second, {before}"
    if snapshot.get("here"):
        return [_loads_itself(story, wait, own, cost, cpus, noun)]
    which = f"no single {noun}"
    if fetch:
        one = f"each takes a worker {seconds_in_words(workers / story.sample_rate)}, " if story.sample_rate > 0 else ""
        which += f": {one}a batch {'' if one else 'takes a worker '}{seconds_in_words(fetch)}"
    held = _slowest(snapshot, noun)
    who = f"all {workers} alike" if workers > 1 else "worker 0, the only one"
    if loads and mean["starved"] >= _STARVED:
        title, kind = "Workers wait for a CPU", "starved"
        why = f"they wanted one and had none {mean['starved']:.0%} of their time; this machine has {cpus}"
        change = [
            "see what else runs here: other programs, or threads of the trainer, take the CPUs",
            "fewer threads in the trainer (torch.set_num_threads, OMP_NUM_THREADS), or more CPUs for the job",
        ]
        if workers > cpus:
            change = [snapshot.get("advice") or f"num_workers={max(1, cpus)}, or more CPUs for the job"]
    elif loads and mean["waiting"] >= _WAITING:
        disk = mean["disk"] >= _ON_DISK * mean["waiting"]
        source = "disk" if disk else "source of the samples"
        title, kind = f"The {source} is slow: the trainer waits for it", "slow-source"
        why = (
            f"with a {noun} in hand, workers wait {mean['waiting']:.0%} of their time for "
            f"{'the disk' if disk else 'reads, answers or locks'} and compute {mean['on_cpu']:.0%}"
        )
        change = [
            f'num_workers={wanted} (now {workers}): while one waits, another can read; or num_workers="auto"',
            f"{'faster storage, or a copy on a local disk' if disk else 'a faster source, or a cache near by'}; "
            "fewer and larger files",
        ]
    elif loads and mean["idle"] < _IDLE:
        title, kind = f"Too few workers: {workers} cannot keep up with the trainer", "too-few-workers"
        why = f"workers compute {min(1.0, mean['on_cpu']):.0%} of their time and are idle {mean['idle']:.0%}"
        fit = min(wanted, max(workers, cpus)) if mean["on_cpu"] >= 0.5 else wanted
        change = []
        if fit > workers:
            change.append(f'num_workers={fit} (now {workers}; this machine has {cpus} CPUs), or num_workers="auto"')
        if fit < wanted:
            change.append(
                f"about {wanted} workers would be needed: more CPUs, or less work in __getitem__ and collate_fn"
            )
    else:
        title, kind = "The trainer waits for batches", "behind"
        why = snapshot.get("advice", "")
        change = [f'num_workers={wanted} (now {workers}), or num_workers="auto"']
    return [
        Finding(
            kind,
            "warn",
            title,
            which + (f"; just now {held}" if held and kind == "slow-source" else ""),
            who,
            story.behind_since,
            cost,
            tuple(change),
            why=why,
        )
    ]


def _loads_itself(story: Story, wait: float, own: float, cost: str, cpus: int, noun: str) -> Finding:
    """num_workers=0: what a batch takes is added to each step."""
    each = wait / (wait + own) / story.rate if story.rate else 0.0
    wanted = max(1, min(math.ceil(1.1 * wait / max(own, 1e-9)), max(1, cpus)))
    return Finding(
        "no-workers",
        "warn",
        "The trainer loads its batches itself, and waits for them",
        f"no single {noun}" + (f": each batch takes {seconds_in_words(each)}" if each else ""),
        _NO_WORKER,
        story.behind_since,
        cost,
        (
            f'num_workers={wanted} (now 0; this machine has {counted(cpus, "CPU")}), or num_workers="auto": then '
            "batches are made while the trainer computes",
        ),
        why="a batch is fetched and collated between two steps; nothing is made ahead",
    )


def _could(story: Story, share: float) -> str:
    """Its own time alone bounds how fast it could take them."""
    return f"and could take {story.rate / max(1 - share, 0.02):.3g}" if share < 0.98 else "and could take many more"


def _slowest(snapshot: Mapping[str, Any], noun: str) -> str:
    held = [slot for slot in snapshot.get("slots", ()) if slot.get("sample") is not None and slot["seconds"] > 0.05]
    if not held:
        return ""
    worst = max(held, key=lambda slot: slot["seconds"])
    return f"{noun} {worst['sample']} for {seconds_in_words(worst['seconds'])}"


def _batch_seconds(snapshot: Mapping[str, Any], stage: str) -> float:
    histogram = snapshot.get("histograms", {}).get(stage, {})
    count = sum(histogram.get("counts", ()))
    return histogram["sum"] / count if count else 0.0


def _idle(snapshot: Mapping[str, Any]) -> list[Finding]:
    advice = snapshot.get("advice", "")
    if "are idle" not in advice or not snapshot.get("alive"):
        return []
    workers = snapshot.get("workers", 0)
    return [
        Finding(
            "too-many-workers",
            "note",
            "More workers than needed",
            "",
            f"all {workers}",
            0.0,
            "memory and CPU time of workers that have nothing to do",
            (advice,),
        )
    ]


# ---------------------------------------------------------------- the source, the end, and nothing


def _breaker(story: Story, snapshot: Mapping[str, Any]) -> list[Finding]:
    if not story.breaker:
        return []
    last = story.breaker[-1]
    state = snapshot.get("breaker", "closed")
    is_open = last["closed"] is None and state != "closed"
    until = last["closed"] or snapshot.get("time", last["time"])
    lasted = seconds_in_words(max(0.0, until - last["time"]))
    times = f"; {counted(len(story.breaker), 'time')} so far" if len(story.breaker) > 1 else ""
    return [
        Finding(
            "breaker",
            "bad" if is_open else "note",
            "The source of the samples is gone" if is_open else "The source of the samples was gone, and is back",
            "none is to blame: different samples fail alike",
            "all: they wait, and try one sample now and then" if is_open else "all of them waited",
            last["time"],
            f"{'nothing is fetched since' if is_open else 'nothing was fetched for'} {lasted}{times}",
            (
                "see whether the mount, the host or the credentials are still there",
                "FaultPolicy(breaker_patience=…) says how many seconds the job waits for it before it ends (300)",
            ),
            why=last["sentence"],
            incidents=(last["id"],),
        )
    ]


def _given_up(event: Mapping[str, Any]) -> Finding:
    return Finding(
        "given-up",
        "bad",
        "The loader gave up",
        "see below",
        "all",
        event["time"],
        "the epoch ended early",
        (f"the limit that was reached: {event['limit']}; mend the cause below before you raise it",),
        why=event["why"],
    )


def _all_well(story: Story, snapshot: Mapping[str, Any], noun: str) -> Finding:
    wait, own = snapshot.get("wait_seconds", 0.0), snapshot.get("trainer_seconds", 0.0)
    share = f"the trainer waited {wait / (wait + own):.0%} of its time" if wait + own > 1 else "it has just begun"
    return Finding(
        "well",
        "good",
        "Nothing is wrong",
        f"no {noun} was left out",
        _NO_WORKER if snapshot.get("here") else "none was lost",
        story.began,
        share,
        ("nothing",),
    )
