"""The result of one check of `foray doctor`: what was checked, the verdict, and a fix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from protocol.errors import UserError

Verdict = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Finding:
    """The result of one check. `fix`: what to do, a command if possible; empty if the check passed."""

    check: str
    verdict: Verdict
    detail: str
    fix: str = ""
    why: str = ""

    @classmethod
    def of(cls, check: str, error: UserError, verdict: Verdict = "fail") -> Finding:
        """Return the finding for an error that a process would exit with."""
        return cls(check, verdict, error.what, error.todo, error.why)

    def error(self) -> UserError:
        """Return the finding as a UserError."""
        return UserError(f"{self.check}: {self.detail}", why=self.why, todo=self.fix)


class NotReady(UserError):
    """Findings that would stop a run. Nothing has been started."""

    def __init__(self, failed: Sequence[Finding]) -> None:
        first = failed[0].error()
        super().__init__(first.what, first.why, first.todo)
        self.failed = tuple(failed)

    def render(self) -> str:
        """Return all findings, not only the first."""
        return "\n".join([*(finding.error().render() for finding in self.failed), "nothing was started"])
