"""What a run that ended early has kept, and the command that goes on from there."""

from __future__ import annotations

from pathlib import Path

from deploy.observe import read_books


def saved(directory: Path, again: str) -> list[str]:
    """Lines for a person. `again`: the command that the run was started with, "" where it is not known."""
    books = read_books(directory)
    if books is None:
        lines = [f"no checkpoint was written yet; logs are in {directory / 'logs'}"]
    else:
        lines = [f"saved: the checkpoint of step {books.step}, in {directory / 'checkpoints'}"]
    if again:
        lines.append(f"go on {'from it' if books else 'from the start'} with: {again}")
    return lines
