"""Verdicts in the words of a pool: rules speak of samples and batches of a loader, a pool has tasks and results.

Reads   a verdict.
Writes  nothing.
Never   a text of the user's: of causes and facts only our own phrases are changed.
"""

from __future__ import annotations

import re
from dataclasses import replace

from outlive.incident import Incident, IncidentKind
from outlive.verdicts import Name, Verdict

_TRANSIENT = ("ConnectionError", "ConnectionResetError", "ConnectionRefusedError", "TimeoutError", "IncompleteRead")
# In causes and facts: phrases that only our own rules write.
_PHRASES = {
    "raised while fetching a sample": "raised by the task",
    "raised while sending a batch": "raised while its result was pickled",
    "an error outside of the sample's code": "an error outside of the task",
    " left the sample's code and ended the worker": " left the task and ended the worker",
    "it is no Exception, or was raised where no sample is in hand: ": "it was raised where no task is in hand: ",
    "no sample is to blame": "no task is to blame",
    "the batch cannot be sent to the trainer: ": "the result cannot be sent: ",
    "the worker could not send its batch: ": "the worker could not send its result: ",
    "the batch itself was ready: ": "the result itself was ready: ",
    " cannot be pickled, at batch": " cannot be pickled, at result",
    "the batch has arrived and cannot be unpickled in the trainer": "the result has come and cannot be unpickled",
    "the trainer had other threads when it was forked": "the pool's process had other threads when it was forked",
    "the trainer could not take over what it sent": "the pool could not take over what it sent",
    "it closed its socket to the trainer": "it closed its socket to the pool",
    " starts the loader outside of ": " starts the pool outside of ",
    ", and under spawn and forkserver all of the dataset is": ", as spawn and forkserver ask for",
    "a worker cannot import what the dataset needs: ": "a worker cannot import what the pool's initializer needs: ",
    " in the worker, none in the trainer": " in the worker, none here",
    "a worker does not find what the dataset is made of: ": "a worker does not find what the initializer is made of: ",
    "it came before the first sample, in start ": "it came before the first task, in start ",
    "worker_init_fn raised ": "the initializer raised ",
    "iter(dataset) raised ": "the initializer raised ",
    "unpickling the dataset raised ": "unpickling the initializer raised ",
    " per batch: ": " per chunk of tasks: ",
    "shared memory for batches": "shared memory for results",
    " batches are left until memory_limit": " chunks are left until memory_limit",
    " more open descriptors with each batch": " more open descriptors with each chunk of tasks",
    " more threads with each batch": " more threads with each chunk of tasks",
}
_CHUNKS = re.compile(
    r"^(the lower edge of its memory rose in every stretch of \d+|it began with \d+ and has \d+ after \d+) batches$"
)
# In remedies, which are ours altogether; in this order. An empty text: of no use to a task.
_REMEDIES = (
    (r"^(?:dataset\[|faults=|FaultPolicy\(retry_on|drop it in collate_fn|lower prefetch_factor).*", ""),
    (r"^start threads that take it only after iter.*", ""),
    (r"^run the sample alone: dataset\[index\] in a fresh", "call the function with these arguments alone, in a fresh"),
    (r"^pickle\.loads\(pickle\.dumps\(dataset\)\)", "pickle.loads(cloudpickle.dumps((initializer, initargs)))"),
    (r"^call (?:worker_init_fn\(0\)|next\(iter\(dataset\)\)) once", "call the initializer once"),
    (r"^num_workers=0   once, to see it fail in", "call the initializer once, to see it fail in"),
    (r"FaultPolicy\(sample_timeout=(\w+)\)   if such a sample is", r"Pool(task_timeout=\1)   if such a task is"),
    (r"FaultPolicy\(sample_timeout=None\)", "Pool(task_timeout=None)"),
    (r"FaultPolicy\((hang_floor_s=\w+)\)", r"Pool(faults=FaultPolicy(\1))"),
    (r"let FaultPolicy\(retry_on=…\) try again", "let Pool(faults=FaultPolicy(retry_on=…)) try again"),
    (r"^DataLoader\(share_dataset=True\), or outlive\.share\(…\) in the dataset", "outlive.share(…) what tasks read"),
    (r"let go of batches you no longer need: a kept slice of a batch",
     "let go of results you no longer need: a kept slice of one"),
    (r"batch\[0\]\.clone\(\)", "result[0].copy()"),
    (r"; the epoch does not notice$", "; no task notices"),
    (r", and the samples before$", ""),
    (r" is healthy elsewhere$", " does well elsewhere"),
    (r"leave such samples out, or read them with", "leave such tasks out, or do them with"),
    (r"a file per sample", "many small ones"),
    (r", or keep fewer batches$", ", or keep fewer results"),
    (r"what starts the training under", "what makes the pool under"),
    (r"starts the training", "starts the program"),
    (r"out of what __getitem__ returns", "out of what the task returns"),
    (r" from __getitem__ instead", " instead"),
    (r"in worker_init_fn, or on first use in the worker, not before the loop over the loader",
     "in the initializer, or on first use in the worker"),
    (r"on first use in __getitem__, or in worker_init_fn", "on first use in a task, or in the initializer"),
    (r"in worker_init_fn", "in the initializer"),
    (r"multiprocessing_context=", "mp_context="),
    (r"num_workers", "max_workers"),
    (r"report it with (?:the|this) sample", "report it with the task's arguments"),
    (r", with this sample;", ", with the task's arguments;"),
    (r"(the|this) sample's (code|path)", r"\1 task's \2"),
    (r"\b(the|this|a|per|same|such) sample(s?)\b", r"\1 task\2"),
    (r"\bif samples write\b", "if tasks write"),
    (r"\bthe trainer\b", "your own process"),
)  # fmt: skip
_COMPILED = tuple((re.compile(pattern), words) for pattern, words in _REMEDIES)


def for_task(verdict: Verdict, incident: Incident) -> Verdict:
    remedies = [told for remedy in verdict.remedies if (told := _remedy(remedy))]
    failure = incident.failure
    if verdict.name is Name.EXCEPTION and incident.kind is IncidentKind.EXCEPTION and failure is not None:
        if failure.type_name in _TRANSIENT:
            again = f"faults=FaultPolicy(retry_on=({failure.type_name},), retries=3)"
            remedies.append(f"Pool({again})   if it may pass by itself")
        remedies.append('pool.map(…, faults="skip")   to go on without such tasks; pool.failures then has them')
    return replace(
        verdict, cause=_told(verdict.cause), facts=tuple(map(_told, verdict.facts)), remedies=tuple(remedies)
    )


def _told(text: str) -> str:
    for ours, theirs in _PHRASES.items():
        text = text.replace(ours, theirs)
    return _CHUNKS.sub(r"\1 chunks", text)


def _remedy(text: str) -> str:
    for pattern, words in _COMPILED:
        text = pattern.sub(words, text)
    return text
