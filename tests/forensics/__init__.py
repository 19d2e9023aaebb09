"""Verdicts, reached by real deaths, hangs and failed starts."""
