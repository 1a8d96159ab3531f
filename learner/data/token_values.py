"""What the learner computed for each trained token of some steps: for inspection, in files of `run.dir/token_values`.

Each rank writes the tokens that it trained, `step-SSSSSSSS.rank-R.safetensors`, after the step. Only viewers read them:
a file that cannot be written is left out.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load, save

from protocol.runtime.files import atomic_write

log = logging.getLogger(__name__)

FOLDER = "token_values"
NAMES = ("position", "logprob", "reference", "advantage")
"""Columns of a file besides the seq and place of a token's trajectory. Only some algorithms have a reference."""

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]
Columns = dict[str, npt.NDArray[np.generic]]


@dataclass(frozen=True)
class TrajectorySource:
    """Where the trajectories of a batch come from.

    step    number of the step that trains them, from 1; 0: unknown
    seqs    [n] int64, seq of each trajectory's group
    places  [n] int64, its place in the group
    """

    step: int = 0
    seqs: IntArray = field(default_factory=lambda: np.zeros(0, np.int64))
    places: IntArray = field(default_factory=lambda: np.zeros(0, np.int64))


class TokenValues:
    """Collects the values of one pass over a rank's share, and writes them."""

    def __init__(self) -> None:
        self._parts: list[Columns] = []

    def add(self, **values: npt.NDArray[np.generic] | None) -> None:
        """Add trained tokens: arrays of equal length, None for one that is not computed. Without `logprob` they were
        not trained, and are left out.

        trajectory  number in the batch
        position    place of the token in its trajectory
        logprob     by the policy that was trained, before its update
        reference   log-prob by the reference policy
        advantage   that its loss was computed with
        """
        if values.get("logprob") is not None:
            self._parts.append({name: value for name, value in values.items() if value is not None})

    def write(self, folder: Path, source: TrajectorySource, *, rank: int, keep: int) -> None:
        """Write the file of `source.step`, and remove this rank's files but for the newest `keep`."""
        if not self._parts:
            return
        columns = {name: np.concatenate([part[name] for part in self._parts]) for name in self._parts[0]}
        numbers = columns.pop("trajectory")
        raw = save({"seq": source.seqs[numbers], "place": source.places[numbers], **columns})
        path = folder / f"step-{source.step:08d}.rank-{rank}.safetensors"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            atomic_write(path, raw, durable=False)
            for old in sorted(folder.glob(f"step-*.rank-{rank}.safetensors"))[:-keep]:
                old.unlink(missing_ok=True)
        except OSError as error:
            log.warning("the token values of step %d are not kept: %s", source.step, error)


def read_token_values(run_dir: Path, step: int, seq: int, place: int) -> dict[str, FloatArray | IntArray]:
    """Return the columns of `TokenValues.add` for one trajectory, by position; {} if they were not kept."""
    found: list[Columns] = []
    for path in sorted((run_dir / FOLDER).glob(f"step-{step:08d}.rank-*.safetensors")):
        try:
            columns = load(path.read_bytes())
            chosen = (columns.pop("seq") == seq) & (columns.pop("place") == place)
            found.append({name: values[chosen] for name, values in columns.items()})
        except (OSError, SafetensorError, KeyError) as error:
            log.warning("cannot read %s: %s", path, error)
    if not found:
        return {}
    order = np.argsort(np.concatenate([part["position"] for part in found]))
    joined = {name: np.concatenate([part[name] for part in found])[order] for name in found[0]}
    return {name: values for name, values in joined.items() if name in NAMES}
