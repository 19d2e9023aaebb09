"""Graphs that live once in shared memory, and neighbourhoods sampled from them by supervised workers."""
