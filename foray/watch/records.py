"""What the files of a run say to every view: trained groups, lineage, settings, tokenizer.

`deploy.run.history` reads the steps, `deploy.run.snapshot` the ledger, and `foray.watch.dead_letters` the dead letters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deploy.run.run_dir import configuration_of, read_configuration
from deploy.run.snapshot import read_ledger_totals
from protocol.errors import UserError
from protocol.runtime.config import section
from protocol.settings import RunSettings
from protocol.versions import PolicyVersion

if TYPE_CHECKING:
    from learner.checkpoint.journal import JournalEntry
    from rollout_server.environment.tokenizer import TrajectoryTokenizer

RECENT_GROUPS = 256
"""Trained groups from which views count: lags, examples."""


def read_lineage(directory: Path) -> tuple[PolicyVersion, ...]:
    """Return the first version of each learner start, from the last checkpoint. Raises ForayError if it is invalid."""
    totals = read_ledger_totals(directory)
    return totals.lineage if totals is not None else ()


def trained_groups(directory: Path, *, seq: int | None = None, last: int | None = None) -> Iterator[JournalEntry]:
    """Yield the trained groups in order, or those of `seq`, or the `last` ones, without what a crash rolled back."""
    from learner.checkpoint.journal import read_journal

    return read_journal(directory / "journal", lineage=read_lineage(directory), seq=seq, last=last)


def read_settings(directory: Path) -> RunSettings | None:
    """Return the run's settings; None if it was started manually, with a configuration elsewhere."""
    path = configuration_of(directory)
    return section(read_configuration(path, directory), "run", RunSettings) if path is not None else None


def find_tokenizer(directory: Path, model: Path | None, run: RunSettings | None) -> TrajectoryTokenizer:
    """Load the tokenizer of `model`, else of the run's newest published weights, else of its initial model.

    Raises UserError if none of them has one.
    """
    from rollout_server.environment.tokenizer import load_tokenizer

    candidates = [model] if model is not None else sorted((directory / "weights").glob("v*/"), reverse=True)
    if model is None and run is not None:
        candidates.append(run.model)
    for candidate in candidates:
        if (candidate / "tokenizer.json").is_file():
            return load_tokenizer(candidate)
    raise UserError(f"no tokenizer found for {directory}", todo="give the model's directory with --model DIR")


def leaves(value: Any, path: str = "") -> list[tuple[str, Any]]:
    """Return (dotted name, value) of each leaf of a tree of mappings."""
    if isinstance(value, Mapping):
        return [leaf for key in value for leaf in leaves(value[key], f"{path}.{key}" if path else str(key))]
    return [(path, value)]
