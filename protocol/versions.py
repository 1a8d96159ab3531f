"""Policy versions (epoch, step), and whether they belong to the current branch of training.

A step counter alone goes backwards when a learner resumes from an older checkpoint. So the epoch, which increases at
each learner start, comes first. A version that a crashed learner published after the checkpoint from which its
successor resumed is an `orphan`: its step number exists again, with other weights.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

_LABEL = re.compile(r"^(\d{1,9})\.(\d{1,12})$")


class PolicyVersion(NamedTuple):
    """`epoch` counts learner starts from 1, `step` counts steps from 0. Ordered by (epoch, step)."""

    epoch: int
    step: int

    @property
    def label(self) -> str:
        """Return the form that engines use, such as `"3.120"` (SGLang's `weight_version`)."""
        return f"{self.epoch}.{self.step}"

    @classmethod
    def parse(cls, label: str) -> PolicyVersion | None:
        """Return the version of `label`, or None for any other string (an engine's default)."""
        found = _LABEL.match(label)
        return cls(int(found[1]), int(found[2])) if found else None


def is_orphan(version: PolicyVersion, lineage: Sequence[PolicyVersion]) -> bool:
    """Return whether `version` is on an abandoned branch of training.

    lineage  first version of each learner start, in order: [(1, 0), (2, 40), ...]. Start e+1 at step s abandons
             every version of an earlier epoch with a step beyond s.
    """
    return any(start.epoch > version.epoch and version.step > start.step for start in lineage)
