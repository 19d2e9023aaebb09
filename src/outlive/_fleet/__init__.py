"""Deciding (the machine) and doing (the runner)."""
