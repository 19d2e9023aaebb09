"""Tests of `outlive.spawn`."""
