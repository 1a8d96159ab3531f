"""Settings of what becomes of groups: dynamic filtering, mixing, replay of a journal. Imports nothing heavy."""

from __future__ import annotations

from pydantic import Field

from protocol.settings import Settings


class FilterSettings(Settings):
    """Dynamic filtering (DAPO, arXiv 2503.14476, section 3.2): groups that teach nothing are left out.

    A group whose voters all earned the same is booked as filtered and never trained; another seq is issued in its
    place. Redis holds filtered groups, too, until the next checkpoint.
    """

    metric: str = ""
    """Part of the reward that must differ within a group, e.g. `em`; `reward` is the whole; "" filters nothing, unless
    the algorithm asks for it (`algorithm.filter`): then the whole reward decides."""
    patience: int = Field(default=8, ge=1)
    """After so many batches' worth of filtered groups in a row, groups are taken as they come until a step is done: a
    policy that is always right or always wrong must not stand still unnoticed."""


class MixSettings(Settings):
    """Off-policy mix: groups that were trained in the last steps are trained again, beside the new ones.

    On purpose, and beside the books: "each seq is trained at most once" counts the commits of a seq.
    """

    share: float = Field(default=0.0, ge=0, le=4)
    """Groups mixed into a batch, as a share of `run.groups_per_step`. They are drawn by `run.seed` and the step, from
    those that no more than `run.max_lag` steps separate from the version that began them. 0: none."""


class ReplaySettings(Settings):
    """Training from a journal: `python -m learner --replay DIR`."""

    passes: int = Field(default=1, ge=1)
    """How often the journal is gone through; `run.steps` ends it earlier."""
    rebatch: bool = False
    """Form batches of `run.groups_per_step` groups anew, and filter; off: the batches of the run, as they were."""
    export: bool = False
    """Write the final weights into `run.dir/weights` as a published version."""
