"""Tests of `holdfast.testing` and `holdfast chaos`."""
