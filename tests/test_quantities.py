"""Sizes, read as people mean them and printed as they read them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlive.quantities import in_words, parse_bytes, parse_bytes_or_share

GIB = 1 << 30


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (1, 1),
        ("512", 512),
        ("4GiB", 4 * GIB),
        ("4 gib", 4 * GIB),
        ("4G", 4 * GIB),
        ("0.5GiB", GIB // 2),
        ("500MB", 500_000_000),
        ("1 TB", 10**12),
        ("64KiB", 65536),
    ],
)
def test_sizes_mean_what_they_say(text, size):
    """Binary and decimal units, with a space or without."""
    assert parse_bytes("memory_limit", text) == size


@pytest.mark.parametrize("text", ["", "4 bananas", "GiB", "-4GiB", "4,5GiB", True, None, 1.5, [4]])
def test_what_is_no_size_is_refused_with_its_name(text):
    """And with what was given."""
    with pytest.raises(TypeError, match="memory_limit must be a size"):
        parse_bytes("memory_limit", text)


@pytest.mark.parametrize("text", ["0", 0, -5, "0GiB"])
def test_nothing_is_no_limit(text):
    """None is, where a limit is optional."""
    with pytest.raises(ValueError, match="memory_limit must be more than nothing"):
        parse_bytes("memory_limit", text)


def test_a_share_is_of_the_whole():
    """And a size is a size there, too."""
    assert parse_bytes_or_share("memory_budget", "80%", 10 * GIB) == 8 * GIB
    assert parse_bytes_or_share("memory_budget", "2GiB", 10 * GIB) == 2 * GIB
    with pytest.raises(ValueError, match="share between"):
        parse_bytes_or_share("memory_budget", "120%", GIB)


@pytest.mark.parametrize(
    ("size", "words"),
    [(0, "0 B"), (1023, "1023 B"), (3 << 20, "3 MiB"), (3_250_000, "3.1 MiB"), (24 * GIB, "24 GiB"), (-2048, "-2 KiB")],
)
def test_sizes_are_printed_short(size, words):
    """Three digits at most, or the whole number."""
    assert in_words(size) == words


@given(st.integers(1, 1 << 60))
def test_what_is_printed_can_be_read_back(size):
    """To the digits that are there."""
    assert parse_bytes("x", in_words(size)) == pytest.approx(size, rel=0.01)
