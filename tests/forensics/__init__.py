"""Tests of verdicts, the journal, reports and alerts."""
