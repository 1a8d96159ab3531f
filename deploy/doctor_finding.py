"""What a check of `foray doctor` gives: one thing that was looked at, the verdict, and how to mend it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at. `mend` is empty when it is in order, a command where one does it."""

    check: str
    verdict: Verdict
    detail: str
    mend: str = ""
