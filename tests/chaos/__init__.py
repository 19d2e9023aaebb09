"""Tests of `outlive.testing` and `outlive chaos`."""
