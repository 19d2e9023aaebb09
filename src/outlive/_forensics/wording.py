"""Verdicts in the words of who asked: rules speak of workers and samples, a launcher has ranks and a function.

Reads   a verdict.
Writes  nothing.
Never   a text of the user's: of causes and facts only our own phrases are changed.
"""

from __future__ import annotations

import re
from dataclasses import replace

from outlive.incident import Incident, IncidentKind
from outlive.verdicts import Name, Verdict

_TRANSIENT = ("ConnectionError", "ConnectionResetError", "ConnectionRefusedError", "TimeoutError", "OSError")
# In causes and facts: phrases that only our own rules write.
_PHRASES = {
    "and this worker held": "and this rank held",
    "the worker's memory: ": "its memory: ",
    "the worker sent ": "the rank sent ",
    "was the worker's own pid": "was the rank's own pid",
    "which was held when the worker was forked": "which was held when the rank was forked",
    "the worker was forked with ": "the rank was forked with ",
    "the worker has but one thread": "the rank has but one thread",
    "no SystemExit passed through the worker": "no SystemExit passed through it",
    "left the sample's code and ended the worker": "left the function and ended the rank",
    "it is no Exception, or was raised where no sample is in hand: nothing caught it": "nothing caught it",
    "which workers have not got: ": "which ranks have not got: ",
    "the trainer had other threads": "the launcher had other threads",
    "starts the loader outside of ": "calls outlive.spawn outside of ",
    "and every worker that imports the main module would do so again": "and every rank, which imports the main module, "
    "would do so again",
    "under spawn and forkserver workers import the main module": "under spawn and forkserver ranks import it",
    "a worker cannot import what the dataset needs: ": "a rank cannot import what the function needs: ",
    " in the worker, none in the trainer": " in the rank, none in the launcher",
    "a worker does not find what the dataset is made of: ": "a rank does not find what the function is made of: ",
    "it came before the first sample, in start ": "it came before the function was called, in attempt ",
    "preparing the worker raised ": "unpickling the function or its arguments raised ",
    "no progress for ": "it ran for ",
    "raised while running its function": "raised by the function",
}
# In remedies, which are ours altogether; in this order. An empty text: of no use to a rank.
_REMEDIES = (
    (r"^(?:faults=|FaultPolicy\(retry_on|lower prefetch_factor|start threads that take it only after iter).*", ""),
    (r"^dataset\[.*", ""),
    (r"^num_workers=0   once, to see.*", "call fn in this process, to see it fail here"),
    (r"^run the sample alone: dataset\[index\] in", "run the function alone in"),
    (r"^pickle\.loads\(pickle\.dumps\(dataset\)\)", "pickle.loads(cloudpickle.dumps((fn, args)))"),
    (r"FaultPolicy\(sample_timeout=(\w+)\)   if such a sample is only slow", r"timeout=\1   if it is only slow"),
    (r"FaultPolicy\(hang_floor_s=(\w+)\)   if starting a worker", r"timeout=\1   if starting"),
    (r"FaultPolicy\(sample_timeout=None\)", "timeout=None"),
    (r": raise, and let FaultPolicy\(retry_on=…\) try again", ": raise, and let max_restarts=… start all again"),
    (r"take the exit out of the sample's code, or raise an exception instead.*", "raise an exception instead: "
     "its traceback is in the error"),
    (r": it names the sample and costs no worker$", ": its traceback is in the error"),
    (r"^leave such samples out, or read them with", "do it with"),
    (r", and the samples before$", ""),
    (r", if such samples really need it$", ", if it really needs so much"),
    (r"multiprocessing_context=", "start_method="),
    (r"num_workers", "nprocs"),
    (r"one worker less", "one rank less"),
    (r"(?:in worker_init_fn, or )?on first use in the worker(?:, or in worker_init_fn)?(?:, not before the loop.*)?",
     "inside of the function"),
    (r"on first use in __getitem__, or in worker_init_fn", "inside of the function"),
    (r"in worker_init_fn", "in the function"),
    (r"what starts the training under", "the call of outlive.spawn under"),
    (r"(?:report it|, ) ?with (?:the|this) sample", "report it with a small program that shows it"),
    (r"(?:the|this) sample's (?:code|path)", "the function"),
    (r"(?:the|this|a|per) sample", "the function"),
    (r"the trainer", "the launcher"),
    (r"\bworkers\b", "ranks"),
    (r"\bworker\b", "rank"),
)  # fmt: skip
_COMPILED = tuple((re.compile(pattern), words) for pattern, words in _REMEDIES)


def for_rank(verdict: Verdict, incident: Incident) -> Verdict:
    remedies = [told for remedy in verdict.remedies if (told := _remedy(remedy))]
    failure = incident.failure
    if verdict.name is Name.EXCEPTION and incident.kind is IncidentKind.EXCEPTION and failure is not None:
        if failure.type_name in _TRANSIENT:
            remedies.append("max_restarts=3   if it may pass by itself")
        named = incident.function if incident.function.isidentifier() else "fn"  # not «<lambda>»
        call = f"{named}({incident.slot}, …)"
        remedies.append(f"{call} in this process, or in a debugger, to see it raise here")
    return replace(
        verdict, cause=_told(verdict.cause), facts=tuple(map(_told, verdict.facts)), remedies=tuple(remedies)
    )


def _told(text: str) -> str:
    for ours, theirs in _PHRASES.items():
        text = text.replace(ours, theirs)
    return text


def _remedy(text: str) -> str:
    for pattern, words in _COMPILED:
        text = pattern.sub(words, text)
    return text
