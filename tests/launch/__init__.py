"""Tests of `holdfast.spawn`."""
