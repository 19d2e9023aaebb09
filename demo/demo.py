"""Train a small network on image files, five of which are bad: first with stock torch, then with outlive.

Reads:   scikit-learn's digits, which it writes to PNG files in a temporary folder first.
Writes:  standard output: log lines, a progress bar, and a table of the bad samples. Incidents also go to the journal.
Never:   uses the network.

The exit status is 0 if outlive kept its promises: two complete epochs, every healthy sample exactly once per epoch, and
exactly the planted samples in quarantine. Otherwise it is 1, and the reason is printed.
"""

from __future__ import annotations

import logging
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any, Literal

import torch
from digits import PLANTED, TEST, TRAIN, Digits, Fault, write_images
from rich.console import Console
from rich.padding import Padding
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text
from training import BATCH_SIZE, EPOCHS, SEED, Network, accuracy, make_loader, train

import outlive
from outlive import DataLoader, FaultPolicy

STOCK_LIMIT_S = 60
POLICY = FaultPolicy(on_error="skip", sample_timeout=1.5)


class IncidentLines(logging.Handler):
    """Print the log of outlive above the progress bar."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        tell(self._console, record.getMessage(), "yellow")


def tell(console: Console, text: str, style: str = "") -> None:
    """Print an indented paragraph, wrapped at the width of the terminal."""
    console.print(Padding(Text(text, style), (0, 0, 0, 2), expand=False))


def main() -> int:
    console = Console(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console = Console(highlight=False, width=100)
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    torch.manual_seed(SEED)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="outlive-demo-") as name:
        folder = Path(name)
        write_images(folder)
        console.print(f"{TRAIN + TEST} handwritten digits as PNG files. Of the {TRAIN} training images, five are bad:")
        tell(console, ", ".join(f"{number} ({fault.value})" for number, fault in PLANTED.items()))
        failures = before(console, folder) + after(console, folder)
    for failure in failures:
        tell(console, f"FAILED: {failure}", "bold red")
    if failures:
        return 1
    healthy = TRAIN - len(PLANTED)
    tell(
        console,
        f"Checked: each of the {healthy} healthy samples arrived exactly once per epoch. The quarantine holds exactly "
        "the five planted samples, each with its true cause.",
        "bold green",
    )
    return 0


# ---------------------------------------------------------------- stock torch


def before(console: Console, folder: Path) -> list[str]:
    """Train with stock torch in another process and show how it ends. Return a complaint if it survives."""
    console.rule("torch.utils.data.DataLoader")
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("stock.py")), str(folder)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        with console.status("training …"):
            output, error = process.communicate(timeout=STOCK_LIMIT_S)
        ended = f"exit status {process.returncode}"
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, error = process.communicate()
        ended = f"it hung, and the demo killed it after {STOCK_LIMIT_S} s"
    lines = error.splitlines()
    trained, all_batches = output.count("\n"), EPOCHS * -(-TRAIN // BATCH_SIZE)
    tell(console, f"{trained} of {all_batches} batches trained, then, in {len(lines)} lines of standard error:")
    for line in said(lines):
        tell(console, line, "red")
    tell(console, f"{ended}: the job is over, and the error does not name the bad file")
    return [] if process.returncode else ["stock torch survived the planted faults, so this demo shows nothing"]


def said(lines: list[str]) -> list[str]:
    """Return the error lines of a traceback, without the frames. Which errors torch raises varies from run to run."""
    errors = [line.rstrip() for line in lines if re.match(r"[A-Za-z_][\w.]*(Error|Exception|Exit|Interrupt)\b", line)]
    return list(dict.fromkeys(errors))[:3] or [line.rstrip() for line in lines if line.strip()][-3:]


# ---------------------------------------------------------------- outlive


def after(console: Console, folder: Path) -> list[str]:
    """Train with outlive and show how it ends. Return the promises that were broken."""
    console.rule('outlive.DataLoader, faults="skip"')
    dataset = Digits(folder, range(TRAIN), planted=PLANTED, augment=True)
    loader = make_loader(DataLoader, dataset, faults=POLICY)
    network = Network()
    delivered: list[Counter[int]] = [Counter() for _ in range(EPOCHS)]
    begun = time.monotonic()
    with progress_bar(console) as progress:
        bars = [
            progress.add_task(f"epoch {epoch + 1}", total=TRAIN - len(PLANTED), start=False, loss="")
            for epoch in range(EPOCHS)
        ]
        handler = IncidentLines(progress.console)
        log = logging.getLogger("outlive")
        log.addHandler(handler)
        progress.start_task(bars[0])

        def saw(epoch: int, numbers: list[int], loss: float) -> None:
            delivered[epoch].update(numbers)
            progress.start_task(bars[epoch])
            progress.update(bars[epoch], advance=len(numbers), loss=f"loss {loss:.3f}")

        try:
            train_accuracies = train(loader, network, saw)
        except Exception as error:
            return [f"the epoch ended with {type(error).__name__}: {error}"]
        finally:
            log.removeHandler(handler)
    seconds = time.monotonic() - begun
    test = Digits(folder, range(TRAIN, TRAIN + TEST), planted={}, augment=False)
    test_accuracy = accuracy(DataLoader(test, batch_size=64, num_workers=2), network)
    accuracies = " → ".join(f"{share:.1%}" for share in train_accuracies)
    tell(
        console,
        f"{EPOCHS} epochs in {seconds:.1f} s; accuracy {accuracies}, on {TEST} unseen digits {test_accuracy:.1%}",
    )
    console.print(table_of(loader, dataset))
    tell(console, summary_of(loader.statistics()))
    return broken_promises(loader, delivered, test_accuracy)


def progress_bar(console: Console) -> Progress:
    columns = (
        TextColumn("  {task.description}"),
        BarColumn(bar_width=40),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}"),
        TimeElapsedColumn(),
    )
    return Progress(*columns, console=console)


def table_of(loader: Any, dataset: Digits) -> Table:
    table = Table(title="Bad samples (loader.quarantine)", title_justify="left", expand=False)
    for name in ("sample", "file", "worker", "cause", "action", "attempts"):
        justify: Literal["left", "right"] = "right" if name in ("sample", "worker", "attempts") else "left"
        table.add_column(name, justify=justify, no_wrap=name != "cause")
    for index, incident in sorted(loader.quarantine.items()):
        table.add_row(
            str(index),
            dataset.files[index].name,
            str(incident.slot),
            Text(incident.cause),
            incident.action,
            str(incident.attempt),
        )
    return table


def summary_of(statistics: outlive.Statistics) -> str:
    return (
        f"loader.statistics(): {statistics.delivered} batches delivered, {statistics.errored} raised, "
        f"{statistics.emptied} left empty; "
        f"{statistics.incidents} incidents, {statistics.restarts} workers replaced, "
        f"{statistics.retries} retries, {statistics.quarantined} samples in quarantine"
    )


def broken_promises(loader: Any, delivered: list[Counter[int]], test_accuracy: float) -> list[str]:
    """Return the promises of the demo that were broken."""
    broken = []
    healthy = Counter(number for number in range(TRAIN) if number not in PLANTED)
    for epoch, numbers in enumerate(delivered, 1):
        if numbers != healthy:
            missing, surplus = sorted((healthy - numbers).elements()), sorted((numbers - healthy).elements())
            broken.append(f"epoch {epoch}: missing {missing}, delivered more than once {surplus}")
    if set(loader.quarantine) != set(PLANTED):
        broken.append(f"the quarantine holds {sorted(loader.quarantine)}, but {sorted(PLANTED)} were planted")
    for number, (kind, words) in EXPECTED.items():
        incident = loader.quarantine.get(number)
        if incident is not None and (incident.kind is not kind or words not in incident.cause):
            broken.append(f"sample {number} is a {PLANTED[number].value}, but its incident says: {incident.cause}")
    if test_accuracy < 0.5:
        broken.append(f"the network learned nothing: {test_accuracy:.1%} on unseen digits")
    return broken


_CAUSES = {
    Fault.CORRUPT: (outlive.IncidentKind.EXCEPTION, "raised "),
    Fault.SEGFAULT: (outlive.IncidentKind.CRASH, "SIGSEGV"),
    Fault.KILLED: (outlive.IncidentKind.CRASH, "SIGKILL"),
    Fault.HANG: (outlive.IncidentKind.HANG, "hung for"),
    Fault.EXIT: (outlive.IncidentKind.CRASH, "code 3"),
}
EXPECTED = {number: _CAUSES[fault] for number, fault in PLANTED.items()}


if __name__ == "__main__":
    sys.exit(main())
