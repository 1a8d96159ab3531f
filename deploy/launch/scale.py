"""Keep the number of training engines of a run at the number that is wanted: start more, drain the last ones."""

from __future__ import annotations


def followed(requested: int | None, reported: float, *, least: int, most: int) -> int | None:
    """Return how many engines to run: as `foray scale` requested, else as the learner reports, within the limits of
    `launch.autoscale`; None to change nothing.
    """
    if requested is not None:
        return requested
    return min(max(int(reported), least), most) if reported and most else None
