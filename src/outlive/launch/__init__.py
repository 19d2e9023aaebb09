"""Starts a group of processes that run one function together, and tells which of them failed first, and why."""
