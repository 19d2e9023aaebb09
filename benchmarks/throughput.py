"""Batches per second of torch's DataLoader and of outlive's, in alternation: `throughput.py [WORD …]`.

Words choose workloads by name (rows, tokens, …). The ratio is what counts, the machine may be busy: it is that of the
medians, and the spread is the least and the most of any round. «of memcpy»: of what one thread reaches that only copies
the same bytes; two workers may pass it. Results and plot go to benchmarks/results/, unless words or --quick made them
partial.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

# Under spawn every worker imports this file again. What only the trainer needs is imported where it is needed: else
# torch's workers would pay for the import of outlive. And what workers have to warn about (Grain: no jax) goes here.
logging.disable(logging.WARNING)

ROUNDS = 7
PEER_ROUNDS = 3
QUICK_ROUNDS = 2
QUICK_SHARE = 0.2


def main(arguments: list[str]) -> None:
    options = parse(arguments)
    import torch

    from machine import write
    from measuring import measure
    from plot import draw
    from workloads import workloads

    torch.set_num_threads(1)  # loaders that use threads have theirs beside; nothing else computes here
    warnings.filterwarnings("ignore", message="This DataLoader will create")  # four workers on two cores are meant
    warnings.filterwarnings("ignore", message="'set_vital' is deprecated")  # torchdata's affair
    rounds = options.rounds or (QUICK_ROUNDS if options.quick else PEER_ROUNDS if options.peers else ROUNDS)
    loaders, skipped = chosen_loaders(options)
    for name, reason in skipped.items():
        print(f"{name}: {reason}")
    print(HEAD, flush=True)
    rows = []
    with tempfile.TemporaryDirectory(prefix="outlive-bench-") as folder:
        for workload in workloads(Path(folder)):
            if options.words and not any(word in workload.name.partition(":")[0] for word in options.words):
                continue
            able = {
                name: loader
                for name, (loader, by_processes) in loaders.items()
                if by_processes or not workload.first_batch
            }
            if workload.first_batch:
                able.pop("bare", None)
            row = measure(workload, able, rounds, QUICK_SHARE if options.quick else 1.0)
            rows.append(row)
            print(table(row), flush=True)
    if options.words or options.quick:
        return
    name = "peers" if options.peers else "throughput"
    path = write(name, {"rounds": rounds, "skipped": skipped, "rows": rows})
    print(f"written to {path}, {draw(path)}")


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", metavar="WORD", help="only workloads whose name has one of these")
    parser.add_argument(
        "--rounds", type=int, metavar="N", help=f"rounds, {ROUNDS} unless told (with peers {PEER_ROUNDS})"
    )
    parser.add_argument("--peers", action="store_true", help="torchdata, Grain and SPDL as well, where installed")
    parser.add_argument("--bare", action="store_true", help="outlive without supervision as well: what that costs")
    parser.add_argument("--quick", action="store_true", help="few rounds of few batches; nothing is written")
    return parser.parse_args(arguments)


def chosen_loaders(options: argparse.Namespace) -> tuple[dict[str, Any], dict[str, str]]:
    """Each loader with whether it has processes to start; and why others are left out."""
    from loaders import bare, stock, supervised

    loaders: dict[str, Any] = {"torch": (stock, True), "outlive": (supervised, True)}
    skipped: dict[str, str] = {}
    if options.bare:
        loaders["bare"] = (bare, True)
    if options.peers:
        from peers import PEERS, silence_resource_tracker

        silence_resource_tracker()
        for peer in PEERS:
            if peer.installed:
                loaders[peer.name] = (peer.loader, peer.processes)
            else:
                skipped[peer.name] = f"left out, {peer.package} is not installed (make bench-peers installs it)"
    return loaders, skipped


WIDTH = 106
HEAD = f"{'':<27} {'median':>11} {'ratio':>8}  {'spread':<13} {'of memcpy':>9}    peak PSS, MiB      + in flight"


def table(row: dict[str, Any]) -> str:
    """A block of lines: the workload, then a line per loader."""
    lines = [f"── {row['workload']} ".ljust(WIDTH, "─")]
    unit = "s" if row["unit"].startswith("seconds") else "/s"
    for name, its in row["loaders"].items():
        rate = f"{its['median']:.2f} {unit}" if unit == "s" else f"{its['median']:.1f} {unit}"
        spread = f"{its['ratio_least']:.2f}…{its['ratio_most']:.2f}" if name != "torch" else ""
        share = f"{its['share_of_limit']:.0%}" if its["share_of_limit"] is not None else ""
        peak = f"{its['peak_pss_mib']:>9.0f} {its['peak_pss_ratio']:>5.2f}×"
        flight = f"{its['peak_with_flight_mib']:>9.0f} {its['peak_with_flight_ratio']:>5.2f}×"
        lines.append(f"{name:<27} {rate:>11} {its['ratio']:>7.2f}×  {spread:<13} {share:>9} {peak} {flight}")
    if "bare" in row["loaders"]:
        cost = 1 - row["loaders"]["outlive"]["median"] / row["loaders"]["bare"]["median"]
        lines.append(f"supervision costs {cost:.1%}")
    lines.extend(f"{name}: failed with {reason}" for name, reason in row["failed"].items())
    return "\n".join(lines)


if __name__ == "__main__":
    main(sys.argv[1:])
