"""Exponential back-off, for every loop that retries."""

from __future__ import annotations


def backoff_s(failures: int, first_s: float, longest_s: float) -> float:
    """Return the pause after `failures` failures in a row, in seconds: first_s, doubling up to longest_s.

    Bounded for any number of failures: `2**failures` itself overflows a float at 1,024.
    """
    return min(longest_s, first_s * 2.0 ** min(max(0, failures - 1), 64))
