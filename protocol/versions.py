"""Policy versions (epoch, step), whether they belong to the current branch of training, and pins of a version.

A step counter alone goes backwards when a learner resumes from an older checkpoint. So the epoch, which increases at
each learner start, comes first. A version that a crashed learner published after the checkpoint from which its
successor resumed is an `orphan`: its step number exists again, with other weights.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

_LABEL = re.compile(r"^(\d{1,9})\.(\d{1,12})$")
EVAL_ENGINES_ONLY = "eval-engines:"
_PIN = re.compile(rf"(?P<only>{EVAL_ENGINES_ONLY})?(?:at (?P<version>[0-9]+\.[0-9]+) )?(?P<holder>.*)", re.DOTALL)


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


@dataclass(frozen=True)
class VersionPin:
    """The value of the key `evaluation`: which engines keep a version while a rollout server evaluates it.

    holder        id of the server
    eval_engines  engines of role `eval` serve it: all others may load new weights
    version       the version to evaluate: engines may load it, and none after it. None: engines keep what they have
    """

    holder: str
    eval_engines: bool = False
    version: PolicyVersion | None = None

    def __str__(self) -> str:
        at = f"at {self.version.label} " if self.version is not None else ""
        return f"{EVAL_ENGINES_ONLY if self.eval_engines else ''}{at}{self.holder}"

    @classmethod
    def parse(cls, raw: bytes | None) -> VersionPin | None:
        """Return the pin that `raw` describes; None if there is none."""
        if raw is None:
            return None
        found = _PIN.fullmatch(raw.decode(errors="replace"))
        assert found is not None  # every text matches
        version = PolicyVersion.parse(found["version"] or "")
        return cls(found["holder"], eval_engines=found["only"] is not None, version=version)

    def concerns(self, role: str) -> bool:
        """Return whether engines of `role` serve the evaluation."""
        return role == "eval" or not self.eval_engines

    def holds_back(self, role: str, version: PolicyVersion) -> bool:
        """Return whether an engine of `role` must not load `version` yet."""
        return self.concerns(role) and (self.version is None or version > self.version)
