"""Verdicts on workers that could not be started: pickling, imports, the main module, preparation.

Reads   incidents.
Writes  nothing.
Never   a process, a file, a lock, the clock.
"""

from __future__ import annotations

from collections.abc import Callable

from outlive._forensics import frames
from outlive.evidence import Unpicklable
from outlive.incident import Failure, Incident, IncidentKind, Stage, first_line
from outlive.verdicts import Confidence, Name, Verdict

_FORK = 'multiprocessing_context="fork"   pickles and imports nothing (not where workers use CUDA)'
_GUARD = 'put what starts the training under   if __name__ == "__main__":'
_FILE_LIKE = ("_io.", "socket.", "sqlite3.", "h5py.", "zipfile.", "tarfile.", "mmap.", "lmdb.", "ssl.", "_ssl.")
_IMPORT_ERRORS = ("ImportError", "ModuleNotFoundError")
# Raised where a process could not be made: a verdict of its own, not the user's preparation.
_NO_PROCESS = ("OSError", "BlockingIOError")
# Our function that calls the user's code → what that is.
_STEPS = {
    ("jobs.py", "prepare"): "worker_init_fn",
    ("payload.py", "load"): "unpickling the dataset",
    ("call.py", "load"): "unpickling the function or its arguments",
    ("streams.py", "open"): "iter(dataset)",
    ("streams.py", "replay_iterations"): "iter(dataset)",
}


def unpicklable_dataset(incident: Incident) -> Verdict | None:
    parts = incident.evidence.unpicklable
    if not _failed_to_start(incident) or not parts:
        return None
    worst = parts[0]
    reasons = tuple(f"{part.path} is {_article(part.type_name)}{_because(part)}" for part in parts)
    return Verdict(
        Name.UNPICKLABLE_DATASET,
        f"{worst.path} cannot be pickled ({_article(worst.type_name)}), and under spawn and forkserver all of the "
        "dataset is",
        facts=reasons,
        remedies=(*_remedies(worst), _FORK),
    )


def main_guard_missing(incident: Incident) -> Verdict | None:
    failure, line = incident.failure, incident.evidence.unguarded
    if not _failed_to_start(incident) or not line or failure is None:
        return None
    told = frames.of_traceback(failure.traceback)
    if failure.type_name and not any(frame.function == "_check_not_importing_main" for frame in told):
        return None
    return Verdict(
        Name.MAIN_GUARD_MISSING,
        f'{line} starts the loader outside of  if __name__ == "__main__":  and every worker that imports the main '
        "module would do so again",
        facts=(
            f"{line} was running at the top level of the main module",
            "under spawn and forkserver workers import the main module",
            first_line(failure.message),
        ),
        remedies=(_GUARD, _FORK),
    )


def import_failed(incident: Incident) -> Verdict | None:
    failure = incident.failure
    if not _failed_to_start(incident) or failure is None:
        return None
    if failure.type_name in _IMPORT_ERRORS:
        return Verdict(
            Name.IMPORT_FAILED,
            f"a worker cannot import what the dataset needs: {first_line(failure.message)}{_where(failure)}",
            facts=(f"{failure.type_name} in the worker, none in the trainer",),
            remedies=(
                "install it, or put it into a folder on PYTHONPATH: what the trainer made by hand in sys.modules, or "
                "has in a notebook, workers do not have",
                _FORK,
            ),
        )
    if failure.type_name == "AttributeError" and _is_lookup(failure):
        return Verdict(
            Name.IMPORT_FAILED,
            f"a worker does not find what the dataset is made of: {first_line(failure.message)}",
            facts=("the module can be imported there, and has no such name",),
            remedies=(
                "define it at the top level of a .py file and import it from there: a notebook's or a prompt's "
                "definitions exist in the trainer only, and so does what stands under the main guard",
                _FORK,
            ),
            confidence=Confidence.LIKELY,
        )
    return None


def preparation_failed(incident: Incident) -> Verdict | None:
    failure = incident.failure
    if not _failed_to_start(incident) or failure is None:
        return None
    if failure.stage is Stage.STARTING and failure.type_name in _NO_PROCESS:
        return None
    if not failure.type_name:  # it ended before it could say why
        return Verdict(
            Name.PREPARATION_FAILED,
            first_line(failure.message),
            facts=("it wrote no reason to outlive; what it printed to standard error may say it",),
            remedies=(f"see that the main module can be imported without starting anything: {_GUARD}",),
            confidence=Confidence.POSSIBLE,
        )
    step = _step(failure)
    return Verdict(
        Name.PREPARATION_FAILED,
        f"{step} raised {failure.type_name}: {first_line(failure.message)}{_where(failure)}",
        facts=(f"it came before the first sample, in start {incident.attempt} of {incident.attempts_allowed}",),
        remedies=_preparation_remedies(step),
    )


RULES: tuple[Callable[[Incident], Verdict | None], ...] = (
    unpicklable_dataset,
    main_guard_missing,
    import_failed,
    preparation_failed,
)


# ---------------------------------------------------------------- words


def _failed_to_start(incident: Incident) -> bool:
    return incident.kind is IncidentKind.START


def _article(type_name: str) -> str:
    if type_name == "function":
        return "a function without a name of its own"
    return f"{'an' if type_name.lstrip('_')[:1].lower() in 'aeiou' else 'a'} {type_name}"


def _because(part: Unpicklable) -> str:
    return f": {part.reason}" if part.reason else ""


def _remedies(part: Unpicklable) -> tuple[str, ...]:
    kind, path = part.type_name, part.path
    if kind == "function":
        return ("def it at the top level of a module; functools.partial(f, …) in place of a lambda with values",)
    if kind == "generator" or kind.endswith("_generator"):
        return (f"keep in {path} what makes the generator, and call iter() on it in the worker",)
    if kind.startswith(_FILE_LIKE):
        return (f"open {path} in the worker: on first use in __getitem__, or in worker_init_fn",)
    if kind.startswith("_thread.") or kind.startswith("threading."):
        return (
            f"leave {path} out of what is pickled: __getstate__ without it, __setstate__ makes a new one",
            f"make {path} on first use in the worker, or in worker_init_fn",
        )
    return (f"make {path} in the worker: on first use in __getitem__, or in worker_init_fn",)


def _where(failure: Failure) -> str:
    frame = frames.nearest_users(frames.of_traceback(failure.traceback)[::-1])
    return f" (at {frame.words})" if frame is not None and frame.is_users else ""


def _is_lookup(failure: Failure) -> bool:
    """Whether unpickling raised it by itself, and no code of the user's that it called."""
    found = frames.of_traceback(failure.traceback)
    return bool(found) and (found[-1].is_own or found[-1].file == "pickle.py") and _step(failure).startswith("unpick")


def _step(failure: Failure) -> str:
    found = [_STEPS[key] for f in frames.of_traceback(failure.traceback) if (key := (f.file, f.function)) in _STEPS]
    return found[-1] if found else "preparing the worker"


def _preparation_remedies(step: str) -> tuple[str, ...]:
    if step == "worker_init_fn":
        return ("call worker_init_fn(0) once in this process to see it fail here",)
    if step == "iter(dataset)":
        return ("call next(iter(dataset)) once in this process to see it fail here",)
    if step.startswith("unpickling"):
        return ("pickle.loads(pickle.dumps(dataset))   in a fresh interpreter, to see it fail there", _FORK)
    return ("num_workers=0   once, to see it fail in this process",)
