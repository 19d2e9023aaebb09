"""Supervises the loaders of programs that know nothing of holdfast: `holdfast run`, `install`, `installed`."""
