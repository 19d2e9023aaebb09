"""Samplers: which nodes and edges around some seeds make a batch, in C where it is built, else with NumPy."""
