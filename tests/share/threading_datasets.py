"""Starts a thread when it is imported: workers then get an interpreter of their own."""

from __future__ import annotations

import multiprocessing
import threading

from share.datasets import Texts

if multiprocessing.parent_process() is not None:
    threading.Thread(target=threading.Event().wait, name="from-import", daemon=True).start()


class ThreadedTexts(Texts):
    """Needs this module."""
