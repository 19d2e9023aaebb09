"""Supervises the loaders of programs that know nothing of outlive: `outlive run`, `install`, `installed`."""
