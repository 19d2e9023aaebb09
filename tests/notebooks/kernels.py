"""A real notebook kernel: runs cells, can be interrupted in one, and shows which processes it has.

Reads   what the kernel publishes.
Writes  cells to it; SIGINT, as a notebook's stop button does.
Never   waits without a deadline.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import psutil
from jupyter_client.manager import KernelManager

DEADLINE_S = 60.0
_SHOWN = ("stream", "display_data", "update_display_data", "execute_result", "error")
Outputs = list[tuple[str, dict[str, Any]]]
_PYTHONS_OWN = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")  # stay until the kernel ends


class Kernel:
    def __init__(self) -> None:
        # This interpreter, whatever kernels are registered on the machine, and the library that is under test.
        path = os.pathsep.join(entry for entry in sys.path if entry)
        self._manager = KernelManager(kernel_name="python3", transport="ipc")
        self._manager.start_kernel(env={**os.environ, "PYTHONPATH": path})
        self._client = self._manager.blocking_client()
        self._client.start_channels()
        self._client.wait_for_ready(timeout=DEADLINE_S)
        self.process = psutil.Process(self._manager.provisioner.process.pid)  # type: ignore[union-attr]

    def run(self, cell: str, on_output: Callable[[str], object] = lambda text: None) -> Outputs:
        """What a cell puts out, as (kind, content); `on_output` is told what it prints, as it comes."""
        request = self._client.execute(cell)
        outputs: Outputs = []
        while True:
            message = self._client.get_iopub_msg(timeout=DEADLINE_S)
            if message["parent_header"].get("msg_id") != request:
                continue
            kind, content = message["msg_type"], message["content"]
            if kind == "status" and content["execution_state"] == "idle":
                return outputs
            if kind in _SHOWN:
                outputs.append((kind, content))
                on_output(content.get("text", ""))

    def interrupt(self) -> None:
        self._manager.interrupt_kernel()

    def descendants(self) -> list[psutil.Process]:
        """What runs because of it, less what multiprocessing keeps for itself."""
        found = []
        for process in self.process.children(recursive=True):
            try:
                # Workers that a fork server has started have its command line: its own parent is the kernel.
                command = " ".join(process.cmdline()) if process.ppid() == self.process.pid else ""
                own = any(name in command for name in _PYTHONS_OWN)
                if not own and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.NoSuchProcess:
                pass  # it has gone while we looked
        return found

    def close(self) -> None:
        self._client.stop_channels()
        self._manager.shutdown_kernel(now=True)
        self._manager.cleanup_resources()


def printed(outputs: Outputs, stream: str = "stdout") -> str:
    return "".join(content["text"] for kind, content in outputs if kind == "stream" and content["name"] == stream)


def error_of(outputs: Outputs) -> str:
    return next((content["ename"] for kind, content in outputs if kind == "error"), "")
